"""The SSD tier on this machine's disk: verified reads against a bare sequential read, and the scan of a warm restart.

Files are made below the temporary folder (`TMPDIR`), which should be on the disk in question. Data comes from the disk
by O_DIRECT; names and inodes are in the kernel's cache, since they were made just before.
"""

import asyncio
import itertools
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console

from benchmarks.report import Row
from kvstore.core.blocks import BlockHash
from kvstore.tiers.block_file import FileForm
from kvstore.tiers.dram import segment_sum
from kvstore.tiers.ssd import Loaded, Missed, NotWritten, SsdTier

FORM = FileForm("0123456789abcdef", layers=30, segment_bytes=32 * 1536)
"""Blocks of 32 tokens of the default model in float32."""
TINY = FileForm("0123456789abcdef", layers=30, segment_bytes=8)
BLOCKS = 64
SCANNED_BLOCKS = 100_000
THREADS = 4
_ROUNDS = 9
_SCANS = 7
_SERVED_BLOCKS = 256
_READ_BAR = 0.8
_SCAN_BAR_S = 10.0

Slots = npt.NDArray[np.uint8]
progress = Console(stderr=True, highlight=False)


def rows(seed: int) -> list[Row]:
    """Raises RuntimeError when a block does not come back as it was written, or none is served during a scan."""
    with tempfile.TemporaryDirectory(prefix="moonpool-bench-") as folder:
        reading = asyncio.run(_read_row(Path(folder), seed))
    with tempfile.TemporaryDirectory(prefix="moonpool-bench-") as folder:
        scanning = asyncio.run(_scan_row(Path(folder), seed))
    return [reading, scanning]


# -- reading ------------------------------------------------------------------------------------------------


async def _read_row(folder: Path, seed: int) -> Row:
    slots = _slots(seed)
    tier = SsdTier.open(folder / "tier", FORM, THREADS)
    names = _names(seed, BLOCKS)
    await _store(tier, names, slots)
    samples: list[dict[str, float]] = []
    with _one_file(folder / "sequential", slots) as big:

        async def ours() -> float:
            began_s = time.perf_counter()
            results = await asyncio.gather(*map(tier.read, names, slots))
            took_s = time.perf_counter() - began_s
            if not all(isinstance(result, Loaded) for result in results):
                raise RuntimeError(f"blocks do not verify: {results}")
            return took_s

        await ours()
        _bare(big, slots, 1)
        for number in range(_ROUNDS):
            bare_s = _bare(big, slots, 1) if number % 2 else 0.0
            ours_s = await ours()
            bare_s = bare_s or _bare(big, slots, 1)
            samples.append({"read_s": ours_s, "bare_s": bare_s, "bare_threads_s": _bare(big, slots, THREADS)})
    await tier.close()
    ratio = statistics.median(sample["bare_s"] / sample["read_s"] for sample in samples)
    bound = statistics.median(sample["bare_s"] / sample["bare_threads_s"] for sample in samples)
    gb = slots.nbytes / 1e9
    bare = gb / statistics.median(sample["bare_s"] for sample in samples)
    progress.print(
        f"sequential {bare:.2f} GB/s, verified blocks {ratio * bare:.2f} GB/s, direct: {tier.direct}"
    )
    return Row(
        name="ssd_read",
        value=ratio,
        unit="of a sequential O_DIRECT read",
        op=">=",
        bar=_READ_BAR,
        bound=bound * FORM.payload_bytes / FORM.file_bytes,
        why=f"bare O_DIRECT reads of one file by as many threads ({THREADS}), measured; less a page of header a block",
        samples=tuple(samples),
    )


def _bare(file: int, slots: Slots, threads: int) -> float:
    """Seconds to read the file, a block at a time, into the slots: by one thread in order, or by several."""
    size = slots[0].nbytes

    def read(number: int) -> None:
        if os.preadv(file, [slots[number].reshape(-1).data], number * size) != size:
            raise RuntimeError("a short read")

    began_s = time.perf_counter()
    if threads == 1:
        for number in range(len(slots)):
            read(number)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(read, range(len(slots))))
    return time.perf_counter() - began_s


