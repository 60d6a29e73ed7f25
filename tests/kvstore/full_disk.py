"""Fills a small disk with blocks: `python full_disk.py FOLDER`, run by test_ssd.py in a namespace of its own."""

import asyncio
import sys
from pathlib import Path

import numpy as np

from kvstore.core.blocks import BlockHash
from kvstore.tiers.block_file import FileForm
from kvstore.tiers.dram import segment_sum
from kvstore.tiers.ssd import Loaded, NotWritten, SsdTier, Written

FORM = FileForm("0123456789abcdef", layers=2, segment_bytes=4096)


async def main(folder: Path) -> None:
    tier = SsdTier.open(folder, FORM)
    content = np.arange(FORM.payload_bytes).astype(np.uint8).reshape(2, 4096)
    names = [BlockHash(bytes([number]) * 32) for number in range(64)]

    async def put(name: BlockHash) -> Written | NotWritten:
        sums = np.array([segment_sum(row, name, layer) for layer, row in enumerate(content)], np.uint64)
        return await tier.write(name, content, sums)

    results = [await put(name) for name in names]
    refused = [each for each in results if isinstance(each, NotWritten)]
    assert refused and len(refused) < len(names), "the disk fills in the middle"
    assert all(each.full for each in refused), refused
    assert tier.counters.full == len(refused)
    assert not list(folder.rglob("*.part"))
    files = sorted(path.name for path in folder.rglob("*") if len(path.name) == 64)
    assert files == sorted(name.hex() for name in tier.names()), "nothing is left of what was refused"
    for name in tier.names():
        assert isinstance(await tier.read(name, np.empty_like(content)), Loaded)
    await tier.drop(tier.names()[0])
    last = next(name for name in names if not tier.contains(name))
    assert isinstance(await put(last), Written), "it goes on by itself once there is room"
    await tier.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
