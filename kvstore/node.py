"""One machine's KV node: owns the DRAM arena, runs the slot pool, answers local workers and the conductor.

This is the driver of `kvstore.core.slots`: it gives that pure machine the time, executes what it decides on the
arena's words, watches workers' processes (a pidfd becomes readable when its process ends) and publishes what is
stored and removed. Control only: KV bytes go straight between an engine and the arena.

Only a worker with a living process may reserve: time never frees what a writer holds, so its end must be seen. A
caller whose Reserve was cancelled or timed out cannot know whether it holds slots, and must Abandon.
"""

import asyncio
import logging
import os
import select
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import grpc

from kvstore.codecs.at_rest import AtRest
from kvstore.codecs.choice import LOSSLESS, codec_named
from kvstore.codecs.codec import BlockForm
from kvstore.core.blocks import BlockHash, KVLayout, NodeId, RequestId, Tier, WorkerId
from kvstore.core.slots import Fenced, NoRoom, SlotPool, SlotRef
from kvstore.core.tiers import TierConfig, TierLimits, TierMachine
from kvstore.directory.directory import BlockChange
from kvstore.fetch import Fetcher
from kvstore.metrics import exported
from kvstore.tiering import Tiering
from kvstore.tiers.block_file import FileForm
from kvstore.tiers.dram import Arena, ArenaShape
from kvstore.tiers.ssd import SsdTier
from kvstore.transfer import kv_pb2 as pb
from kvstore.transfer.choice import Neighbours
from kvstore.transfer.grpc_link import KINDS, Kind, PeerSource
from kvstore.transfer.kv_pb2_grpc import KVNodeServicer, add_KVNodeServicer_to_server
from kvstore.transfer.messages import block_hashes_from, layout_from, permutation_from, slot_list
from kvstore.transfer.nixl_link import LazyMemory
from kvstore.transfer.probe import Probe
from kvstore.transfer.serve_reads import BulkListener, Offer, ReadService
from kvstore.transfer.server import serving
from kvstore.transfer.tls import TlsConfig

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
logger = logging.getLogger(__name__)

_SWEEP_S = 0.05
_SUBSCRIBER_BACKLOG_MAX = 10_000
_LEASE_S_MAX = 3600.0
_FETCH_S_MAX = 600.0
_GIVEN_UP_MAX = 10_000


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """`arena_dir` is where the arena file goes (a tmpfs), `dram_bytes` its size, `address` what gRPC listens on.

    `ssd_dir` is the folder of the SSD tier, which may take `ssd_bytes`; None is no such tier. `ssd_admission` and
    `eviction` are names in `kvstore.core`; admissions within a budget write `ssd_write_bytes_per_s`. `codec` is how blocks
    lie on the SSD, a name in `kvstore.codecs.choice`. `links` may be used to read from other nodes and are offered to
    them. Where there is a `peer_address` (host:port), other nodes read there, and nothing else is served there; `tls` is
    for it, and for such addresses of other nodes. Prometheus may scrape the `metrics_address` (host:port), if there is one.
    """

    node_id: NodeId
    address: str
    dram_bytes: int
    arena_dir: Path = Path("/dev/shm")
    ssd_dir: Path | None = None
    ssd_bytes: int = 0
    ssd_admission: str = "all"
    ssd_write_bytes_per_s: float = inf
    eviction: str = "cost_aware"
    codec: str = LOSSLESS.name
    links: tuple[Kind, ...] = KINDS
    peer_address: str = ""
    tls: TlsConfig | None = None
    metrics_address: str = ""

    @property
    def read_address(self) -> str:
        """Where other nodes read from this one."""
        return self.peer_address or self.address


@dataclass(eq=False, slots=True)
class _Life:
    """A worker from its start to its end. A restarted worker is another writer under the same name: what its former
    processes may still write is not freed by the word, or for the sake, of the new ones.
    """

    worker: WorkerId
    writer: WorkerId
    """Its name in the pool: unique, so that an old life can be told from a new one."""
    attached: set[int] = field(default_factory=set)
    """pidfds of the processes that attached, which speak for the worker."""
    watched: dict[int, int] = field(default_factory=dict)
    """pid by pidfd, of all its processes that have not ended."""


