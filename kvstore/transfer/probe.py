"""A block that nodes read from each other only to see how fast a link is.

It is read like any other, by a layout of its own that has the segments of the real one, some 8 MiB of them. A node has
two slots for it: the one that others read, and the one that it reads into.
"""

import dataclasses
import itertools
import os
from collections.abc import Sequence
from pathlib import Path

from kvstore.core.blocks import BlockHash, KVLayout, NodeId, RequestId
from kvstore.core.slots import Fenced, SlotRef
from kvstore.tiers.dram import Arena, ArenaShape
from kvstore.transfer.nixl_link import LazyMemory

_BYTES = 8 * 2**20
_LAYERS_MAX = 256
_NAME = BlockHash(b"a block to measure links by".ljust(32, b"\0"))
_OFFERED = SlotRef(slot=0, epoch=1, hash=_NAME, filled=True)


def probe_layout(layout: KVLayout) -> KVLayout:
    """That of the probe beside an arena of this layout."""
    layers = min(max(1, _BYTES // (layout.shards * layout.segment_bytes)), _LAYERS_MAX)
    return dataclasses.replace(layout, layers=layers, packing=f"probe of {layout.packing}")


class Probe:
    """A `BlockSource` of the one block, and the slot to read it into. Its arena has no name: it goes with the process."""

    def __init__(self, node: NodeId, layout: KVLayout, folder: Path) -> None:
        """Raises OSError when there is no room in `folder`."""
        shape = ArenaShape(probe_layout(layout), slots=2)
        self.arena = Arena.create(folder / f"moonpool-{node}-probe-{os.getpid()}", shape)
        self.arena.unlink()
        self.memory = LazyMemory(node, self.arena)
        self.arena.begin(_OFFERED.slot, _OFFERED.epoch, _NAME)
        self.arena.payload[_OFFERED.slot] = 1
        for layer in range(shape.layout.segments):
            self.arena.seal(_OFFERED.slot, layer, _OFFERED.epoch, _NAME)
        self._epochs = itertools.count(_OFFERED.epoch + 1)

    @property
    def block_bytes(self) -> int:
        return self.arena.shape.layout.block_bytes

    def wanted(self) -> list[SlotRef]:
        """The slot to read another's probe into, once."""
        ref = SlotRef(slot=1, epoch=next(self._epochs), hash=_NAME, filled=False)
        self.arena.begin(ref.slot, ref.epoch, ref.hash)
        return [ref]

    async def open_read(
        self,
        request: RequestId,
        holder: str,
        uses: Sequence[tuple[int, int]],
        names: Sequence[BlockHash],
        timeout_s: float,
    ) -> list[SlotRef] | Fenced:
        return [_OFFERED] if list(names) == [_NAME] else []

    def close_read(self, request: RequestId, holder: str) -> None:
        """Nobody else wants the slot."""
