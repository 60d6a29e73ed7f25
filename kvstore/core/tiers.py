"""Which blocks go to the SSD tier, which come back to DRAM, which leave: a pure machine over what happens to blocks.

    DRAM   Stored ──► admission ──► queued ──► Demote ──► WriteDone        Drop(dram)
                      (policy)                   │            │                ▲
                                            WriteFailed       ▼                │ watermark, Pressure
    SSD                                       Found ──►     there  ──► Drop(ssd)
                      Asked ──► Promote (into a slot), Read (past DRAM) ──► ReadDone | ReadFailed

The node's driver says what happened and carries out the commands; bytes, files and the time are its own. The rules:

1. A block is written only while it is in DRAM; one that leaves DRAM while it is queued is not written.
2. At most one operation is under way for a block and a tier, at most `writes_max` writes and `reads_max` reads in all,
   so that reads keep the disk. What cannot be read at once is not read: who asked computes it.
3. What is in a tier, and what is on its way there, never exceed its limit. Above `high` blocks go until `low`, in the
   order of the tier's eviction policy (`kvstore.core.eviction`).
4. What is pinned stays: by the driver (counted), by a write that reads it in DRAM, by a read of its file.
5. A failed write leaves nothing. A lost file is a miss, and the block may be written again.
6. A disk that was full is left alone for a while, and asked for nothing but reads.

Where DRAM has no limit here it has another owner of its victims (the slot pool), and the machine only knows what is in
it. Conservation, checked by `check()`: in each tier free + used + pinned = total.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from math import inf

from kvstore.core.blocks import BlockHash, Tier
from kvstore.core.eviction import Eviction, eviction

_Place = tuple[BlockHash | None, int]  # parent, and how many blocks are before this one


@dataclass(frozen=True, slots=True)
class TierLimits:
    """`blocks` None: as many as there are. `high` and `low` are shares of it; `eviction` is a key of `EVICTIONS`."""

    blocks: int | None = None
    eviction: str = "lru"
    high: float = 1.0
    low: float = 1.0


@dataclass(frozen=True, slots=True)
class TierConfig:
    """`admission` is a key of `ADMISSIONS`; `full_pause_s` is how long a full disk is left alone.

    `reads_max` 0: the driver reads as it likes, and is told nothing. The admissions within a budget write
    `write_bytes_per_s`, a second's worth of it at once, in blocks of `block_bytes`.
    """

    ssd: TierLimits
    dram: TierLimits = TierLimits()
    admission: str = "all"
    writes_max: int = 2
    reads_max: int = 0
    queue_max: int = 4096
    full_pause_s: float = 10.0
    write_bytes_per_s: float = inf
    block_bytes: int = 0


# -- what happens ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stored:
    """The block is committed in DRAM, for everyone to see: the one after `parent`, with `depth` blocks before it."""

    name: BlockHash
    parent: BlockHash | None = None
    depth: int = 0


@dataclass(frozen=True, slots=True)
class Removed:
    """The block is in DRAM no more."""

    name: BlockHash


@dataclass(frozen=True, slots=True)
class Asked:
    """A request asked for this chain, from its first block on; `keep`: its blocks are of use in this node's DRAM."""

    names: Sequence[BlockHash]
    keep: bool = True


@dataclass(frozen=True, slots=True)
class Found:
    """The block's file was there when the node started."""

    name: BlockHash


@dataclass(frozen=True, slots=True)
class WriteDone:
    name: BlockHash


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """`full`: the disk has no room; otherwise the block was gone, or the disk failed."""

    name: BlockHash
    full: bool


@dataclass(frozen=True, slots=True)
class ReadDone:
    """A promoted block is in DRAM (with or without a `Stored` before), or one read past DRAM was delivered."""

    name: BlockHash


@dataclass(frozen=True, slots=True)
class ReadFailed:
    """`lost`: the file is gone or was wrong; otherwise there was no slot or no time."""

    name: BlockHash
    lost: bool


@dataclass(frozen=True, slots=True)
class Lost:
    """The file is gone, or was not what was written, or an operator wants it gone."""

    name: BlockHash


@dataclass(frozen=True, slots=True)
class Pinned:
    """A lease of the driver's begins on what is in this tier; a `Released` ends it. Pins are counted."""

    tier: Tier
    name: BlockHash


@dataclass(frozen=True, slots=True)
class Released:
    tier: Tier
    name: BlockHash


