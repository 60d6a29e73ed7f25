"""Runs one worker: an engine, its gRPC service, its membership; the same for both roles."""

import os
import uuid
from collections.abc import Callable

import grpc

from kvstore.codecs.choice import codec_named
from kvstore.directory.membership import Member
from kvstore.directory.presence import Presence
from kvstore.directory.redis_directory import RedisDirectory, connect
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

    Raises EngineDiedError when the engine does, FencedError when the worker was started anew elsewhere. The engine is
    stopped in any case.
    """
    engine = await Engine.start(settings, role)
    redis = connect(settings.redis_url)
    presence = Presence(RedisDirectory(redis, settings.cluster), _member(settings, role, engine))
    try:
        async with serving(settings.address, lambda server: add(server, engine)):
            ready(presence.member)
            reason = await presence.beside(engine.until_dead())
            raise EngineDiedError(f"{settings.worker_id} ends: {reason}")
    finally:
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
        precision=codec_named(settings.pool.codec).precision,
        block_tokens=layout.block_tokens,
        kv_bytes_per_token=layout.block_bytes // layout.block_tokens,
        max_model_len=engine.max_model_len,
        batch_max=settings.engine.prefill_batch_max
        if role == "prefill"
        else settings.engine.decode_batch_max,
        kv_tokens_max=settings.engine.kv_bytes * layout.shards // (layout.block_bytes // layout.block_tokens),
        tensor_parallel=layout.shards,
    )
