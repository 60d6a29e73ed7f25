"""Which block of a tier goes first: eviction policies, by name in `EVICTIONS`.

Pure, and without a clock: a policy counts uses, not seconds, so a quiet night makes nothing old. Its owner (the slot
pool, a tier) says what happens to visible blocks and asks for victims. What every policy promises:

1. A pinned block is never a victim.
2. A just-written block is not the first victim: the latest sixteenth (at least one) goes last, whatever its rank.
   `lru` and `s3fifo` need no such rule, because the latest is the last of its queue.
3. `victims` only proposes. A block leaves when its owner says `removed`.
4. Of blocks that are added or touched in one go the owner names the deepest first, so that of equals the end of a
   chain goes before its beginning, without which the rest cannot be found.
5. `cost_aware` promises it for all: a block with an extension (child) that stays is no victim before that.

All operations are O(log n), amortised; `victims` for each victim.

A ranked policy is a sort key. It grows with every use, so the heap holds one valid entry a block and stale ones, which
are thrown away as they surface; it is built anew when these are the most. S3-FIFO (Yang et al., SOSP 2023) is queues.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import log2
from typing import Protocol

from kvstore.core.blocks import BlockHash


class Eviction(Protocol):
    """One tier's blocks, in the order of their going. See the module's promises."""

    @property
    def idle(self) -> int:
        """Blocks that are not pinned: no more than these can be victims."""
        ...

    def add(
        self,
        name: BlockHash,
        parent: BlockHash | None,
        depth: int,
        kv_bytes: int = 1,
        fresh: bool = True,
    ) -> None:
        """The block is there from now on, unpinned; a name that is there already is a bug.

        `parent` is the block before it in its chain, which need not be there, and `depth` how many are before it.
        Only ratios of `kv_bytes` count. A block that is not `fresh` was there before its owner started: it counts as
        used before all others, and is not protected.
        """
        ...

    def touched(self, name: BlockHash, asked: bool) -> None:
        """A use of the block begins, because a request `asked` for it, or a use ends."""
        ...

    def pinned(self, name: BlockHash) -> None:
        """It is no victim until `unpinned`. Owners that count pins tell only the first."""
        ...

    def unpinned(self, name: BlockHash) -> None:
        """The last pin is gone. Changes no rank: see `touched`."""
        ...

    def removed(self, name: BlockHash) -> None:
        """It is gone, evicted or otherwise, pinned or not."""
        ...

    def victims(self, count: int) -> list[BlockHash]:
        """Up to `count` blocks in the order in which they should go; fewer where pins stand in the way."""
        ...

    def check(self) -> None:
        """Asserts that the books are consistent."""
        ...


Rank = tuple[float, ...]
"""Smaller goes first. Ends in a number that no other block has."""


@dataclass(slots=True)
class Use:
    """What a ranked policy knows of one block."""

    parent: BlockHash | None
    depth: int
    kv_bytes: int
    last: int
    """Number of the latest use, over all blocks of the tier: unique. Negative: before all of them."""
    asked: int = 0
    weight: float = 0.0
    """log2 of its uses, each worth half as much after every half-life; comparable at any time (see `reuse`)."""
    fresh: bool = False
    pinned: bool = False
    rank: Rank = ()


RankOf = Callable[[Use], Rank]


def lru(use: Use) -> Rank:
    """The least recently used goes first."""
    return (use.last,)


def lfu(use: Use) -> Rank:
    """The least frequently asked for, of these the least recently used."""
    return (use.asked, use.last)


def length_aware(use: Use) -> Rank:
    """Mooncake's: like LFU, but of those equally often asked for the latest in its request goes first."""
    return (use.asked, -use.depth, use.last)


DOUBLE_DEPTH = 44
"""Depth at which attention doubles a block's cost: 22 d / 8 tokens for d = 8192 in blocks of 512 (Mooncake's FLOPs)."""


def cost_aware(use: Use) -> Rank:
    """Probability of reuse x seconds to recompute / bytes, in log2: the block least worth its place goes first."""
    return (use.weight + log2((1 + use.depth / DOUBLE_DEPTH) / use.kv_bytes), use.last)


