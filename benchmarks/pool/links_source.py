"""The source's process of `links`: one arena of blocks, offered by every link and, bare, to what they are compared with.

python -m benchmarks.pool.links_source ADDRESS ARENA PLAIN_SOCKET SEED NIXL MOONCAKE_MASTER
"""

import asyncio
import socket
import sys
import threading
from pathlib import Path

import numpy as np

from kvstore.core.blocks import BlockHash, KVLayout, NodeId
from kvstore.tiers.dram import Arena, ArenaShape
from kvstore.transfer.nixl_link import LazyMemory
from tests.contract.source_node import SourceNode

BLOCKS = 64
LAYOUT = KVLayout(
    layers=32, block_tokens=64, page_tokens=64, page_bytes=131072, dtype="float16", packing="benchmark"
)
BATCH_BYTES = BLOCKS * LAYOUT.block_bytes


def name_of(block: int) -> BlockHash:
    return BlockHash(block.to_bytes(4, "little") * 8)


def keys() -> list[str]:
    return [name_of(block).hex() for block in range(BLOCKS)]


def blocks_of(seed: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    """All blocks' bytes, shape [blocks, layers, segment_bytes]."""
    shape = (BLOCKS, LAYOUT.layers, LAYOUT.segment_bytes)
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def stream(listener: socket.socket, content: memoryview) -> None:
    """The plain socket: all bytes for each byte that comes."""
    while True:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection:
            while connection.recv(1):
                connection.sendall(content)


def store_in_mooncake(master: str, content: "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]") -> object:
    """Puts the blocks into a Mooncake segment of this process. Raises RuntimeError."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    status = store.setup("127.0.0.1", "P2PHANDSHAKE", 3 * BATCH_BYTES, BATCH_BYTES, "tcp", "", master)
    if status:
        raise RuntimeError(f"Mooncake's setup returned {status}")
    for key, block in zip(keys(), content, strict=True):
        if status := store.put(key, block.tobytes()):
            raise RuntimeError(f"Mooncake's put returned {status}")
    return store


async def main(address: str, path: Path, plain: int, seed: int, nixl: bool, master: str) -> None:
    arena = Arena.create(path, ArenaShape(LAYOUT, BLOCKS))
    node = SourceNode(arena)  # type: ignore[abstract]  # its other methods answer UNIMPLEMENTED
    content = blocks_of(seed)
    refs = node.reserve_names([name_of(block) for block in range(BLOCKS)])
    for ref, block in zip(refs, content, strict=True):
        arena.payload[ref.slot] = block
        for layer in range(LAYOUT.layers):
            arena.seal(ref.slot, layer, ref.epoch, ref.hash)
    node.commit()
    listener = socket.create_server(("127.0.0.1", plain))
    threading.Thread(target=stream, args=(listener, content.reshape(-1).data), daemon=True).start()
    memory = LazyMemory(NodeId("source"), arena) if nixl else None
    held = store_in_mooncake(master, content) if master else None
    try:
        async with node.serving(address, memory=memory):
            print("ready", flush=True)
            await asyncio.Event().wait()
    finally:
        arena.unlink()
        del held


if __name__ == "__main__":
    at, arena_path, port, chance, with_nixl, mooncake_master = sys.argv[1:]
    asyncio.run(main(at, Path(arena_path), int(port), int(chance), with_nixl == "1", mooncake_master))
