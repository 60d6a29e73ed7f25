"""The KV node as its workers meet it: over gRPC on a Unix socket, with a real arena and real processes."""

import asyncio
import math
import os
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from kvstore.core.blocks import BlockHash, KVLayout, NodeId
from kvstore.node import KVNode, NodeConfig
from kvstore.tiers.block_file import FileForm
from kvstore.tiers.dram import Arena, ArenaShape
from kvstore.transfer import kv_pb2 as pb
from kvstore.transfer.kv_pb2_grpc import KVNodeStub
from kvstore.transfer.messages import block_hashes_from, layout_message

if TYPE_CHECKING:
    from kvstore.transfer.kv_pb2_grpc import KVNodeAsyncStub

LAYOUT = KVLayout(layers=2, block_tokens=4, page_tokens=2, page_bytes=64, dtype="float32", packing="test")
SLOTS = 6
DRAM_BYTES = SLOTS * (LAYOUT.block_bytes + ArenaShape(LAYOUT, 1).header_dtype.itemsize)
SHM = Path("/dev/shm")
WORKER, READER = "prefill-0", "decode-0"
TAIL = b"t" * 32
LEASE_S = 10.0


def chain(count: int, start: int = 0) -> list[bytes]:
    return [bytes([start + i]) * 32 for i in range(count)]


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Running:
    """A node that serves, and what a worker beside it has."""

    node: KVNode
    stub: "KVNodeAsyncStub"
    clock: Clock
    config: NodeConfig

    async def attach(self, worker: str = WORKER, *pids: int, layout: KVLayout = LAYOUT) -> Arena:
        reply: pb.AttachReply = await self.stub.Attach(
            pb.AttachRequest(worker_id=worker, layout=layout_message(layout), pids=pids or [os.getpid()])
        )
        assert reply.node_id == self.config.node_id
        assert reply.slots == SLOTS
        return Arena.attach(Path(reply.arena_path), ArenaShape(layout, reply.slots))

    async def reserve(
        self, request: str, hashes: list[bytes], tail: bytes = b"", worker: str = WORKER, **more: Any
    ) -> list[pb.Slot]:
        wanted = pb.ReserveRequest(
            request_id=request, worker_id=worker, hashes=hashes, tail_hash=tail, lease_s=LEASE_S
        )
        wanted.MergeFrom(pb.ReserveRequest(**more))
        reply: pb.SlotList = await self.stub.Reserve(wanted)
        return list(reply.slots)

    async def commit(self, request: str, holder: str = WORKER) -> int:
        reply: pb.CommitReply = await self.stub.Commit(pb.Holding(request_id=request, holder=holder))
        return reply.blocks

    async def abandon(self, request: str, worker: str = WORKER, stopped: bool = False) -> None:
        await self.stub.Abandon(pb.AbandonRequest(request_id=request, worker_id=worker, stopped=stopped))

    async def release(self, request: str, holder: str = WORKER) -> None:
        await self.stub.Release(pb.Holding(request_id=request, holder=holder))

    async def lease(self, request: str, holder: str = READER, **what: Any) -> list[pb.Slot]:
        wanted = pb.LeaseRequest(request_id=request, holder=holder, lease_s=LEASE_S)
        wanted.MergeFrom(pb.LeaseRequest(**what))
        reply: pb.SlotList = await self.stub.Lease(wanted)
        return list(reply.slots)

    async def store(
        self, arena: Arena, request: str, hashes: list[bytes], tail: bytes = b""
    ) -> list[pb.Slot]:
        """Written, committed and released by the worker."""
        slots = await self.reserve(request, hashes, tail)
        fill(arena, slots)
        await self.commit(request)
        await self.release(request)
        return slots

    async def status(self) -> pb.NodeStatus:
        return await self.stub.Status(pb.Empty())

    async def until(self, **wanted: Any) -> None:
        """Waits until the status has these fields; fails with what it has instead."""
        for _ in range(200):
            status = await self.status()
            found = {name: getattr(status, name) for name in wanted}
            if found == wanted:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"{found} never became {wanted}")


def fill(arena: Arena, slots: list[pb.Slot]) -> None:
    for slot in slots:
        if not slot.filled:
            arena.payload[slot.slot] = slot.epoch
            for layer in range(LAYOUT.layers):
                arena.seal(slot.slot, layer, slot.epoch, BlockHash(slot.hash))


