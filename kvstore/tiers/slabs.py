"""Slots of several sizes in one arena, with a stated bound on what is lost.

The sizes of encoded blocks are known in advance, one class each (raw, int8, ...). The arena is cut into equal *slabs*; a
slab serves one class at a time, and none while it is empty, so room goes to the class that asks for it. Within a
class the lowest slab with room is filled first, so the highest ones run empty.

What can be lost, as parts of the arena:

    rounding   a class's size rounded up to the alignment that O_DIRECT wants
    tail       what is left at a slab's end, and at the arena's
    stranded   free slots in slabs that serve another class: less than one slab a class, once `next_move` has none left

`SlabShape.bound` is the sum of the worst cases, and a shape beyond 15 % is refused. A driver that may not copy a block
(it is being read) evicts it or waits: until then more may be stranded, and `fragmentation` says how much.

Pure: offsets and sizes only, no memory, no clock, no chance.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

FRAGMENTATION_MAX = 0.15


@dataclass(frozen=True, slots=True)
class SlabShape:
    """`slabs` slabs of `slab_bytes` for blocks of these sizes. `classes` are the sizes, rounded up to `align`."""

    arena_bytes: int
    slab_bytes: int
    sizes: tuple[int, ...]
    align: int

    def __post_init__(self) -> None:
        if min(self.sizes, default=0) < 1 or len(set(self.sizes)) != len(self.sizes):
            raise ValueError(f"sizes must be positive and different: {self.sizes}")
        if self.align < 1 or self.slab_bytes % self.align or self.slab_bytes < max(self.classes):
            raise ValueError(
                f"slabs of {self.slab_bytes} bytes, aligned to {self.align}, for blocks of {self.sizes}"
            )
        if self.bound > FRAGMENTATION_MAX:
            raise ValueError(
                f"{self.arena_bytes} bytes in slabs of {self.slab_bytes} may lose {self.bound:.0%} to blocks of "
                f"{self.sizes} bytes; {FRAGMENTATION_MAX:.0%} is the most allowed: a larger arena, or fewer sizes"
            )

    @classmethod
    def fitting(cls, arena_bytes: int, sizes: Sequence[int], align: int = 4096) -> "SlabShape":
        """Slabs of the size that loses least. Raises ValueError when that is still too much."""
        largest = -(-max(sizes, default=0) // align) * align
        choices = (
            range(largest, max(arena_bytes // (2 * len(sizes)), largest) + 1, align) if sizes else range(0)
        )
        steps = choices[:: max(1, len(choices) // 4096)]
        best = min(steps, key=lambda slab: (_bound(arena_bytes, slab, tuple(sizes), align), slab), default=0)
        return cls(arena_bytes, best, tuple(sizes), align)

    @property
    def slabs(self) -> int:
        return self.arena_bytes // self.slab_bytes

    @property
    def classes(self) -> tuple[int, ...]:
        return tuple(-(-size // self.align) * self.align for size in self.sizes)

    @property
    def bound(self) -> float:
        """The most that can be lost, as a part of the arena; see the module's docstring."""
        return _bound(self.arena_bytes, self.slab_bytes, self.sizes, self.align)


