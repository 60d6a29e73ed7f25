"""The source's side of all links: sends what other nodes read, also while it is being written.

A read is watched in the arena's words: a segment is sent when its `segment_epoch` says that it is sealed, with the
checksum of its writer. After sending, the slot's epoch is looked at again; a use that is over by then is reported as
void. (The reader's checksum is what makes this safe; the report says why.) The lease on the slots is held until the
reader has ended the call, because what was sent may still lie in the socket as a reference to the arena's pages.
"""

import asyncio
import itertools
import secrets
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import grpc
import numpy as np
import numpy.typing as npt

from kvstore.core.blocks import BlockHash, RequestId
from kvstore.core.slots import Fenced, SlotRef
from kvstore.tiers.dram import Arena
from kvstore.transfer import kv_pb2 as pb
from kvstore.transfer.frames import TOKEN_BYTES, Frame, Kind, Reason
from kvstore.transfer.messages import block_hashes_from
from kvstore.transfer.nixl_link import LazyMemory, NixlMemory
from kvstore.transfer.threads import finished
from kvstore.transfer.tls import TlsConfig

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_POLL_S = 0.002
_GREETING_S = 5.0
_BULK_READS_MAX = 32
_TIMEOUT_S_MAX = 3600.0


class BlockSource(Protocol):
    """What a node lets other nodes read. Called on the event loop."""

    @property
    def arena(self) -> Arena: ...

    async def open_read(
        self,
        request: RequestId,
        holder: str,
        uses: Sequence[tuple[int, int]],
        names: Sequence[BlockHash],
        timeout_s: float,
    ) -> list[SlotRef] | Fenced:
        """A lease on uses of slots (slot, epoch), committed or being filled, or else on the longest committed prefix
        of `names`.
        """
        ...

    def close_read(self, request: RequestId, holder: str) -> None:
        """Ends the lease; one that has expired is no error."""
        ...


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive sealed segments of one block, with the checksums of their writer."""

    block: int
    layer: int
    sums: npt.NDArray[np.uint64]


class Watched:
    """The uses of slots that one read wants: what of them is sealed and not yet sent, and what will not come."""

    def __init__(self, arena: Arena, refs: Sequence[SlotRef], follow: bool, deadline_s: float) -> None:
        self.arena = arena
        self.refs = refs
        self._slots = [ref.slot for ref in refs]
        self._epochs = np.asarray([ref.epoch for ref in refs], np.uint64)
        self._missing = np.ones((len(refs), arena.shape.layout.segments), bool)
        self._follow = follow
        self._deadline_s = deadline_s

    @property
    def waiting(self) -> bool:
        return bool(self._missing.any())

    @property
    def seconds_left(self) -> float:
        return max(0.0, self._deadline_s - time.monotonic())

    def runs(self) -> list[Run]:
        """What has been sealed since the last call."""
        ready = self._missing & (self.arena.segment_epoch[self._slots] == self._epochs[:, None])
        self._missing &= ~ready
        found = []
        for block in np.flatnonzero(ready.any(axis=1)).tolist():
            edges = np.flatnonzero(np.diff(np.concatenate(([False], ready[block], [False])).astype(np.int8)))
            for first, end in edges.reshape(-1, 2).tolist():
                sums = self.arena.segment_sum[self._slots[block], first:end].copy()
                found.append(Run(block, first, sums))
        return found

    def held(self, block: int) -> bool:
        """Is the block's slot still in the use that was asked for?"""
        return bool(self.arena.epoch[self._slots[block]] == self._epochs[block])

    def voids(self) -> dict[int, Reason]:
        """What does not come any more, each block once. Call `runs` first: nothing sealed is given up."""
        over = self._missing.any(axis=1) & (self.arena.epoch[self._slots] != self._epochs)
        reasons = dict.fromkeys(np.flatnonzero(over).tolist(), Reason.OVER)
        if not self._follow or time.monotonic() >= self._deadline_s:
            reason = Reason.LATE if self._follow else Reason.INCOMPLETE
            waiting = np.flatnonzero(self._missing.any(axis=1)).tolist()
            reasons = dict.fromkeys(waiting, reason) | reasons
        self._missing[list(reasons)] = False
        return reasons


