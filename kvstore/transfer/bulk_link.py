"""The reader's end of a bulk socket: one thread receives into the arena's slots, another verifies and seals.

Both release the interpreter's lock in what takes time (`recv_into`, XXH3), so the event loop goes on.
"""

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.transfer.frames import HEADER_BYTES, TOKEN_BYTES, Frame, Kind
from kvstore.transfer.link import Landing, Progress
from kvstore.transfer.serve_reads import bulk_path
from kvstore.transfer.threads import finished
from kvstore.transfer.tls import TlsConfig

_CONNECT_S = 5.0

_Taken = tuple[int, list[int], npt.NDArray[np.uint64]]


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
    connection = await _connect(address, port, token)
    loop = asyncio.get_running_loop()
    steps: asyncio.Queue[Progress | None] = asyncio.Queue()

    def report(step: Progress | None) -> None:
        loop.call_soon_threadsafe(steps.put_nowait, step)

    receiver = _Receiver(connection, token, landing, segment_bytes, tls, report)
    threads = ThreadPoolExecutor(2, thread_name_prefix="bulk-receive")
    receiving = loop.run_in_executor(threads, receiver.receive)
    verifying = loop.run_in_executor(threads, receiver.verify)
    call_ended.add_done_callback(lambda _: receiver.stop())
    try:
        while (step := await steps.get()) is not None:
            yield step
        await receiving
    finally:
        receiver.stop()
        try:
            await finished(asyncio.gather(receiving, verifying, return_exceptions=True), receiver.stop)
        finally:
            receiver.close()
            threads.shutdown()


async def _connect(address: str, port: int, token: bytes) -> socket.socket:
    """On the event loop, so that giving up waits for nobody."""
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
        except BaseException:
            connection.close()
            raise
    return connection


class _Receiver:
    def __init__(
        self,
        connection: socket.socket,
        token: bytes,
        landing: Landing,
        segment_bytes: int,
        tls: TlsConfig | None,
        report: Callable[[Progress | None], None],
    ) -> None:
        self._socket = connection
        self._token = token
        self._landing = landing
        self._segment_bytes = segment_bytes
        self._tls = tls
        self._report = report
        self._landed: SimpleQueue[_Taken | list[Progress] | None] = SimpleQueue()

    def receive(self) -> None:
        """The first thread. Raises OSError or ValueError; `None` in the queue is its last word."""
        try:
            self._socket.setblocking(True)
            if self._tls is not None:
                context, name = self._tls.connecting(), self._tls.server_name
                self._socket = context.wrap_socket(self._socket, server_hostname=name)
            while self._frame():
                pass
        finally:
            self._landed.put(None)

    def verify(self) -> None:
        """The second thread: ends after the first."""
        try:
            while (landed := self._landed.get()) is not None:
                for step in landed if isinstance(landed, list) else self._landing.take(*landed):
                    self._report(step)
        finally:
            self._report(None)

    def stop(self) -> None:
        """Ends both threads soon. May be called at any time, also after `close`."""
        with suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _frame(self) -> bool:
        """Lands one frame. False for the last."""
        frame = Frame.unpack(self._bytes(HEADER_BYTES), self._token)
        if frame.kind is Kind.END:
            return False
        if frame.kind is Kind.VOID:
            self._landed.put(self._landing.void(frame.block, frame.reason.words))
            return True
        if frame.length != frame.layers * self._segment_bytes:
            raise ValueError(f"{frame.layers} segments of {frame.length} bytes")
        buffers, fresh = self._landing.place(frame.block, frame.layer, frame.layers)
        sums = np.frombuffer(self._bytes(8 * frame.layers), "<u8").astype(np.uint64)
        for buffer in buffers:
            self._fill(buffer)
        if fresh:
            self._landed.put((frame.block, fresh, sums[np.asarray(fresh) - frame.layer]))
        return True

    def _bytes(self, count: int) -> bytes:
        buffer = bytearray(count)
        self._fill(memoryview(buffer))
        return bytes(buffer)

    def _fill(self, buffer: memoryview) -> None:
        flags = 0 if self._tls is not None else socket.MSG_WAITALL
        while buffer:
            count = self._socket.recv_into(buffer, 0, flags)
            if count == 0:
                raise OSError("the stream of blocks was cut short")
            buffer = buffer[count:]
