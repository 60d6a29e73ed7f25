"""The six rules of the slot pool, each as a story."""

import pytest

from kvstore.core.blocks import BlockHash, RequestId, WorkerId
from kvstore.core.eviction import EVICTIONS
from kvstore.core.slots import Fenced, NoRoom, SlotPool, SlotRef

A, B = RequestId("a"), RequestId("b")
PREFILL, DECODE = WorkerId("prefill-0"), WorkerId("decode-0")
OTHER = WorkerId("prefill-1")
TAIL = BlockHash(b"t" * 32)
SOON_S, LATE_S = 10.0, 100.0


def chain(count: int, start: int = 0) -> list[BlockHash]:
    return [BlockHash(bytes([start + i]) * 32) for i in range(count)]


def reserved(
    pool: SlotPool,
    request: RequestId,
    hashes: list[BlockHash],
    tail: BlockHash | None = None,
    writer: WorkerId = PREFILL,
) -> list[SlotRef]:
    found = pool.reserve(request, writer, hashes, tail, SOON_S)
    assert isinstance(found, list), found
    pool.check()
    return found


def written(
    pool: SlotPool, request: RequestId, hashes: list[BlockHash], tail: BlockHash | None = None
) -> list[SlotRef]:
    refs = reserved(pool, request, hashes, tail)
    assert pool.commit(request, PREFILL) == sum(not ref.filled for ref in refs)
    return refs


def stored(pool: SlotPool, request: RequestId, hashes: list[BlockHash]) -> list[SlotRef]:
    """Written, and the writer's lease over: the blocks are victims."""
    refs = written(pool, request, hashes)
    assert pool.release(request, PREFILL)
    pool.check()
    return refs


def test_an_arena_has_a_slot() -> None:
    with pytest.raises(ValueError, match="at least one slot"):
        SlotPool(0)


# -- rule 1: states -------------------------------------------------------------------------------------------


def test_a_slot_goes_from_free_over_filling_to_committed_and_by_eviction_to_free() -> None:
    pool = SlotPool(2)
    assert pool.counts()["free"] == 2
    reserved(pool, A, chain(2))
    assert (pool.counts()["free"], pool.counts()["filling"]) == (0, 2)
    assert pool.commit(A, PREFILL) == 2
    assert (pool.counts()["filling"], pool.counts()["committed"]) == (0, 2)
    pool.release(A, PREFILL)
    reserved(pool, B, chain(2, start=50))
    assert pool.counts()["filling"] == 2
    assert pool.evictions == 2
    assert pool.take_changes() == (chain(2), [chain(2)[1], chain(2)[0]])


def test_a_reservation_returns_the_cached_prefix_as_filled_and_the_rest_to_fill_in_order() -> None:
    pool = SlotPool(8)
    first = stored(pool, A, chain(2))
    refs = reserved(pool, B, chain(4), TAIL)
    assert [ref.filled for ref in refs] == [True, True, False, False, False]
    assert [ref.hash for ref in refs] == [*chain(4), TAIL]
    assert [(ref.slot, ref.epoch) for ref in refs[:2]] == [(ref.slot, ref.epoch) for ref in first]


def test_a_hole_in_a_chain_ends_its_prefix() -> None:
    pool = SlotPool(4)
    stored(pool, A, chain(3))
    assert pool.drop(chain(3)[1])
    assert pool.match(chain(3)) == 1
    assert [ref.hash for ref in pool.acquire(B, DECODE, chain(3), SOON_S)] == chain(1)


# -- rule 2: epochs -------------------------------------------------------------------------------------------


def test_each_use_of_a_slot_has_a_larger_epoch() -> None:
    pool = SlotPool(1)
    epochs = []
    for turn in range(4):
        (ref,) = stored(pool, RequestId(f"r{turn}"), chain(1, start=turn))
        epochs.append(ref.epoch)
    assert epochs == sorted(set(epochs))


def test_a_lease_on_a_use_that_is_over_is_fenced() -> None:
    pool = SlotPool(1)
    (old,) = stored(pool, A, chain(1))
    (new,) = reserved(pool, B, chain(1, start=9))
    assert old.slot == new.slot
    assert isinstance(pool.lease(A, DECODE, [(old.slot, old.epoch)], SOON_S), Fenced)
    assert isinstance(pool.lease(B, DECODE, [(new.slot, new.epoch)], SOON_S), list)


