"""The live driver of the pure conductor: gives it events and the time, carries out its commands.

It adds no policy. Arrivals come from gateways and are answered with the decision; membership comes from Redis, what
nodes hold from their event streams; timers and snapshots that the core asks for are made here.
"""

import asyncio
import json
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import grpc
from redis.asyncio import Redis
from redis.exceptions import RedisError

from cluster.config import SchedulingConfig
from cluster.core.commands import Abort, Command, Place, Reject, RequestSnapshot, RetryAfter, WakeAt
from cluster.core.conductor import Conductor
from cluster.core.events import (
    Arrive,
    BlockRemoved,
    BlockStored,
    Event,
    NodeLeft,
    NodeSnapshot,
    Timer,
    WorkerJoined,
    WorkerLeft,
)
from cluster.core.log import entry
from cluster.core.state import Capacity, ConductorConfig, Role
from kvstore.core.blocks import BlockHash, NodeId, WorkerId
from kvstore.directory.membership import Member, members
from kvstore.transfer import kv_pb2 as kv
from kvstore.transfer.kv_pb2_grpc import KVNodeStub
from kvstore.transfer.server import OPTIONS

logger = logging.getLogger(__name__)

_MEMBERSHIP_POLL_S = 0.25
_NODE_RETRY_S = 0.5
_SUBSCRIBER_BACKLOG_MAX = 10_000


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
    source: Member | None = None


class Driver:
    """One per conductor process; everything runs on one event loop. `run` does the background work."""

    def __init__(
        self,
        config: SchedulingConfig,
        redis: Redis,
        cluster: str,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._config = config
        self._redis = redis
        self._cluster = cluster
        self._clock = clock
        self._chance = chance
        self._core: Conductor | None = None
        self._members: dict[str, Member] = {}
        self._node_streams: dict[str, asyncio.Task[None]] = {}
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

    def decide(self, arrival: Arrive) -> Decided:
        """Raises NoWorkers."""
        self.described()
        for command in self._handle(arrival):
            if isinstance(command, Place):
                prefill = self._members.get(command.prefill or "")
                decode = self._members[command.decode]
                return Decided(
                    command,
                    prefill,
                    decode,
                    self._members.get(prefill.node) if prefill is not None else None,
                    self._members.get(decode.node),
                    self._members.get(command.source or ""),
                )
            if isinstance(command, RetryAfter | Reject):
                return Decided(command)
        raise AssertionError(f"the conductor gave no answer to {arrival.request}")

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
            "conductor": self._core.snapshot() if self._core is not None else None,
        }

    def check(self) -> None:
        if self._core is not None:
            self._core.check()

    # -- background work ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Follows membership until cancelled."""
        try:
            while True:
                try:
                    self._update_members(await members(self._redis, self._cluster))
                except RedisError as error:  # the last known members stay
                    logger.warning("membership is unknown for now: %s", error)
                await asyncio.sleep(_MEMBERSHIP_POLL_S)
        finally:
            for stream in self._node_streams.values():
                stream.cancel()
            if self._log is not None:
                self._log.close()

    def _update_members(self, present: Sequence[Member]) -> None:
        now_here = {member.id: member for member in present}
        for known in list(self._members.values()):
            if now_here.get(known.id) != known:
                self._left(known)
        for member in present:
            if member.id not in self._members and not self._foreign(member):
                self._joined(member)

    def _foreign(self, member: Member) -> bool:
        """Does it serve another model, or in other blocks, than those who are here? Then it is left out."""
        if member.role == "node" or not self._has_workers():
            return False
        here = self.described()
        same = (member.fingerprint, member.dtype, member.block_tokens) == (
            here.fingerprint,
            here.dtype,
            here.block_tokens,
        )
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
            self._node_streams[member.id] = asyncio.create_task(self._follow_node(member))
            return
        if self._core is None:
            self._core = Conductor(
                ConductorConfig(
                    block_tokens=member.block_tokens,
                    kv_bytes_per_token=member.kv_bytes_per_token,
                    policy=self._config.policy,
                    inflight_max=self._config.inflight_max,
                ),
                self._chance,
            )
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
            self._node_streams.pop(member.id).cancel()
            self.report(NodeLeft(node=NodeId(member.id), reason="its membership lapsed"))
        else:
            self.report(WorkerLeft(worker=WorkerId(member.id), reason="its membership lapsed"))

    async def _follow_node(self, member: Member) -> None:
        """Feeds what the node holds; each new stream begins with a snapshot."""
        async with grpc.aio.insecure_channel(member.address, options=OPTIONS) as channel:
            node = KVNodeStub(channel)
            while True:
                try:
                    async for message in node.Events(kv.EventsRequest(), wait_for_ready=True):
                        self._node_event(NodeId(member.id), message)
                except grpc.aio.AioRpcError as error:
                    logger.warning("event stream of node %s broke: %s", member.id, error.details())
                await asyncio.sleep(_NODE_RETRY_S)

    def _node_event(self, node: NodeId, message: kv.BlockEvents) -> None:
        stored = tuple(BlockHash(name) for name in message.stored)
        removed = tuple(BlockHash(name) for name in message.removed)
        if message.snapshot:
            self.report(NodeSnapshot(node=node, hashes=stored, sequence=message.sequence))
        elif removed:
            self.report(BlockRemoved(node=node, hashes=removed, sequence=message.sequence))
        else:
            self.report(BlockStored(node=node, hashes=stored, sequence=message.sequence))

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
            loop = asyncio.get_running_loop()
            loop.call_later(max(0.0, command.at_s - self._clock()), self._wake, command.at_s)
        elif isinstance(command, RequestSnapshot):
            member = self._members.get(command.node)
            if member is not None:  # a new stream begins with one
                self._node_streams[member.id].cancel()
                self._node_streams[member.id] = asyncio.create_task(self._follow_node(member))
        elif isinstance(command, Abort):
            for queue in self._subscribers:
                if not queue.full():
                    queue.put_nowait(command)

    def _wake(self, at_s: float) -> None:
        self._handle(Timer(at_s=at_s))
