"""What a cache of so many blocks would catch of a trace, if all nodes' memory were one: the pool's upper bound."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.sim.trace import TraceRow
from kvstore.core.blocks import BlockHash
from kvstore.core.eviction import eviction


def hit_ratio(rows: Iterable[TraceRow], blocks: int, policy: str = "lru") -> float:
    """Share of all block references that find their block in one pool of `blocks`, kept by a policy of `EVICTIONS`.

    Part-full last blocks count too, as in Mooncake's own table (FAST'25, Table 1 of the arXiv paper).
    """
    kept, there = eviction(policy, blocks), set[int]()
    asked = found = 0
    for row in rows:
        for depth, hash_id in enumerate(row.hash_ids):
            asked += 1
            name = _name(hash_id)
            if hash_id in there:
                found += 1
                kept.touched(name, asked=True)
                continue
            if len(there) == blocks:
                [victim] = kept.victims(1)
                kept.removed(victim)
                there.discard(int.from_bytes(victim, "big"))
            kept.add(name, _name(row.hash_ids[depth - 1]) if depth else None, depth)
            there.add(hash_id)
    return found / asked if asked else 0.0


def _name(hash_id: int) -> BlockHash:
    return BlockHash(hash_id.to_bytes(32, "big"))
