"""Bytes by NIXL: the reader takes them out of the source's arena, by RDMA, shared memory or whatever UCX finds best.

The source registers its arena and says in the call `Read` what is sealed; the reader posts READ transfers into its own
slots and verifies as every link does. NIXL is imported when the first memory is opened; where it is not installed, or
finds no backend, the link is unavailable and the reason says so.
"""

import asyncio
import ctypes
import importlib
import logging
import os
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from kvstore.core.blocks import NodeId
from kvstore.tiers.dram import Arena
from kvstore.transfer import kv_pb2 as pb
from kvstore.transfer.frames import Reason
from kvstore.transfer.landing import Landed, Landing, Segments, Void, landed
from kvstore.transfer.link import Progress

_BATCH_BYTES = 8 * 2**20
_PEERS_MAX = 256
_POLL_S = 0.0001
_SERVE_S = 0.0005
_TRANSFER_S = 10.0


_RDMA_DEVICES = Path("/sys/class/infiniband")


def _nixl() -> Any:
    """NIXL's Python module, whichever of its packages is installed. Raises ImportError."""
    if not _RDMA_DEVICES.exists():
        # UCX's RDMA modules bring a libnl whose destructor crashes the process at its end (nixl-cu12 1.5.1).
        os.environ.setdefault("UCX_MODULES", "^ib")
    nixl = None
    for name in ("nixl_cu12", "nixl_cu13"):
        with suppress(ModuleNotFoundError):
            nixl = nixl or importlib.import_module(name)
    nixl = nixl or importlib.import_module("nixl")
    logging.getLogger("nixl").setLevel(logging.WARNING)  # it says on stdout what it opens
    return nixl


@dataclass(frozen=True, slots=True)
class Unavailable:
    """A link that this machine does not have, and why."""

    reason: str