@dataclass(slots=True)
class Ranked:
    """Blocks in a heap by their rank; with `ends_first` only those without children there are in it."""

    blocks_max: int
    rank_of: RankOf
    young_last: bool = True
    ends_first: bool = False
    half_life: float = 1.0
    """In turnovers of the tier: as many blocks added as it has room for."""
    first_worth: float = 1.0
    """Of the writing, in uses: most blocks are never asked for again."""
    _uses: dict[BlockHash, Use] = field(init=False, default_factory=dict)
    _children: dict[BlockHash, int] = field(
        init=False, default_factory=dict
    )  # there, by parent, there or not
    _fresh: "OrderedDict[BlockHash, None]" = field(init=False, default_factory=OrderedDict)
    _heap: list[tuple[bool, Rank, BlockHash]] = field(init=False, default_factory=list)
    _clock: int = field(init=False, default=0)
    _added: int = field(init=False, default=0)
    _pinned: int = field(init=False, default=0)

    @property
    def idle(self) -> int:
        return len(self._uses) - self._pinned

    def add(
        self,
        name: BlockHash,
        parent: BlockHash | None,
        depth: int,
        kv_bytes: int = 1,
        fresh: bool = True,
    ) -> None:
        assert name not in self._uses, f"{name.hex()[:8]} is there already"
        self._clock += 1
        self._added += fresh
        use = Use(parent, depth, kv_bytes, self._clock if fresh else -self._clock)
        use.weight = (self._now() if fresh else 0.0) + log2(self.first_worth)
        self._uses[name] = use
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1
        if fresh and self.young_last:
            use.fresh = True
            self._fresh[name] = None
        use.rank = self.rank_of(use)
        self._push(name)
        while len(self._fresh) > max(1, len(self._uses) // 16):
            self._grown(next(iter(self._fresh)))

    def touched(self, name: BlockHash, asked: bool) -> None:
        use = self._uses[name]
        self._clock += 1
        use.last = self._clock
        if asked:
            use.asked += 1
            use.weight = _log2_sum(use.weight, self._now())
        use.rank = self.rank_of(use)
        self._push(name)

    def pinned(self, name: BlockHash) -> None:
        use = self._uses[name]
        assert not use.pinned, f"{name.hex()[:8]} is pinned already"
        use.pinned = True
        self._pinned += 1

    def unpinned(self, name: BlockHash) -> None:
        use = self._uses[name]
        assert use.pinned, f"{name.hex()[:8]} is not pinned"
        use.pinned = False
        self._pinned -= 1
        self._push(name)

    def removed(self, name: BlockHash) -> None:
        use = self._uses.pop(name)
        self._pinned -= use.pinned
        self._fresh.pop(name, None)
        if use.parent is not None:
            self._children[use.parent] -= 1
            if not self._children[use.parent]:
                del self._children[use.parent]
                self._push(use.parent)

    def victims(self, count: int) -> list[BlockHash]:
        chosen: dict[BlockHash, None] = {}
        gone: dict[BlockHash, int] = {}  # children chosen, by parent
        while self._heap and len(chosen) < count:
            entry = heappop(self._heap)
            name = entry[-1]
            use = self._uses.get(name)
            if use is None or name in chosen or not self._valid(entry, use, gone):
                continue
            chosen[name] = None
            if use.parent is not None:
                gone[use.parent] = gone.get(use.parent, 0) + 1
                self._push(use.parent, gone)
        for name in chosen:
            self._push(name)
        return list(chosen)

    def check(self) -> None:
        uses = self._uses
        assert self._pinned == sum(use.pinned for use in uses.values()), "pinned blocks are miscounted"
        parents = Counter(use.parent for use in uses.values() if use.parent is not None)
        assert self._children == dict(parents), "children are miscounted"
        assert [name for name, use in uses.items() if use.fresh] == list(self._fresh), (
            "the young are not those"
        )
        entries = set(self._heap)
        for name, use in uses.items():
            if not use.pinned and self._is_end(name, {}):
                assert (use.fresh, use.rank, name) in entries, f"{name.hex()[:8]} can never be a victim"

    # -- inside -------------------------------------------------------------------------------------------

    def _now(self) -> float:
        """In half-lives."""
        return self._added / (self.half_life * self.blocks_max)

    def _grown(self, name: BlockHash) -> None:
        del self._fresh[name]
        self._uses[name].fresh = False
        self._push(name)

    def _is_end(self, name: BlockHash, gone: dict[BlockHash, int]) -> bool:
        return not self.ends_first or self._children.get(name, 0) == gone.get(name, 0)

    def _valid(self, entry: tuple[bool, Rank, BlockHash], use: Use, gone: dict[BlockHash, int]) -> bool:
        return entry[:-1] == (use.fresh, use.rank) and not use.pinned and self._is_end(entry[-1], gone)

    def _push(self, name: BlockHash, gone: dict[BlockHash, int] | None = None) -> None:
        use = self._uses.get(name)
        if use is None or use.pinned or not self._is_end(name, gone or {}):
            return
        heappush(self._heap, (use.fresh, use.rank, name))
        if len(self._heap) > 2 * len(self._uses) + 64:
            self._heap = [
                (one.fresh, one.rank, other) for other, one in self._uses.items() if not one.pinned
            ]  # those with children too: while victims are chosen, parents become ends
            heapify(self._heap)


def _log2_sum(one: float, other: float) -> float:
    """log2(2**one + 2**other), for exponents that no float could hold."""
    high, low = max(one, other), min(one, other)
    return high + log2(1 + 2.0 ** max(low - high, -64.0))


_ASKED_MAX = 3  # the paper's two bits

_Queue = OrderedDict[BlockHash, None]


@dataclass(slots=True)
class _Queued:
    main: bool
    asked: int = 0
    pinned: bool = False
    aside: bool = False
    """It came up for eviction while it was pinned, and is in no queue until it is not."""


@dataclass(slots=True)
class S3Fifo:
    """Three queues: what is new passes a small one, and only what was asked for there gets into the main one.

    Names of what the small queue lost are remembered (`ghost`, as many as the tier has room for): one that comes back
    goes to the main queue at once. Blocks there get another round for each time they were asked for.
    """

    blocks_max: int
    _blocks: dict[BlockHash, _Queued] = field(init=False, default_factory=dict)
    _small: _Queue = field(init=False, default_factory=OrderedDict)
    _main: _Queue = field(init=False, default_factory=OrderedDict)
    _ghost: _Queue = field(init=False, default_factory=OrderedDict)
    _pinned: int = field(init=False, default=0)

    @property
    def idle(self) -> int:
        return len(self._blocks) - self._pinned

    def add(
        self,
        name: BlockHash,
        parent: BlockHash | None,
        depth: int,
        kv_bytes: int = 1,
        fresh: bool = True,
    ) -> None:
        assert name not in self._blocks, f"{name.hex()[:8]} is there already"
        block = self._blocks[name] = _Queued(main=name in self._ghost)
        self._ghost.pop(name, None)
        queue = self._queue(block)
        queue[name] = None
        queue.move_to_end(name, last=fresh)

    def touched(self, name: BlockHash, asked: bool) -> None:
        block = self._blocks[name]
        block.asked = min(block.asked + asked, _ASKED_MAX)

    def pinned(self, name: BlockHash) -> None:
        block = self._blocks[name]
        assert not block.pinned, f"{name.hex()[:8]} is pinned already"
        block.pinned = True
        self._pinned += 1

    def unpinned(self, name: BlockHash) -> None:
        block = self._blocks[name]
        assert block.pinned, f"{name.hex()[:8]} is not pinned"
        block.pinned = False
        self._pinned -= 1
        if block.aside:
            block.aside = False
            self._queue(block)[name] = None

    def removed(self, name: BlockHash) -> None:
        block = self._blocks.pop(name)
        self._pinned -= block.pinned
        self._queue(block).pop(name, None)
        if not block.main:
            self._ghost[name] = None
            if len(self._ghost) > self.blocks_max:
                self._ghost.popitem(last=False)

    def victims(self, count: int) -> list[BlockHash]:
        chosen: list[BlockHash] = []
        while len(chosen) < count and (self._small or self._main):
            small = len(self._small) > self.blocks_max // 10 or not self._main
            name, _ = (self._small if small else self._main).popitem(last=False)
            block = self._blocks[name]
            if block.pinned:
                block.aside = True
            elif small and block.asked > 1:
                block.main, block.asked = True, 0
                self._main[name] = None
            elif block.main and block.asked:
                block.asked -= 1
                self._main[name] = None
            else:
                chosen.append(name)
        for name in reversed(chosen):
            queue = self._queue(self._blocks[name])
            queue[name] = None
            queue.move_to_end(name, last=False)
        return chosen

    def check(self) -> None:
        assert self._pinned == sum(block.pinned for block in self._blocks.values()), "pinned are miscounted"
        for name, block in self._blocks.items():
            assert (name in self._small) == (not block.main and not block.aside), "the small queue"
            assert (name in self._main) == (block.main and not block.aside), "the main queue"
            assert block.pinned or not block.aside, f"{name.hex()[:8]} can never be a victim"
        assert len(self._small) + len(self._main) <= len(self._blocks), "a queue holds what is not there"
        assert len(self._ghost) <= self.blocks_max, "too many are remembered"

    def _queue(self, block: _Queued) -> _Queue:
        return self._main if block.main else self._small


EVICTIONS: dict[str, Callable[[int], Eviction]] = {
    "lru": lambda blocks: Ranked(blocks, lru, young_last=False),
    "lfu": lambda blocks: Ranked(blocks, lfu),
    "length_aware": lambda blocks: Ranked(blocks, length_aware),
    "s3fifo": S3Fifo,
    "cost_aware": lambda blocks: Ranked(blocks, cost_aware, ends_first=True, first_worth=0.3),
}
"""By name; each takes the number of blocks that the tier has room for."""


def eviction(name: str, blocks_max: int) -> Eviction:
    """The policy of that name. Raises ValueError naming those there are."""
    if name not in EVICTIONS:
        raise ValueError(f"eviction {name!r} is none of {', '.join(EVICTIONS)}")
    return EVICTIONS[name](blocks_max)
