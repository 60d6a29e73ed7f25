"""Runs a decode worker: one engine, one gRPC service."""

from collections.abc import Callable

import grpc

from decode_worker.decode_pb2_grpc import add_DecodeWorkerServicer_to_server
from decode_worker.worker import DecodeWorker
from kvstore.engine.engine import Engine
from kvstore.engine.settings import WorkerSettings
from kvstore.transfer.server import serving


async def serve(settings: WorkerSettings, ready: Callable[[Engine], None]) -> None:
    """Starts the engine, calls `ready` once the service listens, serves until cancelled, stops the engine."""
    engine = await Engine.start(settings, "decode")

    def add(server: grpc.aio.Server) -> None:
        add_DecodeWorkerServicer_to_server(DecodeWorker(engine), server)

    try:
        async with serving(settings.address, add):
            ready(engine)
            await engine.until_dead()
    finally:
        await engine.close()
