"""Runs a prefill worker until cancelled."""

from collections.abc import Callable

import grpc

from kvstore.directory.membership import Member
from kvstore.engine.engine import Engine
from kvstore.engine.hosting import host
from kvstore.engine.settings import WorkerSettings
from prefill_worker.prefill_pb2_grpc import add_PrefillWorkerServicer_to_server
from prefill_worker.worker import PrefillWorker


async def serve(settings: WorkerSettings, ready: Callable[[Member], None]) -> None:
    """See `kvstore.engine.hosting.host`."""

    def add(server: grpc.aio.Server, engine: Engine) -> None:
        add_PrefillWorkerServicer_to_server(PrefillWorker(engine), server)

    await host(settings, "prefill", add, ready)