class BulkListener:
    """Accepts bulk sockets beside a node's gRPC address, and hands each to the read whose token it brings."""

    def __init__(self, listener: socket.socket, tls: TlsConfig | None) -> None:
        self._listener = listener
        self._expected: dict[bytes, asyncio.Future[socket.socket]] = {}
        self._greetings: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.get_running_loop().create_task(self._accept())
        self._tls = tls.accepting() if tls is not None else None

    @classmethod
    def open(cls, address: str, port: int = 0, tls: TlsConfig | None = None) -> "BulkListener":
        """Listens beside `address`: on its host and `port` (0: any), or on its Unix socket's path and `.bulk`.

        Raises OSError. Belongs to the running event loop.
        """
        try:
            listener = _listen(address, port)
        except OSError as error:
            raise OSError(
                error.errno, f"cannot listen on the bulk socket beside {address}: {error.strerror or error}"
            ) from error
        listener.setblocking(False)
        return cls(listener, tls)

    @property
    def port(self) -> int:
        """0 for a Unix socket."""
        name = self._listener.getsockname()
        return 0 if isinstance(name, str) else int(name[1])

    def expect(self) -> tuple[bytes, "asyncio.Future[socket.socket]"]:
        """A token, and the connection that will bring it. Cancel the future when it is not wanted any more."""
        token = secrets.token_bytes(TOKEN_BYTES)
        coming: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()
        self._expected[token] = coming
        coming.add_done_callback(lambda _: self._expected.pop(token, None))
        return token, coming

    async def close(self) -> None:
        """Accepts no more; reads that wait for their connection end."""
        name = self._listener.getsockname()
        tasks = [self._accepting, *self._greetings]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()
        for coming in list(self._expected.values()):
            coming.cancel()
        if isinstance(name, str):
            Path(name).unlink(missing_ok=True)  # noqa: ASYNC240  # one quick call at the end

    async def _accept(self) -> None:
        while True:
            try:
                connection, _ = await asyncio.get_running_loop().sock_accept(self._listener)
            except OSError:  # it was gone before it was accepted, or there are no descriptors left
                await asyncio.sleep(_POLL_S)
                continue
            task = asyncio.create_task(self._greet(connection))
            self._greetings.add(task)
            task.add_done_callback(self._greetings.discard)

    async def _greet(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        token = b""
        try:
            async with asyncio.timeout(_GREETING_S):
                while len(token) < TOKEN_BYTES:
                    part = await asyncio.get_running_loop().sock_recv(connection, TOKEN_BYTES - len(token))
                    if not part:
                        break
                    token += part
        except (OSError, TimeoutError):
            token = b""
        except asyncio.CancelledError:
            connection.close()
            raise
        coming = self._expected.get(token)
        if coming is None or coming.done():
            connection.close()
        elif self._tls is None:
            coming.set_result(connection)
        else:
            try:  # the handshake is the sender's
                coming.set_result(
                    self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
                )
            except OSError:  # it is gone already
                connection.close()


def _listen(address: str, port: int) -> socket.socket:
    if not address.startswith("unix:"):
        host = address.rpartition(":")[0].strip("[]")
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener, path = socket.socket(socket.AF_UNIX), Path(bulk_path(address))
    try:
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


@dataclass(frozen=True, slots=True)
class Offer:
    """A source, and its memory where NIXL may read it."""

    source: BlockSource
    memory: LazyMemory | None = None


class ReadService:
    """Answers the RPC `Read`, inline where there is neither `bulk` nor `memory`. Runs on the node's event loop.

    Each source is asked for what has the layout of its arena.
    """

    def __init__(self, sources: Sequence[Offer], bulk: BulkListener | None = None) -> None:
        self._offers = {offer.source.arena.shape.layout.fingerprint(): offer for offer in sources}
        self._bulk = bulk
        self._threads = ThreadPoolExecutor(_BULK_READS_MAX, thread_name_prefix="bulk-send")
        self.sending = 0
        self._numbers = itertools.count(1)

    def close(self) -> None:
        """After the calls have ended."""
        self._threads.shutdown(wait=False)

    async def read(self, request: pb.ReadRequest, context: Context) -> AsyncIterator[pb.ReadReply]:
        """The replies to one call."""
        offer = await self._offer(request, context)
        names = await self._names(request, context)
        source = offer.source
        key = (RequestId(request.request_id), f"node {request.reader} read {next(self._numbers)}")
        uses = [(slot.slot, slot.epoch) for slot in request.slots]
        refs = await source.open_read(*key, uses, names, request.timeout_s)
        if isinstance(refs, Fenced):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, refs.reason)
        assert isinstance(refs, list)
        asked = len(uses) or len(names)
        watched = Watched(source.arena, refs, request.follow, time.monotonic() + request.timeout_s)
        try:
            async for reply in self._replies(request, offer, watched, asked):
                yield reply
        finally:
            source.close_read(*key)

    async def _offer(self, request: pb.ReadRequest, context: Context) -> Offer:
        if request.layout not in self._offers:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"{request.reader} has KV layout {request.layout}, this node has {' and '.join(self._offers)}: "
                "nodes exchange bytes only between engines that pack them alike",
            )
        return self._offers[request.layout]

    async def _names(self, request: pb.ReadRequest, context: Context) -> list[BlockHash]:
        if not 0 <= request.timeout_s <= _TIMEOUT_S_MAX:  # refuses NaN too
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"timeout_s is {request.timeout_s}, not in 0..{_TIMEOUT_S_MAX:.0f}",
            )
        try:
            return block_hashes_from(request.hashes)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    async def _replies(
        self, request: pb.ReadRequest, offer: Offer, watched: Watched, asked: int
    ) -> AsyncIterator[pb.ReadReply]:
        absent = range(len(watched.refs), asked)
        if request.way == pb.BULK and self._bulk is not None and self.sending < _BULK_READS_MAX:
            async for reply in self._on_a_socket(self._bulk, watched, absent):
                yield reply
            return
        if request.way == pb.NIXL and offer.memory is not None:
            memory = await offer.memory.get()
            if isinstance(memory, NixlMemory):
                async for reply in self._from_memory(memory, watched, absent):
                    yield reply
                return
        for block in absent:
            yield void(block, Reason.ABSENT)
        async for reply in inline_replies(watched):
            yield reply

    async def _from_memory(
        self, memory: NixlMemory, watched: Watched, absent: Sequence[int]
    ) -> AsyncIterator[pb.ReadReply]:
        with memory.served():
            yield pb.ReadReply(memory=memory.message)
            async for reply in memory_replies(watched, absent):
                yield reply
            await asyncio.sleep(watched.seconds_left + _GREETING_S)  # until the reader ends the call

    async def _on_a_socket(
        self, bulk: BulkListener, watched: Watched, absent: Sequence[int]
    ) -> AsyncIterator[pb.ReadReply]:
        token, coming = bulk.expect()
        self.sending += 1
        try:
            yield pb.ReadReply(bulk=pb.Bulk(port=bulk.port, token=token))
            async with asyncio.timeout(_GREETING_S):
                connection = await coming
            sender = _Sender(connection, watched, absent, token)
            work = asyncio.get_running_loop().run_in_executor(self._threads, sender.run)
            async with asyncio.timeout(watched.seconds_left + _GREETING_S):
                await finished(work, sender.stop)
        except TimeoutError:
            return  # the reader never came, or never hung up
        finally:
            if not coming.cancel() and not coming.cancelled():
                coming.result().close()  # also where it came just as this read was given up
            self.sending -= 1