class KVNode(KVNodeServicer):
    """The service; `serve` runs it. All methods run on one event loop, so the pool needs no lock.

    `publish` is given every change of what the node holds, in order.
    """

    def __init__(
        self,
        config: NodeConfig,
        now: Callable[[], float] = time.monotonic,
        publish: Callable[[BlockChange], None] = lambda change: None,
    ) -> None:
        self._config = config
        self._now = now
        self._publish_change = publish
        self._fingerprint = ""
        self._arena: Arena | None = None
        self._pool: SlotPool | None = None
        self._fetcher: Fetcher | None = None
        self._tiering: Tiering | None = None
        self._coding: AtRest | None = None
        """How blocks lie on the SSD, where that is not as they lie in the arena; as the first worker has them."""
        self._announced: dict[BlockHash, Tier] = {}
        """What this node holds, and where, as it was published."""
        self._neighbours: Neighbours | None = None
        self._listener: BulkListener | None = None
        self._probe: Probe | None = None
        self._memory: LazyMemory | None = None
        self._reads: ReadService | None = None
        self._lives: dict[WorkerId, _Life] = {}  # the present life of each worker
        self._watched: dict[int, _Life] = {}  # by pidfd; former lives too, while a process of theirs lives
        self._lives_started = 0
        self._given_up: OrderedDict[RequestId, None] = (
            OrderedDict()
        )  # the latest; each attempt has its own name
        self._sequence = 0
        self._subscribers: set[asyncio.Queue[pb.BlockEvents]] = set()
        self._dropped = 0
        self._corrupt = 0
        self._asked_blocks = 0
        self._hit_dram_blocks = 0

    # -- life -----------------------------------------------------------------------------------------------

    async def serve(self, started: Callable[[], None] = lambda: None) -> None:
        """Serves until cancelled; then removes the arena and the socket."""

        def add(server: grpc.aio.Server) -> None:
            add_KVNodeServicer_to_server(self, server)

        config = self._config
        try:
            async with AsyncExitStack() as doors:
                if "bulk" in config.links:
                    tls = config.tls if config.peer_address else None
                    self._listener = BulkListener.open(config.read_address, tls=tls)
                if config.peer_address:
                    await doors.enter_async_context(serving(config.peer_address, self._add_reads, config.tls))
                await doors.enter_async_context(serving(config.address, add))
                if config.metrics_address:
                    doors.enter_context(exported(config.metrics_address, self.status))
                started()
                while True:
                    await asyncio.sleep(_SWEEP_S)
                    self._sweep()
        finally:
            await self._close_transfers()
            if self._tiering is not None:
                await self._tiering.close()
            self.close()

    def _add_reads(self, server: grpc.aio.Server) -> None:
        add_KVNodeServicer_to_server(_ForPeers(self), server)  # type: ignore[abstract]  # the rest is UNIMPLEMENTED

    async def _close_transfers(self) -> None:
        """Ends reads of others, then reads from others, then what both used."""
        if self._listener is not None:
            await self._listener.close()
        if self._reads is not None:
            self._reads.close()
        if self._fetcher is not None:
            await self._fetcher.close()
        if self._neighbours is not None:
            await self._neighbours.close()
        for memory in (self._memory, self._probe.memory if self._probe is not None else None):
            if memory is not None:
                await memory.close()

    def close(self) -> None:
        """Forgets the arena's name and the watched processes. Idempotent."""
        for descriptor in list(self._watched):
            self._unwatch(descriptor)
        if self._arena is not None:
            self._arena.unlink()

    # -- workers --------------------------------------------------------------------------------------------

    async def Attach(self, request: pb.AttachRequest, context: Context) -> pb.AttachReply:
        try:
            layout = layout_from(request.layout)
            coding = await self._coding_with(request, layout, context)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"worker {request.worker_id}: {error}")
        if self._arena is None:
            self._coding = coding
        try:
            arena = self._arena or self._open(layout)
        except (OSError, ValueError) as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        mine = arena.shape.layout
        if layout.shards != mine.shards:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"worker {request.worker_id} has tensor parallelism {layout.shards}, this node's arena is for "
                f"{mine.shards}: prefill and decode engines exchange KV shard by shard, so it must be the same",
            )
        if layout != mine:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"worker {request.worker_id} has KV layout {layout}, this node's arena has {mine}: "
                "prefill and decode engines on one node must share model, dtype, block size and parallelism",
            )
        if _packing(coding) != _packing(self._coding):
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"worker {request.worker_id} packs the elements of a page as {_packing(coding)}, this node's other workers "
                f"as {_packing(self._coding)}: {self._config.codec} could not give each its own back",
            )
        await self._join(WorkerId(request.worker_id), request.pids, context)
        return pb.AttachReply(
            arena_path=str(arena.path),
            slots=arena.shape.slots,
            node_id=self._config.node_id,
            pid=os.getpid(),
        )

    async def _coding_with(
        self, request: pb.AttachRequest, layout: KVLayout, context: Context
    ) -> AtRest | None:
        """The node's codec on this worker's blocks. Raises ValueError for elements that cannot lie as it says."""
        codec, theirs = codec_named(self._config.codec), request.codec or LOSSLESS.name
        if theirs != codec.name:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"worker {request.worker_id} has pool.codec {theirs}, this node {codec.name}: blocks of two precisions "
                "never share a pool",
            )
        if codec is LOSSLESS:
            return None
        return AtRest(BlockForm(layout, permutation_from(request.packing, layout)), codec)

    async def Watch(self, request: pb.WatchRequest, context: Context) -> pb.Empty:
        life = await self._life(request.worker_id, context)
        self._fingerprint = self._fingerprint or request.fingerprint
        if request.fingerprint != self._fingerprint:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"worker {request.worker_id} serves model {request.fingerprint}, this node's other workers "
                f"{self._fingerprint}: start them anew from one folder",
            )
        self._watch(life, await self._open_pidfds(request.pids, context))
        return pb.Empty()

    def _open(self, layout: KVLayout) -> Arena:
        """Raises OSError or ValueError when there is no memory for it."""
        shape = ArenaShape.fitting(layout, self._config.dram_bytes)
        prefix = f"moonpool-{self._config.node_id}-"
        Arena.remove_dead(self._config.arena_dir, prefix)
        arena = self._arena = Arena.create(self._config.arena_dir / f"{prefix}{os.getpid()}", shape)
        try:
            self._pool = SlotPool(shape.slots, self._config.eviction)
            self._fetcher = Fetcher(self._pool, arena, self._apply)
            self._open_transfers(arena)
            if self._config.ssd_dir is not None:
                self._tiering = self._open_ssd(self._config.ssd_dir, self._pool, arena)
        except (OSError, ValueError):
            arena.unlink()
            self._arena = None
            raise
        logger.info("arena %s: %d slots of %d bytes", arena.path, shape.slots, layout.block_bytes)
        return arena

    def _open_transfers(self, arena: Arena) -> None:
        config, layout = self._config, arena.shape.layout
        self._memory = LazyMemory(config.node_id, arena)
        self._probe = Probe(config.node_id, layout, config.arena_dir)
        self._neighbours = Neighbours(
            config.node_id, arena, self._probe, self._memory, config.links, config.tls
        )
        nixl = "nixl" in config.links
        offers = [
            Offer(self, self._memory if nixl else None),
            Offer(self._probe, self._probe.memory if nixl else None),
        ]
        self._reads = ReadService(offers, self._listener)

    def _open_ssd(self, folder: Path, pool: SlotPool, arena: Arena) -> Tiering:
        """Raises OSError when the folder cannot be had, ValueError when the quota holds no block."""
        form, quota_bytes = FileForm.raw(arena.shape.layout), self._config.ssd_bytes
        coding = self._coding
        if coding is not None:
            form = replace(form, encoding=coding.codec.name, segment_bytes=coding.encoded_segment_bytes)
        tiers = TierConfig(
            TierLimits(quota_bytes // form.file_bytes, self._config.eviction),
            admission=self._config.ssd_admission,
            write_bytes_per_s=self._config.ssd_write_bytes_per_s,
            block_bytes=form.file_bytes,
        )
        ssd = SsdTier.open(folder, form, quota_bytes=quota_bytes, coding=coding)
        return Tiering(TierMachine(tiers), ssd, pool, arena, self._announce, coding)

    async def _join(self, worker: WorkerId, pids: Sequence[int], context: Context) -> None:
        """A new life of the worker, unless the caller belongs to the present one."""
        opened = await self._open_pidfds(pids, context)
        if not opened:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"worker {worker}: none of its processes {list(pids)} lives",
            )
        life = self._lives.get(worker)
        if life is None or not set(opened.values()) & set(life.watched.values()):
            if life is not None and any(_lives(descriptor) for descriptor in life.attached):
                for descriptor in opened:
                    os.close(descriptor)
                await context.abort(
                    grpc.StatusCode.ALREADY_EXISTS,
                    f"worker {worker} is here already, in processes {sorted(life.watched.values())}",
                )
            self._lives_started += 1
            life = self._lives[worker] = _Life(worker, WorkerId(f"{worker}#{self._lives_started}"))
        life.attached.update(self._watch(life, opened))

    async def _open_pidfds(self, pids: Sequence[int], context: Context) -> dict[int, int]:
        """Pid by pidfd of those processes that live."""
        opened: dict[int, int] = {}
        for pid in dict.fromkeys(pids):
            try:
                opened[os.pidfd_open(pid)] = pid
            except ProcessLookupError:
                continue
            except (OSError, OverflowError) as error:
                for descriptor in opened:
                    os.close(descriptor)
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"cannot watch process {pid}: {error}")
        return opened

    def _watch(self, life: _Life, opened: dict[int, int]) -> list[int]:
        """The worker's slots are freed when all its watched processes are gone. Returns the pidfds newly watched."""
        added = []
        for descriptor, pid in opened.items():
            if pid in life.watched.values():
                os.close(descriptor)
                continue
            life.watched[descriptor] = pid
            self._watched[descriptor] = life
            asyncio.get_running_loop().add_reader(descriptor, self._process_ended, descriptor)
            added.append(descriptor)
        return added

    def _unwatch(self, descriptor: int) -> _Life:
        life = self._watched.pop(descriptor)
        del life.watched[descriptor]
        life.attached.discard(descriptor)
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)
        return life

    def _process_ended(self, descriptor: int) -> None:
        life = self._unwatch(descriptor)
        if life.watched:
            return
        if self._lives.get(life.worker) is life:
            del self._lives[life.worker]
        if self._pool is not None:
            logger.warning("worker %s is gone: its reservations and leases end", life.writer)
            self._pool.writer_died(life.writer)
            self._apply()

    async def _life(self, worker: str, context: Context) -> _Life:
        life = self._lives.get(WorkerId(worker))
        if life is None:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, f"worker {worker} has not attached, or is gone"
            )
        return life

    def _holder(self, name: str) -> WorkerId:
        """The pool's name for the present life of a worker; a reader that never attached keeps its own."""
        life = self._lives.get(WorkerId(name))
        return life.writer if life is not None else WorkerId(name)

    # -- writers --------------------------------------------------------------------------------------------

    async def Reserve(self, request: pb.ReserveRequest, context: Context) -> pb.SlotList:
        pool, arena = await self._ready(context)
        life = await self._life(request.worker_id, context)
        until_s = await self._until_s(request.lease_s, context)
        names = await self._names(request.hashes, context)
        tail = (await self._names([request.tail_hash], context))[0] if request.tail_hash else None
        here = pool.match(names)
        await self._fetch(names, await self._peer(request.sources, context), request.fetch_s)
        if RequestId(request.request_id) in self._given_up:
            await context.abort(
                grpc.StatusCode.ABORTED, f"request {request.request_id} was given up before it was here"
            )
        if self._lives.get(life.worker) is not life:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"worker {life.worker} is gone or was restarted meanwhile",
            )
        found = pool.reserve(
            RequestId(request.request_id),
            life.writer,
            names,
            tail,
            expires_s=until_s,
        )
        self._apply()  # evicted slots end before their new use begins
        if isinstance(found, NoRoom) and found.wanted > pool.size:
            await context.abort(
                grpc.StatusCode.OUT_OF_RANGE,
                f"the prompt needs {found.wanted} blocks of KV, this node's arena has {pool.size} in all",
            )
        if isinstance(found, NoRoom):
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                _no_room(found),
            )
        if isinstance(found, Fenced):
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, found.reason)
        assert isinstance(found, list)
        self._note_asked(names, here)
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
        done = pool.commit(RequestId(request.request_id), self._holder(request.holder))
        if isinstance(done, Fenced):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, done.reason)
        assert isinstance(done, int)
        self._apply()
        return pb.CommitReply(blocks=done)

    async def Abandon(self, request: pb.AbandonRequest, context: Context) -> pb.Empty:
        pool, arena = await self._ready(context)
        name, writer = RequestId(request.request_id), self._holder(request.worker_id)
        self._given_up[name] = None
        while len(self._given_up) > _GIVEN_UP_MAX:
            self._given_up.popitem(last=False)
        given_up = pool.unfinished(name)
        fenced = pool.abandon(name, writer, request.stopped)
        if fenced is not None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, fenced.reason)
        for slot, _ in given_up:
            arena.end(slot)  # followers stop waiting now; the slot itself waits for its writer
        self._apply()
        return pb.Empty()

    # -- readers --------------------------------------------------------------------------------------------

    async def Lease(self, request: pb.LeaseRequest, context: Context) -> pb.SlotList:
        pool, _ = await self._ready(context)
        key = (RequestId(request.request_id), self._holder(request.holder))
        until_s = await self._until_s(request.lease_s, context)
        if request.slots and request.sources:
            found = await self._follow(request, key, until_s, context)
        elif request.slots:
            found = pool.lease(*key, [(slot.slot, slot.epoch) for slot in request.slots], until_s)
        else:
            names = await self._names(request.hashes, context)
            here = pool.match(names)
            await self._fetch(names, await self._peer(request.sources, context), request.fetch_s)
            found = pool.acquire(*key, names, until_s)
            self._note_asked(names, here)
        if isinstance(found, NoRoom):
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, _no_room(found))
        if isinstance(found, Fenced):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, found.reason)
        assert isinstance(found, list)
        return slot_list(found)

    def _note_asked(self, names: Sequence[BlockHash], here: int) -> None:
        self._asked_blocks += len(names)
        self._hit_dram_blocks += here

    async def _fetch(self, names: Sequence[BlockHash], peer: PeerSource | None, fetch_s: float) -> None:
        """Brings what this node lacks of the chain's blocks from its SSD and from `peer`, as far as time allows.

        Who gives it no time has the bytes and does not ask for the chain.
        """
        assert self._fetcher is not None
        if fetch_s <= 0:
            return
        if self._tiering is not None:
            self._tiering.asked(names)
        if peer is None and self._tiering is None:
            return
        deadline_s = time.monotonic() + min(max(fetch_s, 0.0), _FETCH_S_MAX)
        await self._fetcher.prefix(names, self._tiering, peer, deadline_s)

    async def _follow(
        self, request: pb.LeaseRequest, key: tuple[RequestId, str], until_s: float, context: Context
    ) -> list[SlotRef] | NoRoom | Fenced:
        """Slots here for those that another node is filling."""
        assert self._fetcher is not None
        names = await self._names([slot.hash for slot in request.slots], context)
        uses = dict(zip(names, request.slots, strict=True))
        peer = await self._peer(request.sources[:1], context, uses)
        assert peer is not None
        tail = names.pop() if request.has_tail else None
        return self._fetcher.follow(*key, names, tail, peer, until_s, time.monotonic() + request.lease_s)

    async def _peer(
        self,
        sources: Sequence[pb.Node],
        context: Context,
        uses: Mapping[BlockHash, pb.Slot] = MappingProxyType({}),
    ) -> PeerSource | None:
        """The other nodes, or None when none is named."""
        for source in sources:
            if source.node_id == self._config.node_id or not source.address:
                await context.abort(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    f"source {source.node_id!r} at {source.address!r}: {self._config.node_id} reads from other nodes",
                )
        if not sources:
            return None
        assert self._neighbours is not None
        return PeerSource([self._neighbours.link(source.address, uses) for source in sources], uses)

    async def Read(self, request: pb.ReadRequest, context: Context) -> AsyncIterator[pb.ReadReply]:
        await self._ready(context)
        assert self._reads is not None
        async for reply in self._reads.read(request, context):
            yield reply

    @property
    def arena(self) -> Arena:
        """What other nodes read from; there is one once a worker has attached."""
        assert self._arena is not None
        return self._arena

    async def open_read(
        self,
        request: RequestId,
        holder: str,
        uses: Sequence[tuple[int, int]],
        names: Sequence[BlockHash],
        timeout_s: float,
    ) -> list[SlotRef] | Fenced:
        assert self._pool is not None
        until_s = self._now() + timeout_s
        if uses:
            return self._pool.lease(request, holder, uses, until_s)
        await self._fetch(names, None, timeout_s)  # from this node's own SSD
        return self._pool.acquire(request, holder, names, until_s)

    def close_read(self, request: RequestId, holder: str) -> None:
        assert self._pool is not None
        self._pool.release(request, holder)
        self._apply()

    async def Release(self, request: pb.Holding, context: Context) -> pb.Empty:
        pool, _ = await self._ready(context)
        pool.release(RequestId(request.request_id), self._holder(request.holder))
        self._apply()
        return pb.Empty()

    async def Drop(self, request: pb.DropRequest, context: Context) -> pb.DropReply:
        pool, _ = await self._ready(context)
        if request.tier not in ("", "dram", "ssd"):
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, f"tier {request.tier!r} is neither dram nor ssd"
            )
        dropped = 0
        names = list(self._announced) if request.all else await self._names(request.hashes, context)
        for name in names:
            in_dram = request.tier != "ssd" and pool.drop(name)
            on_ssd = request.tier != "dram" and self._tiering is not None and self._tiering.forget(name)
            dropped += in_dram or on_ssd
        self._dropped += dropped
        self._corrupt += dropped if request.corrupt else 0
        self._apply()
        return pb.DropReply(dropped=dropped)

    async def Verify(self, request: pb.Empty, context: Context) -> pb.VerifyReply:
        pool, arena = await self._ready(context)
        reply = pb.VerifyReply()
        for name in pool.committed():
            key = (RequestId(f"verify {name.hex()}"), "verify")
            refs = pool.acquire(*key, [name], float("inf"), used=False)
            try:
                good = [
                    await asyncio.to_thread(arena.verify_block, ref.slot, ref.epoch, name) for ref in refs
                ]
            finally:
                pool.release(*key)
            reply.dram_blocks += len(good)
            if not all(good):
                reply.dram_corrupt += 1
                gone = pool.drop(name)
                self._dropped += gone
                self._corrupt += gone
            self._apply()
        if self._tiering is not None:
            reply.ssd_blocks, reply.ssd_corrupt = await self._tiering.verify()
        return reply

    # -- events and state -----------------------------------------------------------------------------------

    async def Events(self, request: pb.EventsRequest, context: Context) -> AsyncIterator[pb.BlockEvents]:
        queue: asyncio.Queue[pb.BlockEvents] = asyncio.Queue(_SUBSCRIBER_BACKLOG_MAX)
        self._subscribers.add(queue)
        try:
            held = sorted(self._announced, key=lambda name: self._announced[name] is Tier.SSD)
            on_ssd = sum(tier is Tier.SSD for tier in self._announced.values())
            yield pb.BlockEvents(sequence=self._sequence, snapshot=True, stored=held, on_ssd=on_ssd)
            while True:
                yield await queue.get()
        finally:
            self._subscribers.discard(queue)

    async def Status(self, request: pb.Empty, context: Context) -> pb.NodeStatus:
        return self.status()

    def status(self) -> pb.NodeStatus:
        """What the node holds and has done."""
        status = pb.NodeStatus(
            node_id=self._config.node_id,
            dropped=self._dropped,
            corrupt=self._corrupt,
            asked_blocks=self._asked_blocks,
            hit_dram_blocks=self._hit_dram_blocks,
            workers=sorted(self._lives),
        )
        if self._pool is not None and self._arena is not None and self._fetcher is not None:
            counts = self._pool.counts()
            status.slots = self._pool.size
            status.free, status.filling = counts["free"], counts["filling"]
            status.draining, status.committed = counts["draining"], counts["committed"]
            status.leased, status.leases = counts["leased"], counts["leases"]
            status.evictions = self._pool.evictions
            status.leases_expired = self._pool.leases_expired
            status.fetched_ssd_blocks = self._fetcher.blocks["ssd"]
            status.fetched_peer_blocks = self._fetcher.blocks["peer"]
            status.followed_blocks = self._fetcher.followed_blocks
            status.fetch_failed_blocks = self._fetcher.failed_blocks
            if self._tiering is not None:
                status.ssd_blocks = len(self._tiering.machine.names())
                counters = self._tiering.ssd.counters
                status.ssd_corrupt, status.ssd_refused = counters.corrupt, counters.refused
                status.ssd_full, status.ssd_failed = counters.full, counters.failed
                status.ssd_written_bytes, status.ssd_read_bytes = counters.written_bytes, counters.read_bytes
                status.ssd_evictions = self._tiering.evictions
                status.ssd_block_bytes = self._tiering.ssd.file_bytes
                status.ssd_codec = self._config.codec
            status.block_bytes = self._arena.shape.layout.block_bytes
        if self._neighbours is not None:
            status.rejected_segments = self._neighbours.rejected_segments
            status.neighbours.extend(one.message() for one in self._neighbours.known.values())
        return status

    async def Check(self, request: pb.Empty, context: Context) -> pb.Empty:
        if self._pool is not None and self._arena is not None:
            try:
                self._pool.check()
                if self._tiering is not None:
                    self._tiering.machine.check()
                assert self._arena.epoch.tolist() == self._pool.epochs(), (
                    "the arena's epochs are not the pool's"
                )
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

    async def _until_s(self, lease_s: float, context: Context) -> float:
        if not 0 <= lease_s <= _LEASE_S_MAX:  # refuses NaN too
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, f"lease_s is {lease_s}, not in 0..{_LEASE_S_MAX:.0f}"
            )
        return self._now() + lease_s

    def _sweep(self) -> None:
        if self._pool is None or self._arena is None:
            return
        for slot, epoch in self._pool.draining():
            if self._arena.has_stopped(slot, epoch):
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
        if self._tiering is not None:
            self._tiering.removed(name for name in removed if not self._pool.has(name))
            self._tiering.stored(name for name in stored if self._pool.has(name))
        self._announce([*removed, *stored])

    def _announce(self, changed: Iterable[BlockHash]) -> None:
        """Publishes which of these blocks the node holds elsewhere than before, and which it holds no more."""
        moved: dict[Tier | None, list[BlockHash]] = {None: [], Tier.SSD: [], Tier.DRAM: []}
        for name in dict.fromkeys(changed):
            tier = self._tier(name)
            if tier is self._announced.get(name):
                continue
            moved[tier].append(name)
            if tier is not None:
                self._announced[name] = tier
            else:
                del self._announced[name]
        for tier, names in moved.items():
            if names:
                self._publish(tier, names)

    def _tier(self, name: BlockHash) -> Tier | None:
        """The fastest tier that holds the block."""
        assert self._pool is not None
        if self._pool.has(name):
            return Tier.DRAM
        return Tier.SSD if self._tiering is not None and self._tiering.has(name) else None

    def _publish(self, tier: Tier | None, names: Sequence[BlockHash]) -> None:
        self._sequence += 1
        self._publish_change(BlockChange(self._sequence, tier, tuple(names)))
        event = pb.BlockEvents(
            sequence=self._sequence,
            stored=names if tier is not None else (),
            removed=names if tier is None else (),
            on_ssd=len(names) if tier is Tier.SSD else 0,
        )
        for queue in list(self._subscribers):
            if queue.full():  # the subscriber will see a gap in the sequence and ask for a snapshot
                queue.get_nowait()
            queue.put_nowait(event)


class _ForPeers(KVNodeServicer):
    """All that other nodes may ask of a node over the network."""

    def __init__(self, node: KVNode) -> None:
        self._node = node

    async def Read(self, request: pb.ReadRequest, context: Context) -> AsyncIterator[pb.ReadReply]:
        async for reply in self._node.Read(request, context):
            yield reply


def _no_room(found: NoRoom) -> str:
    return f"{found.wanted} slots wanted, {found.available} can be freed: the rest is leased or being written"


def _packing(coding: AtRest | None) -> str:
    return coding.form.permutation.fingerprint() if coding is not None else ""


def _lives(pidfd: int) -> bool:
    """A pidfd is readable once its process has ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return not poll.poll(0)
