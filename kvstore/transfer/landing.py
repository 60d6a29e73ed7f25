"""Where the bytes of a read arrive: the slots of this node's arena, and the one place where they are verified and sealed."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore.core.slots import SlotRef
from kvstore.tiers.dram import Arena, segment_sum
from kvstore.transfer.link import Arrived, Complete, Failed, Progress
from kvstore.transfer.threads import finished


@dataclass(frozen=True, slots=True)
class Segments:
    """These layers of the block are in its slot, and had these checksums at the source."""

    block: int
    layers: list[int]
    sums: npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Void:
    """What is missing of the block will not come."""

    block: int
    reason: str


Landed: TypeAlias = Segments | Void


class Landing:
    """The destination of one read: where bytes may go, and the only place where segments are sealed.

    Each segment lands once: a second copy goes nowhere, so that what is sealed, or is just being verified, is never
    written. `place` and `take` may be called by two threads, one each.
    """

    def __init__(self, arena: Arena, blocks: Sequence[SlotRef]) -> None:
        self.blocks = blocks
        self._arena = arena
        self._layers = arena.shape.layout.segments
        slots = [ref.slot for ref in blocks]
        epochs = np.asarray([ref.epoch for ref in blocks], np.uint64)
        self._sealed = arena.segment_epoch[slots] == epochs[:, None]  # by an earlier source, perhaps
        self._placed = self._sealed.copy()
        self._nowhere = bytearray(0)
        self._ended: set[int] = set()
        self.rejected_segments = 0

    def place(self, block: int, layer: int, layers: int) -> tuple[list[memoryview], list[int]]:
        """Where the bytes of these consecutive segments go, in order, and which layers of them are for `take`.

        Raises ValueError for segments that nobody asked for.
        """
        if not (0 <= block < len(self.blocks) and layers >= 1 and 0 <= layer <= self._layers - layers):
            raise ValueError(f"segments {layer}+{layers} of block {block} were not asked for")
        rows = self._arena.payload[self.blocks[block].slot, layer : layer + layers]
        placed = self._placed[block, layer : layer + layers]
        if not placed.any():
            placed[:] = True
            return [rows.reshape(-1).data], list(range(layer, layer + layers))
        fresh = [layer + offset for offset, before in enumerate(placed) if not before]
        self._nowhere = self._nowhere or bytearray(self._arena.shape.layout.segment_bytes)
        buffers = [
            memoryview(self._nowhere) if before else row.data
            for before, row in zip(placed, rows, strict=True)
        ]
        placed[:] = True
        return buffers, fresh

    def take(self, block: int, layers: list[int], sums: npt.NDArray[np.uint64]) -> list[Progress]:
        """The bytes of these layers are in the slot, and had these checksums: verifies and seals."""
        ref, rows = self.blocks[block], self._arena.payload[self.blocks[block].slot]
        good = np.array(
            [
                segment_sum(rows[layer], ref.hash, layer) == wanted
                for layer, wanted in zip(layers, sums.tolist(), strict=True)
            ],
            bool,
        )
        sealed = np.asarray(layers, int)[good]
        self._arena.seal_all(ref.slot, sealed, ref.epoch, sums[good])
        self._sealed[block, sealed] = True
        progress: list[Progress] = [Arrived(block, len(sealed))] if len(sealed) else []
        if len(sealed) and self._sealed[block].all():
            self._ended.add(block)
            progress.append(Complete(block))
        if rejected := len(layers) - len(sealed):
            self.rejected_segments += rejected
            progress += self.void(block, f"{rejected} segments came with other bytes")
        return progress

    def void(self, block: int, reason: str) -> list[Progress]:
        """What is missing of the block will not come. Raises ValueError for a block that nobody asked for."""
        if not 0 <= block < len(self.blocks):
            raise ValueError(f"block {block} was not asked for")
        if block in self._ended:
            return []
        self._ended.add(block)
        return [Failed(block, reason)]

    def rest(self, reason: str) -> list[Progress]:
        """The read is over: what has not ended has failed, or was here before it began."""
        steps: list[Progress] = []
        for block in range(len(self.blocks)):
            if block not in self._ended and self._sealed[block].all():
                self._ended.add(block)
                steps.append(Complete(block))
            else:
                steps += self.void(block, reason)
        return steps


async def landed(
    landing: Landing,
    receive: Callable[[Callable[[Landed], None]], None],
    stop: Callable[[], None],
    beside: bool = True,
) -> AsyncGenerator[Progress, None]:
    """Runs `receive(put)` in a thread; what it puts is verified and sealed by a second one while more is coming, or,
    without `beside`, by the first before `put` returns.

    Hashing releases the interpreter's lock, so the event loop goes on. Raises what `receive` raises, after all that it
    had put. `stop` makes it return soon; when this generator has ended, both threads have.
    """
    loop = asyncio.get_running_loop()
    steps: asyncio.Queue[list[Progress]] = asyncio.Queue()
    waiting: SimpleQueue[Landed | None] = SimpleQueue()

    def take(one: Landed) -> None:
        if taken := _taken(landing, one):  # an empty list is the end
            loop.call_soon_threadsafe(steps.put_nowait, taken)

    def received() -> None:
        try:
            receive(waiting.put if beside else take)
        finally:
            waiting.put(None)

    def verified() -> None:
        try:
            while (one := waiting.get()) is not None:
                take(one)
        finally:
            loop.call_soon_threadsafe(steps.put_nowait, [])

    threads = ThreadPoolExecutor(2, thread_name_prefix="landing")
    receiving, verifying = loop.run_in_executor(threads, received), loop.run_in_executor(threads, verified)
    try:
        while arrived := await steps.get():
            for step in arrived:
                yield step
        await verifying
        await receiving
    finally:
        stop()
        try:
            await finished(asyncio.gather(receiving, verifying, return_exceptions=True), stop)
        finally:
            threads.shutdown()


def _taken(landing: Landing, one: Landed) -> list[Progress]:
    if isinstance(one, Void):
        return landing.void(one.block, one.reason)
    return landing.take(one.block, one.layers, one.sums)