@pytest.mark.parametrize("use", [(0, 0), (99, 1), (-1, 1), (0, 10**9)])
def test_a_lease_on_what_never_was_is_fenced(use: tuple[int, int]) -> None:
    pool = SlotPool(1)
    stored(pool, A, chain(1))
    assert isinstance(pool.lease(B, DECODE, [use], SOON_S), Fenced)
    pool.check()


def test_a_lease_is_refused_whole() -> None:
    pool = SlotPool(3)
    good, bad = stored(pool, A, chain(2))
    pool.drop(bad.hash)
    assert isinstance(pool.lease(B, DECODE, [(good.slot, good.epoch), (bad.slot, bad.epoch)], SOON_S), Fenced)
    assert pool.counts()["leases"] == 0


def test_only_the_writer_may_commit_or_give_up() -> None:
    pool = SlotPool(2)
    reserved(pool, A, chain(1), TAIL)
    assert isinstance(pool.commit(A, OTHER), Fenced)
    assert isinstance(pool.abandon(A, OTHER, stopped=True), Fenced)
    pool.check()
    assert pool.counts()["filling"] == 2
    assert pool.commit(A, PREFILL) == 2


def test_only_the_writer_may_commit_even_where_nothing_was_to_be_filled() -> None:
    pool = SlotPool(2)
    stored(pool, A, chain(2))
    reserved(pool, B, chain(2))
    assert isinstance(pool.commit(B, OTHER), Fenced)
    assert pool.commit(B, PREFILL) == 0


def test_a_second_reservation_of_one_request_is_fenced_until_the_first_is_over() -> None:
    pool = SlotPool(4)
    reserved(pool, A, chain(1))
    assert isinstance(pool.reserve(A, PREFILL, chain(1), None, SOON_S), Fenced)
    assert isinstance(pool.reserve(A, OTHER, chain(1), None, SOON_S), Fenced)
    assert pool.counts()["filling"] == 1
    pool.abandon(A, PREFILL, stopped=True)
    reserved(pool, A, chain(1), writer=OTHER)


# -- rule 3: no slot is taken from a writer by time -----------------------------------------------------------------


def test_a_writer_out_of_time_keeps_what_it_fills() -> None:
    pool = SlotPool(1)
    reserved(pool, A, chain(1))
    assert pool.expire(LATE_S) == []
    assert isinstance(pool.reserve(B, OTHER, chain(1, start=9), None, SOON_S), NoRoom)
    assert pool.commit(A, PREFILL) == 1


def test_given_up_slots_drain_until_their_writer_stops() -> None:
    pool = SlotPool(1)
    (ref,) = reserved(pool, A, chain(1))
    pool.abandon(A, PREFILL, stopped=False)
    assert pool.draining() == [(ref.slot, ref.epoch)]
    pool.expire(LATE_S)
    assert isinstance(pool.reserve(B, OTHER, chain(1), None, SOON_S), NoRoom)
    pool.writer_stopped(ref.slot, ref.epoch - 1)  # the word of an older use
    assert pool.counts()["draining"] == 1
    pool.writer_stopped(ref.slot, ref.epoch)
    pool.check()
    assert pool.counts()["free"] == 1


def test_a_writer_that_says_it_stopped_gives_its_slots_back_at_once() -> None:
    pool = SlotPool(3)
    reserved(pool, A, chain(2), TAIL)
    pool.abandon(A, PREFILL, stopped=True)
    pool.check()
    assert pool.counts()["free"] == 3
    assert pool.counts()["leases"] == 0


def test_a_dead_writer_leaves_nothing_behind() -> None:
    pool = SlotPool(6)
    stored(pool, RequestId("old"), chain(1))
    reserved(pool, A, chain(2), TAIL)
    reserved(pool, B, chain(1, start=9))
    pool.abandon(B, PREFILL, stopped=False)
    pool.writer_died(PREFILL)
    pool.check()
    counts = pool.counts()
    assert (counts["free"], counts["committed"], counts["leases"]) == (5, 1, 0)


