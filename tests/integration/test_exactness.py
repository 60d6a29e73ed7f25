"""The project's heart: through the cluster, every token and log-probability is that of one plain engine.

Each case also asserts, from the decode engine's own counters, that the KV came from the pool: exactly one prompt token
a request was computed there, nothing came from its own cache, nothing was recomputed after a failed load.
"""

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cluster.config import ClusterConfig
from cluster.model import default_model
from kvstore.engine.reference import Answer
from tests.integration.conftest import Client, reference_answers, running, small_config, wait_until_idle

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

BLOCK = 32
GREEDY = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 7, "max_tokens": 12, "ignore_eos": True}


def prompts(vocabulary: int, seed: int) -> dict[str, list[list[int]]]:
    """Cases by name. Those of one case run at once, the cases one after another."""
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(4, vocabulary) for _ in range(count)]

    shared = tokens(5 * BLOCK)
    return {
        "one token": [tokens(1)],
        "short": [tokens(5)],
        "a block less one": [tokens(BLOCK - 1)],
        "a block": [tokens(BLOCK)],
        "a block and one": [tokens(BLOCK + 1)],
        "many blocks, several chunks": [tokens(9 * BLOCK + 7)],
        "many blocks, no tail": [tokens(10 * BLOCK)],
        "the first of a shared prefix": [shared + tokens(3)],
        "a prefix cached, another end": [shared + tokens(40)],
        "cached, on a block's border": [shared],
        "all cached: no prefill at all": [shared],
        "a shorter part of it": [shared[: 3 * BLOCK + 5]],
        "a batch of 8 at once": [tokens(10 + 17 * number) for number in range(8)],
        "8 at once with one prefix": [shared + tokens(number) for number in range(1, 9)],
    }


def flattened(cases: dict[str, list[list[int]]]) -> list[dict[str, Any]]:
    greedy = [{"prompt": prompt, "params": GREEDY} for case in cases.values() for prompt in case]
    sampled = [{"prompt": prompt, "params": SAMPLED} for case in list(cases.values())[3:8] for prompt in case]
    return greedy + sampled


def assert_equal_to_one_engine(
    client: Client,
    model: Path,
    config: ClusterConfig,
    tmp: Path,
    vocabulary: int,
    expected: list[Answer] | None = None,
) -> list[Answer]:
    """Returns what the one engine answered, to be given as `expected` for a second pass."""
    cases = prompts(vocabulary, seed=11)
    if expected is None:
        expected = reference_answers(model, config, flattened(cases), tmp / "reference")
    number = 0
    with ThreadPoolExecutor(8) as pool:
        for name, case in [*cases.items(), *(("sampled: " + n, cases[n]) for n in list(cases)[3:8])]:
            params = SAMPLED if name.startswith("sampled") else GREEDY
            before = client.decode_status()
            requests = [{"prompt": prompt, "params": params} for prompt in case]
            answers = list(pool.map(client.complete, requests))
            after = client.decode_status()
            for answer in answers:
                difference = expected[number].difference(answer)
                assert not difference, f"{name}: {difference}"
                number += 1
            grown = {key: after[key] - before[key] for key in after if isinstance(after[key], int | float)}
            assert grown["computed_prompt_tokens"] == len(case), f"{name}: {grown}"
            assert grown["prompt_tokens_from_pool"] == sum(
                len(prompt)
                for prompt in case
                if len(prompt) > 1  # the only token of a prompt is computed, not matched
            ), f"{name}: {grown}"
            assert grown["loads"] == len(case), f"{name}: {grown}"
            assert grown["prompt_tokens_from_own_cache"] == 0, f"{name}: {grown}"
            assert grown["failed_blocks"] == grown["unplanned_prompt_tokens"] == 0, f"{name}: {grown}"
    assert number == len(expected)
    return expected


def test_tiny_model(tiny: Path, tiny_cluster: Client, tmp_path: Path) -> None:
    """Prefill chunks of four blocks."""
    assert_equal_to_one_engine(tiny_cluster, tiny, tiny_cluster.cluster.config, tmp_path, vocabulary=250)
    status = tiny_cluster.prefill_status()
    assert status["prompt_tokens_from_pool"] > 0, "no prefix was ever reused"


def test_across_nodes_and_from_the_ssd(tiny: Path, tmp_path: Path, short_folder: Callable[[], Path]) -> None:
    """Prefill beside one node, decode beside another; the second time all that is left lies on the first one's SSD."""
    pool = {"dram_bytes": 16 << 20, "ssd_dir": str(tmp_path / "ssd")}
    config = small_config(tiny, nodes=2, pool=pool)
    with running(config, short_folder()) as client:
        expected = assert_equal_to_one_engine(client, tiny, config, tmp_path, vocabulary=250)
        wait_until_idle(client)
        blocks = client.node_status().committed
        while client.node_status().ssd_blocks < blocks:
            time.sleep(0.1)
        client.drop("node-0", "dram")
        client.drop("node-1", "")
        assert (client.node_status().committed, client.node_status("node-1").committed) == (0, 0)
        assert_equal_to_one_engine(client, tiny, config, tmp_path, 250, expected)
        first, second = client.node_status(), client.node_status("node-1")
        assert first.fetched_ssd_blocks >= blocks, "every block that was left came from the ssd"
        assert second.fetched_peer_blocks > blocks, "and went from node to node, twice"
        assert first.fetch_failed_blocks == second.fetch_failed_blocks == 0
        assert first.ssd_corrupt == 0


def test_official_openai_client(tiny_cluster: Client) -> None:
    """Unchanged, streaming and not: n, logprobs, usage."""
    from openai import OpenAI

    api = OpenAI(base_url=f"{tiny_cluster.cluster.url}/v1", api_key="unused", max_retries=0)
    name = tiny_cluster.cluster.model_name
    assert [model.id for model in api.models.list()] == [name]
    messages: Any = [{"role": "user", "content": "hello there"}]
    whole = api.chat.completions.create(
        model=name, messages=messages, temperature=0, max_tokens=10, logprobs=True, top_logprobs=2
    )
    streamed = list(
        api.chat.completions.create(
            model=name,
            messages=messages,
            temperature=0,
            max_tokens=10,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices)
    assert text == whole.choices[0].message.content
    assert whole.usage is not None and streamed[-1].usage is not None
    assert whole.usage.completion_tokens == streamed[-1].usage.completion_tokens
    assert whole.choices[0].logprobs is not None and whole.choices[0].logprobs.content is not None
    assert all(len(position.top_logprobs) == 2 for position in whole.choices[0].logprobs.content)
    several = api.completions.create(model=name, prompt=[5] * 70, n=3, temperature=1, seed=3, max_tokens=6)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert len({choice.text for choice in several.choices}) > 1


def test_smollm2(tmp_path: Path, short_folder: Callable[[], Path]) -> None:
    """The default model."""
    model = default_model()
    config = small_config(model, engine={"prefill_chunk_tokens": 256}, pool={"dram_bytes": 256 << 20})
    with running(config, short_folder()) as client:
        assert_equal_to_one_engine(client, model, config, tmp_path, vocabulary=40_000)
