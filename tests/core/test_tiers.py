"""The rules of the tier machine, each as a story."""

from dataclasses import replace

import pytest

from kvstore.core.blocks import BlockHash, Tier
from kvstore.core.tiers import (
    Admit,
    Asked,
    Demote,
    Drop,
    Found,
    Lost,
    NodeLost,
    Pinned,
    Pressure,
    Promote,
    Read,
    ReadDone,
    ReadFailed,
    Reject,
    Released,
    Removed,
    Stored,
    Throttle,
    TierConfig,
    TierLimits,
    TierMachine,
    Timer,
    WakeAt,
    WriteDone,
    WriteFailed,
)


def block(number: int) -> BlockHash:
    return BlockHash(bytes([number]) * 32)


A, B, C, D = (block(number) for number in range(4))


UNSAID = TierLimits()


def machine(blocks: int = 3, ssd: TierLimits = UNSAID, **config: object) -> TierMachine:
    return TierMachine(TierConfig(replace(ssd, blocks=blocks), **config))  # type: ignore[arg-type]


def written(tiers: TierMachine, *names: BlockHash) -> None:
    """On the SSD and in DRAM; each the extension of the one before."""
    for depth, name in enumerate(names):
        parent = names[depth - 1] if depth else None
        assert Demote(name) in tiers.handle(Stored(name, parent, depth), 0.0)
        tiers.handle(WriteDone(name), 0.0)
        tiers.check()


def on_ssd(tiers: TierMachine, *names: BlockHash) -> None:
    written(tiers, *names)
    for name in names:
        tiers.handle(Removed(name), 0.0)


def test_what_is_stored_is_written_once() -> None:
    tiers = machine()
    assert tiers.handle(Stored(A), 0.0) == [Demote(A)]
    assert tiers.handle(Stored(A), 0.0) == []
    assert not tiers.has(A)
    tiers.handle(WriteDone(A), 0.0)
    assert tiers.has(A)
    assert tiers.handle(Stored(A), 0.0) == []


def test_few_are_written_at_once_and_the_rest_in_order() -> None:
    tiers = machine(writes_max=1)
    assert [tiers.handle(Stored(name), 0.0) for name in (A, B, C)] == [[Demote(A)], [], []]
    assert tiers.handle(WriteDone(A), 0.0) == [Demote(B)]


def test_a_block_that_left_dram_is_not_written() -> None:
    tiers = machine(writes_max=1)
    for name in (A, B, C):
        tiers.handle(Stored(name), 0.0)
    tiers.handle(Removed(B), 0.0)
    assert tiers.handle(WriteDone(A), 0.0) == [Demote(C)]


def test_the_least_recently_asked_for_makes_room() -> None:
    tiers = machine()
    written(tiers, A, B, C)
    tiers.handle(Asked([A]), 0.0)
    assert tiers.handle(Stored(D), 0.0) == [Drop(Tier.SSD, B), Demote(D)]
    assert not tiers.has(B)


def test_of_a_chain_the_deepest_makes_room() -> None:
    tiers = machine()
    written(tiers, A, B, C)
    tiers.handle(Asked([A, B, C]), 0.0)
    assert tiers.handle(Stored(D), 0.0) == [Drop(Tier.SSD, C), Demote(D)]


def test_a_full_disk_is_left_alone_for_a_while() -> None:
    tiers = machine(full_pause_s=10.0)
    tiers.handle(Stored(A), 0.0)
    assert tiers.handle(WriteFailed(A, full=True), 1.0) == []
    assert tiers.admission(B, 2.0) == Throttle(9.0)
    assert tiers.handle(Stored(B), 2.0) == []
    assert tiers.handle(Asked([B]), 12.0) == [Demote(B)], "it is asked for again when the time is over"


def test_admission_of_what_is_asked_for_twice() -> None:
    tiers = machine(admission="second")
    tiers.handle(Asked([A]), 0.0)
    assert tiers.handle(Stored(A), 0.0) == []
    assert isinstance(tiers.admission(A, 0.0), Reject)
    assert tiers.handle(Asked([A]), 0.0) == [Demote(A)]


def test_a_lost_file_is_not_there_and_may_be_written_again() -> None:
    tiers = machine()
    written(tiers, A)
    tiers.handle(Lost(A), 0.0)
    assert not tiers.has(A)
    assert tiers.handle(Asked([A]), 0.0) == [Demote(A)]


def test_what_a_former_run_left_is_there_and_goes_first() -> None:
    tiers = machine()
    written(tiers, A)
    tiers.handle(Found(B), 0.0)
    tiers.handle(Found(C), 0.0)
    assert tiers.has(B)
    assert tiers.handle(Stored(D), 0.0) == [Drop(Tier.SSD, C), Demote(D)]


def test_what_a_former_run_left_is_not_written_again() -> None:
    tiers = machine(writes_max=1)
    tiers.handle(Stored(A), 0.0)
    tiers.handle(Stored(B), 0.0)
    tiers.handle(Found(B), 0.0)
    assert tiers.handle(WriteDone(A), 0.0) == []


