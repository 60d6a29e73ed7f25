"""Names and sizes of KV blocks.

A block is the KV of `block_tokens` consecutive prompt tokens in all layers. It is named by everything
that determines its contents, so that two nodes, or two runs a week apart, agree on the name without
talking, and so that nothing else can ever be served under it:

    root   = H("moonpool-root-1",  model, dtype, precision, tenant_salt, block_tokens)
    hash_0 = H("moonpool-block-1", root,       token ids of block 0)
    hash_i = H("moonpool-block-1", hash_{i-1}, token ids of block i)

H is BLAKE3 over a fixed little-endian encoding: each variable field is preceded by its length as u32, each
token id is one u32. Golden vectors are in `tests/core/test_blocks.py`; changing them orphans every stored
block, so the version in the tag changes with them.

How an engine packs the bytes (`layout`) and how they are encoded at rest (`encoding`) are not in the chain:
they are part of the key under which one node stores one copy.
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

from blake3 import blake3

BlockHash = NewType("BlockHash", bytes)
"""32 bytes naming one block of one chain."""

NodeId = NewType("NodeId", str)
RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)

HASH_BYTES = 32


class Tier(StrEnum):
    """Where a node holds a block; one that is in both tiers counts as being in the faster one."""

    DRAM = "dram"
    SSD = "ssd"


_TOKEN_ID_MAX = 2**32 - 1


@dataclass(frozen=True, slots=True)
class ChainRoot:
    """What all blocks of one chain have in common; see the module's docstring for the encoding.

    `model` is a fingerprint of the weights and their rewiring (SwiftKV's n and adapter), not a display name.
    `precision` is the precision family: blocks computed on top of lossy blocks belong to another family.
    """

    model: str
    dtype: str
    block_tokens: int
    precision: str = "exact"
    tenant_salt: bytes = b""

    def digest(self) -> BlockHash:
        """The parent of every first block."""
        hasher = blake3(b"moonpool-root-1")
        for field in (self.model.encode(), self.dtype.encode(), self.precision.encode(), self.tenant_salt):
            hasher.update(struct.pack("<I", len(field)))
            hasher.update(field)
        hasher.update(struct.pack("<I", self.block_tokens))
        return BlockHash(hasher.digest())


def block_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """The name of the block that holds `token_ids` after the chain that ends in `parent`.

    Raises ValueError for a token id that is no u32 (negative ids mark padding in some tokenisers).
    """
    try:
        encoded = struct.pack(f"<{len(token_ids)}I", *token_ids)
    except struct.error:
        bad = next(t for t in token_ids if not isinstance(t, int) or not 0 <= t <= _TOKEN_ID_MAX)
        raise ValueError(f"token id {bad!r} is not an integer in 0..2^32-1") from None
    hasher = blake3(b"moonpool-block-1")
    hasher.update(parent)
    hasher.update(encoded)
    return BlockHash(hasher.digest())


def block_hashes(root: BlockHash, token_ids: Sequence[int], block_tokens: int) -> list[BlockHash]:
    """Names of the full blocks of `token_ids`, in order; the last `len % block_tokens` tokens have none."""
    hashes: list[BlockHash] = []
    parent = root
    for end in range(block_tokens, len(token_ids) + 1, block_tokens):
        parent = block_hash(parent, token_ids[end - block_tokens : end])
        hashes.append(parent)
    return hashes


def tail_hash(parent: BlockHash, token_ids: Sequence[int], request_id: RequestId) -> BlockHash:
    """The private name of a request's last, incomplete block: bound to the request, so it is never shared."""
    hasher = blake3(b"moonpool-tail-1")
    hasher.update(block_hash(parent, token_ids))
    hasher.update(request_id.encode())
    return BlockHash(hasher.digest())


@dataclass(frozen=True, slots=True)
class KVLayout:
    """How one engine holds KV: what a slot must have room for, and whose bytes may be exchanged.

    `pieces` is the number of engine pages in one block; a page is one layer of `page_tokens` tokens, opaque,
    `page_bytes` long. `packing` names what fixes the order of bytes inside a page (instruction set, backend).
    With tensor parallelism each of `shards` ranks has all layers of its own KV heads: a block then holds the segments
    of every rank, rank by rank. Only engines of equal layout may exchange bytes.
    """

    layers: int
    block_tokens: int
    page_tokens: int
    page_bytes: int
    dtype: str
    packing: str
    shards: int = 1

    def __post_init__(self) -> None:
        if min(self.layers, self.block_tokens, self.page_tokens, self.page_bytes, self.shards) < 1:
            raise ValueError(f"every size of a KV layout is at least 1: {self}")
        if self.block_tokens % self.page_tokens:
            raise ValueError(
                f"block_tokens {self.block_tokens} is not a multiple of the engine's block size {self.page_tokens}"
            )

    @property
    def pieces(self) -> int:
        """Engine pages in one block, per layer."""
        return self.block_tokens // self.page_tokens

    @property
    def segment_bytes(self) -> int:
        """One layer of one rank's shard of one block: the unit of progress and of checksums."""
        return self.pieces * self.page_bytes

    @property
    def segments(self) -> int:
        """Of one block: all layers of the first rank, then those of the next."""
        return self.shards * self.layers

    @property
    def block_bytes(self) -> int:
        return self.segments * self.segment_bytes

    def fingerprint(self) -> str:
        """A short name of the layout, part of every stored key."""
        sizes = f"{self.layers}/{self.block_tokens}/{self.page_tokens}/{self.page_bytes}"
        text = f"{sizes}/{self.dtype}/{self.packing}/{self.shards}"
        return blake3(b"moonpool-layout-2" + text.encode()).hexdigest()[:16]


def blocks_needed(prompt_tokens: int, block_tokens: int) -> tuple[int, int]:
    """(full blocks, tokens in the tail) of a prompt."""
    return divmod(prompt_tokens, block_tokens)


def hex_prefix(hashes: Iterable[BlockHash]) -> list[str]:
    """The first 8 hex digits of each hash, for people."""
    return [h.hex()[:8] for h in hashes]
