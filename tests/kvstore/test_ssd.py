"""The SSD tier on a real disk: round trips, what is refused, and what a flipped or torn file becomes."""

import asyncio
import mmap
import os
import resource
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvstore.core.blocks import BlockHash, KVLayout
from kvstore.tiers.block_file import FileForm
from kvstore.tiers.dram import segment_sum
from kvstore.tiers.ssd import Loaded, Missed, NotWritten, SsdTier, Written

ALIGNED = FileForm.raw(
    KVLayout(layers=4, block_tokens=4, page_tokens=2, page_bytes=2048, dtype="float32", packing="test")
)
ODD = FileForm.raw(
    KVLayout(layers=3, block_tokens=4, page_tokens=2, page_bytes=56, dtype="float32", packing="test")
)
FORMS = pytest.mark.parametrize("form", [ALIGNED, ODD], ids=["aligned", "odd"])
U8 = npt.NDArray[np.uint8]
Open = Callable[..., Awaitable[SsdTier]]


def name(number: int) -> BlockHash:
    return BlockHash(bytes([number]) * 32)


def payload(form: FileForm, seed: int) -> U8:
    """What the block with this seed holds."""
    return np.random.default_rng(seed).integers(0, 256, (form.layers, form.segment_bytes), np.uint8)


def sums(content: U8, block: BlockHash) -> npt.NDArray[np.uint64]:
    return np.array([segment_sum(row, block, layer) for layer, row in enumerate(content)], np.uint64)


def buffer_of(form: FileForm, beyond_page: int = 0) -> U8:
    """An empty buffer, aligned as an arena's slot is, or so many bytes further on."""
    size = form.payload_bytes
    memory = mmap.mmap(-1, size + 8192)
    return np.frombuffer(memory, np.uint8, size, beyond_page).reshape(form.layers, -1)


async def put(tier: SsdTier, number: int, form: FileForm = ALIGNED) -> Written | NotWritten:
    buffer = buffer_of(form)
    buffer[:] = payload(form, number)
    return await tier.write(name(number), buffer, sums(buffer, name(number)))


async def stored(tier: SsdTier, number: int, form: FileForm = ALIGNED) -> Path:
    """Stores the block; its file."""
    assert isinstance(await put(tier, number, form), Written)
    [path] = tier.folder.rglob(name(number).hex())
    return path


async def assert_readable(tier: SsdTier, number: int, form: FileForm = ALIGNED) -> None:
    buffer = buffer_of(form)
    result = await tier.read(name(number), buffer)
    assert isinstance(result, Loaded), result
    np.testing.assert_array_equal(buffer, payload(form, number))
    np.testing.assert_array_equal(result.sums, sums(buffer, name(number)))


async def assert_corrupt(tier: SsdTier, number: int, path: Path, form: FileForm = ALIGNED) -> Missed:
    """The read finds it out, counts it and deletes the file."""
    before = tier.counters.corrupt
    result = await tier.read(name(number), buffer_of(form))
    assert isinstance(result, Missed) and result.corrupt, result
    assert not path.exists()
    assert not tier.contains(name(number))
    assert tier.counters.corrupt == before + 1
    return result


def unfinished(tier: SsdTier) -> list[Path]:
    return list(tier.folder.rglob("*.part"))


async def scanned(tier: SsdTier) -> list[BlockHash]:
    return sorted([block async for blocks in tier.scan() for block in blocks])


@pytest.fixture
async def opened(tmp_path: Path) -> AsyncIterator[Open]:
    tiers: list[SsdTier] = []

    async def open_tier(
        form: FileForm = ALIGNED, folder: Path = tmp_path, quota_files: int | None = None
    ) -> SsdTier:
        quota = quota_files * form.file_bytes if quota_files is not None else None
        tiers.append(SsdTier.open(folder, form, quota_bytes=quota))
        return tiers[-1]

    yield open_tier
    for tier in tiers:
        await tier.close()


# -- round trips --------------------------------------------------------------------------------------------