@asynccontextmanager
async def running(
    folder: Path, arena_dir: Path = SHM, dram_bytes: int = DRAM_BYTES, **more: Any
) -> AsyncIterator[Running]:
    """A node on a socket of its own; leaves neither socket nor arena, and its invariants hold at the end."""
    config = NodeConfig(
        node_id=NodeId(f"test-{os.getpid()}"),
        address=f"unix:{folder}/node.sock",
        dram_bytes=dram_bytes,
        arena_dir=arena_dir,
        **more,
    )
    clock, started = Clock(), asyncio.Event()
    node = KVNode(config, clock)
    serving = asyncio.create_task(node.serve(started.set))
    async with grpc.aio.insecure_channel(config.address) as channel:
        await asyncio.wait({serving, asyncio.create_task(started.wait())}, return_when="FIRST_COMPLETED")
        try:
            one = Running(node, KVNodeStub(channel), clock, config)
            yield one
            await one.stub.Check(pb.Empty())
        finally:
            serving.cancel()
            await asyncio.wait({serving})
    assert not (folder / "node.sock").exists()
    left = [path for path in os.listdir(arena_dir) if path.startswith(f"moonpool-{config.node_id}")]  # noqa: PTH208
    assert left == []
    assert not node._watched, "a process is still watched"


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Running]:
    async with running(tmp_path) as one:
        yield one


@contextmanager
def process() -> Iterator["subprocess.Popen[bytes]"]:
    """A process that a worker might be."""
    with subprocess.Popen(["sleep", "600"]) as one:
        try:
            yield one
        finally:
            one.kill()


@contextmanager
def refused(code: grpc.StatusCode, words: str) -> Iterator[None]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        yield
    assert caught.value.code() is code, caught.value.details()
    assert words in str(caught.value.details())


INVALID = grpc.StatusCode.INVALID_ARGUMENT
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
EXISTS = grpc.StatusCode.ALREADY_EXISTS
NO_ROOM = grpc.StatusCode.RESOURCE_EXHAUSTED


# -- joining --------------------------------------------------------------------------------------------------------


async def test_workers_of_one_layout_share_one_arena(node: Running) -> None:
    mine, others = await node.attach(WORKER), await node.attach(READER)
    assert mine.path == others.path
    assert mine.path.parent == SHM
    assert list((await node.status()).workers) == [READER, WORKER]


