"""The tier machine under any history, against a model that keeps plain dictionaries.

The model knows what is in each tier and what is under way, from the events and commands alone, and which commands are
allowed. Which blocks go it does not know: that is the eviction policy's, and has its own tests.
"""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstore.core.blocks import BlockHash, Tier
from kvstore.core.eviction import EVICTIONS
from kvstore.core.tiers import (
    ADMISSIONS,
    Asked,
    Demote,
    Drop,
    Event,
    Found,
    Lost,
    NodeLost,
    Pinned,
    Pressure,
    Promote,
    Read,
    ReadDone,
    ReadFailed,
    Released,
    Removed,
    Stored,
    TierConfig,
    TierLimits,
    TierMachine,
    Timer,
    WakeAt,
    WriteDone,
    WriteFailed,
)

CHAINS = [
    [BlockHash(bytes([i]) * 32) for i in order] for order in ((0, 1, 2, 3, 4), (0, 1, 12, 13), (20, 21))
]
PLACES = {
    name: (names[depth - 1] if depth else None, depth) for names in CHAINS for depth, name in enumerate(names)
}
TIERS: list[Tier] = [Tier.DRAM, Tier.SSD]
names = st.sampled_from(sorted(PLACES))
tiers_named = st.sampled_from(TIERS)
limits = st.builds(
    TierLimits,
    st.integers(1, 6),
    st.sampled_from(sorted(EVICTIONS)),
    st.sampled_from([1.0, 0.7]),
    st.sampled_from([0.7, 0.5]),
)


