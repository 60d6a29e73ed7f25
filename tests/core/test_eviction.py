"""What every eviction policy promises, and what each of them is for."""

import time
from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.core.blocks import BlockHash, RequestId, WorkerId
from kvstore.core.eviction import EVICTIONS, Eviction, eviction
from kvstore.core.slots import SlotPool

every_policy = pytest.mark.parametrize("name", EVICTIONS)


def block(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "big"))


def chain(count: int, start: int = 0) -> list[BlockHash]:
    return [block(start + i) for i in range(count)]


def add(policy: Eviction, names: Sequence[BlockHash], kv_bytes: int = 1) -> None:
    """A chain is written, its end first, as the slot pool has it."""
    for depth in reversed(range(len(names))):
        policy.add(names[depth], names[depth - 1] if depth else None, depth, kv_bytes)


def ask(policy: Eviction, names: Sequence[BlockHash]) -> None:
    for name in reversed(names):
        policy.touched(name, asked=True)


def gone(policy: Eviction, count: int) -> list[BlockHash]:
    """Evicts."""
    names = policy.victims(count)
    policy.check()
    for name in names:
        policy.removed(name)
    policy.check()
    return names


# -- what all promise -----------------------------------------------------------------------------------------


@every_policy
def test_asking_for_victims_changes_nothing(name: str) -> None:
    policy = eviction(name, 20)
    add(policy, chain(20))
    first = policy.victims(7)
    assert len(set(first)) == 7
    assert policy.victims(7) == first
    assert policy.victims(3) == first[:3]
    policy.check()


@every_policy
def test_a_pinned_block_is_no_victim_until_it_is_unpinned(name: str) -> None:
    policy = eviction(name, 4)
    for number in range(4):
        add(policy, chain(1, start=number))
    for number in (0, 1, 3):
        policy.pinned(block(number))
    assert policy.idle == 1
    assert policy.victims(4) == [block(2)]
    policy.unpinned(block(1))
    assert set(policy.victims(4)) == {block(1), block(2)}
    policy.removed(block(0))  # a pinned block may be dropped for another reason
    policy.check()
    assert policy.idle == 2


@every_policy
def test_a_just_written_block_is_not_the_first_victim(name: str) -> None:
    """Though all others were asked for many times."""
    policy = eviction(name, 20)
    for number in range(19):
        add(policy, chain(1, start=number))
    for _ in range(5):
        for number in range(19):
            ask(policy, [block(number)])
    add(policy, [block(19)])
    assert block(19) not in policy.victims(19)
    assert policy.victims(20)[-1] == block(19)


@every_policy
def test_a_chain_goes_from_its_end(name: str) -> None:
    policy = eviction(name, 20)
    add(policy, chain(20))
    assert gone(policy, 10) == chain(20)[:9:-1]


@every_policy
def test_what_was_there_before_the_start_goes_first(name: str) -> None:
    policy = eviction(name, 4)
    for number in range(2):
        add(policy, [block(number)])
    policy.add(block(9), None, 0, fresh=False)
    assert policy.victims(1) == [block(9)]


@every_policy
def test_a_block_that_comes_twice_is_a_bug(name: str) -> None:
    policy = eviction(name, 4)
    add(policy, chain(1))
    with pytest.raises(AssertionError, match="there already"):
        add(policy, chain(1))


def test_an_unknown_name_is_told_those_there_are() -> None:
    with pytest.raises(ValueError, match="'clock' is none of lru, lfu, length_aware, s3fifo, cost_aware"):
        eviction("clock", 1)


# -- what each is for -----------------------------------------------------------------------------------------


def test_lru_takes_the_least_recently_used() -> None:
    policy = eviction("lru", 3)
    for number in range(3):
        add(policy, chain(1, start=number))
    policy.touched(block(0), asked=False)
    assert policy.victims(3) == [block(1), block(2), block(0)]


def test_lfu_takes_the_least_often_asked_for_and_a_use_that_ends_is_no_question() -> None:
    policy = eviction("lfu", 4)
    for number in range(4):
        add(policy, chain(1, start=number))
    ask(policy, [block(0)])
    for _ in range(3):
        policy.touched(block(1), asked=False)
    assert policy.victims(3) == [block(2), block(1), block(0)], "the last one was just written"


def test_length_aware_takes_the_late_blocks_of_requests_first() -> None:
    policy = eviction("length_aware", 6)
    add(policy, chain(3, start=10))
    add(policy, chain(2, start=20))
    add(policy, chain(1, start=30))
    assert policy.victims(3) == [block(12), block(11), block(21)]
    ask(policy, [block(12)])
    assert policy.victims(1) == [block(11)], "being asked for counts for more"


def test_s3fifo_lets_a_scan_pass_by_what_is_asked_for() -> None:
    policy = eviction("s3fifo", 20)
    for number in range(10):
        add(policy, [block(number)])
    for _ in range(2):
        ask(policy, chain(10))
    for number in range(100, 200):
        gone(policy, policy.idle - 19)
        add(policy, [block(number)])
    assert set(chain(10)) <= set(policy.victims(20)[8:]), (
        "all in the small queue above its share goes before them"
    )


def test_s3fifo_remembers_what_it_lost() -> None:
    policy = eviction("s3fifo", 20)
    add(policy, [block(0)])
    for number in range(1, 20):
        add(policy, [block(number)])
    assert gone(policy, 1) == [block(0)]
    add(policy, [block(0)])
    for number in range(20, 40):
        gone(policy, 1)
        add(policy, [block(number)])
    policy.removed(block(0))  # raises if it was evicted again


