"""The slot pool under any sequence of words, against a model that searches plain lists."""

from dataclasses import dataclass
from itertools import pairwise

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.core.blocks import BlockHash, RequestId, WorkerId
from kvstore.core.slots import Fenced, NoRoom, SlotPool, SlotRef

SIZE = 7
# Two chains with a common beginning, and a short one.
CHAINS = [
    [BlockHash(bytes([i]) * 32) for i in order] for order in ((0, 1, 2, 3, 4), (0, 1, 12, 13), (20, 21))
]
PARENTS = {child: parent for names in CHAINS for parent, child in pairwise(names)}
TAIL = BlockHash(b"t" * 32)

requests = st.sampled_from([RequestId(f"r{i}") for i in range(4)])
writers = st.sampled_from([WorkerId(f"prefill-{i}") for i in range(2)])
holders = st.sampled_from([WorkerId("prefill-0"), WorkerId("decode-0"), WorkerId("decode-1")])
prefixes = st.sampled_from(CHAINS).flatmap(lambda names: st.integers(0, len(names)).map(lambda n: names[:n]))
seconds = st.floats(0.1, 10)
Key = tuple[RequestId, str]


@dataclass(eq=False)
class Use:
    """One use of one slot, in the model."""

    ref: SlotRef
    writer: WorkerId
    request: RequestId
    private: bool
    state: str = "filling"


