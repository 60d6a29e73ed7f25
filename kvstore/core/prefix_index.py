"""Who holds which block: the conductor's map of the pool, and the longest cached prefix of a chain on every node.

Theory.  For each block hash the index keeps one integer whose bit *i* says "node number *i* holds it".  A match walks
the chain once and ANDs those integers: a node leaves the running set at the first block it lacks, and the depth at
which it leaves is the length of its prefix.  That is exact whatever nodes evict, from the ends or from the middle; a
binary search over the chain would not be.  A walk costs one dictionary look-up and one AND a block, for all nodes
together.  A block held by one node shares that node's integer, so it costs a dictionary entry here and one in the
node's own list, which exists so that a node can be dropped without a walk over every block of the pool.

Truth.  The nodes are the truth; this is a copy.  Every node numbers its changes 1, 2, 3, ...  A change that was seen
is ignored, one that came too early is kept (a bounded number of them) until the gap closes by itself or by a snapshot.
Meanwhile the copy is stale, which costs a recompute and never a wrong token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvstore.core.blocks import BlockHash, NodeId

EARLY_CHANGES_MAX = 1024
"""Changes kept per node while a gap is open. Above it the oldest is dropped, and the gap will show again."""


@dataclass(frozen=True, slots=True)
class _Change:
    stored: bool
    hashes: tuple[BlockHash, ...]


@dataclass(slots=True)
class _Node:
    bit: int
    sequence: int = 0
    blocks: dict[BlockHash, None] = field(default_factory=dict)
    early: dict[int, _Change] = field(default_factory=dict)


class PrefixIndex:
    """A copy of what every node holds. Changes return whether the node's history is complete so far."""

    def __init__(self) -> None:
        self._holders: dict[BlockHash, int] = {}
        self._nodes: dict[NodeId, _Node] = {}
        self._by_number: list[NodeId | None] = []

    def __len__(self) -> int:
        """Distinct blocks known to be somewhere."""
        return len(self._holders)

    # -- asking: nothing below changes anything

    def match(self, chain: Sequence[BlockHash]) -> dict[NodeId, int]:
        """How many leading blocks of `chain` each node holds; nodes that lack the first are left out.

        The order is that in which nodes drop out, then of their numbers: the longest prefixes come last.
        """
        held: dict[NodeId, int] = {}
        holders_of = self._holders.get
        running = -1
        for depth, block in enumerate(chain):
            still = running & holders_of(block, 0)
            if still != running:
                if depth:
                    self._note(held, running & ~still, depth)
                if not still:
                    return held
                running = still
        if chain:
            self._note(held, running, len(chain))
        return held

    def _note(self, held: dict[NodeId, int], bits: int, depth: int) -> None:
        while bits:
            lowest = bits & -bits
            node = self._by_number[lowest.bit_length() - 1]
            assert node is not None, "a block is held by a node that left"
            held[node] = depth
            bits ^= lowest

    def nodes(self) -> tuple[NodeId, ...]:
        return tuple(self._nodes)

    def blocks_on(self, node: NodeId) -> int:
        return len(self._nodes[node].blocks) if node in self._nodes else 0

    def sequence_of(self, node: NodeId) -> int:
        """The number of the last change that was applied; 0 for an unknown node."""
        return self._nodes[node].sequence if node in self._nodes else 0

    def is_behind(self, node: NodeId) -> bool:
        """True while a gap in the node's history is open: only a snapshot or the missing changes close it."""
        return node in self._nodes and bool(self._nodes[node].early)

    # -- changing

    def stored(self, node: NodeId, hashes: Iterable[BlockHash], sequence: int) -> bool:
        """Record that `node` now holds `hashes`; False where a gap is open."""
        return self._change(node, sequence, _Change(True, tuple(hashes)))

    def removed(self, node: NodeId, hashes: Iterable[BlockHash], sequence: int) -> bool:
        """Record that `node` no longer holds `hashes`; False where a gap is open."""
        return self._change(node, sequence, _Change(False, tuple(hashes)))

    def replace(self, node: NodeId, hashes: Iterable[BlockHash], sequence: int) -> bool:
        """Make `hashes`, all that `node` held after its change number `sequence`, the whole truth about it."""
        entry = self._node(node)
        truth = dict.fromkeys(hashes)
        for block in [block for block in entry.blocks if block not in truth]:
            self._remove(entry, block)
        for block in truth:
            self._store(entry, block)
        entry.sequence = sequence
        for number in [number for number in entry.early if number <= sequence]:
            del entry.early[number]
        return self._catch_up(entry)

    def drop(self, node: NodeId) -> None:
        """Forget `node`: it left, or starts again at sequence 1."""
        entry = self._nodes.pop(node, None)
        if entry is None:
            return
        for block in list(entry.blocks):
            self._remove(entry, block)
        self._by_number[entry.bit.bit_length() - 1] = None

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
            for block in change.hashes:
                if change.stored:
                    self._store(entry, block)
                else:
                    self._remove(entry, block)
            entry.sequence += 1
        return not entry.early

    def _node(self, node: NodeId) -> _Node:
        if node not in self._nodes:
            if None not in self._by_number:
                self._by_number.append(None)
            number = self._by_number.index(None)
            self._by_number[number] = node
            self._nodes[node] = _Node(bit=1 << number)
        return self._nodes[node]

    def _store(self, entry: _Node, block: BlockHash) -> None:
        entry.blocks[block] = None
        holders = self._holders.get(block)
        self._holders[block] = entry.bit if holders is None else holders | entry.bit

    def _remove(self, entry: _Node, block: BlockHash) -> None:
        if block not in entry.blocks:
            return
        del entry.blocks[block]
        rest = self._holders[block] & ~entry.bit
        if rest:
            self._holders[block] = rest
        else:
            del self._holders[block]

    # -- proving

    def check(self) -> None:
        """Assert that the two sides agree: the bits of all blocks are exactly the lists of all nodes."""
        rebuilt: dict[BlockHash, int] = {}
        for node, entry in self._nodes.items():
            assert self._by_number[entry.bit.bit_length() - 1] == node, f"{node} lost its number"
            assert len(entry.early) <= EARLY_CHANGES_MAX, f"{node} keeps too many early changes"
            assert entry.sequence + 1 not in entry.early, f"{node} could catch up and did not"
            for block in entry.blocks:
                rebuilt[block] = rebuilt.get(block, 0) | entry.bit
        assert rebuilt == self._holders, "holders and node lists disagree"
        numbered = [node for node in self._by_number if node is not None]
        assert sorted(numbered) == sorted(self._nodes), "numbers and nodes disagree"
