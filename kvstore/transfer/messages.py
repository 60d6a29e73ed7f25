"""Between the node's messages and the core's types; protobuf stays behind this file."""

from collections.abc import Sequence

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
