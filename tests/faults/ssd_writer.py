"""Writes blocks to an SSD folder until it is killed: `python ssd_writer.py FOLDER SEED`; run by test_ssd_faults.py.

What a block holds follows from its name, so that whoever finds it can tell what it must be.
"""

import asyncio
import itertools
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore.core.blocks import BlockHash
from kvstore.tiers.block_file import FileForm
from kvstore.tiers.dram import segment_sum
from kvstore.tiers.ssd import SsdTier

FORM = FileForm("0123456789abcdef", layers=4, segment_bytes=16_000)
HELD_MAX = 24
LANES = 4


def name_of(seed: int, number: int) -> BlockHash:
    return BlockHash(np.random.default_rng([seed, number]).bytes(32))


def bytes_of(name: BlockHash) -> npt.NDArray[np.uint8]:
    """[layers, segment_bytes]"""
    random = np.random.default_rng(list(name))
    return random.integers(0, 256, (FORM.layers, FORM.segment_bytes), np.uint8)


def sums_of(content: npt.NDArray[np.uint8], name: BlockHash) -> npt.NDArray[np.uint64]:
    return np.array([segment_sum(row, name, layer) for layer, row in enumerate(content)], np.uint64)


async def main(folder: Path, seed: int) -> None:
    tier = SsdTier.open(folder, FORM)
    numbers = itertools.count()

    async def lane() -> None:
        for number in numbers:
            name = name_of(seed, number)
            content = bytes_of(name)
            await tier.write(name, content, sums_of(content, name))
            if len(tier.names()) > HELD_MAX:
                await tier.drop(tier.names()[0])

    print("ready", flush=True)
    await asyncio.gather(*(lane() for _ in range(LANES)))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
