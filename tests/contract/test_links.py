"""One suite for every link: what is read is right, or is not there; and nothing is left behind."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest

from kvstore.core.blocks import BlockHash, KVLayout, NodeId, RequestId
from kvstore.core.slots import SlotRef
from kvstore.tiers.dram import Arena, ArenaShape
from kvstore.transfer import kv_pb2 as pb
from kvstore.transfer.grpc_link import GrpcLink, Kind, Peer
from kvstore.transfer.kv_pb2_grpc import KVNodeStub
from kvstore.transfer.link import Arrived, Complete, Failed, Link, Lost, Progress, read_from
from kvstore.transfer.nixl_link import LazyMemory, NixlMemory, Unavailable
from kvstore.transfer.server import channel_to
from tests.contract.source_node import SourceNode, bytes_of, layout_of, name_of
from tests.network import certificates, free_port

LAYOUT = layout_of(layers=3, page_bytes=512)
SLOTS = 16
SHARDED = layout_of(layers=2, page_bytes=512, shards=2)
"""Of an engine of two tensor-parallel ranks."""
WAYS = ["inline", "bulk", "bulk-unix", "bulk-tls", "nixl"]


@dataclass(slots=True)
class Pair:
    """A node that serves, and an arena to read into."""

    source: SourceNode
    arena: Arena
    link: Callable[[dict[BlockHash, pb.Slot]], Link]
    epoch: int = 0

    @property
    def layout(self) -> KVLayout:
        return self.arena.shape.layout

    def wanted(self, numbers: Sequence[int]) -> list[SlotRef]:
        refs = []
        for slot, number in enumerate(numbers):
            self.epoch += 1
            self.arena.begin(slot, self.epoch, name_of(number))
            self.arena.payload[slot] = 0
            refs.append(SlotRef(slot, self.epoch, name_of(number), filled=False))
        return refs

    async def read(
        self,
        refs: list[SlotRef],
        follow: bool = False,
        within_s: float = 5.0,
        uses: Sequence[SlotRef] = (),
    ) -> list[Progress]:
        link = self.link({u.hash: pb.Slot(slot=u.slot, epoch=u.epoch, hash=u.hash) for u in uses})
        return await read_all(link, refs, follow, within_s)

    def check(self, refs: list[SlotRef], numbers: Sequence[int]) -> int:
        """Whatever is sealed is right. Returns how many segments are."""
        count = 0
        for ref, number in zip(refs, numbers, strict=True):
            sealed = np.flatnonzero(self.arena.segment_epoch[ref.slot] == ref.epoch)
            expected = bytes_of(self.arena.shape.layout, number)
            np.testing.assert_array_equal(self.arena.payload[ref.slot, sealed], expected[sealed])
            for layer in sealed.tolist():
                assert self.arena.verify(
                    ref.slot, layer, ref.epoch, ref.hash, self.arena.payload[ref.slot, layer]
                )
            count += len(sealed)
        return count


async def read_all(
    link: Link, refs: list[SlotRef], follow: bool = False, within_s: float = 5.0
) -> list[Progress]:
    async with aclosing(link.read(RequestId("r"), refs, follow, time.monotonic() + within_s)) as progress:
        return [step async for step in progress]


def ended(steps: list[Progress], kind: type[Complete | Failed]) -> list[int]:
    return [step.block for step in steps if isinstance(step, kind)]


@asynccontextmanager
async def pair(way: str, folder: Path, layout: KVLayout = LAYOUT, number: int = 0) -> AsyncIterator[Pair]:
    shape = ArenaShape(layout, SLOTS)
    source = SourceNode(  # type: ignore[abstract]  # its other methods answer UNIMPLEMENTED
        Arena.create(folder / f"source{number}", shape)
    )
    arena = Arena.create(folder / f"reader{number}", shape)
    address = f"unix:{folder}/n{number}" if way.endswith("unix") else f"127.0.0.1:{free_port()}"
    kind: Kind = way.partition("-")[0]  # type: ignore[assignment]
    tls = certificates(folder) if way.endswith("tls") else None
    theirs, own = LazyMemory(NodeId("source"), source.arena), LazyMemory(NodeId("reader"), arena)
    [_, memory] = [await memory_or_skip(one) for one in (theirs, own)] if kind == "nixl" else [None, None]
    async with source.serving(address, tls, theirs), channel_to(address, tls) as channel:
        await channel.channel_ready()
        peer = Peer(KVNodeStub(channel), address, tls)

        def link(uses: dict[BlockHash, pb.Slot]) -> Link:
            return GrpcLink(peer, NodeId("reader"), arena, uses, kind, memory)

        yield Pair(source, arena, link)
        await settled(source)
    await theirs.close()
    await own.close()


async def memory_or_skip(lazy: LazyMemory) -> NixlMemory:
    memory = await lazy.get()
    if isinstance(memory, Unavailable):
        pytest.skip(memory.reason)
    return memory


async def settled(source: SourceNode) -> None:
    """No lease, thread or socket of a read is left, and the pool is consistent."""
    until_s = time.monotonic() + 5.0
    while leftovers(source) and time.monotonic() < until_s:
        await asyncio.sleep(0.005)
    assert not leftovers(source)
    source.pool.check()


def leftovers(source: SourceNode) -> list[str]:
    """What a read must not leave behind. (Senders' threads are a pool: idle ones may stay.)"""
    receivers = [t.name for t in threading.enumerate() if t.name.startswith("landing")]
    assert source.reads is not None
    sending = ["sending"] * source.reads.sending
    return receivers + sending + [f"{request} of {holder}" for request, holder in source.reading]


def _case(param: tuple[str, KVLayout]) -> str:
    return param[0] + ("-tp2" if param[1].shards == 2 else "")


@pytest.fixture(params=[(way, layout) for layout in (LAYOUT, SHARDED) for way in WAYS], ids=_case)
async def nodes(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Pair]:
    async with pair(request.param[0], tmp_path, request.param[1]) as made:
        yield made


async def test_committed_blocks_come_whole_and_verified(nodes: Pair) -> None:
    nodes.source.store(range(6))
    refs = nodes.wanted(range(6))
    steps = await nodes.read(refs)
    assert ended(steps, Complete) == list(range(6)), steps
    assert nodes.check(refs, range(6)) == 6 * nodes.layout.segments
    assert sum(step.segments for step in steps if isinstance(step, Arrived)) == 6 * nodes.layout.segments


async def test_what_the_source_lacks_fails_by_name(nodes: Pair) -> None:
    nodes.source.store([0, 1])
    refs = nodes.wanted([0, 1, 2])
    steps = await nodes.read(refs)
    assert ended(steps, Complete) == [0, 1]
    assert [step for step in steps if isinstance(step, Failed)] == [Failed(2, "the source does not have it")]


async def test_what_is_being_written_is_followed(nodes: Pair) -> None:
    filling = nodes.source.reserve([0, 1])
    refs = nodes.wanted([0, 1])
    reading = asyncio.create_task(nodes.read(refs, follow=True, uses=filling))
    for layer in range(nodes.layout.segments):
        for number, ref in enumerate(filling):
            nodes.source.seal(ref, number, [layer])
        async with asyncio.timeout(5.0):
            while nodes.check(refs, [0, 1]) < 2 * (layer + 1):
                await asyncio.sleep(0.002)
        assert reading.done() == (layer == nodes.layout.segments - 1) or layer == nodes.layout.segments - 1
    assert sorted(ended(await reading, Complete)) == [0, 1]


async def test_without_follow_what_is_incomplete_fails_at_once(nodes: Pair) -> None:
    filling = nodes.source.reserve([0])
    nodes.source.seal(filling[0], 0, [1])
    refs = nodes.wanted([0])
    began_s = time.monotonic()
    steps = await nodes.read(refs, uses=filling)
    assert time.monotonic() - began_s < 2.0
    assert steps == [Arrived(0, 1), Failed(0, "it is not complete at the source")]


async def test_a_followed_block_that_is_given_up_fails(nodes: Pair) -> None:
    filling = nodes.source.reserve([0])
    refs = nodes.wanted([0])
    reading = asyncio.create_task(nodes.read(refs, follow=True, uses=filling))
    await asyncio.sleep(0.05)
    nodes.source.arena.end(filling[0].slot)
    [step] = await reading
    assert isinstance(step, Failed)
    assert "over" in step.reason


async def test_a_follow_read_ends_at_its_deadline(nodes: Pair) -> None:
    filling = nodes.source.reserve([0])
    refs = nodes.wanted([0])
    began_s = time.monotonic()
    steps = await nodes.read(refs, follow=True, uses=filling, within_s=0.3)
    assert 0.2 < time.monotonic() - began_s < 2.0
    assert isinstance(steps[-1], Failed | Lost)


async def test_a_slot_in_another_use_is_refused(nodes: Pair) -> None:
    [old] = nodes.source.store([0])
    nodes.source.pool.drop(name_of(0))
    for slot in nodes.source.pool.take_freed():
        nodes.source.arena.end(slot)
    nodes.source.store([1])
    [step] = await nodes.read(nodes.wanted([0]), uses=[old])
    assert isinstance(step, Lost)
    assert "no longer held" in step.reason


async def test_a_slot_reused_under_the_read_is_never_taken_for_the_block(nodes: Pair) -> None:
    """As if the lease had been outlived: the node itself would not let this happen."""
    filling = nodes.source.reserve([0])
    nodes.source.seal(filling[0], 0, [0])
    refs = nodes.wanted([0])
    reading = asyncio.create_task(nodes.read(refs, follow=True, uses=filling))
    async with asyncio.timeout(5.0):
        while nodes.check(refs, [0]) < 1:
            await asyncio.sleep(0.002)
    arena, slot = nodes.source.arena, filling[0].slot
    arena.begin(slot, 999, name_of(7))
    arena.payload[slot] = bytes_of(nodes.layout, 7)
    for layer in range(nodes.layout.segments):
        arena.seal(slot, layer, 999, name_of(7))
    assert isinstance((await reading)[-1], Failed)
    assert nodes.check(refs, [0]) == 1
    arena.begin(slot, filling[0].epoch, name_of(0))


async def test_bytes_flipped_at_the_source_are_a_counted_miss(nodes: Pair) -> None:
    stored = nodes.source.store([0, 1])
    nodes.source.arena.payload[stored[0].slot, 1, 17] ^= 1
    refs = nodes.wanted([0, 1])
    steps = await nodes.read(refs)
    assert ended(steps, Complete) == [1]
    assert ended(steps, Failed) == [0]
    assert nodes.check(refs, [0, 1]) == 2 * nodes.layout.segments - 1


async def test_another_layout_is_refused_naming_both(nodes: Pair, tmp_path: Path) -> None:
    other = layout_of(layers=3, page_bytes=1024)
    nodes.source.store([0])
    nodes.arena = Arena.create(tmp_path / "other", ArenaShape(other, SLOTS))
    link = nodes.link({})
    link._arena = nodes.arena  # type: ignore[attr-defined]
    [step] = await read_all(link, nodes.wanted([0]))
    assert isinstance(step, Lost)
    assert other.fingerprint() in step.reason
    assert nodes.source.arena.shape.layout.fingerprint() in step.reason


async def test_a_cancelled_read_leaves_nothing(nodes: Pair) -> None:
    filling = nodes.source.reserve(range(4))
    refs = nodes.wanted(range(4))
    descriptors = 0
    for _ in range(6):
        reading = asyncio.create_task(nodes.read(refs, follow=True, uses=filling))
        await asyncio.sleep(0.03)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await settled(nodes.source)
        descriptors = descriptors or psutil.Process().num_fds()  # with the connections of gRPC and of UCX
    assert psutil.Process().num_fds() <= descriptors + 2


async def test_a_reader_that_stops_listening_leaves_nothing(nodes: Pair) -> None:
    nodes.source.store(range(8))
    link = nodes.link({})
    async with aclosing(
        link.read(RequestId("r"), nodes.wanted(range(8)), False, time.monotonic() + 5.0)
    ) as progress:
        async for _ in progress:
            break
    await settled(nodes.source)


async def test_what_a_source_lacks_comes_from_the_next(nodes: Pair, tmp_path: Path) -> None:
    nodes.source.store([0, 1])
    async with pair("bulk", tmp_path, nodes.layout, number=1) as other:
        other.source.store(range(4))
        first, second = nodes.link({}), other.link({})
        second._arena = nodes.arena  # type: ignore[attr-defined]
        refs = nodes.wanted(range(4))
        progress = read_from([first, second], RequestId("r"), refs, False, time.monotonic() + 5.0)
        steps = [step async for step in progress]
    assert ended(steps, Complete) == [0, 1, 2, 3]
    assert nodes.check(refs, range(4)) == 4 * nodes.layout.segments


async def test_many_reads_at_once(nodes: Pair) -> None:
    """More than the source has threads for: the rest goes inline."""
    nodes.source.store([0])
    arena = nodes.arena
    refs = nodes.wanted([0] * SLOTS)
    link = nodes.link({})
    results = await asyncio.gather(*(read_all(link, [refs[i % SLOTS]]) for i in range(SLOTS)))
    assert all(ended(steps, Complete) == [0] for steps in results)
    assert (arena.segment_epoch[:SLOTS] == np.arange(1, SLOTS + 1)[:, None]).all()


async def test_a_killed_source_is_replaced(tmp_path: Path) -> None:
    """SIGKILL while blocks come, in a random place of the stream; another node has them too."""
    layout = layout_of(layers=8, page_bytes=65536)
    shape, address = ArenaShape(layout, SLOTS), f"127.0.0.1:{free_port()}"
    script = Path(__file__).with_name("source_node.py")
    arguments = [address, tmp_path / "killed", SLOTS, layout.layers, layout.page_bytes, SLOTS]
    process = subprocess.Popen(
        [sys.executable, str(script), *map(str, arguments)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    try:
        assert await asyncio.to_thread(process.stdout.readline) == b"ready\n"
        async with pair("bulk", tmp_path, layout) as other, channel_to(address) as channel:
            await channel.channel_ready()
            other.source.store(range(SLOTS))
            first = GrpcLink(Peer(KVNodeStub(channel), address), NodeId("reader"), other.arena)
            refs = other.wanted(range(SLOTS))
            links = [first, other.link({})]
            steps: list[Progress] = []
            async for step in read_from(links, RequestId("r"), refs, False, time.monotonic() + 20.0):
                steps.append(step)
                if len(steps) == 3:
                    process.kill()
            assert sorted(ended(steps, Complete)) == list(range(SLOTS))
            assert other.check(refs, range(SLOTS)) == shape.slots * layout.layers
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def test_a_node_of_another_authority_is_refused(tmp_path: Path) -> None:
    (tmp_path / "stranger").mkdir()
    stranger = certificates(tmp_path / "stranger")
    async with pair("bulk-tls", tmp_path) as nodes:
        nodes.source.store([0])
        own = nodes.link({})._peer  # type: ignore[attr-defined]
        forged = GrpcLink(Peer(own.stub, own.address, stranger), NodeId("reader"), nodes.arena)
        [step] = await read_all(forged, nodes.wanted([0]))
        assert isinstance(step, Lost)
        assert "certificate" in step.reason.lower()
        async with channel_to(own.address, stranger) as channel:
            outside = GrpcLink(Peer(KVNodeStub(channel), own.address, stranger), NodeId("r"), nodes.arena)
            [step] = await read_all(outside, nodes.wanted([0]))
            assert isinstance(step, Lost)
            assert "UNAVAILABLE" in step.reason