class SlotPoolMachine(RuleBasedStateMachine):
    """`uses` is every use that is on, `order` the unleased visible ones, with the next victim of `lru` first."""

    eviction = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotPool(SIZE, self.eviction)
        self.now = 0.0
        self.uses: list[Use] = []
        self.order: list[Use] = []
        self.leases: dict[Key, list[Use]] = {}
        self.expires: dict[Key, float] = {}
        self.writing: dict[RequestId, WorkerId] = {}
        self.epochs: list[int] = []
        self.announced: list[BlockHash] = []

    # -- the model ----------------------------------------------------------------------------------------------

    def prefix(self, hashes: list[BlockHash]) -> list[Use]:
        found: list[Use] = []
        for name in hashes:
            use = [u for u in self.uses if u.ref.hash == name and u.state == "committed" and not u.private]
            if not use:
                break
            found.extend(use)
        return found

    def hold(self, key: Key, uses: list[Use], lease_s: float) -> None:
        self.expires[key] = max(self.expires.get(key, 0.0), self.now + lease_s)
        held = self.leases.setdefault(key, [])
        held.extend(use for use in uses if use not in held)
        self.order = [use for use in self.order if use not in held]

    def let_go(self, key: Key) -> None:
        held = self.leases.pop(key, [])
        self.expires.pop(key, None)
        for use in reversed(held):
            self.settle(use)

    def settle(self, use: Use) -> None:
        if use.state != "committed" or any(use in held for held in self.leases.values()):
            return
        if use.private:
            self.end(use)
        else:
            self.order.append(use)

    def end(self, use: Use) -> None:
        self.uses.remove(use)
        self.order = [other for other in self.order if other is not use]
        for key, held in self.leases.items():
            self.leases[key] = [other for other in held if other is not use]

    def chained(self, victims: list[Use]) -> int:
        """How many of these are not to go because of an extension that has to stay."""
        return 0

    def evicted(self, victims: list[Use], count: int) -> list[Use]:
        """What had to go: for `lru` as the model has it, otherwise what the pool says, if it may be that."""
        if self.eviction == "lru":
            return victims[:count]
        gone = [use for use in victims if not self.pool.has(use.ref.hash)]
        assert len(gone) == count
        return gone

    def filled_by(self, request: RequestId) -> list[Use]:
        return [use for use in self.uses if use.state == "filling" and use.request == request]

    def same(self, refs: list[SlotRef], uses: list[Use]) -> None:
        assert [(ref.slot, ref.epoch, ref.hash) for ref in refs] == [
            (use.ref.slot, use.ref.epoch, use.ref.hash) for use in uses
        ]
        assert [ref.filled for ref in refs] == [use.state == "committed" for use in uses]

    # -- what may happen ----------------------------------------------------------------------------------------

    @rule(r=requests, w=writers, hashes=prefixes, tail=st.booleans(), lease_s=seconds)
    def reserve(self, r: RequestId, w: WorkerId, hashes: list[BlockHash], tail: bool, lease_s: float) -> None:
        before = self.pool.counts(), self.pool.committed()
        found = self.pool.reserve(r, w, hashes, TAIL if tail else None, self.now + lease_s)
        if r in self.writing or (r, w) in self.leases:
            assert isinstance(found, Fenced)
            return
        cached = self.prefix(hashes)
        names = [*hashes[len(cached) :], *([TAIL] if tail else [])]
        victims = [use for use in self.order if use not in cached]
        free = SIZE - len(self.uses)
        room = free + len(victims) - self.chained(victims)
        if len(names) > room:
            assert isinstance(found, NoRoom)
            assert found.wanted == len(names)
            assert room <= found.available <= free + len(victims)
            assert (self.pool.counts(), self.pool.committed()) == before
            return
        assert isinstance(found, list)
        self.same(found[: len(cached)], cached)
        filling = found[len(cached) :]
        assert [ref.hash for ref in filling] == names
        evicted = self.evicted(victims, max(0, len(names) - free))
        for use in evicted:
            self.end(use)
        taken = [ref.slot for ref in filling]
        assert {use.ref.slot for use in evicted} <= set(taken)
        assert set(taken).isdisjoint(use.ref.slot for use in self.uses)
        for ref in filling:
            assert all(ref.epoch > epoch for epoch in self.epochs), "an epoch came twice or went back"
            self.epochs.append(ref.epoch)
        fresh = [Use(ref, w, r, private=ref.hash == TAIL) for ref in filling]
        self.uses.extend(fresh)
        self.writing[r] = w
        self.hold((r, w), [*cached, *fresh], lease_s)

    @rule(r=requests, w=writers)
    def commit(self, r: RequestId, w: WorkerId) -> None:
        done = self.pool.commit(r, w)
        if self.writing.get(r) != w:
            assert isinstance(done, Fenced)
            return
        filled = self.filled_by(r)
        assert done == len(filled)
        del self.writing[r]
        for use in filled:
            use.private = use.private or bool(self.prefix([use.ref.hash]))
            use.state = "committed"
        for use in reversed(filled):  # the end of a chain is older than its beginning
            self.settle(use)

    @rule(r=requests, w=writers, stopped=st.booleans())
    def abandon(self, r: RequestId, w: WorkerId, stopped: bool) -> None:
        fenced = self.pool.abandon(r, w, stopped)
        if r in self.writing and self.writing[r] != w:
            assert isinstance(fenced, Fenced)
            return
        assert fenced is None
        self.give_up(r, w, stopped)

    def give_up(self, r: RequestId, w: WorkerId, stopped: bool) -> None:
        for use in self.filled_by(r):
            if stopped:
                self.end(use)
            else:
                use.state = "draining"
        self.writing.pop(r, None)
        self.let_go((r, w))

    @rule(data=st.data(), age=st.sampled_from([0, 0, 1]))
    def writer_stopped(self, data: st.DataObject, age: int) -> None:
        slot = data.draw(st.integers(0, SIZE - 1))
        use = next((u for u in self.uses if u.ref.slot == slot), None)
        self.pool.writer_stopped(slot, (use.ref.epoch if use else 1) - age)
        if use is not None and use.state == "draining" and not age:
            self.end(use)

    @rule(w=writers)
    def writer_died(self, w: WorkerId) -> None:
        self.pool.writer_died(w)
        for r in [r for r, writer in self.writing.items() if writer == w]:
            self.give_up(r, w, stopped=True)
        for use in [u for u in self.uses if u.state == "draining" and u.writer == w]:
            self.end(use)
        for key in [key for key in self.leases if key[1] == w]:
            self.let_go(key)

    @rule(r=requests, h=holders, data=st.data(), lease_s=seconds, age=st.sampled_from([0, 0, 0, 1]))
    def lease(self, r: RequestId, h: WorkerId, data: st.DataObject, lease_s: float, age: int) -> None:
        numbers = data.draw(st.lists(st.integers(0, SIZE), max_size=3, unique=True))
        on = {use.ref.slot: use for use in self.uses}
        wanted = [(number, on[number].ref.epoch - age if number in on else 1) for number in numbers]
        found = self.pool.lease(r, h, wanted, self.now + lease_s)
        uses = [on[number] for number in numbers if number in on]
        if len(uses) < len(numbers) or (age and numbers) or any(use.state == "draining" for use in uses):
            assert isinstance(found, Fenced)
            return
        assert isinstance(found, list)
        self.same(found, uses)
        self.hold((r, h), uses, lease_s)

    @rule(r=requests, h=holders, hashes=prefixes, lease_s=seconds)
    def acquire(self, r: RequestId, h: WorkerId, hashes: list[BlockHash], lease_s: float) -> None:
        found = self.pool.acquire(r, h, hashes, self.now + lease_s)
        uses = self.prefix(hashes)
        self.same(found, uses)
        if uses:
            self.hold((r, h), uses, lease_s)

    @rule(r=requests, h=holders)
    def release(self, r: RequestId, h: WorkerId) -> None:
        assert self.pool.release(r, h) == ((r, h) in self.leases)
        self.let_go((r, h))

    @rule(passed_s=st.floats(0, 6))
    def expire(self, passed_s: float) -> None:
        self.now += passed_s
        over = [
            (r, h)
            for (r, h), expires_s in self.expires.items()
            if expires_s <= self.now and self.writing.get(r) != h
        ]
        assert self.pool.expire(self.now) == over
        for key in over:
            self.let_go(key)

    @rule(hashes=prefixes)
    def drop_last(self, hashes: list[BlockHash]) -> None:
        for name in hashes[-1:]:
            uses = self.prefix([name])
            assert self.pool.drop(name) == bool(uses)
            for use in uses:
                use.private = True
                if use in self.order:
                    self.end(use)

    # -- what always holds --------------------------------------------------------------------------------------

    @invariant()
    def conserved(self) -> None:
        self.pool.check()
        counts = self.pool.counts()
        assert counts["free"] == SIZE - len(self.uses)
        for state in ("filling", "draining", "committed"):
            assert counts[state] == sum(use.state == state for use in self.uses)
        assert counts["leases"] == len(self.leases)
        leased = [use for use in self.uses if any(use in held for held in self.leases.values())]
        assert counts["leased"] == len(leased)

    @invariant()
    def agrees_on_what_is_here(self) -> None:
        for hashes in CHAINS:
            assert self.pool.match(hashes) == len(self.prefix(hashes))
        for use in self.uses:
            assert self.pool.holds(use.ref.slot, use.ref.epoch)

    @invariant()
    def announces_what_is_here(self) -> None:
        """Each word of the pool changes a follower's set in one direction, so stored and removed need no order."""
        stored, removed = self.pool.take_changes()
        assert not (stored and removed)
        self.pool.take_freed()
        assert set(stored).isdisjoint(self.announced)
        assert set(removed) <= set(self.announced)
        self.announced = [name for name in [*self.announced, *stored] if name not in removed]
        assert sorted(self.announced) == sorted(self.pool.committed())

    def teardown(self) -> None:
        """After all writers are gone and all leases over, each slot is free or holds a visible block."""
        for w in ("prefill-0", "prefill-1"):
            self.pool.writer_died(WorkerId(w))
        self.pool.expire(1e9)
        self.pool.check()
        counts = self.pool.counts()
        assert counts["leases"] == counts["leased"] == counts["filling"] == counts["draining"] == 0
        assert counts["free"] + len(self.pool.committed()) == SIZE


