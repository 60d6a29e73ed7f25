"""Blocks from the node's own arena into an engine's pages, as the connector loads them, against a plain copy of the bytes.

Both copy the same segments of the arena; the plain copy is one `memcpy` a segment into memory that lies one after
another, the loader's goes into an engine's scattered pages and verifies every segment. They take turns.
"""

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.report import Row
from kvstore.core.blocks import BlockHash, KVLayout
from kvstore.engine.connector import _Worker
from kvstore.engine.loading import LoadJob
from kvstore.engine.plan import PlannedBlock
from kvstore.tiers.dram import Arena, ArenaShape

_SAMPLES = 15
_BYTES = 192 * 2**20
_LOAD_S = 60.0
_BAR = 0.5

LAYOUTS = {
    "Llama-3.1-8B": KVLayout(
        layers=32, block_tokens=64, page_tokens=64, page_bytes=262144, dtype="bfloat16", packing="benchmark"
    ),
    "default model": KVLayout(
        layers=30, block_tokens=32, page_tokens=32, page_bytes=49152, dtype="float32", packing="benchmark"
    ),
}
"""Blocks of a large model in the precision that it is served in, and of the default model on a CPU."""


def rows(seed: int) -> list[Row]:
    """Raises RuntimeError when a block is not loaded, or other bytes come."""
    return [_row(model, layout, seed) for model, layout in LAYOUTS.items()]


def _row(model: str, layout: KVLayout, seed: int) -> Row:
    with tempfile.TemporaryDirectory(prefix="mp-local-", dir="/dev/shm") as folder:
        pool = _Pool(Path(folder), layout, seed)
        pool.load(), pool.copy()  # page tables
        pool.check()
        samples = []
        for number in range(_SAMPLES):
            load_s = pool.load() if number % 2 else 0.0
            copy_s = pool.copy()
            samples.append({"load_s": load_s or pool.load(), "copy_s": copy_s})
        pool.close()
    return Row(
        name=f"local read, every segment verified / plain copy ({model})",
        value=statistics.median(sample["copy_s"] / sample["load_s"] for sample in samples),
        unit="x",
        op=">=",
        bar=_BAR,
        bound=0.67,
        why="the copy, and XXH3 over what it left in the cache, at about twice the copy's speed",
        samples=tuple(samples),
    )


class _Pool:
    """An arena of sealed blocks, the pages of an engine, and memory to copy into."""

    def __init__(self, folder: Path, layout: KVLayout, seed: int) -> None:
        self._blocks = _BYTES // layout.block_bytes
        self._arena = Arena.create(folder / "arena", ArenaShape(layout, self._blocks))
        chance = np.random.default_rng(seed)
        planned = []
        for slot in range(self._blocks):
            name = BlockHash(slot.to_bytes(4, "little") * 8)
            self._arena.begin(slot, 1, name)
            self._arena.payload[slot] = chance.integers(0, 256, self._arena.payload[slot].shape, np.uint8)
            for segment in range(layout.segments):
                self._arena.seal(slot, segment, 1, name)
            planned.append(PlannedBlock(slot, 1, name))
        self._engine = [
            torch.zeros((self._blocks, layout.page_bytes), dtype=torch.uint8) for _ in range(layout.layers)
        ]
        self._worker = _Worker(Arena.attach(self._arena.path, self._arena.shape), verify=True)
        self._worker.register({f"model.layers.{layer}": pages for layer, pages in enumerate(self._engine)})
        self._order = tuple(int(page) for page in chance.permutation(self._blocks))
        self._planned = tuple(planned)
        self._plain = np.zeros_like(self._arena.payload)

    def load(self) -> float:
        """Seconds of one load of all blocks, as the loader took them."""
        job = LoadJob("load", self._planned, self._order, time.monotonic() + _LOAD_S)
        began_s = time.perf_counter()
        self._worker.loader.submit(job)
        while not (reports := self._worker.loader.take_reports()):
            time.sleep(0.0002)
        took_s = time.perf_counter() - began_s
        if reports["load"].failed:
            raise RuntimeError(f"blocks do not verify: {reports['load'].failure}")
        self._worker.loader.take_finished()
        return took_s

    def copy(self) -> float:
        """Seconds of copying the same segments, one by one."""
        began_s = time.perf_counter()
        for there, here in zip(self._plain, self._arena.payload, strict=True):
            for target, segment in zip(there, here, strict=True):
                target[:] = segment
        return time.perf_counter() - began_s

    def check(self) -> None:
        """Raises RuntimeError unless both moved the bytes."""
        for layer, pages in enumerate(self._engine):
            if not np.array_equal(pages.numpy()[list(self._order)], self._arena.payload[:, layer]):
                raise RuntimeError(f"other bytes came to layer {layer}")
        if not np.array_equal(self._plain, self._arena.payload):
            raise RuntimeError("the plain copy is none")

    def close(self) -> None:
        self._worker.loader.stop()
        self._worker.saver.stop()
