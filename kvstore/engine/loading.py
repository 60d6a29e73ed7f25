"""Loads blocks from the arena into an engine's pages, on a thread of its own, following blocks still being written.

A segment is copied when its writer has sealed it; then what was copied is verified, while it is in the cache, and the
slot's epoch is read again. A failed block stays failed; the others are loaded, since vLLM keeps the good ones before
the first failure.
"""

import logging
import queue
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from xxhash import xxh3_64

from kvstore.core.blocks import HASH_BYTES
from kvstore.engine.plan import LoadReport, PlannedBlock
from kvstore.tiers.dram import Arena, segment_seed

logger = logging.getLogger(__name__)

_FOLLOW_POLL_S = 0.001
_CORRUPT = "does not verify"
_WAITING = "waiting"

Bytes = npt.NDArray[np.uint8]


class Pages(Protocol):
    """One layer's KV in the engine, in pages; a `piece` is a page's bytes in the arena."""

    def save(self, page: int, piece: Bytes) -> None: ...

    def load(self, page: int, piece: Bytes) -> Bytes:
        """Returns the bytes to verify: the engine's copy where the host can read it, else those that were copied."""
        ...


class HostPages:
    """Engine memory of a CPU: bytes are copied, nothing else."""

    def __init__(self, pages: torch.Tensor) -> None:
        self._pages: Bytes = pages.numpy()

    def save(self, page: int, piece: Bytes) -> None:
        piece[:] = self._pages[page]

    def load(self, page: int, piece: Bytes) -> Bytes:
        copy: Bytes = self._pages[page]
        copy[:] = piece
        return copy


class DevicePages:
    """Memory of a device."""

    def __init__(self, pages: torch.Tensor) -> None:
        self._pages = pages

    def save(self, page: int, piece: Bytes) -> None:
        torch.from_numpy(piece).copy_(self._pages[page])

    def load(self, page: int, piece: Bytes) -> Bytes:
        self._pages[page].copy_(torch.from_numpy(piece))
        return piece


