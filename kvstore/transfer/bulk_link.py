"""The reader's end of a bulk socket: a thread that receives into the arena's slots."""

import asyncio
import socket
import ssl
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from typing import Any

import numpy as np

from kvstore.transfer.frames import HEADER_BYTES, TOKEN_BYTES, Frame, Kind
from kvstore.transfer.landing import Landed, Landing, Segments, Void, landed
from kvstore.transfer.link import Progress
from kvstore.transfer.serve_reads import bulk_path
from kvstore.transfer.tls import TlsConfig

_CONNECT_S = 5.0


async def receive(
    address: str,
    port: int,
    token: bytes,
    landing: Landing,
    segment_bytes: int,
    tls: TlsConfig | None,
    call_ended: "asyncio.Future[None]",
) -> AsyncGenerator[Progress, None]:
    """Opens the bulk socket beside `address` and lands what comes. Ends early when `call_ended` is done.

    Raises OSError when the stream is cut short, ValueError when it makes no sense.
    """
    if len(token) != TOKEN_BYTES:
        raise ValueError(f"a token of {len(token)} bytes")
    connection = await _connect(address, port, token, tls)
    receiver = _Receiver(connection, token, landing, segment_bytes)
    call_ended.add_done_callback(lambda _: receiver.stop())
    try:
        async with aclosing(landed(landing, receiver.receive, receiver.stop)) as steps:
            async for step in steps:
                yield step
    finally:
        receiver.close()


async def _connect(address: str, port: int, token: bytes, tls: TlsConfig | None) -> socket.socket:
    """On the event loop, so that giving up waits for nobody. The handshake is the receiving thread's."""
    loop = asyncio.get_running_loop()
    host = address.rpartition(":")[0].strip("[]")
    async with asyncio.timeout(_CONNECT_S):
        family: socket.AddressFamily = socket.AF_UNIX
        where: str | tuple[Any, ...] = bulk_path(address)
        if not address.startswith("unix:"):
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            family, where = found[0][0], found[0][4]
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            await loop.sock_connect(connection, where)
            await loop.sock_sendall(connection, token)
            if tls is None:
                return connection
            return tls.connecting().wrap_socket(
                connection, server_hostname=tls.server_name, do_handshake_on_connect=False
            )
        except BaseException:
            connection.close()
            raise


class _Receiver:
    def __init__(
        self,
        connection: socket.socket,
        token: bytes,
        landing: Landing,
        segment_bytes: int,
    ) -> None:
        self._socket = connection
        self._token = token
        self._landing = landing
        self._segment_bytes = segment_bytes

    def receive(self, put: Callable[[Landed], None]) -> None:
        """To be run in a thread. Raises OSError or ValueError."""
        self._socket.setblocking(True)
        if isinstance(self._socket, ssl.SSLSocket):
            self._socket.do_handshake()
        while self._frame(put):
            pass

    def stop(self) -> None:
        """Ends `receive` soon. May be called at any time, also after `close`."""
        with suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _frame(self, put: Callable[[Landed], None]) -> bool:
        """Lands one frame. False for the last."""
        frame = Frame.unpack(self._bytes(HEADER_BYTES), self._token)
        if frame.kind is Kind.END:
            return False
        if frame.kind is Kind.VOID:
            put(Void(frame.block, frame.reason.words))
            return True
        if frame.length != frame.layers * self._segment_bytes:
            raise ValueError(f"{frame.layers} segments of {frame.length} bytes")
        buffers, fresh = self._landing.place(frame.block, frame.layer, frame.layers)
        sums = np.frombuffer(self._bytes(8 * frame.layers), "<u8").astype(np.uint64)
        for buffer in buffers:
            self._fill(buffer)
        if fresh:
            put(Segments(frame.block, fresh, sums[np.asarray(fresh) - frame.layer]))
        return True

    def _bytes(self, count: int) -> bytes:
        buffer = bytearray(count)
        self._fill(memoryview(buffer))
        return bytes(buffer)

    def _fill(self, buffer: memoryview) -> None:
        flags = 0 if isinstance(self._socket, ssl.SSLSocket) else socket.MSG_WAITALL
        while buffer:
            count = self._socket.recv_into(buffer, 0, flags)
            if count == 0:
                raise OSError("the stream of blocks was cut short")
            buffer = buffer[count:]