@FORMS
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
@pytest.mark.parametrize("beyond_page", [0, 1], ids=["slot", "anywhere"])
async def test_what_was_written_is_read(opened: Open, form: FileForm, direct: bool, beyond_page: int) -> None:
    """`buffered`: as where O_DIRECT is refused. The file is the same, so each reads what the other wrote."""
    tier = await opened(form)
    writes_direct = tier.direct
    for number in range(5):
        buffer = buffer_of(form, beyond_page)
        buffer[:] = payload(form, number)
        assert isinstance(await tier.write(name(number), buffer, sums(buffer, name(number))), Written)
    tier.direct = direct and writes_direct
    for number in range(5):
        buffer = buffer_of(form, beyond_page)
        result = await tier.read(name(number), buffer)
        assert isinstance(result, Loaded)
        np.testing.assert_array_equal(buffer, payload(form, number))
        np.testing.assert_array_equal(result.sums, sums(buffer, name(number)))
    counted = tier.counters
    assert (counted.writes, counted.reads, counted.hits, counted.corrupt) == (5, 5, 5, 0)
    assert counted.written_bytes == counted.read_bytes == 5 * tier.file_bytes == tier.used_bytes
    assert sorted(tier.names()) == [name(number) for number in range(5)]


async def test_a_block_that_is_not_there_is_a_miss(opened: Open) -> None:
    tier = await opened()
    assert await tier.read(name(1), buffer_of(ALIGNED)) == Missed("no file", corrupt=False)
    await stored(tier, 1)
    assert tier.contains(name(1))
    await tier.drop(name(1))
    await tier.drop(name(1))
    assert await tier.read(name(1), buffer_of(ALIGNED)) == Missed("no file", corrupt=False)
    assert (tier.used_bytes, tier.names(), tier.counters.hits) == (0, [], 0)


async def test_a_block_may_be_written_again_and_by_two_at_once(opened: Open) -> None:
    tier = await opened()
    assert [type(each) for each in await asyncio.gather(*(put(tier, 1) for _ in range(8)))] == [Written] * 8
    await assert_readable(tier, 1)
    assert tier.used_bytes == tier.file_bytes
    assert not unfinished(tier)


@pytest.mark.parametrize(
    "wrong",
    [np.empty((4, 4095), np.uint8), np.empty((4, 4096), np.int8), np.empty((4, 8192), np.uint8)[:, ::2]],
    ids=["size", "type", "strided"],
)
async def test_arrays_of_another_shape_are_refused_before_they_are_touched(opened: Open, wrong: U8) -> None:
    tier = await opened()
    with pytest.raises(ValueError, match="is not one run of uint8"):
        await tier.read(name(1), wrong)
    with pytest.raises(ValueError, match="is not one run of uint8"):
        await tier.write(name(1), wrong, np.zeros(4, np.uint64))
    with pytest.raises(ValueError, match="checksums for 4 layers"):
        await tier.write(name(1), buffer_of(ALIGNED), np.zeros(3, np.uint64))


async def test_a_write_whose_caller_gave_up_is_accounted_for(opened: Open) -> None:
    tier = await opened()
    writes = [asyncio.create_task(put(tier, number)) for number in range(16)]
    await asyncio.sleep(0)
    for write in writes:
        write.cancel()
    await asyncio.gather(*writes, return_exceptions=True)
    while tier.counters.writes < 16:
        await asyncio.sleep(0.001)
    assert tier.used_bytes == 16 * tier.file_bytes
    assert len(tier.names()) == 16


# -- files that are wrong -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        replace(ALIGNED, layout="0123456789abcdef"),
        replace(ALIGNED, encoding="int8"),
        replace(ALIGNED, shards=2),
        replace(ALIGNED, shards=2, shard=1),
        replace(ALIGNED, layers=8, segment_bytes=2048),
    ],
    ids=["layout", "encoding", "shards", "shard", "sizes"],
)
async def test_a_file_of_another_form_is_not_served(opened: Open, tmp_path: Path, other: FileForm) -> None:
    there = await opened(other, tmp_path / "there")
    path = await stored(there, 1, other)
    tier = await opened(folder=tmp_path / "here")
    mine = await stored(tier, 1)
    path.rename(mine)
    missed = await assert_corrupt(tier, 1, mine)
    assert missed.reason == "the file holds another block"


