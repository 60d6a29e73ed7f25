"""A real engine's KV, kept as int8 on the SSD: as small as promised, as near as promised, and found again."""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvstore.codecs.int8 import error_bound
from kvstore.codecs.pages import PageShape
from tests.integration.conftest import Client, running, small_config, wait_until_idle
from tests.integration.test_reuse import tokens

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]

BLOCK, BLOCKS = 32, 12
SHAPE = PageShape(BLOCK, 2, 32, "float32")  # the tiny model's, a page a block
LAYERS = 3
RATIO = 4 * 32 / (32 + 4)
"""A row of 32 floats becomes 32 bytes and a scale."""
SHORT = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
LOGPROB_OFF = 0.1
"""Of 8 tokens of the tiny model, whose attention is sharper than a real one's; 0.036 was measured."""
Floats = npt.NDArray[np.float32]


def test_int8_at_rest(tiny: Path, tmp_path: Path, short_folder: Callable[[], Path]) -> None:
    pool = {"dram_bytes": 16 << 20, "ssd_dir": tmp_path / "ssd", "codec": "int8-token-head-1"}
    prompt = [*tokens(5, BLOCKS * BLOCK), 7]
    with running(small_config(tiny, pool=pool), short_folder()) as client:
        cold = client.complete({"prompt": prompt, "params": SHORT})
        on_ssd(client, BLOCKS)
        written = kv_by_name(client)
        assert len(written) == BLOCKS
        assert client.drop("node-0", "dram") == BLOCKS
        computed = client.prefill_status()["computed_prompt_tokens"]
        warm = client.complete({"prompt": prompt, "params": SHORT})
        status = client.node_status()
        assert (status.fetched_ssd_blocks, status.ssd_corrupt, status.ssd_refused) == (BLOCKS, 0, 0)
        assert client.prefill_status()["computed_prompt_tokens"] - computed == 1
        read = kv_by_name(client)

    files = [path for path in (tmp_path / "ssd").rglob("*") if len(path.name) == 64]
    assert len(files) == BLOCKS
    payload = SHAPE.page_bytes * LAYERS / RATIO
    assert {path.stat().st_size for path in files} == {4096 + 4096 * -(-payload // 4096)}

    assert read.keys() == written.keys()
    for name, after in read.items():
        before = written[name]
        bound = error_bound(np.abs(before).max(axis=-1), "float32")[..., None]
        assert (np.abs(after.astype(np.float64) - before) <= bound).all()
        assert not np.array_equal(after, before), "it was not encoded"
    assert warm.token_ids == cold.token_ids
    assert warm.logprobs != cold.logprobs, "the engine did not use what came from the SSD"
    assert warm.logprobs == pytest.approx(cold.logprobs, abs=LOGPROB_OFF)


def on_ssd(client: Client, blocks: int) -> None:
    wait_until_idle(client)
    end_s = time.monotonic() + 20
    while (found := client.node_status().ssd_blocks) != blocks:
        assert time.monotonic() < end_s, f"{found} of {blocks} blocks are on the ssd"
        time.sleep(0.05)


def kv_by_name(client: Client) -> dict[bytes, Floats]:
    """All blocks of the arena as [layers, 2, tokens, heads, head_dim], in the order that the engine's own writes have."""
    from kvstore.engine.layout import learn

    wait_until_idle(client)
    permutation, arena = learn(SHAPE), client.tamper()
    found = {}
    for slot in np.flatnonzero(arena.epoch).tolist():
        kv = [np.stack(permutation.to_logical(layer[None])) for layer in arena.payload[slot]]
        found[arena.hash[slot].tobytes()] = np.stack(kv).view(np.float32)
    return found