class NixlMemory:
    """This process's arena, registered with a NIXL agent of its own. Made by `open`."""

    def __init__(self, agent: Any, name: str, arena: Arena) -> None:
        self.arena = arena
        self._agent = agent
        self._lock = threading.Lock()
        """The agent's: its calls come from the threads of several reads."""
        self._peers: OrderedDict[str, None] = OrderedDict()
        self._registered = agent.register_memory([(self.address, arena.payload.nbytes, 0, "")], "DRAM")
        self.message = pb.Memory(
            agent=name,
            metadata=agent.get_agent_metadata(),
            address=self.address,
            length=arena.payload.nbytes,
        )
        """What a reader must know."""
        self._served = 0
        self._serving = threading.Condition()
        self._open = True
        self._progress = threading.Thread(target=self._serve, name="nixl-progress", daemon=True)
        self._progress.start()

    @classmethod
    def open(cls, node: NodeId, arena: Arena) -> "NixlMemory | Unavailable":
        """Takes half a second the first time, and some 40 ms then."""
        try:
            nixl = _nixl()
        except ImportError as error:
            return Unavailable(f"nixl cannot be imported: {error}")
        name = f"{node}-{uuid.uuid4()}"  # a restarted node is another agent
        # NIXL's own thread of progress would poll all the time, whether or not anyone reads.
        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        try:
            return cls(nixl.nixl_agent(name, config), name, arena)
        except Exception as error:  # noqa: BLE001  # each of NIXL's errors is a class of its own under Exception
            return Unavailable(f"NIXL does not start here: {type(error).__name__}: {error}")

    @property
    def address(self) -> int:
        return self.arena.payload.ctypes.data

    @contextmanager
    def served(self) -> Iterator[None]:
        """While another node reads: its connection, and what UCX does not do without this end, need a thread here."""
        with self._serving:
            self._served += 1
            self._serving.notify()
        try:
            yield
        finally:
            with self._serving:
                self._served -= 1

    def _serve(self) -> None:
        while True:
            with self._serving:
                self._serving.wait_for(lambda: self._served or not self._open)
                if not self._open:
                    return
            with self._lock:
                self._agent.get_new_notifs()
            time.sleep(_SERVE_S)

    def meet(self, there: pb.Memory) -> None:
        """Learns how to reach another's memory. Raises ValueError for what NIXL does not understand."""
        with self._lock:
            if there.agent in self._peers:
                self._peers.move_to_end(there.agent)
                return
            try:
                name = self._agent.add_remote_agent(there.metadata)
            except Exception as error:  # see `open`
                raise ValueError(f"NIXL cannot reach {there.agent}: {error}") from error
            name = name.decode() if isinstance(name, bytes) else name
            if name != there.agent:
                raise ValueError(f"the metadata of {name!r} came under the name {there.agent}")
            self._peers[there.agent] = None
            if len(self._peers) > _PEERS_MAX:
                self._forget(next(iter(self._peers)))

    def read(
        self,
        agent: str,
        here: list[tuple[int, int, int]],
        there: list[tuple[int, int, int]],
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Copies (address, length, device 0) pairs; returns when the last byte is here, or none comes any more.

        Raises OSError, also when it was `stopped` or takes longer than a lost connection may go unseen.
        """
        until_s = time.monotonic() + _TRANSFER_S
        try:
            with self._lock:
                transfer = self._agent.initialize_xfer(
                    "READ",
                    self._agent.get_xfer_descs(here, "DRAM"),
                    self._agent.get_xfer_descs(there, "DRAM"),
                    agent,
                )
                state = self._agent.transfer(transfer)
            while state == "PROC" and not stopped() and time.monotonic() < until_s:
                time.sleep(_POLL_S)
                with self._lock:
                    state = self._agent.check_xfer_state(transfer)
            with self._lock:
                if state == "PROC":  # with its connection ends what it might still write
                    self._forget(agent)
                self._agent.release_xfer_handle(transfer)
        except Exception as error:  # see `open`
            raise OSError(f"a NIXL transfer failed: {type(error).__name__}: {error}") from error
        if state != "DONE":
            raise OSError(f"a NIXL transfer ended in state {state}")

    def _forget(self, agent: str) -> None:
        self._peers.pop(agent, None)
        self._agent.remove_remote_agent(agent)

    def close(self) -> None:
        """After all reads have ended."""
        with self._serving:
            self._open = False
            self._serving.notify()
        self._progress.join()
        with self._lock:
            self._agent.deregister_memory(self._registered)
            del self._agent  # which closes its connections


class LazyMemory:
    """Memory that is registered when the first read by NIXL wants it: by then both ends have found NIXL worth it."""

    def __init__(self, node: NodeId, arena: Arena) -> None:
        self._node = node
        self._arena = arena
        self._opening: asyncio.Task[NixlMemory | Unavailable] | None = None

    async def get(self) -> "NixlMemory | Unavailable":
        if self._opening is None:
            self._opening = asyncio.create_task(asyncio.to_thread(NixlMemory.open, self._node, self._arena))
        return await asyncio.shield(self._opening)

    async def close(self) -> None:
        """After all reads have ended."""
        if self._opening is not None and isinstance(memory := await self._opening, NixlMemory):
            memory.close()


async def pull(
    memory: NixlMemory, there: pb.Memory, replies: AsyncIterator[pb.ReadReply], landing: Landing
) -> AsyncGenerator[Progress, None]:
    """Takes what the replies say is sealed. Raises OSError when a transfer fails, ValueError for replies without sense."""
    await asyncio.to_thread(memory.meet, there)
    puller = _Puller(memory, there, landing)
    telling = asyncio.ensure_future(_tell(replies, puller.sealed.put))
    telling.add_done_callback(lambda _: puller.end())
    try:
        # NIXL's calls keep the interpreter's lock while they copy: a second thread would only wait for it.
        async with aclosing(landed(landing, puller.receive, puller.stop, beside=False)) as steps:
            async for step in steps:
                yield step
        await telling
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)


async def _tell(replies: AsyncIterator[pb.ReadReply], put: Callable[[pb.Sealed | pb.Void], None]) -> None:
    async for reply in replies:
        match reply.WhichOneof("reply"):
            case "sealed":
                put(reply.sealed)
            case "void":
                put(reply.void)
            case "end":
                return
            case other:
                raise ValueError(f"a reply of kind {other} in a NIXL read")
    raise OSError("the source ended the call before it had said all")


@dataclass(frozen=True, slots=True)
class _Placed:
    moves: list[tuple[int, int, int]]
    """(address here, address there, bytes)"""
    segments: Segments


class _Puller:
    """The thread that posts transfers, as many segments at once as are sealed."""

    def __init__(self, memory: NixlMemory, there: pb.Memory, landing: Landing) -> None:
        self.sealed: SimpleQueue[pb.Sealed | pb.Void | None] = SimpleQueue()
        self._memory = memory
        self._there = there
        self._landing = landing
        self._segment_bytes = memory.arena.shape.layout.segment_bytes
        self._layers = memory.arena.shape.layout.segments
        self._stopped = False

    def end(self) -> None:
        """All has been said: `receive` returns when it has taken it."""
        self.sealed.put(None)

    def stop(self) -> None:
        """`receive` returns soon, whatever is queued."""
        self._stopped = True
        self.sealed.put(None)

    def receive(self, put: Callable[[Landed], None]) -> None:
        """To be run in a thread. Raises OSError or ValueError."""
        while not self._stopped:
            batch = self._batch()
            landings = [self._place(one) for one in batch if isinstance(one, pb.Sealed)]
            here = [(address, length, 0) for landing in landings for address, _, length in landing.moves]
            there = [(address, length, 0) for landing in landings for _, address, length in landing.moves]
            if here:
                self._memory.read(self._there.agent, here, there, lambda: self._stopped)
            for landing in landings:
                if landing.segments.layers:
                    put(landing.segments)
            for one in batch:
                if isinstance(one, pb.Void):
                    put(Void(one.block, Reason(one.reason).words))
            if None in batch:
                return

    def _batch(self) -> list[pb.Sealed | pb.Void | None]:
        """What is queued, at least one."""
        batch = [self.sealed.get()]
        batch_bytes = 0
        while batch_bytes < _BATCH_BYTES and not self.sealed.empty():
            one = self.sealed.get()
            batch.append(one)
            if isinstance(one, pb.Sealed):
                batch_bytes += len(one.checksums) * self._segment_bytes
        return batch

    def _place(self, one: pb.Sealed) -> _Placed:
        """Raises ValueError for segments that nobody asked for, or that lie outside the source's memory."""
        sums = np.array(one.checksums, np.uint64)
        buffers, fresh = self._landing.place(one.block, one.layer, len(sums))
        offset = (one.slot * self._layers + one.layer) * self._segment_bytes
        if offset + len(sums) * self._segment_bytes > self._there.length:
            raise ValueError(f"slot {one.slot} lies outside the source's memory")
        moves, source, layer = [], self._there.address + offset, one.layer
        for buffer in buffers:
            if layer in fresh:
                moves.append((ctypes.addressof(ctypes.c_char.from_buffer(buffer)), source, buffer.nbytes))
            source += buffer.nbytes
            layer += buffer.nbytes // self._segment_bytes
        return _Placed(moves, Segments(one.block, fresh, sums[np.asarray(fresh, int) - one.layer]))
