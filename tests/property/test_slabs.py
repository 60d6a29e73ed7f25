"""The slab allocator against a dumb model: a list of what is in use."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.tiers.slabs import FRAGMENTATION_MAX, Slabs, SlabShape

SIZES = (96, 50, 30)
SHAPE = SlabShape(arena_bytes=60 * 304 + 11, slab_bytes=304, sizes=SIZES, align=2)


class SlabsMachine(RuleBasedStateMachine):
    """`used` is offset -> size of what the driver holds; `memory` what it wrote there."""

    def __init__(self) -> None:
        super().__init__()
        self.slabs = Slabs(SHAPE)
        self.used: dict[int, int] = {}
        self.memory: dict[int, int] = {}
        self.written: list[int] = []

    def slab_classes(self) -> dict[int, int]:
        return {offset // SHAPE.slab_bytes: size for offset, size in self.used.items()}

    @rule(size=st.sampled_from(SIZES), count=st.integers(1, 40))
    def allocate(self, size: int, count: int) -> None:
        for _ in range(count):
            classes = self.slab_classes()
            room = SHAPE.slab_bytes // (size + size % SHAPE.align)
            mine = sum(each == size for each in self.used.values())
            full = mine == room * sum(each == size for each in classes.values())
            offset = self.slabs.allocate(size)
            if offset is None:
                assert full and len(classes) == SHAPE.slabs, "there was room"
                return
            assert offset not in self.used
            assert offset % SHAPE.align == 0
            if not full:
                assert classes.get(offset // SHAPE.slab_bytes) == size, "an empty slab taken without need"
            self.used[offset] = size
            self.written.append(len(self.written))
            self.memory[offset] = self.written[-1]

    @precondition(lambda self: self.used)
    @rule(data=st.data(), count=st.integers(1, 40))
    def free(self, data: st.DataObject, count: int) -> None:
        chance = random.Random(data.draw(st.integers(0, 2**16)))
        for offset in chance.sample(sorted(self.used), min(count, len(self.used))):
            self.slabs.free(offset)
            del self.used[offset], self.memory[offset]
            with pytest.raises(ValueError, match="is not in use"):
                self.slabs.free(offset)

    @rule()
    def compact(self) -> None:
        """Moves end, lose nothing, and leave no more stranded than the bound says."""
        before = sorted(self.memory.values())
        for _ in range(10_000):
            move = self.slabs.next_move()
            if move is None:
                break
            assert self.used[move.source] == move.size
            assert move.target not in self.used
            self.slabs.moved(move)
            self.used[move.target] = self.used.pop(move.source)
            self.memory[move.target] = self.memory.pop(move.source)
        else:
            raise AssertionError("compaction does not end")
        assert sorted(self.memory.values()) == before
        assert self.slabs.fragmentation() <= SHAPE.bound <= FRAGMENTATION_MAX

    @invariant()
    def books_agree(self) -> None:
        self.slabs.check()
        assert self.slabs.used_bytes == sum(self.used.values())
        spans = sorted((offset, offset + size) for offset, size in self.used.items())
        assert all(end <= start for (_, end), (start, _) in pairwise(spans)), "overlap"
        assert all(end <= SHAPE.arena_bytes for _, end in spans)
        held = len(self.slab_classes()) * SHAPE.slab_bytes
        outside = SHAPE.arena_bytes % SHAPE.slab_bytes
        lost = held + outside - sum(self.used.values())
        assert self.slabs.fragmentation() == pytest.approx(lost / SHAPE.arena_bytes)


TestSlabs = SlabsMachine.TestCase
TestSlabs.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)


def test_an_empty_slab_goes_to_the_class_that_asks() -> None:
    slabs = Slabs(SHAPE)
    offsets = [slabs.allocate(96) for _ in range(SHAPE.slabs * 3)]
    assert slabs.allocate(96) is None
    assert slabs.allocate(30) is None
    for offset in offsets[3:6]:
        assert offset is not None
        slabs.free(offset)
    assert [slabs.allocate(30) for _ in range(11)][-1] is None  # ten in that one slab
    assert slabs.allocate(96) is None


def test_a_move_that_came_too_late_is_void() -> None:
    slabs = Slabs(SHAPE)
    offsets = [slabs.allocate(96) for _ in range(6)]
    for offset in (offsets[0], offsets[3], offsets[4]):
        assert offset is not None
        slabs.free(offset)
    move = slabs.next_move()
    assert move is not None
    taken = slabs.allocate(96)
    assert taken == move.target
    with pytest.raises(ValueError, match="no longer free"):
        slabs.moved(move)
    slabs.free(move.source)
    with pytest.raises(ValueError, match="is not in use"):
        slabs.moved(move)
    slabs.check()


def test_unknown_sizes_and_offsets_are_refused() -> None:
    slabs = Slabs(SHAPE)
    with pytest.raises(ValueError, match="no class for 97 bytes"):
        slabs.allocate(97)
    assert slabs.allocate(96) == 0
    for offset in (-1, 1, 96, SHAPE.arena_bytes):
        with pytest.raises(ValueError, match="is not in use"):
            slabs.free(offset)


@pytest.mark.parametrize(
    ("arena_bytes", "slab_bytes", "sizes", "align", "problem"),
    [
        (60 * 304, 304, (96, 96), 2, "different"),
        (60 * 304, 304, (96, 0), 2, "positive"),
        (60 * 304, 304, (306,), 2, "for blocks of"),
        (60 * 304, 305, (96,), 2, "aligned to 2"),
        (6 * 304, 304, (96, 50), 2, "may lose [3-9].%"),
    ],
)
def test_a_shape_that_cannot_keep_the_bound_is_refused(
    arena_bytes: int, slab_bytes: int, sizes: tuple[int, ...], align: int, problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        SlabShape(arena_bytes, slab_bytes, sizes, align)


@given(raw=st.integers(368_640, 4_000_000), ratio=st.floats(1.5, 4), gib=st.integers(1, 16))
@settings(max_examples=40, deadline=None)
def test_arenas_of_real_size_keep_the_bound(raw: int, ratio: float, gib: int) -> None:
    shape = SlabShape.fitting(gib * 2**30, (raw, int(raw / ratio)))
    assert shape.bound <= FRAGMENTATION_MAX


def test_an_arena_too_small_for_its_classes_is_refused() -> None:
    with pytest.raises(ValueError, match="a larger arena"):
        SlabShape.fitting(8 * 2**20, (2**20, 600_000))