@dataclass(frozen=True, slots=True)
class Pressure:
    """Room for so many more blocks is wanted now."""

    tier: Tier
    blocks: int


@dataclass(frozen=True, slots=True)
class NodeLost:
    """The node ended: its DRAM, its pins and all that was under way are gone; files that were whole are not."""


@dataclass(frozen=True, slots=True)
class Timer:
    """The time of a `WakeAt` has come."""


Event = (
    Stored
    | Removed
    | Asked
    | Found
    | WriteDone
    | WriteFailed
    | ReadDone
    | ReadFailed
    | Lost
    | Pinned
    | Released
    | Pressure
    | NodeLost
    | Timer
)


# -- what to do -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Demote:
    """Copy the block from DRAM to the SSD, then say WriteDone or WriteFailed. It stays in DRAM too."""

    name: BlockHash


@dataclass(frozen=True, slots=True)
class Promote:
    """Copy `chain[first:]` from the SSD into DRAM, where `chain[:first]` is; then ReadDone or ReadFailed for each."""

    chain: tuple[BlockHash, ...]
    first: int

    @property
    def names(self) -> tuple[BlockHash, ...]:
        return self.chain[self.first :]


@dataclass(frozen=True, slots=True)
class Read:
    """Copy the block from the SSD to who asked, past DRAM, then say ReadDone or ReadFailed."""

    name: BlockHash


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget the block in this tier. No answer is expected; a late `Removed` does no harm."""

    tier: Tier
    name: BlockHash


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Say `Timer` then; a later WakeAt replaces none before."""

    at_s: float


Command = Demote | Promote | Read | Drop | WakeAt


# -- admission to the SSD ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Admit:
    pass


@dataclass(frozen=True, slots=True)
class Reject:
    reason: str


