"""Between the node's messages and the core's types; protobuf stays behind this file."""

from collections.abc import Sequence

import numpy as np

from kvstore.codecs.pages import PageShape, Permutation
from kvstore.core.blocks import HASH_BYTES, BlockHash, KVLayout
from kvstore.core.slots import SlotRef
from kvstore.transfer import kv_pb2 as pb


def layout_message(layout: KVLayout) -> pb.Layout:
    return pb.Layout(
        layers=layout.layers,
        block_tokens=layout.block_tokens,
        page_tokens=layout.page_tokens,
        page_bytes=layout.page_bytes,
        dtype=layout.dtype,
        packing=layout.packing,
        shards=layout.shards,
    )


def layout_from(message: pb.Layout) -> KVLayout:
    """Raises ValueError for a layout that cannot be."""
    return KVLayout(
        layers=message.layers,
        block_tokens=message.block_tokens,
        page_tokens=message.page_tokens,
        page_bytes=message.page_bytes,
        dtype=message.dtype,
        packing=message.packing,
        shards=message.shards,
    )


def packing_message(permutation: Permutation) -> pb.Packing:
    shape = permutation.shape
    return pb.Packing(
        heads=shape.heads, head_dim=shape.head_dim, positions=permutation.index.ravel().tolist()
    )


def permutation_from(message: pb.Packing, layout: KVLayout) -> Permutation:
    """The order of elements in this layout's pages. Raises ValueError for one that cannot be."""
    shape = PageShape(layout.page_tokens, message.heads, message.head_dim, layout.dtype)
    if shape.page_bytes != layout.page_bytes:  # before anything of that size is made
        raise ValueError(f"{shape} has pages of {shape.page_bytes} bytes, the layout of {layout.page_bytes}")
    return Permutation(shape, np.array(message.positions, np.int64).reshape(shape.logical))


def slot_list(refs: Sequence[SlotRef]) -> pb.SlotList:
    return pb.SlotList(
        slots=[pb.Slot(slot=ref.slot, epoch=ref.epoch, hash=ref.hash, filled=ref.filled) for ref in refs]
    )


def block_hashes_from(names: Sequence[bytes]) -> list[BlockHash]:
    """Raises ValueError for a name that is not 32 bytes long."""
    for name in names:
        if len(name) != HASH_BYTES:
            raise ValueError(f"a block hash has {HASH_BYTES} bytes, not {len(name)}")
    return [BlockHash(name) for name in names]
