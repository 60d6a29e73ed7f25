"""SIGKILL of a node at random moments of writing: what can be read afterwards is right, and nothing is left behind."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import numpy as np
import pytest

from kvstore.core.blocks import BlockHash, KVLayout
from kvstore.tiers.dram import Arena, ArenaShape
from kvstore.transfer import kv_pb2 as pb
from kvstore.transfer.kv_pb2_grpc import KVNodeStub
from kvstore.transfer.messages import layout_message

if TYPE_CHECKING:
    from kvstore.transfer.kv_pb2_grpc import KVNodeAsyncStub

LAYOUT = KVLayout(layers=2, block_tokens=4, page_tokens=4, page_bytes=4096, dtype="float32", packing="test")
SLOTS = 64
DRAM_BYTES = SLOTS * (LAYOUT.block_bytes + ArenaShape(LAYOUT, 1).header_dtype.itemsize)
FULL = os.environ.get("MOONPOOL_FAULTS") == "full"
SEEDS = range(200 if FULL else 4)
CHAIN = 4


def name_of(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(4, "little") * 8)


def bytes_of(name: bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    seed = int.from_bytes(name[:4], "little")
    return np.random.default_rng(seed).integers(0, 256, (LAYOUT.layers, LAYOUT.segment_bytes), np.uint8)


@asynccontextmanager
async def node(folder: Path) -> AsyncIterator[tuple["subprocess.Popen[bytes]", "KVNodeAsyncStub", Arena]]:
    """A node process with this test as its worker."""
    address = f"unix:{folder}/node.sock"
    script = Path(__file__).with_name("node_process.py")
    process = subprocess.Popen(
        [sys.executable, str(script), address, str(folder), str(folder / "ssd"), str(DRAM_BYTES)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    try:
        assert await asyncio.to_thread(process.stdout.readline) == b"ready\n"
        async with grpc.aio.insecure_channel(address) as channel:
            stub = KVNodeStub(channel)
            reply = await stub.Attach(
                pb.AttachRequest(worker_id="w", layout=layout_message(LAYOUT), pids=[os.getpid()]),
                wait_for_ready=True,
            )
            yield process, stub, Arena.attach(Path(reply.arena_path), ArenaShape(LAYOUT, reply.slots))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def write_on(stub: "KVNodeAsyncStub", arena: Arena, start: int) -> None:
    """Stores chain after chain until the node is gone."""
    number = start
    while True:
        names = [name_of(number + i) for i in range(CHAIN)]
        request = f"r{number}"
        reply = await stub.Reserve(
            pb.ReserveRequest(request_id=request, worker_id="w", hashes=names, lease_s=10.0)
        )
        for slot in reply.slots:
            arena.payload[slot.slot] = bytes_of(slot.hash)
            for layer in range(LAYOUT.layers):
                arena.seal(slot.slot, layer, slot.epoch, BlockHash(slot.hash))
        await stub.Commit(pb.Holding(request_id=request, holder="w"))
        await stub.Release(pb.Holding(request_id=request, holder="w"))
        number += CHAIN


async def read_back(stub: "KVNodeAsyncStub", arena: Arena, number: int) -> bool:
    """Is the block there? Then it is right."""
    lease = pb.LeaseRequest(
        request_id=f"l{number}", holder="w", hashes=[name_of(number)], lease_s=10.0, fetch_s=10.0
    )
    slots = (await stub.Lease(lease)).slots
    for slot in slots:
        np.testing.assert_array_equal(arena.payload[slot.slot], bytes_of(slot.hash))
        for layer in range(LAYOUT.layers):
            assert arena.verify(
                slot.slot, layer, slot.epoch, BlockHash(slot.hash), arena.payload[slot.slot, layer]
            )
    await stub.Release(pb.Holding(request_id=f"l{number}", holder="w"))
    return bool(slots)


@pytest.mark.parametrize("seed", SEEDS)
async def test_what_is_readable_after_a_kill_is_right(seed: int) -> None:
    moment_s = random.Random(seed).uniform(0.0, 0.4)
    with tempfile.TemporaryDirectory(prefix="mp-") as name:
        folder = Path(name)
        async with node(folder) as (process, stub, arena):
            writing = asyncio.create_task(write_on(stub, arena, 0))
            await asyncio.sleep(moment_s)
            process.send_signal(signal.SIGKILL)
            with pytest.raises(grpc.aio.AioRpcError):
                await writing
        files = {path.name for path in (folder / "ssd").rglob("*") if path.is_file() and len(path.name) == 64}
        async with node(folder) as (process, stub, arena):
            assert len(list(folder.glob("moonpool-node-0-*"))) == 1, "the dead node's arena is removed"
            numbers = sorted(int.from_bytes(bytes.fromhex(file)[:4], "little") for file in files)
            while (status := await stub.Status(pb.Empty())).ssd_blocks < len(files):
                await asyncio.sleep(0.01)
            assert [await read_back(stub, arena, number) for number in numbers] == [True] * len(numbers)
            status = await stub.Status(pb.Empty())
            assert (status.leased, status.filling, status.draining, status.ssd_corrupt) == (0, 0, 0, 0)
            await stub.Check(pb.Empty())
            assert not list((folder / "ssd").rglob("*.part")), "unfinished files are removed"
