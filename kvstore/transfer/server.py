"""A gRPC server on one address, for as long as a block lasts."""

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import grpc

_MESSAGE_BYTES_MAX = 64 * 2**20
OPTIONS = [
    ("grpc.max_send_message_length", _MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", _MESSAGE_BYTES_MAX),
    # A process that comes back is found at once: gRPC's own back-off grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]


@asynccontextmanager
async def serving(address: str, add: Callable[[grpc.aio.Server], None]) -> AsyncIterator[grpc.aio.Server]:
    """Serves what `add` registers on `address` (`unix:/path` or `host:port`). Raises OSError if it cannot listen."""
    server = grpc.aio.server(options=OPTIONS)
    add(server)
    try:
        bound = server.add_insecure_port(address)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}: {error}") from error
    if bound == 0:
        raise OSError(f"cannot listen on {address}")
    await server.start()
    try:
        yield server
    finally:
        await server.stop(grace=0.2)
        if address.startswith("unix:"):
            with suppress(FileNotFoundError):
                os.unlink(address.removeprefix("unix:"))  # noqa: PTH108  # one quick call at the end