async def sealed_runs(watched: Watched) -> AsyncIterator[Run | pb.ReadReply]:
    """Runs as they are sealed, and the replies that say what will not come."""
    while True:
        runs = watched.runs()
        for run in runs:
            yield run
        for block, reason in watched.voids().items():
            yield void(block, reason)
        if not watched.waiting:
            return
        if not runs:
            await asyncio.sleep(_POLL_S)


async def inline_replies(watched: Watched) -> AsyncIterator[pb.ReadReply]:
    """All that is wanted, with its bytes in the replies."""
    async for run in sealed_runs(watched):
        if isinstance(run, pb.ReadReply):
            yield run
            continue
        slot = watched.refs[run.block].slot
        for layer, checksum in enumerate(run.sums.tolist(), run.layer):
            payload = watched.arena.payload[slot, layer].tobytes()
            segment = pb.Segment(block=run.block, layer=layer, checksum=checksum, payload=payload)
            yield pb.ReadReply(segment=segment)
        if not watched.held(run.block):
            yield void(run.block, Reason.OVER)


async def memory_replies(watched: Watched, absent: Sequence[int]) -> AsyncIterator[pb.ReadReply]:
    """What may be taken out of memory now, as it is sealed."""
    for block in absent:
        yield void(block, Reason.ABSENT)
    async for run in sealed_runs(watched):
        if isinstance(run, pb.ReadReply):
            yield run
            continue
        slot = watched.refs[run.block].slot
        sealed = pb.Sealed(block=run.block, layer=run.layer, slot=slot, checksums=run.sums.tolist())
        yield pb.ReadReply(sealed=sealed)
    yield pb.ReadReply(end=pb.Empty())


