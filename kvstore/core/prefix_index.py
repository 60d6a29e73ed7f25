"""Who holds which block: the conductor's map of the pool, and the longest cached prefix of a chain on every node.

Theory.  For each block hash the index keeps one integer with two bits for each node: bit *2i* says "node number *i*
holds it in DRAM", bit *2i + 1* says "node number *i* holds it in some tier".  A match walks the chain once and ANDs
those integers: a bit leaves the running set at the first block that lacks it, and the depth at which it leaves is the
length of that node's prefix, in DRAM or at all.  That is exact whatever nodes evict, from the ends or from the middle;
a binary search over the chain would not be.  A walk costs one dictionary look-up and one AND a block, for all nodes
and tiers together, and no AND where the integer is the one before: blocks that came together share one integer, as do
all blocks that one node alone holds.  So a block costs a dictionary entry here and one in the node's own list, which
exists so that a node can be dropped without a walk over every block of the pool.

Truth.  The nodes are the truth; this is a copy.  Every node numbers its changes 1, 2, 3, ...  A change that was seen
is ignored, one that came too early is kept (a bounded number of them) until the gap closes by itself or by a snapshot.
Meanwhile the copy is stale, which costs a recompute and never a wrong token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import NamedTuple

from kvstore.core.blocks import BlockHash, NodeId, Tier

EARLY_CHANGES_MAX = 1024
"""Changes kept per node while a gap is open. Above it the oldest is dropped, and the gap will show again."""
_NAMES_MAX = 4096


class Held(NamedTuple):
    """How many leading blocks of a chain a node holds: in its DRAM alone, and in DRAM or on its SSD."""

    dram: int
    blocks: int


@dataclass(frozen=True, slots=True)
class _Change:
    tier: Tier | None
    """Where the blocks are held after it; None: nowhere."""
    hashes: tuple[BlockHash, ...]


@dataclass(slots=True)
class _Node:
    number: int
    sequence: int = 0
    blocks: dict[BlockHash, int] = field(default_factory=dict)
    """The node's own bits of each block."""
    dram_blocks: int = 0
    early: dict[int, _Change] = field(default_factory=dict)
    bits: dict[Tier, int] = field(init=False)

    def __post_init__(self) -> None:
        # One object for all blocks of a tier: a block must not cost an integer of its own.
        self.bits = {Tier.DRAM: 0b11 << 2 * self.number, Tier.SSD: 0b10 << 2 * self.number}


