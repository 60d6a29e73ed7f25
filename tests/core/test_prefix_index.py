"""The prefix index against a model that keeps a table a node and compares block by block."""

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.core import prefix_index
from kvstore.core.blocks import BlockHash, NodeId, Tier
from kvstore.core.prefix_index import Held, PrefixIndex

NODES = [NodeId(f"node-{i}") for i in range(4)]
BLOCKS = [BlockHash(bytes([i]) * 32) for i in range(12)]
chains = st.lists(st.sampled_from(BLOCKS), max_size=8, unique=True)
nodes = st.sampled_from(NODES)
tiers = st.sampled_from([Tier.DRAM, Tier.SSD, None])


class Node:
    """A node and what the index was told of it: every change ever made, and the numbers of those delivered."""

    def __init__(self) -> None:
        self.changes: list[tuple[Tier | None, list[BlockHash]]] = []
        self.known = 0
        self.early: set[int] = set()

    def held(self, sequence: int) -> dict[BlockHash, Tier]:
        held: dict[BlockHash, Tier] = {}
        for tier, hashes in self.changes[:sequence]:
            for block in hashes:
                held.pop(block, None)
                if tier is not None:
                    held[block] = tier
        return held

    def catch_up(self) -> None:
        self.early = {number for number in self.early if number > self.known}
        while self.known + 1 in self.early:
            self.known += 1
            self.early.remove(self.known)


class PrefixIndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.model: dict[NodeId, Node] = {}

    def deliver(self, name: NodeId, number: int) -> None:
        node = self.model[name]
        tier, hashes = node.changes[number - 1]
        if number > node.known:
            node.early.add(number)
        node.catch_up()
        if tier is None:
            complete = self.index.removed(name, hashes, number)
        else:
            complete = self.index.stored(name, hashes, number, tier)
        assert complete == (not node.early)

    @rule(name=nodes, tier=tiers, hashes=chains, delivered=st.integers(0, 3))
    def change(self, name: NodeId, tier: Tier | None, hashes: list[BlockHash], delivered: int) -> None:
        """A node changes; one change in four is lost on the way, for now or for ever."""
        node = self.model.setdefault(name, Node())
        node.changes.append((tier, hashes))
        if delivered:
            self.deliver(name, len(node.changes))

    @rule(name=nodes, data=st.data())
    def deliver_again(self, name: NodeId, data: st.DataObject) -> None:
        """Any change, seen or not, in any order."""
        node = self.model.get(name)
        if node and node.changes:
            self.deliver(name, data.draw(st.integers(1, len(node.changes))))

    @rule(name=nodes, data=st.data())
    def snapshot(self, name: NodeId, data: st.DataObject) -> None:
        """A snapshot may be of now or older than what the index knows."""
        node = self.model.setdefault(name, Node())
        sequence = data.draw(st.integers(0, len(node.changes)))
        node.known = sequence
        node.catch_up()
        held = node.held(sequence)
        dram, ssd = ([block for block in sorted(held) if held[block] is tier] for tier in Tier)
        assert self.index.replace(name, dram, sequence, ssd) == (not node.early)

    @rule(name=nodes)
    def leave(self, name: NodeId) -> None:
        self.model.pop(name, None)
        self.index.drop(name)

    @rule(chain=chains)
    def match(self, chain: list[BlockHash]) -> None:
        expected = {}
        for name, node in self.model.items():
            held = node.held(node.known)
            in_dram = prefix(chain, {block for block in held if held[block] is Tier.DRAM})
            if length := prefix(chain, set(held)):
                expected[name] = Held(in_dram, length)
        before = self.state()
        assert self.index.match(chain) == expected
        assert self.state() == before

    def state(self) -> str:
        return repr({name: value for name, value in vars(self.index).items() if name != "_names"})

    @invariant()
    def agrees(self) -> None:
        self.index.check()
        everything: set[BlockHash] = set()
        for name, node in self.model.items():
            held = node.held(node.known)
            everything |= set(held)
            assert self.index.blocks_on(name) == len(held)
            assert self.index.sequence_of(name) == node.known
            assert self.index.is_behind(name) == bool(node.early)
        assert len(self.index) == len(everything)


def prefix(chain: list[BlockHash], held: set[BlockHash]) -> int:
    return next((i for i, block in enumerate(chain) if block not in held), len(chain))


PrefixIndexMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPrefixIndex: Any = PrefixIndexMachine.TestCase


def test_a_hole_in_the_middle_ends_the_prefix() -> None:
    index = PrefixIndex()
    index.stored(NODES[0], BLOCKS[:5], 1)
    index.removed(NODES[0], [BLOCKS[2]], 2)
    assert index.match(BLOCKS[:5]) == {NODES[0]: Held(2, 2)}


def test_what_is_on_the_ssd_is_told_apart() -> None:
    index = PrefixIndex()
    index.stored(NODES[0], BLOCKS[:5], 1)
    index.stored(NODES[0], BLOCKS[2:4], 2, Tier.SSD)
    assert index.match(BLOCKS[:6]) == {NODES[0]: Held(dram=2, blocks=5)}
    index.stored(NODES[0], BLOCKS[2:3], 3)
    assert index.match(BLOCKS[:6]) == {NODES[0]: Held(dram=3, blocks=5)}
    assert index.match(BLOCKS[3:5]) == {NODES[0]: Held(dram=0, blocks=2)}


def test_early_changes_are_bounded_and_a_snapshot_still_heals() -> None:
    index = PrefixIndex()
    last = prefix_index.EARLY_CHANGES_MAX + 50
    for number in range(2, last + 1):
        assert not index.stored(NODES[0], BLOCKS[:1], number)
    index.check()
    assert not index.replace(NODES[0], BLOCKS[1:3], 1), "the changes that were dropped are a gap again"
    assert index.replace(NODES[0], BLOCKS[1:3], last)
    assert index.match(BLOCKS[1:3]) == {NODES[0]: Held(2, 2)}


def test_a_node_that_left_gives_its_number_to_the_next() -> None:
    index = PrefixIndex()
    for name in NODES:
        index.stored(name, BLOCKS[:1], 1)
    index.drop(NODES[1])
    index.stored(NodeId("late"), BLOCKS[:2], 1)
    one, both = Held(1, 1), Held(2, 2)
    assert index.match(BLOCKS[:2]) == {NODES[0]: one, NODES[2]: one, NODES[3]: one, NodeId("late"): both}


def test_check_sees_a_bit_without_a_block() -> None:
    index = PrefixIndex()
    index.stored(NODES[0], BLOCKS[:1], 1)
    index._holders[BLOCKS[1]] = 1
    with pytest.raises(AssertionError, match="disagree"):
        index.check()
