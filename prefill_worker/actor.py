"""Runs a prefill worker: one engine, one gRPC service."""

from collections.abc import Callable

import grpc

from kvstore.engine.engine import Engine
from kvstore.engine.settings import WorkerSettings
from kvstore.transfer.server import serving
from prefill_worker.prefill_pb2_grpc import add_PrefillWorkerServicer_to_server
from prefill_worker.worker import PrefillWorker


async def serve(settings: WorkerSettings, ready: Callable[[Engine], None]) -> None:
    """Starts the engine, calls `ready` once the service listens, serves until cancelled, stops the engine."""
    engine = await Engine.start(settings, "prefill")

    def add(server: grpc.aio.Server) -> None:
        add_PrefillWorkerServicer_to_server(PrefillWorker(engine), server)

    try:
        async with serving(settings.address, add):
            ready(engine)
            await engine.until_dead()
    finally:
        await engine.close()