def test_a_smaller_quota_than_before_deletes() -> None:
    tiers = machine(1)
    assert tiers.handle(Found(A), 0.0) == []
    assert len(tiers.handle(Found(B), 0.0)) == 1


def test_bad_configuration_is_named() -> None:
    with pytest.raises(ValueError, match="ssd admission 'some' is none of all, second"):
        machine(admission="some")
    with pytest.raises(ValueError, match="holds no block"):
        machine(0)

    with pytest.raises(ValueError, match="watermarks"):
        machine(ssd=TierLimits(high=0.5, low=0.9))
    with pytest.raises(ValueError, match="eviction 'clock' is none of lru"):
        machine(ssd=TierLimits(eviction="clock"))


# -- watermarks and pressure ------------------------------------------------------------------------------------


def test_above_the_high_watermark_blocks_go_until_the_low_one() -> None:
    tiers = machine(10, TierLimits(high=0.9, low=0.5))
    written(tiers, *(block(number) for number in range(9)))
    drops = tiers.handle(Stored(block(9)), 0.0)
    assert drops == [*(Drop(Tier.SSD, block(number)) for number in range(5)), Demote(block(9))]


def test_dram_with_a_limit_of_its_own_makes_room_for_what_is_stored() -> None:
    tiers = machine(dram=TierLimits(2))
    written(tiers, A, B)
    assert tiers.handle(Stored(C), 0.0) == [Drop(Tier.DRAM, A), Demote(C)]
    assert not tiers.has(A, Tier.DRAM)
    assert tiers.has(A, Tier.SSD)


def test_a_block_is_never_dropped_from_dram_while_it_is_written_back() -> None:
    tiers = machine(dram=TierLimits(2), writes_max=1)
    tiers.handle(Stored(A), 0.0)
    tiers.handle(Stored(B), 0.0)
    assert tiers.handle(Stored(C), 0.0) == [Drop(Tier.DRAM, B)], "A is older, but its write reads it"
    assert tiers.handle(Stored(D), 0.0) == [Drop(Tier.DRAM, C)]
    assert tiers.handle(WriteDone(A), 0.0) == [Demote(D)], "B and C left DRAM before their turn"
    tiers.check()


def test_pressure_frees_what_is_asked_for_and_no_pinned_block() -> None:
    tiers = machine(dram=TierLimits(3), writes_max=3)
    written(tiers, A, B, C)
    tiers.handle(Pinned(Tier.DRAM, A), 0.0)
    tiers.handle(Pinned(Tier.DRAM, A), 0.0)
    assert tiers.handle(Pressure(Tier.DRAM, 1), 0.0) == [Drop(Tier.DRAM, B)]
    tiers.handle(Released(Tier.DRAM, A), 0.0)
    assert tiers.handle(Pressure(Tier.DRAM, 3), 0.0) == [Drop(Tier.DRAM, C)]
    tiers.check()
    tiers.handle(Released(Tier.DRAM, A), 0.0)
    tiers.handle(Released(Tier.DRAM, A), 0.0)  # a word too many
    assert tiers.handle(Pressure(Tier.DRAM, 3), 0.0) == [Drop(Tier.DRAM, A)]


def test_a_pinned_file_stays() -> None:
    tiers = machine(1)
    written(tiers, A)
    tiers.handle(Pinned(Tier.SSD, A), 0.0)
    assert tiers.handle(Stored(B), 0.0) == []
    assert tiers.handle(Released(Tier.SSD, A), 0.0) == [Drop(Tier.SSD, A), Demote(B)]


def test_what_a_former_run_left_displaces_nothing() -> None:
    tiers = machine(1)
    written(tiers, A)
    assert tiers.handle(Found(B), 0.0) == [Drop(Tier.SSD, B)]


def test_a_tier_evicts_by_its_own_policy() -> None:
    tiers = machine(3, TierLimits(eviction="lfu"))
    written(tiers, A, B, C)
    for name in (A, A, B):
        tiers.handle(Asked([name]), 0.0)
    assert tiers.handle(Stored(D), 0.0) == [Drop(Tier.SSD, B), Demote(D)], (
        "C was just written, A asked for more"
    )


def test_a_block_found_after_a_restart_learns_its_chain_from_who_asks() -> None:
    tiers = machine(3, TierLimits(eviction="cost_aware"))
    for name in (C, B, A):
        tiers.handle(Found(name), 0.0)
    tiers.handle(Asked([A, B, C]), 0.0)
    tiers.check()
    assert tiers.handle(Stored(D), 0.0) == [Drop(Tier.SSD, C), Demote(D)], "the end of the chain"


# -- promotion ----------------------------------------------------------------------------------------------------


def test_what_is_asked_for_and_on_the_ssd_is_promoted_after_its_prefix() -> None:
    tiers = machine(reads_max=8)
    on_ssd(tiers, A, B, C)
    tiers.handle(Stored(A), 0.0)
    [promote] = tiers.handle(Asked([A, B, C, D]), 0.0)
    assert promote == Promote((A, B, C), 1)
    assert isinstance(promote, Promote) and promote.names == (B, C)
    assert tiers.handle(Asked([A, B, C]), 0.0) == [], "they are on their way"
    tiers.handle(Stored(B, A, 1), 0.0)
    tiers.handle(ReadDone(B), 0.0)
    tiers.handle(ReadDone(C), 0.0)
    tiers.check()
    assert tiers.names(Tier.DRAM) == [A, B, C]


