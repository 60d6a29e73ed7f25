"""Runs a decode worker until cancelled."""

from collections.abc import Callable

import grpc

from decode_worker.decode_pb2_grpc import add_DecodeWorkerServicer_to_server
from decode_worker.worker import DecodeWorker
from kvstore.directory.membership import Member
from kvstore.engine.engine import Engine
from kvstore.engine.hosting import host
from kvstore.engine.settings import WorkerSettings


async def serve(settings: WorkerSettings, ready: Callable[[Member], None]) -> None:
    """See `kvstore.engine.hosting.host`."""

    def add(server: grpc.aio.Server, engine: Engine) -> None:
        add_DecodeWorkerServicer_to_server(DecodeWorker(engine, settings.pool.save_generated), server)

    await host(settings, "decode", add, ready)
