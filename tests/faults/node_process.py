"""A KV node in a process of its own, for tests that kill it: `python node_process.py ADDRESS ARENA_DIR SSD_DIR BYTES`."""

import asyncio
import sys
from pathlib import Path

from kvstore.core.blocks import NodeId
from kvstore.node import KVNode, NodeConfig


async def main() -> None:
    address, arena_dir, ssd_dir, dram_bytes = sys.argv[1:]
    config = NodeConfig(
        NodeId("node-0"),
        address,
        int(dram_bytes),
        arena_dir=Path(arena_dir),
        ssd_dir=Path(ssd_dir),
        ssd_bytes=2**22,
    )
    await KVNode(config).serve(started=lambda: print("ready", flush=True))


if __name__ == "__main__":
    asyncio.run(main())
