"""Wrong bytes in the pool: with verification they cost a recompute; without it the exactness comparison is red.

Each case lets a prompt's blocks be cached, spoils the arena, and asks again: the second answer loads every block.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.tiers.dram import Arena
from tests.integration.conftest import Client, running, small_config

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

Spoiler = Callable[[Arena, list[int], list[int]], None]

BLOCKS = 6
PARAMS = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}


def swap_two_blocks(arena: Arena, slots: list[int], other: list[int]) -> None:
    """One of them the prompt's last. Keys carry their positions, so attention does not see the order of whole blocks:
    two blocks in the middle could be swapped and no token would change. The last prompt token is computed anew and
    written over its own slot, which is then another token's.
    """
    first = arena.payload[slots[1]].copy()
    arena.payload[slots[1]] = arena.payload[slots[-1]]
    arena.payload[slots[-1]] = first


def drop_one_layer(arena: Arena, slots: list[int], other: list[int]) -> None:
    arena.payload[slots[2], 1] = 0


def serve_another_prompts_block(arena: Arena, slots: list[int], other: list[int]) -> None:
    arena.payload[slots[3]] = arena.payload[other[3]]


def flip_one_bit(arena: Arena, slots: list[int], other: list[int]) -> None:
    arena.payload[slots[5], 2, 77] ^= 64


SPOILERS: list[Spoiler] = [swap_two_blocks, drop_one_layer, serve_another_prompts_block]


def cached_prompt(client: Client, arena: Arena, seed: int) -> tuple[list[int], list[int]]:
    """A new prompt of whole blocks, and the slots that hold its blocks in order."""
    rng = random.Random(seed)
    prompt = [rng.randrange(4, 250) for _ in range(BLOCKS * client.cluster.config.pool.block_tokens)]
    before = int(arena.epoch.max())
    client.complete({"prompt": prompt, "params": PARAMS})
    slots = [int(slot) for slot in arena.epoch.argsort() if arena.epoch[slot] > before]
    assert len(slots) == BLOCKS
    return prompt, slots


@pytest.mark.parametrize("spoil", [*SPOILERS, flip_one_bit])
def test_verified_corruption_is_a_counted_recompute(tiny_cluster: Client, spoil: Spoiler) -> None:
    arena = tiny_cluster.tamper()
    prompt, slots = cached_prompt(tiny_cluster, arena, seed=SPOILERS.index(spoil) if spoil in SPOILERS else 9)
    _, other = cached_prompt(tiny_cluster, arena, seed=101 + slots[0])
    right = tiny_cluster.complete({"prompt": prompt, "params": PARAMS})
    before, held = tiny_cluster.decode_status(), tiny_cluster.node_status()
    spoil(arena, slots, other)
    again = tiny_cluster.complete({"prompt": prompt, "params": PARAMS})
    after = tiny_cluster.decode_status()
    assert not right.difference(again)
    assert after["failed_blocks"] > before["failed_blocks"]
    assert after["computed_prompt_tokens"] > before["computed_prompt_tokens"] + 1
    assert tiny_cluster.node_status().dropped > held.dropped, "a corrupt block stayed in the pool"


@pytest.fixture(scope="module")
def unverified(tiny: Path, short_folder: Callable[[], Path]) -> Iterator[Client]:
    config = small_config(tiny, pool={"dram_bytes": 16 << 20, "verify": False})
    with running(config, short_folder()) as client:
        yield client


@pytest.mark.parametrize("spoil", SPOILERS)
def test_without_verification_the_comparison_is_red(unverified: Client, spoil: Spoiler) -> None:
    """The exactness test can fail: these mistakes do change answers, and `Answer.difference` sees it."""
    arena = unverified.tamper()
    prompt, slots = cached_prompt(unverified, arena, seed=SPOILERS.index(spoil))
    _, other = cached_prompt(unverified, arena, seed=101 + slots[0])
    right = unverified.complete({"prompt": prompt, "params": PARAMS})
    spoil(arena, slots, other)
    assert right.difference(unverified.complete({"prompt": prompt, "params": PARAMS}))
