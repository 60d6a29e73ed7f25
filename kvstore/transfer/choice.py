"""The links to other nodes: which there are is found out by measuring them, and the fastest is used.

A node that is read from for the first time is read inline, which always works, while beside that each link that is
allowed here reads the other's probe. A read that is lost has its link measured anew, for it may be the link that is gone.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import grpc

from kvstore.core.blocks import BlockHash, NodeId, RequestId
from kvstore.core.slots import SlotRef
from kvstore.tiers.dram import Arena
from kvstore.transfer import kv_pb2 as pb
from kvstore.transfer.grpc_link import KINDS, GrpcLink, Kind, Peer
from kvstore.transfer.kv_pb2_grpc import KVNodeStub
from kvstore.transfer.link import Arrived, Complete, Failed, Link, Lost, Progress
from kvstore.transfer.nixl_link import LazyMemory, Unavailable
from kvstore.transfer.probe import Probe
from kvstore.transfer.server import channel_to
from kvstore.transfer.tls import TlsConfig

logger = logging.getLogger(__name__)

_ROUNDS = 4
_PROBE_S = 5.0
_AGAIN_S = 10.0
_PROBE_REQUEST = RequestId("probe")


@dataclass(slots=True)
class Neighbour:
    """Another node that this one has read from."""

    peer: Peer
    channel: grpc.aio.Channel
    in_use: Kind
    bytes_per_s: dict[Kind, float] = field(default_factory=dict)
    """Of verified reads, by link; at the last measurement."""
    refused: dict[Kind, str] = field(default_factory=dict)
    """Why a link was of no use."""
    read_bytes: dict[Kind, int] = field(default_factory=dict)
    lost_reads: int = 0
    due: bool = True
    """Is it to be measured?"""
    measured_s: float = float("-inf")

    def judge(self, measured: Mapping[Kind, float | str]) -> None:
        """Takes the fastest."""
        self.bytes_per_s = {kind: found for kind, found in measured.items() if isinstance(found, float)}
        self.refused = {kind: found for kind, found in measured.items() if isinstance(found, str)}
        self.in_use = max(self.bytes_per_s, key=self.bytes_per_s.__getitem__, default=self.in_use)

    def lost(self, kind: Kind, slowest: Kind) -> None:
        """A read by this link found no end: the next fastest takes over until they have been measured again."""
        self.lost_reads += 1
        self.bytes_per_s.pop(kind, None)
        self.in_use = max(self.bytes_per_s, key=self.bytes_per_s.__getitem__, default=slowest)
        self.due = True

    def message(self) -> pb.Neighbour:
        """For people."""
        links = [
            pb.LinkMeasured(
                link=kind,
                bytes_per_s=self.bytes_per_s.get(kind, 0.0),
                refused=self.refused.get(kind, ""),
                read_bytes=self.read_bytes.get(kind, 0),
            )
            for kind in KINDS
            if kind in self.bytes_per_s | self.refused | self.read_bytes
        ]
        return pb.Neighbour(
            address=self.peer.address, link=self.in_use, links=links, lost_reads=self.lost_reads
        )


class Neighbours:
    """All of them, by address. Belongs to the running event loop."""

    def __init__(
        self,
        node: NodeId,
        arena: Arena,
        probe: Probe,
        memory: LazyMemory,
        allowed: Sequence[Kind] = KINDS,
        tls: TlsConfig | None = None,
    ) -> None:
        """`tls` holds for addresses that are not Unix sockets. Of `allowed` the first is used until there is a measurement."""
        self.known: dict[str, Neighbour] = {}
        self.rejected_segments = 0
        """Segments that came with other bytes than they had been sealed with."""
        self._node = node
        self._arena = arena
        self._probe = probe
        self._memory = memory
        self._allowed = allowed
        self._tls = tls
        self._measuring: set[asyncio.Task[None]] = set()
        self._one_at_a_time = asyncio.Lock()

    def link(self, address: str, uses: Mapping[BlockHash, pb.Slot]) -> Link:
        """The way to read from the node that listens there."""
        if address not in self.known:
            tls = None if address.startswith("unix:") else self._tls
            channel = channel_to(address, tls)
            self.known[address] = Neighbour(
                Peer(KVNodeStub(channel), address, tls), channel, self._allowed[0]
            )
        neighbour = self.known[address]
        if neighbour.due and time.monotonic() - neighbour.measured_s > _AGAIN_S:
            neighbour.due, neighbour.measured_s = False, time.monotonic()
            task = asyncio.create_task(self._measure(neighbour))
            self._measuring.add(task)
            task.add_done_callback(self._measuring.discard)
        return _Chosen(self, neighbour, uses)

    async def close(self) -> None:
        """Ends measuring and hangs up. After all reads have ended."""
        for task in self._measuring:
            task.cancel()
        await asyncio.gather(*self._measuring, return_exceptions=True)
        for neighbour in self.known.values():
            await neighbour.channel.close()

    # -- inside -------------------------------------------------------------------------------------------

    async def _measure(self, neighbour: Neighbour) -> None:
        async with self._one_at_a_time:
            measured = {kind: await self._speed(neighbour.peer, kind) for kind in self._allowed}
        neighbour.judge(measured)
        logger.info("links to %s: %s; %s is used", neighbour.peer.address, measured, neighbour.in_use)

    async def _speed(self, peer: Peer, kind: Kind) -> float | str:
        """Bytes a second, or why there are none. The first rounds open connections."""
        memory = await self._probe.memory.get() if kind == "nixl" else None
        if isinstance(memory, Unavailable):
            return memory.reason
        best = 0.0
        for _ in range(_ROUNDS):
            link = GrpcLink(peer, self._node, self._probe.arena, kind=kind, memory=memory)
            wanted, began_s = self._probe.wanted(), time.monotonic()
            async with aclosing(link.read(_PROBE_REQUEST, wanted, False, began_s + _PROBE_S)) as progress:
                steps = [step async for step in progress]
            if Complete(0) not in steps:
                return next((step.reason for step in steps if isinstance(step, Failed | Lost)), "no answer")
            if link.answered != kind:
                return "the other node does not offer it"
            best = max(best, self._probe.block_bytes / (time.monotonic() - began_s))
        return best

    async def read(
        self,
        neighbour: Neighbour,
        uses: Mapping[BlockHash, pb.Slot],
        request: RequestId,
        blocks: Sequence[SlotRef],
        follow: bool,
        deadline_s: float,
    ) -> AsyncGenerator[Progress, None]:
        """One read by the link in use."""
        kind = neighbour.in_use
        memory = await self._memory.get() if kind == "nixl" else None
        if isinstance(memory, Unavailable):
            neighbour.lost(kind, self._allowed[0])
            yield Lost(memory.reason)
            return
        link = GrpcLink(neighbour.peer, self._node, self._arena, uses, kind, memory)
        segment_bytes = self._arena.shape.layout.segment_bytes
        try:
            async with aclosing(link.read(request, blocks, follow, deadline_s)) as progress:
                async for step in progress:
                    if isinstance(step, Arrived):
                        moved = neighbour.read_bytes.get(link.answered, 0)
                        neighbour.read_bytes[link.answered] = moved + step.segments * segment_bytes
                    elif isinstance(step, Lost):
                        neighbour.lost(kind, self._allowed[0])
                    yield step
        finally:
            self.rejected_segments += link.rejected_segments


class _Chosen:
    """What `Neighbours.link` returns: the link is chosen when the read begins."""

    def __init__(
        self, neighbours: Neighbours, neighbour: Neighbour, uses: Mapping[BlockHash, pb.Slot]
    ) -> None:
        self._neighbours = neighbours
        self._neighbour = neighbour
        self._uses = uses

    @property
    def kind(self) -> str:
        return self._neighbour.in_use

    def read(
        self, request: RequestId, blocks: Sequence[SlotRef], follow: bool, deadline_s: float
    ) -> AsyncGenerator[Progress, None]:
        return self._neighbours.read(self._neighbour, self._uses, request, blocks, follow, deadline_s)
