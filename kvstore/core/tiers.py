"""Which blocks go to the SSD tier, and which leave it: a pure machine over what happens to blocks.

    Stored ──► admission ──► queued ──► Write ──► there ──► Delete
               (policy)                   │         ▲
                                  WriteFailed     Found (after a restart)

The node's driver says what happened and carries out the commands; bytes, files and the time are its own. The rules:

1. A block is written only while it is in DRAM; one that leaves DRAM while it is queued is not written.
2. At most one operation is under way for a block, and at most `writes_max` writes in all, so that reads keep the disk.
3. What is there and what is being written never exceed `capacity_blocks`. The least recently asked for goes first,
   and of one chain the deepest, because without its first block the rest of a chain cannot be found.
4. A disk that was full is left alone for a while, and asked for nothing but reads.

Conservation, checked by `check()`: free + used + writing = capacity.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.core.blocks import BlockHash


@dataclass(frozen=True, slots=True)
class TierConfig:
    """`admission` is a key of `ADMISSIONS`; `full_pause_s` is how long a full disk is left alone."""

    capacity_blocks: int
    admission: str = "all"
    writes_max: int = 2
    queue_max: int = 4096
    full_pause_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Stored:
    """The block is committed in DRAM, for everyone to see."""

    name: BlockHash


@dataclass(frozen=True, slots=True)
class Removed:
    """The block is in DRAM no more."""

    name: BlockHash


@dataclass(frozen=True, slots=True)
class Asked:
    """A request asked for this chain of blocks."""

    names: Sequence[BlockHash]


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
class Lost:
    """The file is gone, or was not what was written, or an operator wants it gone."""

    name: BlockHash


Event = Stored | Removed | Asked | Found | WriteDone | WriteFailed | Lost


@dataclass(frozen=True, slots=True)
class Write:
    """Copy the block from DRAM to the SSD, then say WriteDone or WriteFailed."""

    name: BlockHash


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete the block's file. No answer is expected."""

    name: BlockHash


Command = Write | Delete


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


Admission = Callable[[int], Admit | Reject]
"""Of a block that was asked for so many times before it was stored."""


def admit_all(asked: int) -> Admit | Reject:
    """Every block: an SSD that is large and fast enough for all that is computed."""
    return Admit()


def admit_second(asked: int) -> Admit | Reject:
    """Blocks that were asked for before, so that prompts that come once wear no disk."""
    return Admit() if asked > 1 else Reject("asked for once only")


ADMISSIONS: dict[str, Admission] = {"all": admit_all, "second": admit_second}

_REMEMBERED_MAX = 100_000
_COUNTED = ("written", "refused", "failed", "evicted")


@dataclass(slots=True)
class TierMachine:
    """See the module's rules."""

    config: TierConfig
    _there: "OrderedDict[BlockHash, None]" = field(
        init=False, default_factory=OrderedDict
    )  # victims, oldest first
    _dram: set[BlockHash] = field(init=False, default_factory=set)
    _queued: dict[BlockHash, None] = field(init=False, default_factory=dict)
    _writing: set[BlockHash] = field(init=False, default_factory=set)
    _asked: "OrderedDict[BlockHash, int]" = field(init=False, default_factory=OrderedDict)
    _full_until_s: float = field(init=False, default=float("-inf"))
    counts: dict[str, int] = field(init=False, default_factory=lambda: dict.fromkeys(_COUNTED, 0))

    def __post_init__(self) -> None:
        if self.config.admission not in ADMISSIONS:
            raise ValueError(f"ssd admission {self.config.admission!r} is none of {', '.join(ADMISSIONS)}")
        if self.config.capacity_blocks < 1:
            raise ValueError("the ssd quota holds no block")

    # -- asking -------------------------------------------------------------------------------------------

    def has(self, name: BlockHash) -> bool:
        return name in self._there

    def names(self) -> list[BlockHash]:
        """The blocks that are there, least recently asked for first."""
        return list(self._there)

    def admission(self, name: BlockHash, now: float) -> Admit | Reject | Throttle:
        """What is to become of a block in DRAM."""
        if now < self._full_until_s:
            return Throttle(self._full_until_s - now)
        if len(self._queued) >= self.config.queue_max:
            return Reject("the disk is too slow for what is stored")
        return ADMISSIONS[self.config.admission](self._asked.get(name, 0))

    # -- events in, commands out --------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Command]:
        """Any event may come late, twice, or about a block that is not known."""
        match event:
            case Stored(name):
                self._dram.add(name)
                self._consider(name, now)
            case Removed(name):
                self._dram.discard(name)
                self._queued.pop(name, None)
            case Asked(names):
                self._touch(names, now)
            case Found(name):
                if name not in self._writing:
                    self._queued.pop(name, None)
                    self._there.setdefault(name)
                    self._there.move_to_end(name, last=False)
            case WriteDone(name):
                if name in self._writing:
                    self._writing.discard(name)
                    self._there[name] = None
                    self.counts["written"] += 1
            case WriteFailed(name, full):
                self._writing.discard(name)
                self.counts["failed"] += 1
                if full:
                    self._full_until_s = now + self.config.full_pause_s
                    self._queued.clear()
            case Lost(name):
                self._there.pop(name, None)
        return [*self._shrink(), *self._start(now)]

    def _consider(self, name: BlockHash, now: float) -> None:
        if name in self._there or name in self._queued or name in self._writing:
            return
        verdict = self.admission(name, now)
        if isinstance(verdict, Admit):
            self._queued[name] = None
        else:
            self.counts["refused"] += 1

    def _touch(self, names: Sequence[BlockHash], now: float) -> None:
        for name in reversed(names):  # rule 3: the end of a chain is the first victim
            self._asked[name] = self._asked.pop(name, 0) + 1
            if name in self._there:
                self._there.move_to_end(name)
            elif name in self._dram:
                self._consider(name, now)
        while len(self._asked) > _REMEMBERED_MAX:
            self._asked.popitem(last=False)

    def _shrink(self, wanted: int = 0) -> list[Command]:
        """Makes room for `wanted` more."""
        deleted: list[Command] = []
        while self._there and len(self._there) + len(self._writing) + wanted > self.config.capacity_blocks:
            name, _ = self._there.popitem(last=False)
            self.counts["evicted"] += 1
            deleted.append(Delete(name))
        return deleted

    def _start(self, now: float) -> list[Command]:
        commands: list[Command] = []
        while self._queued and len(self._writing) < self.config.writes_max and now >= self._full_until_s:
            commands += self._shrink(1)
            if len(self._there) + len(self._writing) >= self.config.capacity_blocks:
                break
            name = next(iter(self._queued))
            del self._queued[name]
            self._writing.add(name)
            commands.append(Write(name))
        return commands

    def check(self) -> None:
        """Asserts the rules."""
        used = len(self._there) + len(self._writing)
        assert used <= self.config.capacity_blocks, (
            f"{used} blocks on an ssd for {self.config.capacity_blocks}"
        )
        assert len(self._writing) <= self.config.writes_max, "too many writes at once"
        assert not self._writing & self._there.keys(), "a block is written that is there"
        assert not self._queued.keys() & self._there.keys(), "a block waits to be written that is there"
        assert not self._queued.keys() & self._writing, "a block waits to be written that is being written"
        assert self._queued.keys() <= self._dram, "a block waits to be written that is not in DRAM"