async def test_a_worker_of_another_layout_is_told_both(node: Running) -> None:
    await node.attach()
    two_ranks = replace(LAYOUT, page_bytes=LAYOUT.page_bytes // 2, shards=2)
    with refused(
        PRECONDITION,
        "worker two has tensor parallelism 2, this node's arena is for 1: prefill and decode engines exchange KV",
    ):
        await node.attach("two", layout=two_ranks)
    with refused(PRECONDITION, "must share model, dtype, block size and parallelism"):
        await node.attach(READER, layout=replace(LAYOUT, page_bytes=128))
    assert list((await node.status()).workers) == [WORKER]


async def test_a_layout_that_cannot_be_is_refused(node: Running) -> None:
    impossible = layout_message(LAYOUT)
    impossible.page_tokens = 3
    with refused(INVALID, "not a multiple"):
        await node.stub.Attach(pb.AttachRequest(worker_id=WORKER, layout=impossible, pids=[os.getpid()]))
    with refused(INVALID, "at least 1"):
        await node.stub.Attach(pb.AttachRequest(worker_id=WORKER, pids=[os.getpid()]))
    await node.attach()


async def test_nothing_works_before_a_worker_has_attached(node: Running) -> None:
    for call in (
        node.reserve("r", chain(1)),
        node.commit("r"),
        node.abandon("r"),
        node.release("r"),
        node.lease("r", hashes=chain(1)),
        node.stub.Drop(pb.DropRequest(hashes=chain(1))),
    ):
        with refused(PRECONDITION, "no worker has attached"):
            await call
    assert (await node.status()).slots == 0
    await node.stub.Check(pb.Empty())


async def test_too_little_memory_is_told_in_words(tmp_path: Path) -> None:
    async with running(tmp_path, dram_bytes=100) as small:
        with refused(PRECONDITION, "holds no block of 256 bytes"):
            await small.attach()
    layout = replace(LAYOUT, page_bytes=2**31)
    async with running(tmp_path, dram_bytes=2**50) as large:
        with refused(PRECONDITION, "for the KV arena in /dev/shm"):
            await large.attach(layout=layout)


async def test_the_arena_that_a_killed_node_left_behind_is_removed(tmp_path: Path) -> None:
    async with running(tmp_path, arena_dir=tmp_path) as one:
        left = tmp_path / f"moonpool-{one.config.node_id}-1"
        left.write_bytes(b"what a killed node left")
        await one.attach()
        assert not left.exists()


async def test_a_second_worker_of_one_name_is_refused_while_the_first_lives(node: Running) -> None:
    with process() as first, process() as second:
        await node.attach(WORKER, first.pid)
        await node.attach(WORKER, first.pid)  # asking again is no second worker
        with refused(EXISTS, f"is here already, in processes [{first.pid}]"):
            await node.attach(WORKER, second.pid)
        first.kill()
        first.wait()
        await node.attach(WORKER, second.pid)


@pytest.mark.parametrize("pid", [0, 2**32 - 1])
async def test_a_process_that_cannot_be_is_refused(node: Running, pid: int) -> None:
    with refused(INVALID, "cannot watch process"):
        await node.attach(WORKER, os.getpid(), pid)
    assert list((await node.status()).workers) == []


async def test_a_worker_that_died_before_it_was_heard_is_refused(node: Running) -> None:
    with process() as dead:
        dead.kill()
    with refused(PRECONDITION, "none of its processes"):
        await node.attach(WORKER, dead.pid)
    await node.attach(READER)
    with refused(PRECONDITION, "has not attached, or is gone"):
        await node.reserve("r", chain(1))
    with refused(PRECONDITION, "has not attached, or is gone"):
        await node.stub.Watch(pb.WatchRequest(worker_id=WORKER, pids=[os.getpid()]))


async def test_a_worker_that_serves_another_model_is_refused(node: Running) -> None:
    for worker in (WORKER, READER):
        await node.attach(worker)
    await node.stub.Watch(pb.WatchRequest(worker_id=WORKER, pids=[os.getpid()], fingerprint="one"))
    with refused(PRECONDITION, "serves model another, this node's other workers one"):
        await node.stub.Watch(pb.WatchRequest(worker_id=READER, pids=[os.getpid()], fingerprint="another"))


# -- writing --------------------------------------------------------------------------------------------------------


async def test_a_prompt_is_reserved_written_committed_and_found_again(node: Running) -> None:
    arena = await node.attach()
    slots = await node.reserve("a", chain(2), TAIL)
    assert [(slot.hash, slot.filled) for slot in slots] == [(name, False) for name in (*chain(2), TAIL)]
    assert arena.all_held([slot.slot for slot in slots], [slot.epoch for slot in slots])
    assert [arena.hash[slot.slot].tobytes() for slot in slots] == [*chain(2), TAIL]
    fill(arena, slots)
    assert await node.commit("a") == 3
    again = await node.reserve("b", chain(3))
    assert [slot.filled for slot in again] == [True, True, False]
    assert [(slot.slot, slot.epoch) for slot in again[:2]] == [(slot.slot, slot.epoch) for slot in slots[:2]]


async def test_what_is_not_complete_is_not_committed(node: Running) -> None:
    arena = await node.attach()
    slots = await node.reserve("a", chain(2))
    fill(arena, slots[:1])
    arena.seal(slots[1].slot, 0, slots[1].epoch, BlockHash(slots[1].hash))  # one layer of two
    with refused(PRECONDITION, "1 of 2 blocks are not complete"):
        await node.commit("a")
    assert (await node.status()).committed == 0
    fill(arena, slots)
    assert await node.commit("a") == 2
    with refused(PRECONDITION, "is filling nothing"):
        await node.commit("a")


async def test_only_its_writer_commits_or_gives_up_a_reservation(node: Running) -> None:
    arena = await node.attach()
    await node.attach(READER)
    slots = await node.reserve("a", chain(1))
    fill(arena, slots)
    for stranger in (READER, "nobody", ""):
        with refused(PRECONDITION, "is not the writer"):
            await node.commit("a", stranger)
        with refused(PRECONDITION, "is not the writer"):
            await node.abandon("a", stranger, stopped=True)
    assert arena.all_held([slots[0].slot], [slots[0].epoch])
    assert await node.commit("a") == 1


async def test_one_request_is_reserved_once(node: Running) -> None:
    await node.attach()
    await node.reserve("a", chain(1))
    with refused(EXISTS, "already has a reservation"):
        await node.reserve("a", chain(1))


async def test_no_room_is_said_in_numbers_and_room_comes_with_a_release(node: Running) -> None:
    arena = await node.attach()
    await node.reserve("a", chain(4))
    with refused(NO_ROOM, "3 slots wanted, 2 can be freed"):
        await node.reserve("b", chain(3, start=50))
    await node.abandon("a", stopped=True)
    await node.store(arena, "b", chain(6, start=50))
    assert len(await node.reserve("c", chain(3, start=100))) == 3
    assert (await node.status()).evictions == 3


async def test_a_given_up_slot_is_free_only_when_its_writer_says_that_it_stopped(node: Running) -> None:
    arena = await node.attach()
    slots = await node.reserve("a", chain(2))
    await node.abandon("a")
    assert not arena.all_held([slots[0].slot], [slots[0].epoch]), "followers see at once that it was given up"
    await asyncio.sleep(0.2)
    node.clock.now_s += 10 * LEASE_S
    await node.until(draining=2, free=SLOTS - 2)
    arena.stop(slots[0].slot, slots[0].epoch)
    arena.stop(slots[1].slot, slots[1].epoch - 1)  # the word of an older use
    await node.until(draining=1, free=SLOTS - 1)
    arena.stop(slots[1].slot, slots[1].epoch)
    await node.until(draining=0, free=SLOTS)


async def test_a_writer_that_said_it_stopped_before_it_gave_up_waits_for_nothing(node: Running) -> None:
    arena = await node.attach()
    (slot,) = await node.reserve("a", chain(1))
    arena.stop(slot.slot, slot.epoch)
    await node.abandon("a")
    await node.until(free=SLOTS)


async def test_a_reservation_that_comes_after_it_was_given_up_is_refused(node: Running) -> None:
    """As when the caller's patience ended while its Reserve was on the way."""
    await node.attach()
    await node.abandon("r1", stopped=True)
    with pytest.raises(grpc.aio.AioRpcError, match="r1 was given up before it was here"):
        await node.reserve("r1", chain(2))
    assert (await node.status()).free == SLOTS


async def test_callers_that_lose_patience_and_abandon_leave_nothing(node: Running) -> None:
    await node.attach()
    answered = 0
    for turn in range(150):
        call = asyncio.create_task(node.reserve(f"r{turn}", chain(2), TAIL))
        for _ in range(turn % 15):
            await asyncio.sleep(0)
        await asyncio.sleep(0.0001 * (turn % 10))
        answered += call.done()
        call.cancel()
        await asyncio.wait({call})
        await node.abandon(f"r{turn}", stopped=True)
    await node.until(filling=0, draining=0, leases=0, free=SLOTS)
    assert answered < 150, "no call was cancelled in the middle"


# -- reading --------------------------------------------------------------------------------------------------------


async def test_a_chain_is_leased_by_its_names(node: Running) -> None:
    arena = await node.attach()
    stored = await node.store(arena, "a", chain(2))
    leased = await node.lease("b", hashes=chain(4))
    assert [(slot.slot, slot.epoch, slot.filled) for slot in leased] == [
        (slot.slot, slot.epoch, True) for slot in stored
    ]
    assert await node.lease("c", hashes=chain(1, start=9)) == []
    await node.until(leased=2, leases=1)
    await node.release("b", READER)
    await node.release("b", READER)
    await node.until(leased=0, leases=0)


async def test_a_hand_off_is_leased_while_it_is_written(node: Running) -> None:
    arena = await node.attach()
    slots = await node.reserve("a", chain(1), TAIL)
    leased = await node.lease("a", slots=slots)
    assert not any(slot.filled for slot in leased)
    fill(arena, slots)
    await node.commit("a")
    await node.release("a")
    assert all(slot.filled for slot in await node.lease("a", slots=slots))
    await node.until(committed=2)
    await node.release("a", READER)
    await node.until(committed=1, free=SLOTS - 1)


async def test_a_hand_off_that_nobody_fetches_ends_with_its_lease(node: Running) -> None:
    arena = await node.attach()
    slots = await node.reserve("a", chain(1), TAIL)
    fill(arena, slots)
    await node.commit("a")
    await node.until(committed=2, leases=1)
    node.clock.now_s += LEASE_S
    await node.until(committed=1, leases=0, leases_expired=1)
    with refused(PRECONDITION, "is no longer held"):
        await node.lease("a", slots=slots)


async def test_a_reader_that_never_attached_holds_until_its_time(node: Running) -> None:
    arena = await node.attach()
    await node.store(arena, "a", chain(1))
    await node.lease("b", holder="a tool", hashes=chain(1))
    await node.until(leases=1)
    node.clock.now_s += LEASE_S
    await node.until(leases=0, committed=1)


async def test_a_dropped_block_is_forgotten(node: Running) -> None:
    arena = await node.attach()
    await node.store(arena, "a", chain(2))
    reply = await node.stub.Drop(pb.DropRequest(hashes=[*chain(1), b"x" * 32]))
    assert reply.dropped == 1
    assert await node.lease("b", hashes=chain(2)) == []
    status = await node.status()
    assert (status.dropped, status.free) == (1, SLOTS - 1)


# -- dying ----------------------------------------------------------------------------------------------------------


async def test_a_killed_worker_leaves_neither_slots_nor_leases(node: Running) -> None:
    with process() as victim, process() as child:
        arena = await node.attach(WORKER, victim.pid)
        await node.stub.Watch(pb.WatchRequest(worker_id=WORKER, pids=[child.pid]))
        await node.attach(READER)
        stored = await node.store(arena, "old", chain(1))
        await node.reserve("a", chain(3))
        await node.reserve("b", chain(1, start=50))
        await node.abandon("b")
        await node.lease("c", holder=WORKER, slots=stored)
        await node.lease("d", holder=READER, slots=stored)
        await node.until(filling=2, draining=1, leases=3)
        victim.send_signal(signal.SIGKILL)
        await asyncio.sleep(0.2)
        await node.until(filling=2, draining=1)  # its engine may still be writing
        child.send_signal(signal.SIGKILL)
        await node.until(filling=0, draining=0, leases=1, free=SLOTS - 1, workers=[READER])
        with refused(PRECONDITION, "has not attached, or is gone"):
            await node.reserve("e", chain(1))


async def test_a_restarted_worker_is_not_confused_with_what_is_left_of_the_former(node: Running) -> None:
    with process() as former, process() as former_child, process() as present:
        arena = await node.attach(WORKER, former.pid)
        await node.stub.Watch(pb.WatchRequest(worker_id=WORKER, pids=[former_child.pid]))
        slots = await node.reserve("a", chain(2))
        fill(arena, slots)
        former.kill()
        former.wait()
        await node.attach(WORKER, present.pid)
        with refused(PRECONDITION, "is not the writer"):
            await node.commit("a")
        with refused(PRECONDITION, "is not the writer"):
            await node.abandon("a", stopped=True)
        await node.reserve("b", chain(1, start=50))
        former_child.kill()
        await node.until(filling=1, free=SLOTS - 1, workers=[WORKER])
        await node.abandon("b", stopped=True)
        await node.until(filling=0)


async def test_a_killed_worker_that_had_nothing_left_to_write_leaves_nothing(node: Running) -> None:
    with process() as victim:
        arena = await node.attach(WORKER, victim.pid)
        await node.attach(READER)
        await node.store(arena, "old", chain(2))
        await node.reserve("a", chain(2))
        victim.kill()
        await node.until(leases=0, workers=[READER])
        await node.lease("a", hashes=chain(2))
        node.clock.now_s += LEASE_S
        await node.until(leases=0)


async def test_what_a_worker_asked_for_before_it_ended_is_not_leased_after_that(
    node: Running, tmp_path: Path
) -> None:
    """Nobody would take such a lease back: on its way, or waiting for another node, when its worker was killed."""
    path = str(tmp_path / "mute")
    hangs: dict[str, Any] = {"sources": [pb.Node(node_id="other", address=f"unix:{path}")], "fetch_s": 1.0}
    with process() as victim, process() as next_one, socket.socket(socket.AF_UNIX) as mute:
        mute.bind(path)
        mute.listen()
        stored = await node.store(await node.attach(WORKER), "old", chain(2))
        await node.attach(READER, victim.pid)
        asking = [asyncio.create_task(node.lease(name, hashes=chain(3), **hangs)) for name in "ab"]
        await asyncio.sleep(0.2)
        victim.kill()
        await node.until(workers=[WORKER])
        with refused(PRECONDITION, f"worker {READER} is gone"):
            await asking[0]
        with refused(PRECONDITION, f"worker {READER} is gone"):
            await asking[1]
        more: list[dict[str, Any]] = [{"hashes": chain(2)}, {"slots": stored}]
        for what in more:
            with refused(PRECONDITION, f"worker {READER} is gone"):
                await node.lease("c", **what)
        await node.attach(READER, next_one.pid)
        late = asyncio.create_task(node.lease("d", hashes=chain(3), **hangs))
        await asyncio.sleep(0.2)
        next_one.kill()
        await node.until(workers=[WORKER])
        await node.attach(READER)
        with refused(PRECONDITION, "was restarted meanwhile"):
            await late
        await node.until(leases=0, leased=0)
        assert len(await node.lease("e", hashes=chain(2))) == 2, "the new one is served"
        await node.release("e", READER)


# -- events ---------------------------------------------------------------------------------------------------------


def told(event: object) -> tuple[int, bool, list[bytes], list[bytes]]:
    assert isinstance(event, pb.BlockEvents), "the stream ended"
    return event.sequence, event.snapshot, list(event.stored), list(event.removed)


async def test_a_subscriber_gets_a_snapshot_and_then_every_change_in_order(node: Running) -> None:
    early = node.stub.Events(pb.EventsRequest())
    assert told(await early.read()) == (0, True, [], [])
    arena = await node.attach()
    await node.store(arena, "a", chain(4))
    late = node.stub.Events(pb.EventsRequest())
    assert told(await late.read()) == (1, True, chain(4), [])
    await node.store(arena, "b", chain(3, start=50))  # evicts one
    await node.stub.Drop(pb.DropRequest(hashes=chain(1, start=50)))
    changes = [
        (2, False, [], [chain(4)[3]]),
        (3, False, chain(3, start=50), []),
        (4, False, [], chain(1, start=50)),
    ]
    assert told(await early.read()) == (1, False, chain(4), [])
    for subscriber in (early, late):
        assert [told(await subscriber.read()) for _ in changes] == changes
        subscriber.cancel()


async def test_a_tail_is_never_announced(node: Running) -> None:
    events = node.stub.Events(pb.EventsRequest())
    await events.read()
    arena = await node.attach()
    await node.store(arena, "a", chain(1), TAIL)
    assert told(await events.read()) == (1, False, chain(1), [])
    await node.store(arena, "b", chain(1, start=50))
    assert told(await events.read()) == (2, False, chain(1, start=50), [])
    events.cancel()


async def test_a_subscriber_that_left_is_forgotten(node: Running) -> None:
    events = node.stub.Events(pb.EventsRequest())
    await events.read()
    assert len(node.node._subscribers) == 1
    events.cancel()
    for _ in range(100):
        if not node.node._subscribers:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the subscriber's queue is kept for ever")


async def test_a_slow_subscriber_sees_a_gap_and_blocks_nobody(node: Running) -> None:
    arena = await node.attach()
    stream = node.node.Events(pb.EventsRequest(), None)  # type: ignore[arg-type]  # Events uses no context
    assert (await anext(stream)).snapshot
    next_event = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    for turn in range(2):
        await node.store(arena, f"r{turn}", chain(1, start=turn))
    first = await next_event
    assert first.sequence == 1
    for _ in range(10_000):
        node.node._publish(None, block_hashes_from(chain(1, start=200)))
    assert (await anext(stream)).sequence > first.sequence + 1
    node.node._subscribers.clear()
    assert await node.reserve("after", chain(1, start=9))


# -- what a careless or hostile caller may say ----------------------------------------------------------------------


@pytest.mark.parametrize("name", [b"", b"x" * 31, b"x" * 33])
async def test_a_name_of_another_length_is_refused(node: Running, name: bytes) -> None:
    await node.attach()
    words = f"a block hash has 32 bytes, not {len(name)}"
    for call in (
        node.reserve("r", [*chain(1), name]),
        node.lease("r", hashes=[name]),
        node.stub.Drop(pb.DropRequest(hashes=[name])),
    ):
        with refused(INVALID, words):
            await call
    if name:
        with refused(INVALID, words):
            await node.reserve("r", chain(1), tail=name)
    await node.until(free=SLOTS, leases=0)


@pytest.mark.parametrize(("slot", "epoch"), [(0, 0), (SLOTS, 1), (2**32 - 1, 1), (0, 2**64 - 1), (1, 1)])
async def test_a_use_that_never_was_is_refused(node: Running, slot: int, epoch: int) -> None:
    arena = await node.attach()
    (stored,) = await node.store(arena, "a", chain(1))
    with refused(PRECONDITION, "is no longer held"):
        await node.lease("r", slots=[stored, pb.Slot(slot=slot, epoch=epoch)])
    await node.until(leases=0)


@pytest.mark.parametrize("lease_s", [math.inf, -math.inf, math.nan, -1.0, 1e9])
async def test_a_lease_for_ever_is_refused(node: Running, lease_s: float) -> None:
    arena = await node.attach()
    stored = await node.store(arena, "a", chain(1))
    for call in (
        node.reserve("r", chain(2), lease_s=lease_s),
        node.lease("r", slots=stored, lease_s=lease_s),
        node.lease("r", hashes=chain(1), lease_s=lease_s),
    ):
        with refused(INVALID, "lease_s is"):
            await call
    await node.until(leases=0, filling=0)


async def test_words_of_unknown_holders_change_nothing(node: Running) -> None:
    arena = await node.attach()
    await node.store(arena, "a", chain(1))
    await node.release("a", "nobody")
    await node.release("never", WORKER)
    await node.abandon("never", WORKER)
    with refused(PRECONDITION, "is filling nothing"):
        await node.commit("never", "nobody")
    with refused(PRECONDITION, "has not attached, or is gone"):
        await node.reserve("r", chain(1), worker="nobody")
    await node.until(committed=1, leases=0)


async def test_check_sees_an_arena_that_differs_from_the_books(tmp_path: Path) -> None:
    async with running(tmp_path) as one:
        arena = await one.attach()
        (slot,) = await one.store(arena, "a", chain(1))
        arena.epoch[slot.slot] += 1
        with refused(grpc.StatusCode.INTERNAL, "the arena's epochs are not the pool's"):
            await one.stub.Check(pb.Empty())
        arena.epoch[slot.slot] -= 1


# -- ending ---------------------------------------------------------------------------------------------------------


async def test_a_node_ends_while_it_is_watched_and_used(tmp_path: Path) -> None:
    with process() as worker:
        async with running(tmp_path) as one:
            arena = await one.attach(WORKER, worker.pid)
            await one.reserve("a", chain(2))
            events = one.stub.Events(pb.EventsRequest())
            await events.read()
            await one.stub.Check(pb.Empty())
    assert not arena.path.exists()


async def test_a_socket_that_cannot_be_is_told(tmp_path: Path) -> None:
    node = KVNode(NodeConfig(NodeId("n"), f"unix:{tmp_path}/no/such/folder.sock", DRAM_BYTES, tmp_path))
    with pytest.raises(OSError, match="cannot listen on"):
        await node.serve()


async def test_the_ssd_is_worn_no_faster_than_its_budget(tmp_path: Path) -> None:
    """A second's worth at once, and then one block after the other, without anybody asking."""
    per_s = 4
    budget = per_s * FileForm.raw(LAYOUT).file_bytes
    ssd: dict[str, Any] = {
        "ssd_dir": tmp_path / "ssd",
        "ssd_bytes": 2**24,
        "ssd_admission": "budget",
        "ssd_write_bytes_per_s": budget,
    }
    async with running(tmp_path, **ssd) as node:
        arena = await node.attach()
        began_s = time.monotonic()
        await node.store(arena, "r", [bytes([number]) * 32 for number in range(SLOTS)])
        while (written := (await node.status()).ssd_blocks) < SLOTS:
            assert written <= per_s * (time.monotonic() - began_s) + per_s + 1
            await asyncio.sleep(0.01)
        assert time.monotonic() - began_s >= (SLOTS - per_s - 1) / per_s


async def test_a_policy_that_is_not_known_is_named(tmp_path: Path) -> None:
    async with running(tmp_path, eviction="oldest") as node:
        with refused(grpc.StatusCode.FAILED_PRECONDITION, "oldest"):
            await node.attach()