class LfuMachine(SlotPoolMachine):
    eviction = "lfu"


class LengthAwareMachine(SlotPoolMachine):
    eviction = "length_aware"


class S3FifoMachine(SlotPoolMachine):
    eviction = "s3fifo"


class CostAwareMachine(SlotPoolMachine):
    """Here fewer than the unleased may be victims: a leased block's chain stays with it."""

    eviction = "cost_aware"

    def chained(self, victims: list[Use]) -> int:
        able = {use.ref.hash for use in victims}
        stay = {use.ref.hash for use in self.uses if use.state == "committed" and not use.private} - able
        for _ in range(SIZE):
            stay |= {PARENTS[name] for name in sorted(stay) if name in PARENTS}
        return len(able & stay)

    def evicted(self, victims: list[Use], count: int) -> list[Use]:
        gone = super().evicted(victims, count)
        for use in gone:
            for other in self.uses:
                if other not in gone and other.state == "committed" and not other.private:
                    assert PARENTS.get(other.ref.hash) != use.ref.hash, "a block went before its extension"
        return gone


TestSlotPool = SlotPoolMachine.TestCase
TestSlotPool.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestLfu = LfuMachine.TestCase
TestLengthAware = LengthAwareMachine.TestCase
TestS3Fifo = S3FifoMachine.TestCase
TestCostAware = CostAwareMachine.TestCase
for other in (TestLfu, TestLengthAware, TestS3Fifo, TestCostAware):
    other.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)