def test_no_more_is_read_at_once_than_may_be() -> None:
    tiers = machine(reads_max=2)
    on_ssd(tiers, A, B, C)
    assert tiers.handle(Asked([A, B, C]), 0.0) == [Promote((A, B), 0)]
    assert tiers.handle(Asked([C]), 0.0) == []
    tiers.handle(ReadDone(A), 0.0)
    assert tiers.handle(Asked([C]), 0.0) == [Promote((C,), 0)]


def test_a_gap_ends_a_promotion() -> None:
    tiers = machine(reads_max=8)
    on_ssd(tiers, A, B, C)
    tiers.handle(Lost(B), 0.0)
    assert tiers.handle(Asked([A, B, C]), 0.0) == [Promote((A,), 0)]


def test_a_promotion_takes_no_room_from_its_own_prefix() -> None:
    tiers = machine(4, dram=TierLimits(2, "lfu"), reads_max=8)
    on_ssd(tiers, A, B, C)
    tiers.handle(Stored(A), 0.0)
    written(tiers, D)
    assert tiers.handle(Asked([A, B, C]), 0.0) == [Drop(Tier.DRAM, D), Promote((A, B), 1)], (
        "A is the next victim"
    )
    tiers.check()
    assert tiers.has(A, Tier.DRAM)


def test_what_is_not_to_be_kept_is_read_past_dram() -> None:
    tiers = machine(dram=TierLimits(1), reads_max=8)
    on_ssd(tiers, A, B)
    tiers.handle(Stored(D), 0.0)
    assert tiers.handle(Asked([A, B], keep=False), 0.0) == [Read(A), Read(B)]
    tiers.handle(ReadDone(A), 0.0)
    tiers.handle(ReadFailed(B, lost=False), 0.0)
    tiers.check()
    assert tiers.names(Tier.DRAM) == [D]


def test_a_file_that_is_read_stays_and_a_lost_one_is_a_miss() -> None:
    tiers = machine(1, reads_max=1)
    on_ssd(tiers, A)
    assert tiers.handle(Asked([A]), 0.0) == [Promote((A,), 0)]
    assert tiers.handle(Stored(B), 0.0) == [], "the only file is being read"
    assert tiers.handle(ReadFailed(A, lost=True), 0.0) == [Demote(B)]
    assert not tiers.has(A)
    tiers.check()
    assert tiers.handle(Asked([A]), 0.0) == []


def test_a_lost_file_is_not_written_anew_while_the_old_one_is_read() -> None:
    tiers = machine(reads_max=1)
    on_ssd(tiers, A)
    tiers.handle(Asked([A], keep=False), 0.0)
    tiers.handle(Lost(A), 0.0)
    assert tiers.handle(Stored(A), 0.0) == []
    tiers.check()
    assert tiers.handle(ReadFailed(A, lost=True), 0.0) == [Demote(A)]


# -- the budget of writes -------------------------------------------------------------------------------------------


def test_writes_keep_to_their_budget_after_a_burst_of_a_second() -> None:
    tiers = machine(9, admission="budget", writes_max=9, block_bytes=10, write_bytes_per_s=20.0)
    stored = [tiers.handle(Stored(block(number)), 100.0) for number in range(5)]
    assert stored == [[Demote(block(0))], [Demote(block(1))], [Demote(block(2))], [WakeAt(100.5)], []]
    assert tiers.admission(block(3), 100.25) == Throttle(0.25)
    assert tiers.handle(Timer(), 100.5) == [Demote(block(3)), WakeAt(101.0)]
    assert tiers.handle(Timer(), 200.0) == [Demote(block(4))]
    assert tiers.admission(block(9), 200.0) == Admit()


# -- the end of the node ----------------------------------------------------------------------------------------------


def test_with_the_node_its_dram_and_all_that_was_under_way_are_gone_but_no_whole_file() -> None:
    tiers = machine(dram=TierLimits(3), writes_max=1, reads_max=8)
    on_ssd(tiers, A, B)
    tiers.handle(Pinned(Tier.SSD, B), 0.0)
    tiers.handle(Asked([A, B]), 0.0)
    tiers.handle(Stored(C), 0.0)
    tiers.handle(Stored(D), 0.0)
    assert tiers.handle(NodeLost(), 0.0) == []
    tiers.check()
    assert (tiers.names(Tier.DRAM), tiers.names(Tier.SSD)) == ([], [A, B])
    tiers.handle(WriteDone(C), 0.0)
    tiers.handle(ReadDone(A), 0.0)
    assert (tiers.names(Tier.DRAM), tiers.names(Tier.SSD)) == ([], [A, B]), "words of the former life"
    assert tiers.handle(Pressure(Tier.SSD, 3), 0.0) == [Drop(Tier.SSD, B), Drop(Tier.SSD, A)], (
        "nothing is held"
    )
