"""A node that others read from, without workers: a pool and an arena behind the RPC `Read`. Also a process of its own:

python source_node.py ADDRESS ARENA SLOTS LAYERS PAGE_BYTES BLOCKS [nixl]   # prints "ready" and serves BLOCKS
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from kvstore.core.blocks import BlockHash, KVLayout, NodeId, RequestId, WorkerId
from kvstore.core.slots import Fenced, SlotPool, SlotRef
from kvstore.tiers.dram import Arena, ArenaShape
from kvstore.transfer import kv_pb2 as pb
from kvstore.transfer.kv_pb2_grpc import KVNodeServicer, add_KVNodeServicer_to_server
from kvstore.transfer.nixl_link import LazyMemory
from kvstore.transfer.serve_reads import BulkListener, Offer, ReadService
from kvstore.transfer.server import serving
from kvstore.transfer.tls import TlsConfig

_LEASE_S = 1e9
WRITER = WorkerId("writer")


def layout_of(layers: int, page_bytes: int, shards: int = 1) -> KVLayout:
    return KVLayout(
        layers=layers,
        block_tokens=4,
        page_tokens=4,
        page_bytes=page_bytes,
        dtype="float32",
        packing="test",
        shards=shards,
    )


def name_of(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(4, "little") * 8)


def bytes_of(layout: KVLayout, number: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.random.default_rng(number).integers(0, 256, (layout.segments, layout.segment_bytes), np.uint8)


class SourceNode(KVNodeServicer):
    """Holds what `fill` and `commit` put into it."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.pool = SlotPool(arena.shape.slots)
        self.reads: ReadService | None = None
        self.reading: set[tuple[RequestId, str]] = set()

    @asynccontextmanager
    async def serving(
        self,
        address: str,
        tls: TlsConfig | None = None,
        memory: LazyMemory | None = None,
        others: Sequence[Offer] = (),
        bulk: bool = True,
    ) -> AsyncIterator[None]:
        listener = BulkListener.open(address, tls=tls) if bulk else None
        self.reads = ReadService([Offer(self, memory), *others], listener)
        try:
            async with serving(address, lambda server: add_KVNodeServicer_to_server(self, server), tls):
                yield
        finally:
            if listener is not None:
                await listener.close()
            self.reads.close()

    async def Read(
        self, request: pb.ReadRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[pb.ReadReply]:
        assert self.reads is not None
        async for reply in self.reads.read(request, context):
            yield reply

    async def open_read(
        self,
        request: RequestId,
        holder: str,
        uses: Sequence[tuple[int, int]],
        names: Sequence[BlockHash],
        timeout_s: float,
    ) -> list[SlotRef] | Fenced:
        refs = (
            self.pool.lease(request, holder, uses, _LEASE_S)
            if uses
            else self.pool.acquire(request, holder, names, _LEASE_S)
        )
        if not isinstance(refs, Fenced):
            self.reading.add((request, holder))
        return refs

    def close_read(self, request: RequestId, holder: str) -> None:
        self.reading.discard((request, holder))
        self.pool.release(request, holder)

    def reserve(self, numbers: Sequence[int]) -> list[SlotRef]:
        return self.reserve_names([name_of(number) for number in numbers])

    def reserve_names(self, names: Sequence[BlockHash]) -> list[SlotRef]:
        refs = self.pool.reserve(RequestId("write"), WRITER, names, None, _LEASE_S)
        assert isinstance(refs, list), refs
        for ref in refs:
            if not ref.filled:
                self.arena.begin(ref.slot, ref.epoch, ref.hash)
        return refs

    def seal(self, ref: SlotRef, number: int, layers: Sequence[int] | None = None) -> None:
        content = bytes_of(self.arena.shape.layout, number)
        for layer in range(len(content)) if layers is None else layers:
            self.arena.payload[ref.slot, layer] = content[layer]
            self.arena.seal(ref.slot, layer, ref.epoch, ref.hash)

    def store(self, numbers: Sequence[int]) -> list[SlotRef]:
        """Committed blocks, whose bytes are those of their numbers."""
        refs = self.reserve(numbers)
        for ref, number in zip(refs, numbers, strict=True):
            if not ref.filled:
                self.seal(ref, number)
        self.commit()
        return refs

    def commit(self) -> None:
        self.pool.commit(RequestId("write"), WRITER)
        self.pool.release(RequestId("write"), WRITER)


async def main(
    address: str, path: str, slots: int, layers: int, page_bytes: int, blocks: int, *ways: str
) -> None:
    arena = Arena.create(Path(path), ArenaShape(layout_of(layers, page_bytes), slots))
    node = SourceNode(arena)  # type: ignore[abstract]  # its other methods answer UNIMPLEMENTED
    try:
        node.store(range(blocks))
        memory = LazyMemory(NodeId("source"), arena) if "nixl" in ways else None
        async with node.serving(address, memory=memory):
            print("ready", flush=True)
            await asyncio.Event().wait()
    finally:
        node.arena.unlink()


if __name__ == "__main__":
    slots, layers, page_bytes, blocks = map(int, sys.argv[3:7])
    asyncio.run(main(sys.argv[1], sys.argv[2], slots, layers, page_bytes, blocks, *sys.argv[7:]))
