"""One machine's KV node: owns the DRAM arena, runs the slot pool, answers local workers and the conductor.

This is the driver of `kvstore.core.slots`: it gives that pure machine the time, executes what it decides on the
arena's words, watches workers' processes (a pidfd becomes readable when its process ends) and publishes what is
stored and removed. Control only: KV bytes go straight between an engine and the arena.
"""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import grpc

from kvstore.core.blocks import BlockHash, KVLayout, NodeId, RequestId, WorkerId
from kvstore.core.slots import Fenced, NoRoom, SlotPool
from kvstore.tiers.dram import Arena, ArenaShape
from kvstore.transfer import kv_pb2 as pb
from kvstore.transfer.kv_pb2_grpc import KVNodeServicer, add_KVNodeServicer_to_server
from kvstore.transfer.messages import block_hashes_from, layout_from, slot_list
from kvstore.transfer.server import serving

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
logger = logging.getLogger(__name__)

_SWEEP_S = 0.05
_SUBSCRIBER_BACKLOG_MAX = 10_000


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """`arena_dir` is where the arena file goes (a tmpfs), `dram_bytes` its size, `address` what gRPC listens on."""

    node_id: NodeId
    address: str
    dram_bytes: int
    arena_dir: Path = Path("/dev/shm")


class KVNode(KVNodeServicer):
    """The service; `serve` runs it. All methods run on one event loop, so the pool needs no lock."""

    def __init__(self, config: NodeConfig, now: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._now = now
        self._arena: Arena | None = None
        self._pool: SlotPool | None = None
        self._pidfds: dict[int, tuple[WorkerId, int]] = {}  # fd -> (worker, pid)
        self._sequence = 0
        self._subscribers: set[asyncio.Queue[pb.BlockEvents]] = set()
        self._dropped = 0

    # -- life -----------------------------------------------------------------------------------------------

    async def serve(self, started: Callable[[], None] = lambda: None) -> None:
        """Serves until cancelled; then removes the arena and the socket."""

        def add(server: grpc.aio.Server) -> None:
            add_KVNodeServicer_to_server(self, server)

        async with serving(self._config.address, add):
            started()
            try:
                while True:
                    await asyncio.sleep(_SWEEP_S)
                    self._sweep()
            finally:
                self.close()

    def close(self) -> None:
        """Forgets the arena's name and the watched processes. Idempotent."""
        for descriptor in list(self._pidfds):
            self._unwatch(descriptor)
        if self._arena is not None:
            self._arena.unlink()

    # -- workers --------------------------------------------------------------------------------------------

    async def Attach(self, request: pb.AttachRequest, context: Context) -> pb.AttachReply:
        try:
            layout = layout_from(request.layout)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"worker {request.worker_id}: {error}")
        if self._arena is None:
            self._open(layout)
        assert self._arena is not None
        mine = self._arena.shape.layout
        if layout != mine:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"worker {request.worker_id} has KV layout {layout}, this node's arena has {mine}: "
                "prefill and decode engines on one node must share model, dtype, block size and parallelism",
            )
        self._watch(WorkerId(request.worker_id), request.pids)
        return pb.AttachReply(
            arena_path=str(self._arena.path), slots=self._arena.shape.slots, node_id=self._config.node_id
        )

    async def Watch(self, request: pb.WatchRequest, context: Context) -> pb.Empty:
        self._watch(WorkerId(request.worker_id), request.pids)
        return pb.Empty()

    def _open(self, layout: KVLayout) -> None:
        shape = ArenaShape.fitting(layout, self._config.dram_bytes)
        path = self._config.arena_dir / f"moonpool-{self._config.node_id}-{os.getpid()}"
        self._arena = Arena.create(path, shape)
        self._pool = SlotPool(shape.slots)
        logger.info("arena %s: %d slots of %d bytes", path, shape.slots, layout.block_bytes)

    def _watch(self, worker: WorkerId, pids: Sequence[int]) -> None:
        """The worker's slots are freed when all its watched processes are gone."""
        loop = asyncio.get_running_loop()
        watched = {pid for owner, pid in self._pidfds.values() if owner == worker}
        for pid in set(pids) - watched:
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            self._pidfds[descriptor] = (worker, pid)
            loop.add_reader(descriptor, self._process_ended, descriptor)

    def _unwatch(self, descriptor: int) -> WorkerId:
        worker, _ = self._pidfds.pop(descriptor)
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)
        return worker

    def _process_ended(self, descriptor: int) -> None:
        worker = self._unwatch(descriptor)
        if self._pool is not None and not any(owner == worker for owner, _ in self._pidfds.values()):
            logger.warning("worker %s is gone: its reservations and leases end", worker)
            self._pool.writer_died(worker)
            self._apply()

    # -- writers --------------------------------------------------------------------------------------------

    async def Reserve(self, request: pb.ReserveRequest, context: Context) -> pb.SlotList:
        pool, arena = await self._ready(context)
        names = await self._names(request.hashes, context)
        tail = (await self._names([request.tail_hash], context))[0] if request.tail_hash else None
        found = pool.reserve(
            RequestId(request.request_id),
            WorkerId(request.worker_id),
            names,
            tail,
            expires_s=self._now() + request.lease_s,
            reuse=not request.no_reuse,
        )
        self._apply()  # evicted slots end before their new use begins
        if isinstance(found, NoRoom):
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{found.wanted} slots wanted, {found.available} can be freed: the rest is leased or being written",
            )
        if isinstance(found, Fenced):
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, found.reason)
        assert isinstance(found, list)
        for ref in found:
            if not ref.filled:
                arena.begin(ref.slot, ref.epoch, ref.hash)
        return slot_list(found)

    async def Commit(self, request: pb.Holding, context: Context) -> pb.CommitReply:
        pool, arena = await self._ready(context)
        holding = pool.unfinished(RequestId(request.request_id))
        missing = [slot for slot, epoch in holding if not arena.complete(slot, epoch)]
        if missing:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"request {request.request_id}: {len(missing)} of {len(holding)} blocks are not complete",
            )
        done = pool.commit(RequestId(request.request_id), WorkerId(request.holder))
        if isinstance(done, Fenced):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, done.reason)
        assert isinstance(done, int)
        self._apply()
        return pb.CommitReply(blocks=done)

    async def Abandon(self, request: pb.AbandonRequest, context: Context) -> pb.Empty:
        pool, arena = await self._ready(context)
        for slot, _ in pool.unfinished(RequestId(request.request_id)):
            arena.end(slot)  # followers stop waiting now; the slot itself waits for its writer
        pool.abandon(RequestId(request.request_id), WorkerId(request.worker_id), request.stopped)
        self._apply()
        return pb.Empty()

    # -- readers --------------------------------------------------------------------------------------------

    async def Lease(self, request: pb.LeaseRequest, context: Context) -> pb.SlotList:
        pool, _ = await self._ready(context)
        key = (RequestId(request.request_id), request.holder)
        until = self._now() + request.lease_s
        if request.slots:
            found = pool.lease(*key, [(slot.slot, slot.epoch) for slot in request.slots], until)
        else:
            found = pool.acquire(*key, await self._names(request.hashes, context), until)
        if isinstance(found, Fenced):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, found.reason)
        assert isinstance(found, list)
        return slot_list(found)

    async def Release(self, request: pb.Holding, context: Context) -> pb.Empty:
        pool, _ = await self._ready(context)
        pool.release(RequestId(request.request_id), request.holder)
        self._apply()
        return pb.Empty()

    async def Drop(self, request: pb.DropRequest, context: Context) -> pb.DropReply:
        pool, _ = await self._ready(context)
        dropped = sum(pool.drop(name) for name in await self._names(request.hashes, context))
        self._dropped += dropped
        self._apply()
        return pb.DropReply(dropped=dropped)

    # -- events and state -----------------------------------------------------------------------------------

    async def Events(self, request: pb.EventsRequest, context: Context) -> AsyncIterator[pb.BlockEvents]:
        queue: asyncio.Queue[pb.BlockEvents] = asyncio.Queue(_SUBSCRIBER_BACKLOG_MAX)
        self._subscribers.add(queue)
        try:
            stored = self._pool.committed() if self._pool is not None else []
            yield pb.BlockEvents(sequence=self._sequence, snapshot=True, stored=stored)
            while True:
                yield await queue.get()
        finally:
            self._subscribers.discard(queue)

    async def Status(self, request: pb.Empty, context: Context) -> pb.NodeStatus:
        status = pb.NodeStatus(
            node_id=self._config.node_id,
            dropped=self._dropped,
            workers=sorted({worker for worker, _ in self._pidfds.values()}),
        )
        if self._pool is not None and self._arena is not None:
            counts = self._pool.counts()
            status.slots = self._pool.size
            status.free, status.filling = counts["free"], counts["filling"]
            status.draining, status.committed = counts["draining"], counts["committed"]
            status.leased, status.leases = counts["leased"], counts["leases"]
            status.evictions = self._pool.evictions
            status.leases_expired = self._pool.leases_expired
            status.block_bytes = self._arena.shape.layout.block_bytes
        return status

    async def Check(self, request: pb.Empty, context: Context) -> pb.Empty:
        if self._pool is not None:
            try:
                self._pool.check()
            except AssertionError as broken:
                await context.abort(grpc.StatusCode.INTERNAL, f"invariant broken: {broken}")
        return pb.Empty()

    # -- inside ---------------------------------------------------------------------------------------------

    async def _ready(self, context: Context) -> tuple[SlotPool, Arena]:
        if self._pool is None or self._arena is None:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, "no worker has attached: there is no arena yet"
            )
        assert self._pool is not None and self._arena is not None
        return self._pool, self._arena

    async def _names(self, names: Sequence[bytes], context: Context) -> list[BlockHash]:
        try:
            return block_hashes_from(names)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    def _sweep(self) -> None:
        if self._pool is None or self._arena is None:
            return
        for slot, epoch in self._pool.draining():
            if self._arena.stopped[slot] == epoch:
                self._pool.writer_stopped(slot, epoch)
        self._pool.expire(self._now())
        self._apply()

    def _apply(self) -> None:
        """Ends on the arena what the pool has freed, and publishes what it stored and removed."""
        if self._pool is None or self._arena is None:
            return
        for slot in self._pool.take_freed():
            self._arena.end(slot)
        stored, removed = self._pool.take_changes()
        if not stored and not removed:
            return
        self._sequence += 1
        event = pb.BlockEvents(sequence=self._sequence, stored=stored, removed=removed)
        for queue in list(self._subscribers):
            if queue.full():  # the subscriber will see a gap in the sequence and ask for a snapshot
                queue.get_nowait()
            queue.put_nowait(event)
