"""The SSD tier on a real disk: round trips, what is refused, and what a flipped or torn file becomes."""

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvstore.core.blocks import BlockHash, KVLayout
from kvstore.tiers.dram import segment_sum
from kvstore.tiers.ssd import Loaded, Missed, NotWritten, SsdTier, Written

ALIGNED = KVLayout(layers=4, block_tokens=4, page_tokens=2, page_bytes=2048, dtype="float32", packing="test")
ODD = KVLayout(layers=3, block_tokens=4, page_tokens=2, page_bytes=56, dtype="float32", packing="test")
U8 = npt.NDArray[np.uint8]
Open = Callable[..., Awaitable[SsdTier]]


def name(number: int) -> BlockHash:
    return BlockHash(bytes([number]) * 32)


def payload(layout: KVLayout, seed: int) -> U8:
    """What the block with this seed holds, in memory aligned to a page."""
    return np.random.default_rng(seed).integers(0, 256, (layout.layers, layout.segment_bytes), np.uint8)


def sums(content: U8, block: BlockHash) -> npt.NDArray[np.uint64]:
    return np.array([segment_sum(row, block, layer) for layer, row in enumerate(content)], np.uint64)


def aligned(layout: KVLayout) -> U8:
    """An empty buffer, aligned as an arena's slot is."""
    import mmap

    size = layout.block_bytes
    return np.frombuffer(mmap.mmap(-1, -(-size // 4096) * 4096), np.uint8, size).reshape(layout.layers, -1)


async def put(tier: SsdTier, layout: KVLayout, number: int) -> U8:
    buffer = aligned(layout)
    buffer[:] = payload(layout, number)
    assert isinstance(await tier.write(name(number), buffer, sums(buffer, name(number))), Written)
    return buffer


def file_of(tier: SsdTier, number: int) -> Path:
    [path] = tier.folder.rglob(name(number).hex())
    return path


@pytest.fixture
async def opened(tmp_path: Path) -> AsyncIterator[Open]:
    tiers: list[SsdTier] = []

    async def open_tier(layout: KVLayout = ALIGNED, folder: Path = tmp_path) -> SsdTier:
        tiers.append(SsdTier.open(folder, layout))
        return tiers[-1]

    yield open_tier
    for tier in tiers:
        await tier.close()


@pytest.mark.parametrize("layout", [ALIGNED, ODD], ids=["aligned", "odd"])
async def test_what_was_written_is_read(opened: Open, layout: KVLayout) -> None:
    tier = await opened(layout)
    assert not tier.direct or layout is ALIGNED
    for number in range(5):
        await put(tier, layout, number)
    for number in range(5):
        buffer = aligned(layout)
        result = await tier.read(name(number), buffer)
        assert isinstance(result, Loaded)
        np.testing.assert_array_equal(buffer, payload(layout, number))
        np.testing.assert_array_equal(result.sums, sums(buffer, name(number)))
    assert (tier.counters.writes, tier.counters.reads, tier.counters.corrupt) == (5, 5, 0)


async def test_a_block_that_is_not_there_is_a_miss(opened: Open) -> None:
    tier = await opened()
    assert await tier.read(name(1), aligned(ALIGNED)) == Missed("no file", corrupt=False)
    await put(tier, ALIGNED, 1)
    await tier.drop(name(1))
    await tier.drop(name(1))
    assert await tier.read(name(1), aligned(ALIGNED)) == Missed("no file", corrupt=False)


async def test_another_blocks_file_is_not_served(opened: Open) -> None:
    tier = await opened()
    await put(tier, ALIGNED, 1)
    file_of(tier, 1).rename(tier.folder / ALIGNED.fingerprint() / "01" / name(2).hex())
    (tier.folder / ALIGNED.fingerprint() / "02").mkdir()
    (tier.folder / ALIGNED.fingerprint() / "01" / name(2).hex()).rename(
        tier.folder / ALIGNED.fingerprint() / "02" / name(2).hex()
    )
    assert await tier.read(name(2), aligned(ALIGNED)) == Missed("the file holds another block", corrupt=True)
    assert not list(tier.folder.rglob(name(2).hex())), "it is deleted"


@pytest.mark.parametrize("layout", [ALIGNED, ODD], ids=["aligned", "odd"])
@pytest.mark.parametrize("kept", [0, 1, 4095, 4096, 4100, -1])
async def test_a_torn_file_is_a_miss(opened: Open, layout: KVLayout, kept: int) -> None:
    tier = await opened(layout)
    await put(tier, layout, 1)
    path = file_of(tier, 1)
    os.truncate(path, kept if kept >= 0 else path.stat().st_size - 1)
    result = await tier.read(name(1), aligned(layout))
    assert isinstance(result, Missed)
    assert result.corrupt
    assert not path.exists()


async def test_a_scan_finds_whole_files_and_removes_unfinished_ones(opened: Open, tmp_path: Path) -> None:
    first = await opened(folder=tmp_path / "a")
    for number in range(20):
        await put(first, ALIGNED, number)
    path = file_of(first, 3)
    torn = path.with_name(name(200).hex())
    torn.write_bytes(b"short")
    unfinished = path.with_name(name(201).hex() + ".part")
    unfinished.write_bytes(b"x")
    (path.parent / "stranger").write_bytes(b"x")
    found = [block async for blocks in first.scan() for block in blocks]
    assert sorted(found) == [name(number) for number in range(20)]
    assert not unfinished.exists()


async def test_a_folder_belongs_to_one_node(opened: Open, tmp_path: Path) -> None:
    await opened()
    with pytest.raises(OSError, match=f"{tmp_path} belongs to another node"):
        SsdTier.open(tmp_path, ALIGNED)


async def test_a_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=f"ssd folder {tmp_path}/file"):
        SsdTier.open(tmp_path / "file", ALIGNED)


async def test_a_disk_that_refuses_leaves_nothing_behind(opened: Open) -> None:
    """The block's folder is in the way, as a file: the write fails as on a broken disk."""
    tier = await opened()
    (tier.folder / ALIGNED.fingerprint() / "01").write_text("")
    buffer = aligned(ALIGNED)
    result = await tier.write(name(1), buffer, sums(buffer, name(1)))
    assert isinstance(result, NotWritten)
    assert not result.full
    assert not list(tier.folder.rglob("*.part"))