def _bound(arena_bytes: int, slab_bytes: int, sizes: tuple[int, ...], align: int) -> float:
    slabs = arena_bytes // slab_bytes
    rounded = [-(-size // align) * align for size in sizes]
    lost_per_slab = max(
        slab_bytes - slab_bytes // step * size for step, size in zip(rounded, sizes, strict=True)
    )
    stranded = len(sizes) * slab_bytes
    return (slabs * lost_per_slab + stranded + arena_bytes - slabs * slab_bytes) / max(arena_bytes, 1)


@dataclass(frozen=True, slots=True)
class Move:
    """Copy `size` bytes from one offset to the other, then tell `Slabs.moved`; or evict what is at `source`."""

    source: int
    target: int
    size: int


@dataclass(slots=True)
class _Slab:
    """A slab that serves a class: its free slots (a heap) and what the others hold."""

    kind: int
    free: list[int]
    used: set[int]


class Slabs:
    """Which bytes of the arena are in use. Owns the books; the driver owns the memory."""

    def __init__(self, shape: SlabShape) -> None:
        self.shape = shape
        self._empty = list(range(shape.slabs))  # a heap
        self._slabs: dict[int, _Slab] = {}
        self._roomy: list[list[int]] = [
            [] for _ in shape.sizes
        ]  # a heap for each class: slabs with a free slot
        self._kinds = {size: kind for kind, size in enumerate(shape.sizes)}

    def allocate(self, size: int) -> int | None:
        """The offset of `size` bytes, aligned; None when there is no room for them.

        Raises ValueError for a size that is not one of the shape's.
        """
        kind = self._kind(size)
        if not self._roomy[kind]:
            if not self._empty:
                return None
            number = heapq.heappop(self._empty)
            slots = self.shape.slab_bytes // self.shape.classes[kind]
            self._slabs[number] = _Slab(kind, list(range(slots)), set())
            heapq.heappush(self._roomy[kind], number)
        return self._take(self._roomy[kind][0])

    def free(self, offset: int) -> None:
        """Gives the bytes back; a slab that is empty now may serve any class.

        Raises ValueError for an offset that is not in use.
        """
        number, slot = self._place(offset)
        slab = self._slabs[number]
        slab.used.remove(slot)
        heapq.heappush(slab.free, slot)
        roomy = self._roomy[slab.kind]
        if len(slab.free) == 1:
            heapq.heappush(roomy, number)
        if not slab.used:
            del self._slabs[number]
            roomy.remove(number)
            heapq.heapify(roomy)
            heapq.heappush(self._empty, number)

    def next_move(self) -> Move | None:
        """The next step towards an empty slab, where a class has a whole slab's worth of free slots.

        It takes from the slab with the least in it and fills the lowest of the others.
        """
        for kind, roomy in enumerate(self._roomy):
            slots = self.shape.slab_bytes // self.shape.classes[kind]
            if len(roomy) < 2 or sum(len(self._slabs[number].free) for number in roomy) < slots:
                continue
            source = min(roomy, key=lambda number: (len(self._slabs[number].used), -number))
            target = min(number for number in roomy if number != source)
            return Move(
                self._offset(source, min(self._slabs[source].used)),
                self._offset(target, self._slabs[target].free[0]),
                self.shape.sizes[kind],
            )
        return None

    def moved(self, move: Move) -> None:
        """The bytes are at `target` now, and `source` is free.

        Raises ValueError when the books have changed since: the copy is void, the block still at `source`.
        """
        source, _ = self._place(move.source)
        number = move.target // self.shape.slab_bytes
        slab = self._slabs.get(number)
        kind = self._slabs[source].kind
        if (
            slab is None
            or slab.kind != kind
            or not slab.free
            or self._offset(number, slab.free[0]) != move.target
        ):
            raise ValueError(f"offset {move.target} is no longer free for {move}")
        self._take(number)
        self.free(move.source)

    def fragmentation(self) -> float:
        """What no block of any class can have, or only blocks of one class, as a part of the arena."""
        in_slabs = len(self._slabs) * self.shape.slab_bytes
        outside = self.shape.arena_bytes - self.shape.slabs * self.shape.slab_bytes
        return (in_slabs + outside - self.used_bytes) / self.shape.arena_bytes

    @property
    def used_bytes(self) -> int:
        return sum(len(slab.used) * self.shape.sizes[slab.kind] for slab in self._slabs.values())

    def check(self) -> None:
        """Every slab is empty or serves one class, every slot is free or used, and the heaps say so."""
        assert sorted([*self._empty, *self._slabs]) == list(range(self.shape.slabs))
        for number, slab in self._slabs.items():
            slots = self.shape.slab_bytes // self.shape.classes[slab.kind]
            assert sorted([*slab.free, *slab.used]) == list(range(slots)), number
            assert slab.used, f"slab {number} is empty and still serves a class"
        for kind, roomy in enumerate(self._roomy):
            with_room = [n for n, slab in sorted(self._slabs.items()) if slab.kind == kind and slab.free]
            assert sorted(roomy) == with_room, kind

    def _take(self, number: int) -> int:
        """The lowest free slot of a slab that has one."""
        slab = self._slabs[number]
        slot = heapq.heappop(slab.free)
        slab.used.add(slot)
        if not slab.free:
            roomy = self._roomy[slab.kind]
            roomy.remove(number)
            heapq.heapify(roomy)
        return self._offset(number, slot)

    def _kind(self, size: int) -> int:
        if size not in self._kinds:
            raise ValueError(f"no class for {size} bytes; the sizes are {self.shape.sizes}")
        return self._kinds[size]

    def _offset(self, number: int, slot: int) -> int:
        return number * self.shape.slab_bytes + slot * self.shape.classes[self._slabs[number].kind]

    def _place(self, offset: int) -> tuple[int, int]:
        """(slab, slot) of an offset in use."""
        number, within = divmod(offset, self.shape.slab_bytes)
        slab = self._slabs.get(number)
        if slab is not None:
            slot, rest = divmod(within, self.shape.classes[slab.kind])
            if not rest and slot in slab.used:
                return number, slot
        raise ValueError(f"offset {offset} is not in use")
