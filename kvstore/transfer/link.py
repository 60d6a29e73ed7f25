"""Reading blocks from another node: the contract of every link, and what all links have in common.

A link's `read` brings blocks into slots of this node's arena that the caller has reserved for them. Bytes arrive
straight in the slot. A segment is verified there, under the name that was asked for, and only then sealed, so an
engine never sees what was flipped, cut short, sent twice, or is another block's. A sealed segment is never written
again. When the generator has ended, or has been closed, nothing writes into the slots any more.

Whatever goes wrong at the source is progress (`Failed`, `Lost`), not an exception: what is missing can be read from
another source (`read_from`), and what nobody has is computed.
"""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore.core.blocks import RequestId
from kvstore.core.slots import SlotRef
from kvstore.tiers.dram import Arena, segment_sum


@dataclass(frozen=True, slots=True)
class Arrived:
    """So many more segments of the block are verified and sealed. `block` is its position in what was asked for."""

    block: int
    segments: int


@dataclass(frozen=True, slots=True)
class Complete:
    """All segments of the block are here, verified and sealed."""

    block: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The block does not come whole from this source."""

    block: int
    reason: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The source is of no more use for this read: gone, too late, or it sent what makes no sense. Comes last."""

    reason: str


Progress: TypeAlias = Arrived | Complete | Failed | Lost


class Link(Protocol):
    """A way to one other node."""

    kind: str

    def read(
        self, request: RequestId, blocks: Sequence[SlotRef], follow: bool, deadline_s: float
    ) -> AsyncGenerator[Progress, None]:
        """Fills and seals the slots of `blocks`, whose uses the caller holds and has begun in the arena.

        `follow`: waits for what the source is still writing; otherwise reads what is complete there now. Each block
        ends in one `Complete` or `Failed`, or the read in `Lost`, which ends all others. `deadline_s` is in CLOCK_MONOTONIC seconds.
        """
        ...


class Landing:
    """The destination of one read: where bytes may go, and the only place where segments are sealed.

    Each segment lands once: a second copy goes nowhere, so that what is sealed, or is just being verified, is never
    written. `place` and `take` may be called by two threads, one each.
    """

    def __init__(self, arena: Arena, blocks: Sequence[SlotRef]) -> None:
        self.blocks = blocks
        self._arena = arena
        self._layers = arena.shape.layout.layers
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


async def read_from(
    links: Sequence[Link], request: RequestId, blocks: Sequence[SlotRef], follow: bool, deadline_s: float
) -> AsyncGenerator[Progress, None]:
    """Reads from the first link, and what is then missing from the next: a source that dies is replaced.

    A block is `Failed` when the last source has failed it; `Lost` is not reported.
    """
    missing = list(range(len(blocks)))
    reasons: dict[int, str] = {}
    for link in links:
        if not missing or time.monotonic() >= deadline_s:
            break
        asked, lost = missing, ""
        complete: set[int] = set()
        reasons = {}
        async with aclosing(link.read(request, [blocks[i] for i in asked], follow, deadline_s)) as progress:
            async for step in progress:
                match step:
                    case Arrived(block, segments):
                        yield Arrived(asked[block], segments)
                    case Complete(block):
                        complete.add(asked[block])
                        yield Complete(asked[block])
                    case Failed(block, reason):
                        reasons[asked[block]] = reason
                    case Lost(reason):
                        lost = reason
        missing = [block for block in asked if block not in complete]
        reasons = {block: reasons.get(block) or lost for block in missing}
    for block in missing:
        yield Failed(block, reasons.get(block) or "there is no source, or no time")
