"""The conductor's gRPC service over the live driver."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeAlias, cast

import grpc

from cluster.control import conductor_pb2 as pb
from cluster.control.conductor_pb2_grpc import ConductorServicer, add_ConductorServicer_to_server
from cluster.control.driver import Driver, NoWorkers
from cluster.core.events import Arrive, Event
from cluster.core.log import decode, encode
from kvstore.directory.membership import Member
from kvstore.transfer import kv_pb2 as kv
from kvstore.transfer.server import serving

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class ConductorService(ConductorServicer):
    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.Description:
        try:
            member = self._driver.described()
        except NoWorkers as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        return pb.Description(
            model_fingerprint=member.fingerprint,
            dtype=member.dtype,
            block_tokens=member.block_tokens,
            max_model_len=member.max_model_len,
            precision=member.precision,
        )

    async def Decide(self, request: pb.Event, context: Context) -> pb.Decision:
        arrival = await self._event(request, context)
        if not isinstance(arrival, Arrive):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"not an arrival: {type(arrival).__name__}")
        try:
            decided = await self._driver.decide(arrival)
        except NoWorkers as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        return pb.Decision(
            command_json=json.dumps(encode(decided.command)),
            prefill_address=decided.prefill.address if decided.prefill is not None else "",
            decode_address=decided.decode.address if decided.decode is not None else "",
            prefill_node=_node(decided.prefill_node) if decided.prefill_node is not None else None,
            decode_node=_node(decided.decode_node) if decided.decode_node is not None else None,
            sources=[_node(source) for source in decided.sources],
        )

    async def Report(self, request: pb.Event, context: Context) -> pb.Reported:
        self._driver.report(await self._event(request, context))
        return pb.Reported()

    async def Commands(self, request: pb.CommandsRequest, context: Context) -> AsyncIterator[pb.Command]:
        async for command in self._driver.commands():
            yield pb.Command(json=json.dumps(encode(command)))

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusReply:
        return pb.StatusReply(json=json.dumps(self._driver.status()))

    async def Check(self, request: pb.CheckRequest, context: Context) -> pb.CheckReply:
        try:
            self._driver.check()
        except AssertionError as broken:
            await context.abort(grpc.StatusCode.INTERNAL, f"invariant broken: {broken}")
        return pb.CheckReply()

    async def _event(self, request: pb.Event, context: Context) -> Event:
        try:
            return cast(Event, decode(json.loads(request.json)))
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"not an event: {error}")


def _node(member: Member) -> kv.Node:
    """The node as other nodes reach it."""
    return kv.Node(node_id=member.id, address=member.peer_address or member.address)


async def serve(driver: Driver, address: str, ready: Callable[[], None]) -> None:
    """Serves until cancelled."""

    def add(server: grpc.aio.Server) -> None:
        add_ConductorServicer_to_server(ConductorService(driver), server)

    async with serving(address, add), asyncio.TaskGroup() as tasks:
        tasks.create_task(driver.run())
        ready()