async def test_another_blocks_file_is_not_served(opened: Open) -> None:
    tier = await opened()
    path = await stored(tier, 2)
    (await stored(tier, 1)).rename(path)
    assert (await assert_corrupt(tier, 2, path)).reason == "the file holds another block"


@FORMS
@pytest.mark.parametrize("kept", [0, 1, 4095, 4096, 4100, -1])
async def test_a_torn_file_is_a_miss(opened: Open, form: FileForm, kept: int) -> None:
    tier = await opened(form)
    path = await stored(tier, 1, form)
    os.truncate(path, kept if kept >= 0 else path.stat().st_size - 1)
    await assert_corrupt(tier, 1, path, form)


@FORMS
async def test_a_file_that_goes_on_is_a_miss(opened: Open, form: FileForm) -> None:
    tier = await opened(form)
    path = await stored(tier, 1, form)
    with path.open("ab") as file:
        file.write(b"\0")
    await assert_corrupt(tier, 1, path, form)


@FORMS
@pytest.mark.parametrize("seed", range(40))
async def test_a_flipped_bit_is_a_miss(opened: Open, form: FileForm, seed: int) -> None:
    tier = await opened(form)
    path = await stored(tier, 1, form)
    random = np.random.default_rng(seed)
    content = bytearray(path.read_bytes())
    content[random.integers(len(content))] ^= 1 << int(random.integers(8))
    path.write_bytes(content)
    await assert_corrupt(tier, 1, path, form)
    await stored(tier, 1, form)
    await assert_readable(tier, 1, form)


# -- a restart ----------------------------------------------------------------------------------------------


async def test_a_scan_finds_blocks_and_deletes_what_is_none(opened: Open) -> None:
    tier = await opened()
    for number in range(20):
        await stored(tier, number)
    await tier.close()
    blocks = tier.folder / ALIGNED.name
    (blocks / "c8").mkdir()
    short = blocks / "c8" / name(200).hex()
    short.write_bytes(b"short")
    long = blocks / "03" / name(3).hex()
    with long.open("ab") as file:
        file.write(b"x")
    (blocks / "03" / "stranger").write_bytes(b"x")
    again = await opened()
    assert again.names() == []
    found = await scanned(again)
    assert found == sorted(again.names()) == [name(number) for number in range(20) if number != 3]
    assert again.counters.corrupt == 2
    assert again.used_bytes == 19 * again.file_bytes
    assert not short.exists()
    assert not long.exists()
    assert (blocks / "03" / "stranger").exists(), "what is not ours is left alone"


async def test_reads_and_writes_go_on_during_a_scan(opened: Open) -> None:
    first = await opened()
    for number in range(200):
        await stored(first, number)
    await first.close()
    tier = await opened()
    found: list[BlockHash] = []
    served = 0
    async for batch in tier.scan():
        found += batch
        await assert_readable(tier, 199 - served % 200)
        assert isinstance(await put(tier, 200 + served % 50), Written)
        served += 1
    assert served > 20, "a scan comes in batches"
    assert set(found) >= {name(number) for number in range(200)}
    assert len(tier.names()) == 200 + min(served, 50)
    assert tier.used_bytes == len(tier.names()) * tier.file_bytes
    assert tier.counters.failed == tier.counters.corrupt == 0


async def test_what_a_dead_process_was_writing_is_removed(opened: Open) -> None:
    tier = await opened()
    await stored(tier, 1)
    await tier.close()
    (tier.folder / "unfinished" / f"{name(2).hex()}.0.part").write_bytes(b"half")
    again = await opened()
    assert not unfinished(again)
    assert await scanned(again) == [name(1)]


