"""The tier machine against its rules, and against a model that keeps plain sets."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core.blocks import BlockHash
from kvstore.core.tiers import (
    Asked,
    Delete,
    Event,
    Found,
    Lost,
    Reject,
    Removed,
    Stored,
    Throttle,
    TierConfig,
    TierMachine,
    Write,
    WriteDone,
    WriteFailed,
)


def block(number: int) -> BlockHash:
    return BlockHash(bytes([number]) * 32)


A, B, C, D = (block(number) for number in range(4))


def machine(**config: object) -> TierMachine:
    return TierMachine(TierConfig(**{"capacity_blocks": 3, **config}))  # type: ignore[arg-type]


def written(tiers: TierMachine, *names: BlockHash) -> None:
    for name in names:
        assert Write(name) in tiers.handle(Stored(name), 0.0)
        tiers.handle(WriteDone(name), 0.0)


def test_what_is_stored_is_written_once() -> None:
    tiers = machine()
    assert tiers.handle(Stored(A), 0.0) == [Write(A)]
    assert tiers.handle(Stored(A), 0.0) == []
    assert not tiers.has(A)
    tiers.handle(WriteDone(A), 0.0)
    assert tiers.has(A)
    assert tiers.handle(Stored(A), 0.0) == []


def test_few_are_written_at_once_and_the_rest_in_order() -> None:
    tiers = machine(writes_max=1)
    assert [tiers.handle(Stored(name), 0.0) for name in (A, B, C)] == [[Write(A)], [], []]
    assert tiers.handle(WriteDone(A), 0.0) == [Write(B)]


def test_a_block_that_left_dram_is_not_written() -> None:
    tiers = machine(writes_max=1)
    for name in (A, B, C):
        tiers.handle(Stored(name), 0.0)
    tiers.handle(Removed(B), 0.0)
    assert tiers.handle(WriteDone(A), 0.0) == [Write(C)]


def test_the_least_recently_asked_for_makes_room() -> None:
    tiers = machine()
    written(tiers, A, B, C)
    tiers.handle(Asked([A]), 0.0)
    assert tiers.handle(Stored(D), 0.0) == [Delete(B), Write(D)]
    assert not tiers.has(B)


def test_of_a_chain_the_deepest_makes_room() -> None:
    tiers = machine()
    written(tiers, A, B, C)
    tiers.handle(Asked([A, B, C]), 0.0)
    assert tiers.handle(Stored(D), 0.0) == [Delete(C), Write(D)]


def test_a_full_disk_is_left_alone_for_a_while() -> None:
    tiers = machine(full_pause_s=10.0)
    tiers.handle(Stored(A), 0.0)
    assert tiers.handle(WriteFailed(A, full=True), 1.0) == []
    assert tiers.admission(B, 2.0) == Throttle(9.0)
    assert tiers.handle(Stored(B), 2.0) == []
    assert tiers.handle(Asked([B]), 12.0) == [Write(B)], "it is asked for again when the time is over"


def test_admission_of_what_is_asked_for_twice() -> None:
    tiers = machine(admission="second")
    tiers.handle(Asked([A]), 0.0)
    assert tiers.handle(Stored(A), 0.0) == []
    assert isinstance(tiers.admission(A, 0.0), Reject)
    assert tiers.handle(Asked([A]), 0.0) == [Write(A)]


def test_a_lost_file_is_not_there_and_may_be_written_again() -> None:
    tiers = machine()
    written(tiers, A)
    tiers.handle(Lost(A), 0.0)
    assert not tiers.has(A)
    assert tiers.handle(Asked([A]), 0.0) == [Write(A)]


def test_what_a_former_run_left_is_there_and_goes_first() -> None:
    tiers = machine()
    written(tiers, A)
    tiers.handle(Found(B), 0.0)
    tiers.handle(Found(C), 0.0)
    assert tiers.has(B)
    assert tiers.handle(Stored(D), 0.0) == [Delete(C), Write(D)]


def test_what_a_former_run_left_is_not_written_again() -> None:
    tiers = machine(writes_max=1)
    tiers.handle(Stored(A), 0.0)
    tiers.handle(Stored(B), 0.0)
    tiers.handle(Found(B), 0.0)
    assert tiers.handle(WriteDone(A), 0.0) == []


def test_a_smaller_quota_than_before_deletes() -> None:
    tiers = machine(capacity_blocks=1)
    assert tiers.handle(Found(A), 0.0) == []
    assert len(tiers.handle(Found(B), 0.0)) == 1


def test_bad_configuration_is_named() -> None:
    with pytest.raises(ValueError, match="ssd admission 'some' is none of all, second"):
        machine(admission="some")
    with pytest.raises(ValueError, match="holds no block"):
        machine(capacity_blocks=0)


names = st.sampled_from([block(number) for number in range(8)])
events = st.one_of(
    st.builds(Stored, names),
    st.builds(Removed, names),
    st.builds(Asked, st.lists(names, max_size=4, unique=True)),
    st.builds(Found, names),
    st.builds(WriteDone, names),
    st.builds(WriteFailed, names, st.booleans()),
    st.builds(Lost, names),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(events, max_size=60), st.integers(1, 4), st.integers(1, 3))
def test_any_history_keeps_the_rules(history: list[Event], capacity: int, writes: int) -> None:
    """The model: what is in DRAM, what is on the disk, what is being written, kept by the commands alone."""
    tiers = machine(capacity_blocks=capacity, writes_max=writes, full_pause_s=3.0)
    dram: set[BlockHash] = set()
    disk: set[BlockHash] = set()
    writing: set[BlockHash] = set()
    for second, event in enumerate(history):
        match event:
            case Stored(name):
                dram.add(name)
            case Removed(name):
                dram.discard(name)
            case WriteDone(name) if name in writing:
                writing.discard(name)
                disk.add(name)
            case WriteFailed(name):
                writing.discard(name)
            case Found(name) if name not in writing:
                disk.add(name)
            case Lost(name):
                disk.discard(name)
        for command in tiers.handle(event, float(second)):
            if isinstance(command, Write):
                assert command.name in dram, "only what is in DRAM can be written"
                assert command.name not in disk | writing
                writing.add(command.name)
            else:
                disk.remove(command.name)
        tiers.check()
        assert set(tiers.names()) == disk
        assert len(disk) + len(writing) <= capacity
        assert len(writing) <= writes