def test_cost_aware_keeps_what_is_asked_for_what_is_dear_and_what_is_small() -> None:
    policy = eviction("cost_aware", 40)
    policy.add(block(1), None, 0)
    policy.add(block(2), None, 0)
    policy.add(block(3), block(99), 400)  # deep: its attention is dear
    policy.add(block(4), None, 0, kv_bytes=2)
    policy.add(block(5), None, 0)  # just written
    ask(policy, [block(1)])
    assert policy.victims(5) == [block(4), block(2), block(1), block(3), block(5)]


def test_cost_aware_forgets_what_was_asked_for_long_ago() -> None:
    policy = eviction("cost_aware", 10)
    add(policy, [block(0)])
    for _ in range(8):
        ask(policy, [block(0)])
    for number in range(1, 10):
        add(policy, [block(number)])
    kept = 0
    for number in range(10, 1000):
        if block(0) in gone(policy, 1):
            break
        kept += 1
        add(policy, [block(number)])
    assert 9 < kept < 200


def test_cost_aware_evicts_no_block_whose_extension_stays() -> None:
    policy = eviction("cost_aware", 6)
    add(policy, chain(3))
    add(policy, [block(11)])
    policy.pinned(block(2))
    assert policy.victims(6) == [block(11)], "its chain stays with the pinned block"
    policy.unpinned(block(2))
    assert [name for name in policy.victims(6) if name != block(11)] == [block(2), block(1), block(0)]


# -- against a model ------------------------------------------------------------------------------------------

PARENTS = {number: number - 1 if number % 4 else None for number in range(12)}  # three chains
numbers = st.integers(0, 11)


class EvictionMachine(RuleBasedStateMachine):
    """The model keeps what is there and what is pinned, and counts who may be a victim."""

    @initialize(name=st.sampled_from(sorted(EVICTIONS)), blocks=st.integers(1, 30))
    def start(self, name: str, blocks: int) -> None:
        self.name = name
        self.policy = eviction(name, blocks)
        self.there: dict[int, bool] = {}

    @rule(number=numbers, fresh=st.booleans())
    def add(self, number: int, fresh: bool) -> None:
        if number not in self.there:
            parent = PARENTS[number]
            place = None if parent is None else block(parent), number % 4
            self.policy.add(block(number), *place, fresh=fresh)
            self.there[number] = False

    @precondition(lambda self: self.there)
    @rule(data=st.data(), what=st.sampled_from(["ask", "use", "pin", "pin", "remove"]))
    def one(self, data: st.DataObject, what: str) -> None:
        number = data.draw(st.sampled_from(sorted(self.there)))
        if what == "remove":
            self.policy.removed(block(number))
            del self.there[number]
        elif what == "pin":
            self.there[number] = not self.there[number]
            (self.policy.pinned if self.there[number] else self.policy.unpinned)(block(number))
        else:
            self.policy.touched(block(number), asked=what == "ask")

    def allowed(self) -> set[int]:
        """All that could go, the ends of chains inwards where the policy says so."""
        free = {number for number, pinned in self.there.items() if not pinned}
        if self.name == "cost_aware":
            stay = set(self.there) - free
            for number in range(11, 0, -1):  # parents have smaller numbers
                parent = PARENTS[number]
                if number in stay and parent is not None and parent in self.there:
                    stay.add(parent)
            free -= stay
        return free

    @rule(count=st.integers(0, 12), evict=st.booleans())
    def victims(self, count: int, evict: bool) -> None:
        allowed = self.allowed()
        chosen = [int.from_bytes(name, "big") for name in self.policy.victims(count)]
        assert len(chosen) == len(set(chosen)) == min(count, len(allowed))
        assert set(chosen) <= allowed
        if self.name == "cost_aware":
            for at, number in enumerate(chosen):
                stays = set(self.there) - set(chosen[:at])
                assert not any(PARENTS.get(child) == number for child in stays), "an extension stays"
        for number in chosen if evict else ():
            self.policy.removed(block(number))
            del self.there[number]

    @invariant()
    def consistent(self) -> None:
        self.policy.check()
        assert self.policy.idle == sum(not pinned for pinned in self.there.values())


TestEviction = EvictionMachine.TestCase
TestEviction.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


# -- on a workload --------------------------------------------------------------------------------------------


def hits(name: str) -> int:
    """Conversations of eight turns, interleaved with prompts that come once, in an arena for a third of it all."""
    pool = SlotPool(64, name)
    found = 0
    fresh = 100_000
    for turn in range(1, 9):
        for user in range(12):
            names = [*chain(2), *chain(2 * turn, start=1000 * (user + 1))]
            once = chain(6, start=fresh)
            fresh += 10
            for number, asked in enumerate((names, once)):
                request = RequestId(f"{turn} {user} {number}")
                found += pool.match(asked)
                assert isinstance(pool.reserve(request, WorkerId("w"), asked, None, 1.0), list)
                pool.commit(request, WorkerId("w"))
                pool.release(request, WorkerId("w"))
    pool.check()
    return found


def test_on_prefix_chains_cost_aware_finds_no_less_than_lru() -> None:
    assert hits("cost_aware") >= hits("lru") > 0


@every_policy
def test_a_million_blocks_would_be_no_burden(name: str) -> None:
    """The cost of one use hardly grows with the number of blocks: 16 times as many, less than 6 times as slow."""

    def use_s(blocks: int) -> float:
        policy = eviction(name, blocks)
        for start in range(0, blocks, 50):
            add(policy, chain(50, start))
        took: list[float] = []
        for turn in range(5):
            began = time.process_time()
            for number in range(200):
                at = block((number * 977 + turn) % blocks)
                ask(policy, [at])
                policy.pinned(at)
                policy.unpinned(at)
                policy.victims(1)
            took.append(time.process_time() - began)
        return min(took)

    assert use_s(16_000) < 6 * use_s(1000)
