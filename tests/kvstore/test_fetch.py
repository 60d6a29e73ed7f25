"""The fetcher between a pool, an arena and sources that are slow, fail, or give part of what was asked for."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from kvstore.core.blocks import BlockHash, KVLayout, RequestId, WorkerId
from kvstore.core.slots import NoRoom, SlotPool, SlotRef
from kvstore.fetch import Fetcher
from kvstore.tiers.dram import Arena, ArenaShape

LAYOUT = KVLayout(layers=2, block_tokens=4, page_tokens=2, page_bytes=64, dtype="float32", packing="test")
SLOTS = 6
A, B, C, D = (BlockHash(bytes([number]) * 32) for number in range(4))
TAIL = BlockHash(b"t" * 32)
SOON_S = 5.0


class Shelf:
    """A source that has some blocks, and gives them when it is let."""

    def __init__(self, arena: Arena, *names: BlockHash, kind: str = "peer") -> None:
        self.kind = kind
        self._arena = arena
        self._names = set(names)
        self.open = asyncio.Event()
        self.open.set()
        self.asked: list[list[BlockHash]] = []
        self.promised: set[BlockHash] = set()

    def has(self, name: BlockHash) -> bool:
        return name in self._names | self.promised

    async def read(self, request: RequestId, blocks: Sequence[SlotRef], deadline_s: float) -> set[BlockHash]:
        self.asked.append([ref.hash for ref in blocks])
        await self.open.wait()
        came = [ref for ref in blocks if ref.hash in self._names]
        for ref in came:
            for layer in range(LAYOUT.layers):
                self._arena.seal(ref.slot, layer, ref.epoch, ref.hash)
        return {ref.hash for ref in came}


class Bench:
    """A fetcher and what it works on."""

    def __init__(self, folder: Path) -> None:
        self.arena = Arena.create(folder / "arena", ArenaShape(LAYOUT, SLOTS))
        self.pool = SlotPool(SLOTS)
        self.fetcher = Fetcher(self.pool, self.arena, self._changed)

    def _changed(self) -> None:
        for slot in self.pool.take_freed():
            self.arena.end(slot)

    async def prefix(self, names: list[BlockHash], peer: Shelf, ssd: Shelf | None = None) -> int:
        """How many of the chain's blocks are here afterwards."""
        await self.fetcher.prefix(names, ssd, peer, time.monotonic() + SOON_S)
        return self.pool.match(names)

    def follow(self, peer: Shelf) -> list[SlotRef]:
        refs = self.fetcher.follow(
            RequestId("r"), "reader", [A, B], TAIL, peer, time.monotonic() + SOON_S, time.monotonic() + SOON_S
        )
        assert isinstance(refs, list)
        return refs

    async def settled(self) -> None:
        """No fetch runs; nothing is held but what its readers hold."""
        for _ in range(100):
            if not self.pool.counts()["filling"]:
                break
            await asyncio.sleep(0.01)
        self.pool.release(RequestId("r"), "reader")
        self._changed()
        self.pool.check()
        counts = self.pool.counts()
        assert (counts["filling"], counts["draining"], counts["leases"]) == (0, 0, 0)
        assert self.arena.epoch.tolist() == self.pool.epochs()


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path)
    yield made
    await made.settled()
    await made.fetcher.close()


async def test_each_block_comes_from_where_it_is(bench: Bench) -> None:
    ssd, peer = Shelf(bench.arena, A, C, kind="ssd"), Shelf(bench.arena, A, B, C, D)
    assert await bench.prefix([A, B, C, D], peer, ssd) == 4
    assert (ssd.asked, peer.asked) == ([[A, C]], [[B, D]])
    assert (bench.fetcher.blocks, bench.fetcher.failed_blocks) == ({"ssd": 2, "peer": 2}, 0)
    assert await bench.prefix([A, B, C, D], peer, ssd) == 4
    assert len(peer.asked) == 1, "what is here is not asked for again"


async def test_what_comes_after_a_gap_is_given_up(bench: Bench) -> None:
    peer = Shelf(bench.arena, A, C)
    peer.promised = {B}
    assert await bench.prefix([A, B, C], peer) == 1
    assert bench.fetcher.failed_blocks == 2
    assert bench.pool.counts()["free"] == SLOTS - 1


async def test_two_requests_bring_a_block_once(bench: Bench) -> None:
    peer = Shelf(bench.arena, A, B, C)
    peer.open.clear()
    first = asyncio.create_task(bench.prefix([A, B], peer))
    await asyncio.sleep(0)
    second = asyncio.create_task(bench.prefix([A, B, C], peer))
    await asyncio.sleep(0.01)
    assert peer.asked == [[A, B]]
    peer.open.set()
    assert (await first, await second) == (2, 3)
    assert peer.asked == [[A, B], [C]]


async def test_a_caller_that_gives_up_does_not_free_what_is_being_written(bench: Bench) -> None:
    peer = Shelf(bench.arena, A)
    peer.open.clear()
    asking = asyncio.create_task(bench.prefix([A], peer))
    await asyncio.sleep(0.01)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert bench.pool.counts()["filling"] == 1
    peer.open.set()
    await bench.settled()
    assert bench.pool.match([A]) == 1, "what came is kept"


async def test_a_full_arena_brings_nothing(bench: Bench) -> None:
    names = [BlockHash(bytes([number]) * 32) for number in range(SLOTS + 1)]
    assert await bench.prefix(names, Shelf(bench.arena, *names)) == 0


async def test_a_follower_sees_the_new_use_at_once(bench: Bench) -> None:
    """The caller may look at the arena, from another process, before this loop turns again."""
    refs = bench.follow(Shelf(bench.arena, A, B, TAIL))
    assert bench.arena.all_held([ref.slot for ref in refs], [ref.epoch for ref in refs])
    assert not bench.arena.segments_complete([ref.slot for ref in refs], [ref.epoch for ref in refs])
    await asyncio.sleep(0.01)
    assert all(bench.arena.complete(ref.slot, ref.epoch) for ref in refs)
    assert bench.pool.match([A, B]) == 2


async def test_a_follower_learns_that_the_rest_will_not_come(bench: Bench) -> None:
    refs = bench.follow(Shelf(bench.arena, A))
    await asyncio.sleep(0.01)
    assert [bench.arena.complete(ref.slot, ref.epoch) for ref in refs] == [True, False, False]
    assert not bench.arena.all_held([ref.slot for ref in refs], [ref.epoch for ref in refs])


async def test_following_into_a_full_arena_is_refused(bench: Bench) -> None:
    others = [BlockHash(bytes([number]) * 32) for number in range(9, 13)]
    taken = bench.pool.reserve(RequestId("x"), WorkerId("w"), others, None, 1e9)
    assert isinstance(taken, list)
    for ref in taken:
        bench.arena.begin(ref.slot, ref.epoch, ref.hash)
    refused = bench.fetcher.follow(RequestId("r"), "reader", [A, B], TAIL, Shelf(bench.arena), 1e9, 1e9)
    assert refused == NoRoom(wanted=3, available=2)
    bench.pool.abandon(RequestId("x"), WorkerId("w"), stopped=True)