def test_a_dead_writer_with_nothing_left_to_fill_is_forgotten_too() -> None:
    pool = SlotPool(2)
    stored(pool, RequestId("old"), chain(2))
    reserved(pool, A, chain(2))  # all cached
    pool.acquire(A, DECODE, chain(2), SOON_S)
    pool.writer_died(PREFILL)
    assert pool.expire(LATE_S) == [(A, DECODE)], "the dead writer's request still shields a reader's lease"
    reserved(pool, A, chain(2), writer=OTHER)


def test_another_writers_death_changes_nothing() -> None:
    pool = SlotPool(2)
    reserved(pool, A, chain(2))
    pool.writer_died(OTHER)
    assert pool.commit(A, PREFILL) == 2


# -- rule 4: readers' leases end by word or by time ------------------------------------------------------------------


def test_a_leased_block_is_no_victim_until_released() -> None:
    pool = SlotPool(1)
    stored(pool, A, chain(1))
    pool.acquire(B, DECODE, chain(1), SOON_S)
    refused = pool.reserve(A, PREFILL, chain(1, start=9), None, SOON_S)
    assert refused == NoRoom(wanted=1, available=0)
    assert pool.release(B, DECODE)
    assert not pool.release(B, DECODE)
    reserved(pool, A, chain(1, start=9))


def test_a_lease_ends_by_time_and_asking_again_extends_it() -> None:
    pool = SlotPool(1)
    (ref,) = stored(pool, A, chain(1))
    pool.acquire(B, DECODE, chain(1), 10.0)
    assert isinstance(pool.lease(B, DECODE, [(ref.slot, ref.epoch)], 20.0), list)
    pool.lease(B, DECODE, [(ref.slot, ref.epoch)], 5.0)  # never shortens
    assert pool.expire(19.9) == []
    assert pool.expire(20.0) == [(B, DECODE)]
    assert (pool.leases_expired, pool.counts()["leases"]) == (1, 0)


def test_a_follow_reader_out_of_time_loses_its_lease_though_the_writer_goes_on() -> None:
    pool = SlotPool(1)
    (ref,) = reserved(pool, A, chain(1))
    pool.lease(A, DECODE, [(ref.slot, ref.epoch)], SOON_S)
    assert pool.expire(LATE_S) == [(A, DECODE)]
    assert pool.commit(A, PREFILL) == 1


def test_a_follow_reader_of_a_writer_that_gave_up_holds_nothing() -> None:
    pool = SlotPool(1)
    (ref,) = reserved(pool, A, chain(1))
    pool.lease(A, DECODE, [(ref.slot, ref.epoch)], SOON_S)
    pool.abandon(A, PREFILL, stopped=False)
    assert isinstance(pool.lease(A, DECODE, [(ref.slot, ref.epoch)], SOON_S), Fenced)
    pool.writer_stopped(ref.slot, ref.epoch)
    pool.check()
    assert pool.counts()["free"] == 1
    assert pool.release(A, DECODE)


# -- rule 5: visibility ----------------------------------------------------------------------------------------


def test_a_block_is_visible_when_committed_and_not_before() -> None:
    pool = SlotPool(2)
    reserved(pool, A, chain(1))
    assert (pool.match(chain(1)), pool.acquire(B, DECODE, chain(1), SOON_S)) == (0, [])
    assert pool.take_changes() == ([], [])
    pool.commit(A, PREFILL)
    assert (pool.match(chain(1)), pool.committed()) == (1, chain(1))
    assert pool.take_changes() == (chain(1), [])


def test_a_tail_is_never_visible_and_is_gone_with_its_last_reader() -> None:
    pool = SlotPool(2)
    refs = written(pool, A, chain(1), TAIL)
    assert pool.match([TAIL]) == 0
    assert TAIL not in pool.committed()
    pool.lease(A, DECODE, [(ref.slot, ref.epoch) for ref in refs], SOON_S)
    pool.release(A, PREFILL)
    assert pool.counts()["committed"] == 2
    pool.release(A, DECODE)
    pool.check()
    assert pool.counts()["free"] == 1