def void(block: int, reason: Reason) -> pb.ReadReply:
    return pb.ReadReply(void=pb.Void(block=block, reason=reason))


def bulk_path(address: str) -> str:
    """Of the bulk socket beside a Unix socket's address."""
    return f"{address.removeprefix('unix:')}.bulk"


class _Sender:
    """One read on one bulk socket, in a thread."""

    def __init__(
        self,
        connection: socket.socket,
        watched: Watched,
        absent: Sequence[int],
        token: bytes,
    ) -> None:
        self._socket = connection
        self._watched = watched
        self._absent = absent
        self._token = token
        self._stopped = threading.Event()

    def stop(self) -> None:
        self._stopped.set()
        with suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def run(self) -> None:
        """Sends until all is sent, then waits until the reader hangs up. A reader that is gone ends it."""
        with suppress(OSError):
            self._socket.setblocking(True)
            if self._socket.family != socket.AF_UNIX:
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if isinstance(self._socket, ssl.SSLSocket):
                self._socket.do_handshake()
            for block in self._absent:
                self._send(Frame(Kind.VOID, block, reason=Reason.ABSENT))
            self._send_all()
            self._send(Frame(Kind.END))
            while self._socket.recv(1):
                pass

    def _send_all(self) -> None:
        watched = self._watched
        while not self._stopped.is_set():
            runs = watched.runs()
            for run in runs:
                self._send_run(run)
            for block, reason in watched.voids().items():
                self._send(Frame(Kind.VOID, block, reason=reason))
            if not watched.waiting:
                return
            if not runs:
                self._stopped.wait(_POLL_S)

    def _send_run(self, run: Run) -> None:
        arena, layers = self._watched.arena, len(run.sums)
        slot = self._watched.refs[run.block].slot
        payload = arena.payload[slot, run.layer : run.layer + layers].reshape(-1).data
        frame = Frame(Kind.SEGMENTS, run.block, run.layer, layers, payload.nbytes)
        self._send(frame, run.sums.astype("<u8").tobytes(), payload)
        if not self._watched.held(run.block):
            self._send(Frame(Kind.VOID, run.block, reason=Reason.OVER))

    def _send(self, frame: Frame, sums: bytes = b"", payload: memoryview | None = None) -> None:
        self._socket.sendall(frame.pack(self._token) + sums)
        if payload is not None:
            self._socket.sendall(payload)