class Shard:
    """One rank's part of the arena's slots. `pieces` has shape [slots, layers, pieces, page bytes]."""

    def __init__(self, arena: Arena, rank: int) -> None:
        self.arena = arena
        self.layout = arena.shape.layout
        self._rank = rank
        first, last = self.segment(0), self.segment(self.layout.layers)
        mine = arena.payload[:, first:last]
        self.pieces: Bytes = mine.reshape(arena.shape.slots, self.layout.layers, self.layout.pieces, -1)
        assert np.may_share_memory(self.pieces, arena.payload)

    def segment(self, layer: int) -> int:
        """The number of this rank's segment of that layer."""
        return self._rank * self.layout.layers + layer

    def named(self, layer: int) -> str:
        return f"layer {layer}" + (f" of rank {self._rank}" if self.layout.shards > 1 else "")

    def stop(self, blocks: Iterable[PlannedBlock]) -> None:
        """This rank writes these no more."""
        for block in blocks:
            self.arena.stop(block.slot, block.epoch, self._rank)


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Load `blocks` into engine pages; `pages` are in token order, `pieces` per block except perhaps in the last."""

    engine_request: str
    blocks: tuple[PlannedBlock, ...]
    pages: tuple[int, ...]
    deadline_s: float

    def pages_of(self, index: int, pieces: int) -> tuple[int, ...]:
        """The pages that block `index` goes to."""
        return self.pages[index * pieces : (index + 1) * pieces]


@dataclass(slots=True)
class _Active:
    """A load under way. `done[layer]` counts the blocks of that layer that are in the engine, or have failed."""

    job: LoadJob
    done: list[int]
    started_s: float
    failed: set[int] = field(default_factory=set)
    corrupt: set[int] = field(default_factory=set)
    failure: str = ""
    slots: npt.NDArray[np.intp] = field(init=False)
    epochs: npt.NDArray[np.uint64] = field(init=False)
    names: Bytes = field(init=False)

    def __post_init__(self) -> None:
        blocks = self.job.blocks
        self.slots = np.array([block.slot for block in blocks], np.intp)
        self.epochs = np.array([block.epoch for block in blocks], np.uint64)
        joined = b"".join(block.hash for block in blocks)
        self.names = np.frombuffer(joined, np.uint8).reshape(len(blocks), HASH_BYTES)

    def fail(self, problem: str) -> None:
        """Ends the load: nothing of it counts as loaded."""
        blocks = len(self.job.blocks)
        self.failed, self.failure = set(range(blocks)), f"block 0 {problem}"
        self.done = [blocks] * len(self.done)

    def fail_block(self, index: int, problem: str) -> None:
        self.failed.add(index)
        if problem.endswith(_CORRUPT):
            self.corrupt.add(index)
        self.failure = f"block {index} {problem}"

    @property
    def ended(self) -> bool:
        blocks = len(self.job.blocks)
        return all(count == blocks for count in self.done)


class Loader:
    """One to a rank. All methods but those of its thread are called by the engine's worker."""

    def __init__(self, shard: Shard, verify: bool) -> None:
        self._arena = shard.arena
        self._shard = shard
        self._verify = verify
        self._layers: Sequence[Pages] = []
        self._jobs: queue.Queue[LoadJob | None] = queue.Queue()
        self._lock = threading.Lock()
        self._finished: set[str] = set()
        self._failed_pages: set[int] = set()
        self._reports: dict[str, LoadReport] = {}
        self._thread = threading.Thread(target=self._run, name="moonpool-load", daemon=True)

    def begin(self, layers: Sequence[Pages]) -> None:
        self._layers = layers
        self._thread.start()

    def submit(self, job: LoadJob) -> None:
        self._jobs.put(job)

    def stop(self) -> None:
        self._jobs.put(None)

    def take_finished(self) -> set[str]:
        with self._lock:
            finished, self._finished = self._finished, set()
            return finished

    def take_failed_pages(self) -> set[int]:
        with self._lock:
            failed, self._failed_pages = self._failed_pages, set()
            return failed

    def take_reports(self) -> dict[str, LoadReport]:
        with self._lock:
            reports, self._reports = self._reports, {}
            return reports

    # -- its thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        active: list[_Active] = []
        while True:
            try:
                job = self._jobs.get(timeout=_FOLLOW_POLL_S) if active else self._jobs.get()
                if job is None:
                    return
                active.append(_Active(job, [0] * len(self._layers), time.monotonic()))
            except queue.Empty:
                pass
            for load in active:
                try:
                    self._advance(load)
                except Exception as error:  # the thread's edge: a request without report hangs for ever
                    logger.exception("request %s: loading broke", load.job.engine_request)
                    load.fail(f"could not be loaded: {error}")
            for load in [load for load in active if load.ended]:
                active.remove(load)
                self._report(load)

    def _advance(self, load: _Active) -> None:
        """Copies all segments that are ready; past the deadline, or when the writer gave up, the rest fails."""
        late = time.monotonic() > load.job.deadline_s
        for layer in range(len(self._layers)):
            if load.done[layer] < len(load.job.blocks):
                self._advance_layer(load, layer, late)

    def _advance_layer(self, load: _Active, layer: int, late: bool) -> None:
        """The order of reading: epoch, name, the segment's epoch, its checksum; the copy; then both epochs again."""
        arena, segment = self._arena, self._shard.segment(layer)
        first = load.done[layer]
        slots, epochs = load.slots[first:], load.epochs[first:]
        held = arena.epoch[slots] == epochs
        same = (arena.hash[slots] == load.names[first:]).all(axis=1)
        sealed = arena.segment_epoch[slots, segment] == epochs
        sums = arena.segment_sum[slots, segment].tolist()
        told = ["" if there else _WAITING for there in sealed.tolist()]
        if self._verify:
            for offset in np.flatnonzero(~(held & same)):
                told[offset] = "is another block" if held[offset] else "is no longer held by its writer"
        if late:
            told = ["came too late" if problem == _WAITING else problem for problem in told]
        ready = told.index(_WAITING) if _WAITING in told else len(told)
        copied = [offset for offset in range(ready) if not told[offset]]
        for offset in copied:
            if not self._copy(load.job, first + offset, layer, sums[offset]):
                told[offset] = f"{self._shard.named(layer)} {_CORRUPT}"
        if self._verify and copied:
            again = (arena.segment_epoch[slots, segment] == epochs) & (arena.epoch[slots] == epochs)
            for offset in copied:
                if not again[offset]:
                    told[offset] = f"{self._shard.named(layer)} {_CORRUPT}"
        for offset in range(ready):
            if told[offset]:
                load.fail_block(first + offset, told[offset])
        load.done[layer] = first + ready

    def _copy(self, job: LoadJob, index: int, layer: int, wanted: int) -> bool:
        """Copies one segment into the engine. Is it what was sealed, as the name and the layer have it?"""
        block, pages = job.blocks[index], job.pages_of(index, self._shard.layout.pieces)
        engine, pieces = self._layers[layer], self._shard.pieces[block.slot, layer]
        copies = [engine.load(page, piece) for page, piece in zip(pages, pieces, strict=False)]
        if not self._verify:
            return True
        copies.extend(pieces[len(pages) :])  # what the block does not fill is summed where it lies
        checksum = xxh3_64(seed=segment_seed(block.hash, self._shard.segment(layer)))
        for copy in copies:
            checksum.update(copy.data)
        return bool(checksum.intdigest() == wanted)

    def _report(self, load: _Active) -> None:
        now = time.monotonic()
        layout = self._shard.layout
        failed_pages = {page for index in load.failed for page in load.job.pages_of(index, layout.pieces)}
        loaded = len(load.job.blocks) - len(load.failed)
        report = LoadReport(
            blocks=len(load.job.blocks),
            failed=tuple(sorted(load.failed)),
            failure=load.failure,
            corrupt=tuple(load.job.blocks[index].hash.hex() for index in sorted(load.corrupt)),
            kv_bytes=loaded * layout.block_bytes // layout.shards,
            load_s=now - load.started_s,
            resident_at=now,
        )
        if load.failed:
            logger.warning(
                "request %s: %d blocks failed: %s", load.job.engine_request, len(load.failed), load.failure
            )
        with self._lock:
            self._finished.add(load.job.engine_request)
            self._failed_pages |= failed_pages
            self._reports[load.job.engine_request] = report