class TierMachineModel(RuleBasedStateMachine):
    """`there` is what is in each tier, with its pins; `writing`, `reading` (promoted?) what is under way."""

    @initialize(
        ssd=limits,
        dram=st.one_of(st.just(TierLimits()), limits),
        admission=st.sampled_from(sorted(ADMISSIONS)),
        writes=st.integers(1, 3),
        reads=st.integers(0, 3),
    )
    def start(self, ssd: TierLimits, dram: TierLimits, admission: str, writes: int, reads: int) -> None:
        self.config = TierConfig(
            ssd, dram, admission, writes, reads, 5, full_pause_s=3.0, write_bytes_per_s=4.0, block_bytes=3
        )
        self.tiers = TierMachine(self.config)
        self.now = 100.0
        self.there: dict[Tier, dict[BlockHash, int]] = {Tier.DRAM: {}, Tier.SSD: {}}
        self.writing: set[BlockHash] = set()
        self.reading: dict[BlockHash, bool] = {}
        self.full_until_s = 0.0
        self.wakes: list[float] = []

    # -- what the machine answers -----------------------------------------------------------------------------

    def tell(self, event: Event) -> None:
        for command in self.tiers.handle(event, self.now):
            match command:
                case Demote(name):
                    self.demoted(name)
                case Promote(chain, first):
                    assert all(name in self.there[Tier.DRAM] for name in chain[:first])
                    for name in command.names:
                        assert name not in self.there[Tier.DRAM]
                        self.read_begins(name, promoted=True)
                case Read(name):
                    self.read_begins(name, promoted=False)
                case Drop(tier, name):
                    self.dropped(tier, name)
                case WakeAt(at_s):
                    assert at_s > self.now
                    self.wakes.append(at_s)

    def demoted(self, name: BlockHash) -> None:
        assert name in self.there[Tier.DRAM], "only what is in DRAM can be written"
        assert name not in self.there[Tier.SSD]
        assert name not in self.writing
        assert name not in self.reading, "a file is written while it is read"
        assert self.now >= self.full_until_s, "a full disk is asked for a write"
        self.writing.add(name)
        assert len(self.writing) <= self.config.writes_max

    def read_begins(self, name: BlockHash, promoted: bool) -> None:
        assert name in self.there[Tier.SSD], "only what is on the SSD can be read"
        assert name not in self.reading
        assert name not in self.writing
        self.reading[name] = promoted
        assert len(self.reading) <= self.config.reads_max

    def dropped(self, tier: Tier, name: BlockHash) -> None:
        pins = self.there[tier].pop(name)
        assert not pins, "a pinned block was dropped"
        assert name not in (self.writing if tier == Tier.DRAM else self.reading), "it is being read"

    # -- what may happen --------------------------------------------------------------------------------------

    @rule(name=names)
    def stored(self, name: BlockHash) -> None:
        self.there[Tier.DRAM].setdefault(name, 0)
        if name in self.reading:
            self.reading[name] = False  # it is there already, and may be gone before the read is over
        self.tell(Stored(name, *PLACES[name]))

    @rule(name=names)
    def removed(self, name: BlockHash) -> None:
        self.there[Tier.DRAM].pop(name, None)
        self.tell(Removed(name))

    @rule(chain=st.sampled_from(CHAINS), count=st.integers(1, 5), keep=st.booleans())
    def asked(self, chain: list[BlockHash], count: int, keep: bool) -> None:
        self.tell(Asked(chain[:count], keep))

    @rule(name=names)
    def found(self, name: BlockHash) -> None:
        if name not in self.writing:
            self.there[Tier.SSD].setdefault(name, 0)
        self.tell(Found(name))

    @rule(name=names, how=st.sampled_from(["done", "done", "failed", "full"]))
    def write_ends(self, name: BlockHash, how: str) -> None:
        """Of any block: those that were never begun, and words that come twice, change nothing."""
        name = min(self.writing, default=name) if how == "done" else name
        if how == "done":
            if name in self.writing:
                self.there[Tier.SSD][name] = 0
            self.writing.discard(name)
            self.tell(WriteDone(name))
        else:
            self.writing.discard(name)
            if how == "full":
                self.full_until_s = self.now + self.config.full_pause_s
            self.tell(WriteFailed(name, how == "full"))

    @rule(chain=st.sampled_from(CHAINS), how=st.sampled_from(["done", "failed", "lost"]))
    def promoted(self, chain: list[BlockHash], how: str) -> None:
        """A chain's beginning comes from the SSD, or does not: seldom enough by chance."""
        self.found(chain[0])
        self.asked(chain, 2, keep=True)
        self.agrees()
        self.read_ends(chain[0], how)

    @rule(name=names, how=st.sampled_from(["done", "done", "failed", "lost"]))
    def read_ends(self, name: BlockHash, how: str) -> None:
        name = min(self.reading, default=name)
        was_read = name in self.reading
        promoted = self.reading.pop(name, False)
        if how == "done":
            if promoted:
                self.there[Tier.DRAM].setdefault(name, 0)
            self.tell(ReadDone(name))
        else:
            if how == "lost" and was_read:
                self.there[Tier.SSD].pop(name, None)
            self.tell(ReadFailed(name, how == "lost"))

    @rule(name=names)
    def lost(self, name: BlockHash) -> None:
        self.there[Tier.SSD].pop(name, None)
        self.tell(Lost(name))

    @rule(tier=tiers_named, name=names)
    def pinned(self, tier: Tier, name: BlockHash) -> None:
        if name in self.there[tier]:
            self.there[tier][name] += 1
        self.tell(Pinned(tier, name))

    @rule(tier=tiers_named, name=names)
    def released(self, tier: Tier, name: BlockHash) -> None:
        if self.there[tier].get(name):
            self.there[tier][name] -= 1
        self.tell(Released(tier, name))

    @rule(tier=tiers_named, blocks=st.integers(0, 7))
    def pressure(self, tier: Tier, blocks: int) -> None:
        self.tell(Pressure(tier, blocks))

    @rule(passed_s=st.sampled_from([0.0, 0.25, 1.0, 5.0]))
    def time_passes(self, passed_s: float) -> None:
        self.now += passed_s
        due = [at_s for at_s in self.wakes if at_s <= self.now]
        self.wakes = [at_s for at_s in self.wakes if at_s > self.now]
        if due:
            self.tell(Timer())

    @rule()
    def node_lost(self) -> None:
        self.there = {Tier.DRAM: {}, Tier.SSD: dict.fromkeys(self.there[Tier.SSD], 0)}
        self.writing.clear()
        self.reading.clear()
        self.wakes.clear()
        self.tell(NodeLost())

    # -- what always holds ------------------------------------------------------------------------------------

    @invariant()
    def agrees(self) -> None:
        self.tiers.check()
        for tier in TIERS:
            assert sorted(self.tiers.names(tier)) == sorted(self.there[tier])
        coming = sum(
            promoted and name not in self.there[Tier.DRAM] for name, promoted in self.reading.items()
        )
        for limit, taken in (
            (self.config.ssd.blocks, len(self.there[Tier.SSD]) + len(self.writing)),
            (self.config.dram.blocks, len(self.there[Tier.DRAM]) + coming),
        ):
            assert limit is None or taken <= limit

    def teardown(self) -> None:
        """When all is over and nothing is held, pressure empties both tiers."""
        if not hasattr(self, "tiers"):
            return
        self.now += 1000.0
        self.node_lost()
        for tier in TIERS:
            limit = (self.config.ssd if tier == Tier.SSD else self.config.dram).blocks
            if limit is not None:
                self.tell(Pressure(tier, limit))
                assert self.there[tier] == {}


TestTierMachine = TierMachineModel.TestCase
TestTierMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
