"""The live driver of the pure conductor: gives it events and the time, carries out its commands.

It adds no policy. Arrivals come from gateways and are answered with the decision; membership and changes of what
nodes hold come from the directory, snapshots of it from the nodes themselves; timers that the core asks for are made
here.
"""

import asyncio
import json
import logging
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TextIO

import grpc

from cluster.config import SchedulingConfig
from cluster.core.commands import Abort, Command, Place, Reject, RequestSnapshot, RetryAfter, WakeAt
from cluster.core.conductor import Conductor
from cluster.core.events import (
    Aborted,
    Arrive,
    BlockRemoved,
    BlockStored,
    DirectoryFound,
    DirectoryLost,
    Event,
    NodeLeft,
    NodeSnapshot,
    Timer,
    WorkerJoined,
    WorkerLeft,
)
from cluster.core.log import entry
from cluster.core.state import Capacity, ConductorConfig, Role
from kvstore.core.blocks import BlockHash, NodeId, RequestId, WorkerId
from kvstore.directory.directory import AwayError, BlockChange, Directory, Gap, Roster
from kvstore.directory.membership import LEASE_S, Member
from kvstore.transfer import kv_pb2 as kv
from kvstore.transfer.kv_pb2_grpc import KVNodeStub
from kvstore.transfer.server import OPTIONS

logger = logging.getLogger(__name__)

_MEMBERSHIP_POLL_S = 0.25
_SNAPSHOT_S = 10.0
_SNAPSHOT_RETRY_S = 0.5
_SUBSCRIBER_BACKLOG_MAX = 10_000
_SOURCES_MAX = 3


class NoWorkers(Exception):  # noqa: N818  # a state of the cluster, not a fault
    """No worker has joined yet, so there is no model to speak of."""


@dataclass(frozen=True, slots=True)
class Decided:
    """An arrival's answer, with the members that a placement names, as far as they are known."""

    command: Place | RetryAfter | Reject
    prefill: Member | None = None
    decode: Member | None = None
    prefill_node: Member | None = None
    decode_node: Member | None = None
    sources: tuple[Member, ...] = ()
    """Who has the cached blocks: the placement's source, and others in case that one is gone."""