async def test_a_folder_belongs_to_one_node(opened: Open, tmp_path: Path) -> None:
    tier = await opened()
    with pytest.raises(OSError, match=f"{tmp_path} belongs to another node"):
        SsdTier.open(tmp_path, ALIGNED)
    await tier.close()
    await opened()


async def test_a_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=f"ssd folder {tmp_path}/file"):
        SsdTier.open(tmp_path / "file", ALIGNED)
    (tmp_path / "unfinished").write_text("")
    for _ in range(2):  # the lock is given back
        with pytest.raises(OSError, match=f"ssd folder {tmp_path}: File exists"):
            SsdTier.open(tmp_path, ALIGNED)


# -- quota and full disk ------------------------------------------------------------------------------------


async def test_a_write_beyond_the_quota_is_refused(opened: Open) -> None:
    tier = await opened(quota_files=3)
    results = await asyncio.gather(*(put(tier, number) for number in range(5)))
    assert [isinstance(each, Written) for each in results] == [True, True, True, False, False]
    assert isinstance(results[4], NotWritten) and results[4].full
    assert (tier.counters.full, tier.used_bytes) == (2, tier.quota_bytes)
    dropping = asyncio.create_task(tier.drop(name(0)))
    await asyncio.sleep(0)
    assert isinstance(await put(tier, 4), Written), "the room of a dropped block is free at once"
    await dropping
    assert sorted(tier.names()) == [name(1), name(2), name(4)]


async def test_blocks_of_an_earlier_configuration_make_room_oldest_first(opened: Open) -> None:
    earlier = await opened(replace(ALIGNED, layout="0123456789abcdef"))
    for number in range(4):
        os.utime(await stored(earlier, number), (1000 - number, 1000 - number))
    await earlier.close()
    tier = await opened(quota_files=3)
    assert await scanned(tier) == []
    left = sorted(path.name for path in (tier.folder / earlier.form.name).rglob("*") if path.is_file())
    assert left == [name(number).hex() for number in range(3)], "one was beyond the quota"
    assert tier.used_bytes == tier.quota_bytes
    await stored(tier, 9)
    assert sorted(path.name for path in (tier.folder / earlier.form.name).iterdir()) == ["00", "01"]
    await stored(tier, 8)
    await stored(tier, 7)
    assert not (tier.folder / earlier.form.name).exists()
    assert isinstance(await put(tier, 6), NotWritten)
    assert tier.used_bytes == tier.quota_bytes


async def test_a_disk_that_refuses_leaves_nothing_behind(opened: Open) -> None:
    """The block's folder is in the way, as a file: the write fails as on a broken disk."""
    tier = await opened()
    (tier.folder / ALIGNED.name / "01").write_text("")
    result = await put(tier, 1)
    assert isinstance(result, NotWritten)
    assert not result.full
    assert (tier.counters.failed, tier.used_bytes) == (1, 0)
    assert not unfinished(tier)


async def test_a_write_that_is_cut_short_leaves_nothing_behind(opened: Open) -> None:
    """The limit on a file's size ends it in its middle."""
    tier = await opened()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ALIGNED.header_bytes, before[1]))
    try:
        result = await put(tier, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert isinstance(result, NotWritten), result
    assert "File too large" in result.reason
    assert not list(tier.folder.rglob(name(1).hex() + "*"))
    await stored(tier, 1)
    await assert_readable(tier, 1)


def test_a_full_disk_is_said_and_left_whole(tmp_path: Path) -> None:
    """On a disk of its own, which a namespace makes; see the script."""
    script = Path(__file__).with_name("full_disk.py")
    command = f"mount -t tmpfs -o size=128k none {tmp_path} && exec {sys.executable} {script} {tmp_path}"
    allowed = subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", str(tmp_path)], check=False)
    if allowed.returncode:
        pytest.skip("this user may not mount a disk in a namespace")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(["unshare", "-rm", "sh", "-c", command], check=True, env=environment, timeout=60)
