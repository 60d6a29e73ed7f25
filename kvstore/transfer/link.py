"""Reading blocks from another node: the contract of every link, and what all links have in common.

A link's `read` brings blocks into slots of this node's arena that the caller has reserved for them. Bytes arrive
straight in the slot. A segment is verified there, under the name that was asked for, and only then sealed, so an
engine never sees what was flipped, cut short, sent twice, or is another block's. A sealed segment is never written
again. When the generator has ended, or has been closed, nothing writes into the slots any more.

Whatever goes wrong at the source is progress (`Failed`, `Lost`), not an exception: what is missing can be read from
another source (`read_from`), and what nobody has is computed.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from kvstore.core.blocks import RequestId
from kvstore.core.slots import SlotRef

_STALLED_S = 2.0


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

    @property
    def kind(self) -> str: ...

    def read(
        self, request: RequestId, blocks: Sequence[SlotRef], follow: bool, deadline_s: float
    ) -> AsyncGenerator[Progress, None]:
        """Fills and seals the slots of `blocks`, whose uses the caller holds and has begun in the arena.

        `follow`: waits for what the source is still writing; otherwise reads what is complete there now. Each block
        ends in one `Complete` or `Failed`, or the read in `Lost`, which ends all others. `deadline_s` is in CLOCK_MONOTONIC seconds.
        """
        ...


async def read_from(
    links: Sequence[Link], request: RequestId, blocks: Sequence[SlotRef], follow: bool, deadline_s: float
) -> AsyncGenerator[Progress, None]:
    """Reads from the first link, and what is then missing from the next: a source that dies or hangs is replaced.

    A block is `Failed` when the last source has failed it; `Lost` is not reported. A source from which nothing comes for
    two seconds while there is another one is left; not so where `follow` has it wait for its own writer.
    """
    missing = list(range(len(blocks)))
    reasons: dict[int, str] = {}
    for number, link in enumerate(links, 1):
        patience_s = _STALLED_S if number < len(links) and not follow else None
        if not missing or time.monotonic() >= deadline_s:
            break
        asked, lost = missing, ""
        complete: set[int] = set()
        reasons = {}
        async with aclosing(link.read(request, [blocks[i] for i in asked], follow, deadline_s)) as progress:
            async for step in _while_it_comes(progress, patience_s):
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


async def _while_it_comes(
    progress: AsyncGenerator[Progress, None], patience_s: float | None
) -> AsyncGenerator[Progress, None]:
    """The same progress, which ends in `Lost` when there is none for so long."""
    while True:
        try:
            async with asyncio.timeout(patience_s):
                step = await anext(progress)
        except StopAsyncIteration:
            return
        except TimeoutError:
            yield Lost(f"nothing came for {patience_s} s")
            return
        yield step