@contextmanager
def _one_file(path: Path, slots: Slots) -> Iterator[int]:
    """The slots' bytes in one file, open for O_DIRECT reads."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    try:
        for number, slot in enumerate(slots):
            os.pwrite(file, slot.reshape(-1).data, number * slot.nbytes)
        yield file
    finally:
        os.close(file)


async def _store(tier: SsdTier, names: Sequence[BlockHash], slots: Slots) -> None:
    for name, slot in zip(names, slots, strict=True):
        match await tier.write(name, slot, _sums(name, slot)):
            case NotWritten(reason):
                raise RuntimeError(f"the disk does not take {len(names)} blocks: {reason}")


def _slots(seed: int) -> Slots:
    """[blocks, layers, segment_bytes], page-aligned as an arena's are, each page touched."""
    memory = mmap.mmap(-1, BLOCKS * FORM.payload_bytes)
    slots = np.frombuffer(memory, np.uint8).reshape(BLOCKS, FORM.layers, FORM.segment_bytes)
    slots[:] = np.random.default_rng(seed).integers(0, 256, slots.shape, np.uint8)
    return slots


def _names(seed: int, count: int) -> list[BlockHash]:
    random = np.random.default_rng(seed)
    return [BlockHash(random.bytes(32)) for _ in range(count)]


# -- scanning -----------------------------------------------------------------------------------------------


async def _scan_row(folder: Path, seed: int) -> Row:
    """A scan looks at names and sizes. Some of the files hold a block, to be read meanwhile; the others hold nothing."""
    names = _names(seed, SCANNED_BLOCKS)
    began_s = time.perf_counter()
    await asyncio.to_thread(_make_files, folder, names)
    progress.print(f"{SCANNED_BLOCKS} files made in {time.perf_counter() - began_s:.0f} s")
    samples = [await _scanned(folder, names) for _ in range(_SCANS)]
    return Row(
        name="ssd_scan_100k",
        value=statistics.median(sample["scan_s"] for sample in samples),
        unit="s",
        op="<=",
        bar=_SCAN_BAR_S,
        bound=statistics.median(sample["bare_s"] for sample in samples),
        why="a bare scandir of the same folders, with a stat of each entry, measured",
        samples=tuple(samples),
    )


async def _scanned(folder: Path, names: Sequence[BlockHash]) -> dict[str, float]:
    """One restart: the scan, and how long reads of one block take meanwhile."""
    tier = SsdTier.open(folder, TINY, THREADS)
    reads_s: list[float] = []

    async def serve() -> None:
        slot = np.empty((TINY.layers, TINY.segment_bytes), np.uint8)
        for name in itertools.cycle(names[:_SERVED_BLOCKS]):
            began_s = time.perf_counter()
            match await tier.read(name, slot):
                case Missed(reason):
                    raise RuntimeError(f"a block was not served during the scan: {reason}")
            reads_s.append(time.perf_counter() - began_s)
            await asyncio.sleep(0.01)

    serving = asyncio.create_task(serve())
    began_s = time.perf_counter()
    found = [len(batch) async for batch in tier.scan()]
    scan_s = time.perf_counter() - began_s
    if serving.done():
        serving.result()
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    await tier.close()
    if sum(found) != len(names) or not reads_s:
        raise RuntimeError(f"{sum(found)} of {len(names)} blocks found, {len(reads_s)} reads meanwhile")
    return {
        "scan_s": scan_s,
        "reads": len(reads_s),
        "read_p50_s": statistics.median(reads_s),
        "read_max_s": max(reads_s),
        "bare_s": await asyncio.to_thread(_bare_listing, folder),
    }


def _path(folder: Path, name: BlockHash) -> Path:
    return folder / TINY.name / name.hex()[:2] / name.hex()


def _make_files(folder: Path, names: Sequence[BlockHash]) -> None:
    """As the tier names them; but for the first ones all bytes are a hole."""
    content = np.zeros((TINY.layers, TINY.segment_bytes), np.uint8)
    for number in range(256):
        (folder / TINY.name / f"{number:02x}").mkdir(parents=True)
    for number, name in enumerate(names):
        with _path(folder, name).open("wb") as file:
            if number < _SERVED_BLOCKS:
                file.write(TINY.header(name, _sums(name, content)))
            file.truncate(TINY.file_bytes)


def _sums(name: BlockHash, content: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    return np.array([segment_sum(row, name, layer) for layer, row in enumerate(content)], np.uint64)


def _bare_listing(folder: Path) -> float:
    """Seconds to list the folders and look at each file's size."""
    began_s = time.perf_counter()
    for fan in (folder / TINY.name).iterdir():
        with os.scandir(fan) as entries:
            sum(entry.stat().st_size for entry in entries)
    return time.perf_counter() - began_s