def test_the_first_of_two_equal_blocks_is_kept_and_the_others_copy_lives_for_its_readers() -> None:
    pool = SlotPool(2)
    (first,) = reserved(pool, A, chain(1))
    (second,) = reserved(pool, B, chain(1), writer=OTHER)
    assert pool.commit(B, OTHER) == 1
    assert pool.commit(A, PREFILL) == 1
    assert pool.take_changes() == (chain(1), [])
    assert pool.acquire(RequestId("c"), DECODE, chain(1), SOON_S)[0].slot == second.slot
    assert pool.counts()["committed"] == 2
    pool.release(A, PREFILL)
    pool.check()
    assert pool.counts()["committed"] == 1
    assert not pool.holds(first.slot, first.epoch)


def test_a_dropped_block_is_invisible_at_once_and_freed_after_its_readers() -> None:
    pool = SlotPool(1)
    (ref,) = stored(pool, A, chain(1))
    pool.acquire(B, DECODE, chain(1), SOON_S)
    assert pool.drop(ref.hash)
    assert not pool.drop(ref.hash)
    assert (pool.match(chain(1)), pool.holds(ref.slot, ref.epoch)) == (0, True)
    pool.release(B, DECODE)
    pool.check()
    assert pool.counts()["free"] == 1
    assert pool.take_changes() == (chain(1), chain(1))


# -- rule 6: victims -------------------------------------------------------------------------------------------


def test_the_least_recently_used_chain_goes_first_from_its_end() -> None:
    pool = SlotPool(4, "lru")
    old, new = chain(2), chain(2, start=50)
    stored(pool, A, old)
    stored(pool, B, new)
    reserved(pool, A, chain(1, start=100))
    assert (pool.match(old), pool.match(new)) == (1, 2), (
        "the end of the older chain went, its beginning serves"
    )


def test_reading_a_block_makes_it_young() -> None:
    pool = SlotPool(2, "lru")
    stored(pool, A, chain(1))
    stored(pool, B, chain(1, start=50))
    pool.acquire(A, DECODE, chain(1), SOON_S)
    pool.release(A, DECODE)
    reserved(pool, A, chain(1, start=100))
    assert (pool.match(chain(1)), pool.match(chain(1, start=50))) == (1, 0)


def test_a_reservation_never_evicts_the_prefix_it_stands_on() -> None:
    pool = SlotPool(3)
    stored(pool, A, chain(2))
    assert pool.reserve(B, PREFILL, chain(4), None, SOON_S) == NoRoom(wanted=2, available=1)
    pool.check()
    assert pool.match(chain(4)) == 2, "a refusal changes nothing"
    refs = reserved(pool, B, chain(3))
    assert [ref.filled for ref in refs] == [True, True, False]


def test_housekeeping_makes_no_block_younger() -> None:
    pool = SlotPool(3, "lru")
    stored(pool, A, chain(3))
    for name in chain(3):  # a write-back, in the order in which the blocks were stored
        pool.acquire(B, "write-back", [name], SOON_S, used=False)
        pool.release(B, "write-back")
    reserved(pool, B, chain(1, start=50))
    assert pool.match(chain(3)) == 2, "the end of the chain went, not its beginning"


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_under_every_policy_a_chain_is_evicted_from_its_end(eviction: str) -> None:
    pool = SlotPool(4, eviction)
    stored(pool, A, chain(4))
    reserved(pool, B, chain(2, start=50))
    assert pool.match(chain(4)) == 2


def test_a_lease_on_the_end_of_a_chain_keeps_all_of_it_where_ends_go_first() -> None:
    pool = SlotPool(3, "cost_aware")
    refs = stored(pool, A, chain(3))
    pool.lease(A, DECODE, [(refs[-1].slot, refs[-1].epoch)], SOON_S)
    assert pool.reserve(B, PREFILL, chain(1, start=50), None, SOON_S) == NoRoom(wanted=1, available=0)
    pool.check()
    pool.release(A, DECODE)
    reserved(pool, B, chain(1, start=50))


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(ValueError, match="eviction 'clock' is none of lru, lfu"):
        SlotPool(1, "clock")


def test_a_block_knows_its_place_in_its_chain() -> None:
    pool = SlotPool(3)
    stored(pool, A, chain(1))
    stored(pool, B, chain(3))
    assert [pool.place(name) for name in chain(3)] == [(None, 0), (chain(3)[0], 1), (chain(3)[1], 2)]
