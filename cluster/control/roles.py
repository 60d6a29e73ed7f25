"""What each process of a cluster runs, by role: the Ray actors come here."""

import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from cluster.config import SchedulingConfig
from kvstore.core.blocks import NodeId
from kvstore.directory.membership import Member
from kvstore.directory.presence import Presence
from kvstore.directory.redis_directory import RedisDirectory, connect
from kvstore.engine.settings import WorkerSettings
from kvstore.node import KVNode, NodeConfig

Ready = Callable[[Member], None]


@dataclass(frozen=True, slots=True)
class NodeSettings:
    config: NodeConfig
    redis_url: str
    cluster: str


@dataclass(frozen=True, slots=True)
class ConductorSettings:
    config: SchedulingConfig
    address: str
    redis_url: str
    cluster: str


Settings = NodeSettings | ConductorSettings | WorkerSettings


async def run_role(role: str, settings: Settings, ready: Ready) -> None:
    """Runs until cancelled; `ready` is called when the process serves. Raises what ended it."""
    match role, settings:
        case "node", NodeSettings():
            await _run_node(settings, ready)
        case "conductor", ConductorSettings():
            await _run_conductor(settings, ready)
        case "prefill", WorkerSettings():
            from prefill_worker.serve import serve as serve_prefill

            await serve_prefill(settings, ready)
        case "decode", WorkerSettings():
            from decode_worker.serve import serve as serve_decode

            await serve_decode(settings, ready)
        case _:
            raise ValueError(f"role {role!r} does not run with {type(settings).__name__}")


async def _run_node(settings: NodeSettings, ready: Ready) -> None:
    config = settings.config
    member = _member(config.node_id, "node", config.address, config.node_id, config.peer_address)
    redis = connect(settings.redis_url)
    presence = Presence(RedisDirectory(redis, settings.cluster), member)
    node = KVNode(config, publish=presence.publish)
    try:
        await presence.beside(node.serve(started=lambda: ready(member)))
    finally:
        await redis.aclose()


async def _run_conductor(settings: ConductorSettings, ready: Ready) -> None:
    from cluster.control.driver import Driver
    from cluster.control.service import serve

    redis = connect(settings.redis_url)
    member = _member("conductor", "conductor", settings.address, NodeId(""))
    try:
        driver = Driver(settings.config, RedisDirectory(redis, settings.cluster))
        await serve(driver, settings.address, ready=lambda: ready(member))
    finally:
        await redis.aclose()


def _member(name: str, role: str, address: str, node: NodeId, peer_address: str = "") -> Member:
    return Member(
        id=name,
        role=role,
        incarnation=uuid.uuid4().hex,
        node=node,
        address=address,
        pid=os.getpid(),
        peer_address=peer_address,
    )