class PrefixIndex:
    """A copy of what every node holds. Changes return whether the node's history is complete so far."""

    def __init__(self) -> None:
        self._holders: dict[BlockHash, int] = {}
        self._nodes: dict[NodeId, _Node] = {}
        self._by_number: list[NodeId | None] = []
        self._every_node = 0
        """The bit "in some tier" of every number."""
        self._names: dict[int, tuple[NodeId, ...]] = {}
        """Sets of nodes that were asked for before, by their bits "in some tier"; not part of the state."""

    def __len__(self) -> int:
        """Distinct blocks known to be somewhere."""
        return len(self._holders)

    # -- asking: nothing below changes anything

    def match(self, chain: Sequence[BlockHash]) -> dict[NodeId, Held]:
        """How many leading blocks of `chain` each node holds; nodes that lack the first are left out.

        The order is that in which nodes drop out, so the longest prefixes come last; of those that drop out together
        the ones with all of it in DRAM come first, then it is that of their numbers.
        """
        held: dict[NodeId, Held] = {}
        running = last = self._holders.get(chain[0], 0) if chain else 0
        if not running:
            return held
        in_dram: dict[NodeId, int] = {}
        for depth, holders in enumerate(map(self._holders.get, chain, repeat(0))):
            if holders is last:
                continue
            last = holders
            still = running & holders
            if still != running:
                self._note(held, in_dram, running ^ still, depth)
                if not still:
                    return held
                running = still
        self._note(held, in_dram, running, len(chain))
        return held

    def _note(self, held: dict[NodeId, Held], in_dram: dict[NodeId, int], bits: int, depth: int) -> None:
        """These bits end at `depth`. A node's DRAM bit, the lower one, ends with its other bit or before it."""
        ends = bits & self._every_node
        whole = ends & bits << 1
        if whole:
            held.update(dict.fromkeys(self._named(whole), Held(depth, depth)))
        if ends != whole:
            for node in self._named(ends ^ whole):
                held[node] = Held(in_dram.get(node, 0), depth)
        alone = bits & ~(ends | ends >> 1)
        if alone:
            in_dram.update(dict.fromkeys(self._named(alone << 1), depth))

    def _named(self, ends: int) -> tuple[NodeId, ...]:
        """The nodes of these bits, in order of their numbers. The same sets come again and again, and are kept."""
        names = self._names.get(ends)
        if names is None:
            numbers = (number for number in range(len(self._by_number)) if ends >> 2 * number + 1 & 1)
            names = tuple(node for number in numbers if (node := self._by_number[number]) is not None)
            assert len(names) == ends.bit_count(), "a block is held by a node that left"
            if len(self._names) >= _NAMES_MAX:
                self._names.clear()
            self._names[ends] = names
        return names

    def nodes(self) -> tuple[NodeId, ...]:
        return tuple(self._nodes)

    def blocks_on(self, node: NodeId) -> int:
        return len(self._nodes[node].blocks) if node in self._nodes else 0

    def dram_blocks_on(self, node: NodeId) -> int:
        return self._nodes[node].dram_blocks if node in self._nodes else 0

    def sequence_of(self, node: NodeId) -> int:
        """The number of the last change that was applied; 0 for an unknown node."""
        return self._nodes[node].sequence if node in self._nodes else 0

    def is_behind(self, node: NodeId) -> bool:
        """True while a gap in the node's history is open: only a snapshot or the missing changes close it."""
        return node in self._nodes and bool(self._nodes[node].early)

    # -- changing

    def stored(
        self, node: NodeId, hashes: Iterable[BlockHash], sequence: int, tier: Tier = Tier.DRAM
    ) -> bool:
        """Record that `node` now holds `hashes`, in `tier` at best; False where a gap is open."""
        return self._change(node, sequence, _Change(tier, tuple(hashes)))

    def removed(self, node: NodeId, hashes: Iterable[BlockHash], sequence: int) -> bool:
        """Record that `node` no longer holds `hashes`; False where a gap is open."""
        return self._change(node, sequence, _Change(None, tuple(hashes)))

    def replace(
        self, node: NodeId, hashes: Iterable[BlockHash], sequence: int, ssd: Iterable[BlockHash] = ()
    ) -> bool:
        """Make what `node` held after its change number `sequence` the whole truth about it.

        `hashes` were in its DRAM; `ssd` on its SSD alone.
        """
        entry = self._node(node)
        truth = dict.fromkeys(ssd, Tier.SSD) | dict.fromkeys(hashes, Tier.DRAM)
        self._put(entry, [block for block in entry.blocks if block not in truth], None)
        for tier in Tier:
            self._put(entry, [block for block, where in truth.items() if where is tier], tier)
        entry.sequence = sequence
        for number in [number for number in entry.early if number <= sequence]:
            del entry.early[number]
        return self._catch_up(entry)

    def drop(self, node: NodeId) -> None:
        """Forget `node`: it left, or starts again at sequence 1."""
        entry = self._nodes.pop(node, None)
        if entry is None:
            return
        self._put(entry, list(entry.blocks), None)
        self._by_number[entry.number] = None
        self._names.clear()

    def _change(self, node: NodeId, sequence: int, change: _Change) -> bool:
        entry = self._node(node)
        if sequence > entry.sequence:
            entry.early[sequence] = change
        complete = self._catch_up(entry)
        if len(entry.early) > EARLY_CHANGES_MAX:
            del entry.early[min(entry.early)]  # never the newest: without it the gap would not show
        return complete

    def _catch_up(self, entry: _Node) -> bool:
        while (change := entry.early.pop(entry.sequence + 1, None)) is not None:
            self._put(entry, change.hashes, change.tier)
            entry.sequence += 1
        return not entry.early

    def _node(self, node: NodeId) -> _Node:
        if node not in self._nodes:
            if None not in self._by_number:
                self._every_node |= 0b10 << 2 * len(self._by_number)
                self._by_number.append(None)
            number = self._by_number.index(None)
            self._by_number[number] = node
            self._names.clear()
            self._nodes[node] = _Node(number)
        return self._nodes[node]

    def _put(self, entry: _Node, blocks: Iterable[BlockHash], tier: Tier | None) -> None:
        """The node holds these blocks in that tier now, whatever it was before."""
        bits = entry.bits[tier] if tier is not None else 0
        shared = {0: bits}  # one integer for all blocks that had the same other holders
        in_dram = entry.bits[Tier.DRAM]
        for block in blocks:
            before = entry.blocks.pop(block, 0)
            entry.dram_blocks += (bits == in_dram) - (before == in_dram)
            others = self._holders.get(block, 0) ^ before
            holders = shared.setdefault(others, others | bits)
            if bits:
                entry.blocks[block] = bits
            if holders:
                self._holders[block] = holders
            else:
                self._holders.pop(block, None)

    # -- proving

    def check(self) -> None:
        """Assert that the two sides agree: the bits of all blocks are exactly the lists of all nodes."""
        rebuilt: dict[BlockHash, int] = {}
        for node, entry in self._nodes.items():
            assert self._by_number[entry.number] == node, f"{node} lost its number"
            assert len(entry.early) <= EARLY_CHANGES_MAX, f"{node} keeps too many early changes"
            assert entry.sequence + 1 not in entry.early, f"{node} could catch up and did not"
            in_dram = sum(bits == entry.bits[Tier.DRAM] for bits in entry.blocks.values())
            assert in_dram == entry.dram_blocks, f"{node}: blocks in DRAM are counted wrong"
            for block, bits in entry.blocks.items():
                assert bits in entry.bits.values(), f"{node} holds a block in no tier"
                rebuilt[block] = rebuilt.get(block, 0) | bits
        assert rebuilt == self._holders, "holders and node lists disagree"
        numbered = [node for node in self._by_number if node is not None]
        assert sorted(numbered) == sorted(self._nodes), "numbers and nodes disagree"
