"""A gRPC server on one address, for as long as a block lasts."""

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import grpc

from kvstore.transfer.tls import TlsConfig

_MESSAGE_BYTES_MAX = 64 * 2**20
OPTIONS = [
    ("grpc.max_send_message_length", _MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", _MESSAGE_BYTES_MAX),
    # A process that comes back is found at once: gRPC's own back-off grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    (
        "grpc.min_reconnect_backoff_ms",
        5000,
    ),  # whatever its name says: how long a connection may take to be made
]


@asynccontextmanager
async def serving(
    address: str, add: Callable[[grpc.aio.Server], None], tls: TlsConfig | None = None
) -> AsyncIterator[grpc.aio.Server]:
    """Serves what `add` registers on `address` (`unix:/path` or `host:port`). Raises OSError if it cannot listen."""
    server = grpc.aio.server(options=OPTIONS)
    add(server)
    try:
        if tls is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, tls.server_credentials())
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


def channel_to(address: str, tls: TlsConfig | None = None) -> grpc.aio.Channel:
    """A channel to what `serving` serves."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=OPTIONS)
    options = [*OPTIONS, *tls.channel_options]
    return grpc.aio.secure_channel(address, tls.channel_credentials(), options=options)
