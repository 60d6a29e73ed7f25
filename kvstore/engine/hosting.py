"""Runs one worker: an engine, its gRPC service, its membership; the same for both roles."""

import asyncio
import os
import uuid
from collections.abc import Callable

import grpc
from redis.asyncio import Redis

from kvstore.directory.membership import Member, keep_announced
from kvstore.engine.engine import Engine
from kvstore.engine.launch import Role
from kvstore.engine.settings import WorkerSettings
from kvstore.transfer.server import serving


class EngineDiedError(RuntimeError):
    """The engine or its KV node is gone; the worker must be started anew."""


async def host(
    settings: WorkerSettings,
    role: Role,
    add: Callable[[grpc.aio.Server, Engine], None],
    ready: Callable[[Member], None],
) -> None:
    """Starts the engine, serves what `add` registers, announces the worker and calls `ready`, until cancelled.

    Raises EngineDiedError when the engine does. The engine is stopped in any case.
    """
    engine = await Engine.start(settings, role)
    redis = Redis.from_url(settings.redis_url)
    member = _member(settings, role, engine)
    announcing = asyncio.create_task(asyncio.sleep(0))
    try:
        async with serving(settings.address, lambda server: add(server, engine)):
            announcing = asyncio.create_task(keep_announced(redis, settings.cluster, member))
            ready(member)
            raise EngineDiedError(f"{settings.worker_id} ends: {await engine.until_dead()}")
    finally:
        announcing.cancel()
        await asyncio.gather(announcing, return_exceptions=True)
        await redis.aclose()
        await engine.close()


def _member(settings: WorkerSettings, role: Role, engine: Engine) -> Member:
    layout = engine.layout
    return Member(
        id=settings.worker_id,
        role=role,
        incarnation=uuid.uuid4().hex,
        node=engine.node_id,
        address=settings.address,
        pid=os.getpid(),
        fingerprint=engine.fingerprint,
        dtype=engine.dtype,
        block_tokens=layout.block_tokens,
        kv_bytes_per_token=layout.block_bytes // layout.block_tokens,
        max_model_len=engine.max_model_len,
        batch_max=settings.engine.prefill_batch_max
        if role == "prefill"
        else settings.engine.decode_batch_max,
        kv_tokens_max=settings.engine.kv_bytes // (layout.block_bytes // layout.block_tokens),
    )