@dataclass(frozen=True, slots=True)
class Throttle:
    """Not before so many seconds have passed."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """A block in DRAM: how often it was asked for, and when the write budget has room for it."""

    asked: int
    budget_wait_s: float


Verdict = Admit | Reject | Throttle
Admission = Callable[[Candidate], Verdict]


def admit_all(block: Candidate) -> Verdict:
    """Every block: an SSD that is large and fast enough for all that is computed."""
    return Admit()


def admit_second(block: Candidate) -> Verdict:
    """Blocks that were asked for before, so that prompts that come once wear no disk."""
    return Admit() if block.asked > 1 else Reject("asked for once only")


def within_budget(admission: Admission) -> Admission:
    """What `admission` admits, no faster than the disk is to be worn."""

    def admit(block: Candidate) -> Verdict:
        verdict = admission(block)
        late = isinstance(verdict, Admit) and block.budget_wait_s > 0
        return Throttle(block.budget_wait_s) if late else verdict

    return admit


ADMISSIONS: dict[str, Admission] = {
    "all": admit_all,
    "second": admit_second,
    "budget": within_budget(admit_all),
    "second_budget": within_budget(admit_second),
}

_REMEMBERED_MAX = 100_000
_BURST_S = 1.0
_AT_ONCE_S = 1e-6  # less is an error of rounding
_COUNTED = ("written", "refused", "failed", "evicted", "read", "read_failed")


# -- one tier ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Block:
    placed: bool  # its parent is known
    pins: int = 0
    busy: bool = False  # an operation reads it


@dataclass(slots=True)
class _Contents:
    """What is in one tier and on its way there."""

    limits: TierLimits
    blocks: dict[BlockHash, _Block] = field(init=False, default_factory=dict)
    coming: dict[BlockHash, None] = field(init=False, default_factory=dict)
    policy: Eviction = field(init=False)

    def __post_init__(self) -> None:
        self.policy = eviction(self.limits.eviction, self.limits.blocks or 1)

    @property
    def taken(self) -> int:
        return len(self.blocks) + len(self.coming)

    def fits(self, wanted: int) -> bool:
        return self.limits.blocks is None or self.taken + wanted <= self.limits.blocks

    def add(self, name: BlockHash, place: _Place | None, busy: bool, fresh: bool = True) -> None:
        self.coming.pop(name, None)
        self.blocks[name] = _Block(placed=place is not None)
        self.policy.add(name, *(place or (None, 0)), fresh=fresh)
        self.hold(name, busy=busy)

    def remove(self, name: BlockHash) -> None:
        if self.blocks.pop(name, None) is not None:
            self.policy.removed(name)

    def hold(self, name: BlockHash, pins: int = 0, busy: bool | None = None) -> None:
        """Adds to its pins, or says whether an operation reads it. A late word about what is gone says nothing."""
        block = self.blocks.get(name)
        if block is None:
            return
        was = block.pins > 0 or block.busy
        block.pins = max(0, block.pins + pins)
        block.busy = block.busy if busy is None else busy
        now = block.pins > 0 or block.busy
        if now and not was:
            self.policy.pinned(name)
        if was and not now:
            self.policy.unpinned(name)

    def touch(self, names: Sequence[BlockHash]) -> None:
        for depth in reversed(range(len(names))):  # the end of a chain is the first victim
            name = names[depth]
            block = self.blocks.get(name)
            if block is None:
                continue
            if depth and not block.placed:  # found after a restart: the first to ask for it knows its chain
                self.policy.removed(name)
                self.policy.add(name, names[depth - 1], depth)
                if block.pins or block.busy:
                    self.policy.pinned(name)
            block.placed = True
            self.policy.touched(name, asked=True)

    def let_go(self) -> None:
        """No one holds anything, nothing comes."""
        self.coming.clear()
        for name, block in self.blocks.items():
            self.hold(name, pins=-block.pins, busy=False)

    def make_room(self, wanted: int) -> list[BlockHash]:
        """What has to go for `wanted` more; where it is not enough, all that may. It is gone then."""
        limits = self.limits
        if limits.blocks is None or self.taken + wanted <= int(limits.high * limits.blocks):
            return []
        victims = self.policy.victims(self.taken + wanted - int(limits.low * limits.blocks))
        for name in victims:
            self.remove(name)
        return victims

    def check(self, tier: Tier) -> None:
        pinned = sum(block.pins > 0 or block.busy for block in self.blocks.values()) + len(self.coming)
        used = self.policy.idle
        assert self.taken == used + pinned, f"{tier}: {used} used and {pinned} pinned of {self.taken}"
        assert self.fits(0), f"{tier}: {self.taken} blocks where {self.limits.blocks} may be"
        assert not self.blocks.keys() & self.coming.keys(), f"{tier}: a block comes that is there"
        self.policy.check()


# -- the machine --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class TierMachine:
    """See the module's rules. Any event may come late, twice, or about a block that is not known."""

    config: TierConfig
    counts: dict[str, int] = field(init=False, default_factory=lambda: dict.fromkeys(_COUNTED, 0))
    _dram: _Contents = field(init=False)
    _ssd: _Contents = field(init=False)
    _queued: dict[BlockHash, _Place] = field(init=False, default_factory=dict)  # to be written
    _writing: dict[BlockHash, _Place] = field(init=False, default_factory=dict)
    _reading: dict[BlockHash, _Place] = field(init=False, default_factory=dict)  # promoted or past DRAM
    _asked: "OrderedDict[BlockHash, int]" = field(init=False, default_factory=OrderedDict)
    _full_until_s: float = field(init=False, default=-inf)
    _paid_until_s: float = field(init=False, default=-inf)  # of the write budget
    _wake_s: float = field(init=False, default=inf)

    def __post_init__(self) -> None:
        if self.config.admission not in ADMISSIONS:
            raise ValueError(f"ssd admission {self.config.admission!r} is none of {', '.join(ADMISSIONS)}")
        for tier, limits in ((Tier.SSD, self.config.ssd), (Tier.DRAM, self.config.dram)):
            if limits.blocks is not None and limits.blocks < 1:
                raise ValueError(f"the {tier} quota holds no block")
            if not 0 < limits.low <= limits.high <= 1:
                raise ValueError(
                    f"{tier} watermarks are 0 < low <= high <= 1, not {limits.low}, {limits.high}"
                )
        self._dram, self._ssd = _Contents(self.config.dram), _Contents(self.config.ssd)

    # -- asking -------------------------------------------------------------------------------------------

    def has(self, name: BlockHash, tier: Tier = Tier.SSD) -> bool:
        return name in self._tier(tier).blocks

    def names(self, tier: Tier = Tier.SSD) -> list[BlockHash]:
        """The blocks that are there, the first to come first."""
        return list(self._tier(tier).blocks)

    def admission(self, name: BlockHash, now: float) -> Verdict:
        """What is to become of a block in DRAM."""
        if now < self._full_until_s:
            return Throttle(self._full_until_s - now)
        wait_s = self._paid_until_s - now
        candidate = Candidate(self._asked.get(name, 0), wait_s if wait_s > _AT_ONCE_S else 0.0)
        return ADMISSIONS[self.config.admission](candidate)

    # -- events in, commands out --------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Command]:
        return [*self._happened(event, now), *self._start_writes(now)]

    def _happened(self, event: Event, now: float) -> Iterable[Command]:  # noqa: PLR0912  # one branch an event
        match event:
            case Stored():
                return self._stored(event, now)
            case Removed(name):
                self._left_dram(name)
            case Asked(names, keep):
                self._asked_for(names, now)
                return self._start_reads(names, keep)
            case Found(name):
                return self._found(name)
            case WriteDone(name):
                place = self._write_over(name)
                if place is not None:
                    self._ssd.add(name, place, busy=False)
                    self.counts["written"] += 1
            case WriteFailed(name, full):
                self.counts["failed"] += self._write_over(name) is not None
                if full:
                    self._full_until_s = now + self.config.full_pause_s
                    self._queued.clear()
            case ReadDone(name):
                self._read_over(name, came=True)
            case ReadFailed(name, lost):
                if self._read_over(name, came=False) and lost:
                    self._ssd.remove(name)
            case Lost(name):
                self._ssd.remove(name)
            case Pinned(tier, name):
                self._tier(tier).hold(name, pins=1)
            case Released(tier, name):
                self._tier(tier).hold(name, pins=-1)
            case Pressure(tier, blocks):
                return self._make_room(tier, blocks)
            case NodeLost():
                self._forget_dram()
            case Timer():
                self._wake_s = inf
        return ()

    # -- DRAM ---------------------------------------------------------------------------------------------

    def _stored(self, event: Stored, now: float) -> list[Command]:
        name, place = event.name, (event.parent, event.depth)
        drops: list[Command] = []
        if name not in self._dram.blocks:
            if name not in self._dram.coming:
                drops = self._make_room(Tier.DRAM, 1)
                if not self._dram.fits(1):
                    return [*drops, Drop(Tier.DRAM, name)]
            self._dram.add(name, place, busy=name in self._writing)
        self._consider(name, place, now)
        return drops

    def _left_dram(self, name: BlockHash) -> None:
        self._dram.remove(name)
        self._queued.pop(name, None)

    def _forget_dram(self) -> None:
        self._dram = _Contents(self.config.dram)
        self._queued.clear()
        self._writing.clear()
        self._reading.clear()
        self._ssd.let_go()
        self._wake_s = inf

    # -- requests -----------------------------------------------------------------------------------------

    def _asked_for(self, names: Sequence[BlockHash], now: float) -> None:
        for name in reversed(names):
            self._asked[name] = self._asked.pop(name, 0) + 1
        while len(self._asked) > _REMEMBERED_MAX:
            self._asked.popitem(last=False)
        self._dram.touch(names)
        self._ssd.touch(names)
        for depth, name in enumerate(names):
            if name in self._dram.blocks:
                self._consider(name, (names[depth - 1] if depth else None, depth), now)

    def _start_reads(self, names: Sequence[BlockHash], keep: bool) -> list[Command]:
        """Of what follows the chain's prefix in DRAM: what is on the SSD, without a gap."""
        first = sum(1 for _ in takewhile(self._dram.blocks.__contains__, names))
        wanted = names[first : first + max(0, self.config.reads_max - len(self._reading))]
        run = list(takewhile(self._readable, wanted))
        drops = self._make_room_beside(names[:first], len(run)) if keep else []
        while keep and run and not self._dram.fits(len(run)):
            run.pop()
        for depth, name in enumerate(run, first):
            self._reading[name] = (names[depth - 1] if depth else None, depth)
            self._ssd.hold(name, busy=True)
            if keep:
                self._dram.coming[name] = None
        if not keep:
            return [Read(name) for name in run]
        return [*drops, Promote(tuple(names[: first + len(run)]), first)] if run else drops

    def _readable(self, name: BlockHash) -> bool:
        return name in self._ssd.blocks and name not in self._reading and name not in self._dram.blocks

    def _make_room_beside(self, prefix: Sequence[BlockHash], wanted: int) -> list[Command]:
        for name in prefix:
            self._dram.hold(name, pins=1)
        drops = self._make_room(Tier.DRAM, wanted) if wanted else []
        for name in prefix:
            self._dram.hold(name, pins=-1)
        return drops

    def _read_over(self, name: BlockHash, came: bool) -> bool:
        """False if it was not being read."""
        place = self._reading.pop(name, None)
        if place is None:
            return False
        self._ssd.hold(name, busy=False)
        if name in self._dram.coming and came:
            self._dram.add(name, place, busy=False)
        self._dram.coming.pop(name, None)
        self.counts["read" if came else "read_failed"] += 1
        return True

    # -- the SSD ------------------------------------------------------------------------------------------

    def _found(self, name: BlockHash) -> list[Command]:
        if name in self._ssd.blocks or name in self._writing:
            return []
        self._queued.pop(name, None)
        if not self._ssd.fits(1):
            return [Drop(Tier.SSD, name)]
        self._ssd.add(name, None, busy=name in self._reading, fresh=False)
        return []

    def _consider(self, name: BlockHash, place: _Place, now: float) -> None:
        if name in self._ssd.blocks or name in self._queued or name in self._writing:
            return
        refused = isinstance(self.admission(name, now), Reject) or now < self._full_until_s
        if refused or len(self._queued) >= self.config.queue_max:
            self.counts["refused"] += 1
        else:
            self._queued[name] = place

    def _start_writes(self, now: float) -> list[Command]:
        commands: list[Command] = []
        while len(self._writing) < self.config.writes_max and now >= self._full_until_s:
            name = next((name for name in self._queued if name not in self._reading), None)
            if name is None:
                break
            verdict = self.admission(name, now)
            if isinstance(verdict, Throttle):
                commands += self._wake(now + verdict.seconds)
                break
            if isinstance(verdict, Reject):
                del self._queued[name]
                self.counts["refused"] += 1
                continue
            commands += self._make_room(Tier.SSD, 1)
            if not self._ssd.fits(1):
                break
            commands.append(self._write(name, now))
        return commands

    def _write(self, name: BlockHash, now: float) -> Demote:
        self._writing[name] = self._queued.pop(name)
        self._ssd.coming[name] = None
        self._dram.hold(name, busy=True)
        seconds = self.config.block_bytes / self.config.write_bytes_per_s
        self._paid_until_s = max(self._paid_until_s, now - _BURST_S) + seconds
        return Demote(name)

    def _write_over(self, name: BlockHash) -> _Place | None:
        place = self._writing.pop(name, None)
        if place is not None:
            del self._ssd.coming[name]
            self._dram.hold(name, busy=False)
        return place

    # -- both ---------------------------------------------------------------------------------------------

    def _tier(self, tier: Tier) -> _Contents:
        return self._dram if tier == Tier.DRAM else self._ssd

    def _make_room(self, tier: Tier, wanted: int) -> list[Command]:
        victims = self._tier(tier).make_room(wanted)
        self.counts["evicted"] += len(victims)
        if tier == Tier.DRAM:
            for name in victims:
                self._queued.pop(name, None)
        return [Drop(tier, name) for name in victims]

    def _wake(self, at_s: float) -> list[Command]:
        if at_s >= self._wake_s:
            return []
        self._wake_s = at_s
        return [WakeAt(at_s)]

    def check(self) -> None:
        """Asserts the rules."""
        self._dram.check(Tier.DRAM)
        self._ssd.check(Tier.SSD)
        assert len(self._writing) <= self.config.writes_max, "too many writes at once"
        assert len(self._reading) <= self.config.reads_max, "too many reads at once"
        assert list(self._ssd.coming) == list(self._writing), "what comes to the ssd is not what is written"
        assert self._dram.coming.keys() <= self._reading.keys(), "a block comes to DRAM that is not read"
        assert not self._writing.keys() & self._reading.keys(), "a file is read and written at once"
        assert not self._queued.keys() & (self._ssd.blocks.keys() | self._writing.keys()), "written twice"
        assert self._queued.keys() <= self._dram.blocks.keys(), (
            "a block waits to be written that is not there"
        )
        for tier, busy in ((self._dram, self._writing), (self._ssd, self._reading)):
            for name, block in tier.blocks.items():
                assert block.busy == (name in busy), f"{name.hex()[:8]} is held by no operation, or not held"