class Driver:
    """One per conductor process; everything runs on one event loop. `run` does the background work."""

    def __init__(
        self,
        config: SchedulingConfig,
        directory: Directory,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._config = config
        self._directory = directory
        self._clock = clock
        self._chance = chance
        self._core: Conductor | None = None
        self._members: dict[str, Member] = {}
        self._directory_known = False
        self._memory = ""
        self._losses_from_s = float("-inf")
        self._undecided: dict[RequestId, list[tuple[Arrive, asyncio.Future[Decided]]]] = {}
        self._timers: dict[float, asyncio.TimerHandle] = {}
        self._ended = False
        self._snapshots: dict[str, asyncio.Task[None]] = {}
        self._subscribers: set[asyncio.Queue[Command]] = set()
        self._refused: set[str] = set()
        self._log: TextIO | None = None
        if config.record_events is not None:
            self._log = config.record_events.open("w", buffering=1)

    # -- what gateways ask ----------------------------------------------------------------------------------

    def described(self) -> Member:
        """A worker whose model all share. Raises NoWorkers."""
        for member in self._members.values():
            if member.role != "node":
                return member
        raise NoWorkers("no worker has joined yet")

    async def decide(self, arrival: Arrive) -> Decided:
        """The answer, which a policy that binds late gives later. Raises NoWorkers.

        A caller that leaves meanwhile takes the request out of the line.
        """
        self.described()
        answered: asyncio.Future[Decided] = asyncio.get_running_loop().create_future()
        self._undecided.setdefault(arrival.request, []).append((arrival, answered))
        try:
            self._handle(arrival)
            return await answered
        except asyncio.CancelledError:
            if len(self._undecided[arrival.request]) == 1:  # nobody else waits for the same answer
                self.report(Aborted(request=arrival.request))
            raise
        finally:
            self._no_longer_asked(arrival.request, answered)

    def _no_longer_asked(self, request: RequestId, answered: "asyncio.Future[Decided]") -> None:
        others = [(asked, other) for asked, other in self._undecided[request] if other is not answered]
        self._undecided[request] = others
        if not others:
            del self._undecided[request]

    def _answer(self, command: Place | RetryAfter | Reject) -> None:
        for arrival, answered in self._undecided.get(command.request, ()):
            if arrival.attempt == command.attempt and not answered.done():
                answered.set_result(self._decided(command, arrival))

    def _decided(self, command: Place | RetryAfter | Reject, arrival: Arrive) -> Decided:
        if not isinstance(command, Place):
            return Decided(command)
        prefill = self._members.get(command.prefill or "")
        decode = self._members[command.decode]
        return Decided(
            command,
            prefill,
            decode,
            self._members.get(prefill.node) if prefill is not None else None,
            self._members.get(decode.node),
            self._sources(command, arrival),
        )

    def _sources(self, place: Place, arrival: Arrive) -> tuple[Member, ...]:
        """The placement's source, then others that hold as much of the prompt, those with the most of it in DRAM first."""
        assert self._core is not None
        if place.source is None:
            return ()
        held = self._core.index.match(arrival.chain)
        enough = held[place.source].blocks if place.source in held else 1
        others = [node for node in held if node != place.source and held[node].blocks >= enough]
        others.sort(key=lambda node: (-held[node].dram, node))
        nodes = [place.source, *others[: _SOURCES_MAX - 1]]
        return tuple(self._members[node] for node in nodes if node in self._members)

    def report(self, event: Event) -> None:
        if self._core is not None:
            self._handle(event)

    async def commands(self) -> AsyncIterator[Command]:
        """Commands that were nobody's answer, from now on."""
        queue: asyncio.Queue[Command] = asyncio.Queue(_SUBSCRIBER_BACKLOG_MAX)
        self._subscribers.add(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self._subscribers.discard(queue)

    def status(self) -> dict[str, Any]:
        return {
            "members": [
                {"id": m.id, "role": m.role, "node": m.node, "address": m.address, "pid": m.pid}
                for m in self._members.values()
            ],
            "directory": "known" if self._directory_known else "away",
            "conductor": self._core.snapshot() if self._core is not None else None,
        }

    def check(self) -> None:
        if self._core is not None:
            self._core.check()

    # -- background work ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Follows the directory until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow_members())
                tasks.create_task(self._follow_changes())
        finally:
            self._ended = True
            for timer in self._timers.values():
                timer.cancel()
            for snapshot in self._snapshots.values():
                snapshot.cancel()
            if self._log is not None:
                self._log.close()

    async def _follow_members(self) -> None:
        while True:
            try:
                self._update_members(await self._directory.roster())
            except AwayError as error:
                self._directory_away(error)
            await asyncio.sleep(_MEMBERSHIP_POLL_S)

    def _directory_away(self, error: AwayError) -> None:
        """The last known members stay; how long they are trusted is for the core to say."""
        if self._directory_known:
            logger.warning("membership is unknown for now: %s", error)
            self._directory_known = False
            self.report(DirectoryLost())

    def _directory_here(self, memory: str) -> None:
        """After it was away, or has lost its memory, every member that lives gets the time to renew its lease. At the
        start there is none that could be lost.
        """
        if self._members and (not self._directory_known or memory != self._memory):
            self._losses_from_s = self._clock() + LEASE_S
        if not self._directory_known:
            self.report(DirectoryFound())
        self._directory_known, self._memory = True, memory

    def _update_members(self, roster: Roster) -> None:
        self._directory_here(roster.memory)
        now_here = {member.id: member for member in roster.members}
        for known in list(self._members.values()):
            absent = known.id not in now_here
            if now_here.get(known.id) != known and not (absent and self._clock() < self._losses_from_s):
                self._left(known)
        for member in roster.members:
            if member.id not in self._members and not self._foreign(member):
                self._joined(member)

    def _foreign(self, member: Member) -> bool:
        """Does it serve another model, or in other blocks or shards, than those who are here? Then it is left out."""
        if member.role == "node" or not self._has_workers():
            return False
        here = self.described()
        same = _serves(member) == _serves(here)
        if not same and member.incarnation not in self._refused:
            self._refused.add(member.incarnation)
            logger.error("%s is left out: it serves %s, the cluster %s", member.id, member, here)
        return not same

    def _has_workers(self) -> bool:
        return any(member.role != "node" for member in self._members.values())

    def _joined(self, member: Member) -> None:
        logger.info("%s %s joined at %s", member.role, member.id, member.address)
        self._members[member.id] = member
        if member.role == "node":
            self._ask(member)
            return
        if self._core is None:
            self._core = Conductor(
                ConductorConfig(
                    block_tokens=member.block_tokens,
                    kv_bytes_per_token=member.kv_bytes_per_token,
                    policy=self._config.policy,
                    options=tuple(self._config.options.items()),
                    overload=self._config.overload,
                    inflight_max=self._config.inflight_max,
                ),
                self._chance,
            )
            for node in self._nodes():  # what they said before was heard by nobody
                self._ask(node)
        self._handle(
            WorkerJoined(
                worker=WorkerId(member.id),
                role=Role(member.role),
                node=NodeId(member.node),
                address=member.address,
                capacity=Capacity(batch_max=member.batch_max, kv_tokens_max=member.kv_tokens_max),
            )
        )

    def _left(self, member: Member) -> None:
        logger.warning("%s %s left", member.role, member.id)
        del self._members[member.id]
        if member.role == "node":
            if (asked := self._snapshots.pop(member.id, None)) is not None:
                asked.cancel()
            self.report(NodeLeft(node=NodeId(member.id), reason="its membership lapsed"))
        else:
            self.report(WorkerLeft(worker=WorkerId(member.id), reason="its membership lapsed"))

    def _nodes(self) -> list[Member]:
        return [member for member in self._members.values() if member.role == "node"]

    async def _follow_changes(self) -> None:
        async with aclosing(self._directory.changes()) as changes:
            async for told in changes:
                if isinstance(told, Gap):
                    for node in self._nodes():
                        self._ask(node)
                    continue
                member = self._members.get(told.node)
                if member is not None and member.epoch == told.epoch:  # of others a snapshot comes first
                    self._changed(told.node, told.change)

    def _changed(self, node: NodeId, change: BlockChange) -> None:
        hashes, sequence = change.hashes, change.sequence
        if change.tier is None:
            self.report(BlockRemoved(node=node, hashes=hashes, sequence=sequence))
        else:
            self.report(BlockStored(node=node, hashes=hashes, sequence=sequence, tier=change.tier))

    def _ask(self, node: Member) -> None:
        """Asks for all that the node holds, from now on."""
        if (asked := self._snapshots.pop(node.id, None)) is not None:
            asked.cancel()
        self._snapshots[node.id] = asyncio.create_task(self._take_snapshot(node))

    async def _take_snapshot(self, node: Member) -> None:
        """The first message of a node's event stream is one."""
        async with grpc.aio.insecure_channel(node.address, options=OPTIONS) as channel:
            while True:
                events = KVNodeStub(channel).Events(
                    kv.EventsRequest(), wait_for_ready=True, timeout=_SNAPSHOT_S
                )
                try:
                    message = await events.read()
                except grpc.aio.AioRpcError as error:
                    logger.warning("node %s gives no snapshot: %s", node.id, error.details())
                else:
                    if isinstance(message, kv.BlockEvents):
                        events.cancel()
                        del self._snapshots[node.id]
                        self.report(_snapshot(NodeId(node.id), message))
                        return
                await asyncio.sleep(_SNAPSHOT_RETRY_S)

    # -- the core -------------------------------------------------------------------------------------------

    def _handle(self, event: Event) -> list[Command]:
        assert self._core is not None
        now = self._clock()
        commands = self._core.handle(event, now)
        if self._log is not None:
            self._log.write(json.dumps(entry(event, now, commands)) + "\n")
        for command in commands:
            self._carry_out(command)
        return commands

    def _carry_out(self, command: Command) -> None:
        if isinstance(command, WakeAt):
            self._wake_at(command.at_s)
        elif isinstance(command, Place | RetryAfter | Reject):
            self._answer(command)
        elif isinstance(command, RequestSnapshot):
            member = self._members.get(command.node)
            if member is not None and member.id not in self._snapshots:
                self._ask(member)
        elif isinstance(command, Abort):
            for queue in self._subscribers:
                if not queue.full():
                    queue.put_nowait(command)

    def _wake_at(self, at_s: float) -> None:
        """A timer that is an hour away would keep an ended driver, and all that its conductor knows, in memory till then."""
        if not self._ended and at_s not in self._timers:
            loop = asyncio.get_running_loop()
            self._timers[at_s] = loop.call_later(max(0.0, at_s - self._clock()), self._wake, at_s)

    def _wake(self, at_s: float) -> None:
        del self._timers[at_s]
        self._handle(Timer(at_s=at_s))


def _serves(member: Member) -> tuple[str, str, str, int, int]:
    """What workers must have in common to exchange KV."""
    return member.fingerprint, member.dtype, member.precision, member.block_tokens, member.tensor_parallel


def _snapshot(node: NodeId, message: kv.BlockEvents) -> NodeSnapshot:
    names = tuple(BlockHash(name) for name in message.stored)
    in_dram = len(names) - message.on_ssd
    return NodeSnapshot(node=node, hashes=names[:in_dram], sequence=message.sequence, ssd=names[in_dram:])
