"""The conductor's prefix index at scale: one look at who holds how much of a prompt, in a pool of a million blocks.

Prompts are as they are met: one system prompt that all nodes keep, a document that ten nodes keep, and a conversation
of its own that one node or two keep, in DRAM or on SSD. Under pressure nodes have lost the ends of what they kept: the
system prompt on one node in five, half of the conversations. Of the prompts asked for, one in four breaks off from
its conversation half-way, and one in twenty knows nothing but the system prompt.
"""

import random
import statistics
import time
from dataclasses import dataclass, field

import psutil

from benchmarks.report import Row
from kvstore.core.blocks import HASH_BYTES, BlockHash, NodeId, Tier
from kvstore.core.prefix_index import PrefixIndex

_BLOCKS = 1_000_000
_NODES = 100
_CHAIN = 256
_SYSTEM, _DOCUMENT = 64, 64
_CONVERSATION = _CHAIN - _SYSTEM - _DOCUMENT
_MATCHES = 4000
_BAR_S = 0.3e-3


@dataclass(slots=True)
class _Pool:
    """Nodes that tell the index of their changes, and the prompts that made them."""

    chance: random.Random
    index: PrefixIndex = field(default_factory=PrefixIndex)
    prompts: list[list[BlockHash]] = field(default_factory=list)

    def blocks(self, count: int) -> list[BlockHash]:
        return [BlockHash(self.chance.randbytes(HASH_BYTES)) for _ in range(count)]

    def store(self, node: NodeId, blocks: list[BlockHash], tier: Tier = Tier.DRAM) -> None:
        self.index.stored(node, blocks, self.index.sequence_of(node) + 1, tier)

    def fill(self) -> None:
        nodes = [NodeId(f"node-{number}") for number in range(_NODES)]
        system = self.blocks(_SYSTEM)
        for number, node in enumerate(nodes):
            self.store(node, system if number % 5 else system[: self.chance.randint(1, _SYSTEM)])
        documents = [(self.blocks(_DOCUMENT), self.chance.sample(nodes, 10)) for _ in range(_NODES)]
        for document, holders in documents:
            for node in holders:
                self.store(node, document)
        while len(self.index) < _BLOCKS:
            document, holders = self.chance.choice(documents)
            conversation = self.blocks(_CONVERSATION)
            kept = self.chance.choice([_CONVERSATION, self.chance.randint(1, _CONVERSATION)])
            for node in self.chance.sample(holders, self.chance.choice([1, 1, 2])):
                self.store(node, conversation[:kept], self.chance.choice([Tier.DRAM, Tier.SSD]))
            self.prompts.append([*system, *document, *conversation])

    def asked(self) -> list[BlockHash]:
        """A prompt's chain as it comes over the wire: other objects than those in the index."""
        chain = list(self.chance.choice(self.prompts))
        drawn = self.chance.random()
        if drawn < 0.25:
            chain[-_CONVERSATION // 2 :] = self.blocks(_CONVERSATION // 2)
        elif drawn < 0.3:
            chain[_SYSTEM:] = self.blocks(_CHAIN - _SYSTEM)
        return [BlockHash(bytes(bytearray(block))) for block in chain]


def rows(seed: int) -> list[Row]:
    pool = _Pool(random.Random(seed))
    before = psutil.Process().memory_info().rss
    pool.fill()
    index_bytes = psutil.Process().memory_info().rss - before
    samples = [_match(pool) for _ in range(_MATCHES)]
    seconds = [sample["match_s"] for sample in samples]
    lookup_s = statistics.median(sample["lookup_s"] for sample in samples)
    return [
        Row(
            name="prefix_match_p99",
            value=statistics.quantiles(seconds, n=100)[98] * 1e3,
            unit="ms",
            op="<=",
            bar=_BAR_S * 1e3,
            bound=lookup_s * 1e3,
            why=f"{_CHAIN} look-ups in a dictionary of {len(pool.index):,} blocks, which their cache misses make slow; "
            f"{_NODES} nodes, {sum(pool.index.blocks_on(node) for node in pool.index.nodes()) // _NODES:,} blocks each, "
            f"{index_bytes / len(pool.index):.0f} bytes of memory a block; p50 {statistics.median(seconds) * 1e3:.2f} ms",
            samples=tuple(samples),
        )
    ]


def _match(pool: _Pool) -> dict[str, float]:
    """Times one match, and beside it the bare look-ups of another prompt's chain."""
    chain, other = pool.asked(), pool.asked()
    holders: dict[BlockHash, int] = pool.index._holders
    began_s = time.perf_counter()
    held = pool.index.match(chain)
    matched_s = time.perf_counter()
    for block in other:
        holders.get(block)
    looked_s = time.perf_counter()
    return {"match_s": matched_s - began_s, "lookup_s": looked_s - matched_s, "nodes": len(held)}
