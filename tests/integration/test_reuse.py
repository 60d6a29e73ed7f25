"""Conversations: the next turn finds the KV of what was generated in the turn before, and answers the same tokens."""

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.model import default_model
from kvstore.engine.reference import Answer
from tests.integration.conftest import (
    Client,
    reference_answers,
    running,
    small_config,
    wait_until_idle,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

BLOCK = 32
ANSWER_TOKENS = 100
GREEDY = {"temperature": 0.0, "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
SHORT = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}


def tokens(seed: int, count: int, vocabulary: int = 250) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(4, vocabulary) for _ in range(count)]


def turns(client: Client, prompt: list[int], more: list[int]) -> tuple[dict[str, Any], Answer]:
    """Two turns of a conversation: the second's request and answer. Counters prove what it found in the pool."""
    first = client.complete({"prompt": prompt, "params": GREEDY})
    saved_to = len(prompt) + len(first.token_ids) - 1
    wait_until_idle(client)
    before = client.prefill_status()
    second = {"prompt": [*prompt, *first.token_ids, *more], "params": SHORT}
    answer = client.complete(second)
    after = client.prefill_status()
    grown = {key: after[key] - before[key] for key in after if isinstance(after[key], int | float)}
    assert grown["loaded_blocks"] == saved_to // BLOCK, grown
    assert grown["computed_prompt_tokens"] == len(second["prompt"]) - saved_to // BLOCK * BLOCK, grown
    assert grown["failed_blocks"] == 0, grown
    return second, answer


def test_the_next_turn_of_the_tiny_model(tiny: Path, tiny_cluster: Client, tmp_path: Path) -> None:
    saved = tiny_cluster.decode_status()["saved_blocks"]
    done = [turns(tiny_cluster, tokens(count, count), tokens(1, 9)) for count in (5, BLOCK, 3 * BLOCK + 17)]
    wait_until_idle(tiny_cluster)
    assert tiny_cluster.decode_status()["saved_blocks"] - saved == 3 + 3 + 4, (
        "the last second turn fills one, too"
    )
    requests = [second for second, _ in done]
    colds = reference_answers(tiny, tiny_cluster.cluster.config, requests, tmp_path / "cold")
    for cold, (_, answer) in zip(colds, done, strict=True):
        assert not cold.difference(answer)


def test_an_answer_that_a_stop_string_ended_is_saved_too(tiny_cluster: Client) -> None:
    """The engine learns of it as of an abort, and says nothing with the last output."""
    prompt = tokens(77, 40)
    body = {"model": tiny_cluster.cluster.model_name, "prompt": prompt, "return_token_ids": True, **GREEDY}
    whole = httpx.post(f"{tiny_cluster.cluster.url}/v1/completions", json=body, timeout=240).json()
    text = whole["choices"][0]["text"]
    stop = text[-12:-6]
    wait_until_idle(tiny_cluster)  # that answer's blocks are in the pool, so that all of them are dropped
    assert tiny_cluster.drop("node-0", "") > 0
    saved = tiny_cluster.decode_status()["saved_blocks"]
    stopped = httpx.post(
        f"{tiny_cluster.cluster.url}/v1/completions", json={**body, "stop": [stop]}, timeout=240
    ).json()["choices"][0]
    assert stopped["finish_reason"] == "stop"
    wait_until_idle(tiny_cluster)
    fed = len(prompt) + len(stopped["token_ids"]) - 1
    assert tiny_cluster.decode_status()["saved_blocks"] - saved == fed // BLOCK - len(prompt) // BLOCK > 0


def test_clients_that_leave_in_the_middle_leave_nothing(tiny_cluster: Client) -> None:
    """At any moment of the answer, its end and its saving included; the fixture sees what stays."""
    body = {"model": tiny_cluster.cluster.model_name, "stream": True, **GREEDY}
    for seed in range(12):
        request = {**body, "prompt": tokens(1000 + seed, 20 + seed), "max_tokens": 40}
        url = f"{tiny_cluster.cluster.url}/v1/completions"
        with httpx.stream("POST", url, json=request, timeout=240) as response:
            for number, _ in enumerate(line for line in response.iter_lines() if line.startswith("data: {")):
                if number == 3 * seed + 6:
                    break
        if seed % 4 == 3:
            time.sleep(0.02 * seed)
    wait_until_idle(tiny_cluster)


def test_the_next_turn_of_smollm2(short_folder: Callable[[], Path], tmp_path: Path) -> None:
    """By token ids, and as a chat, where the template decides how much of it is the same tokens."""
    model = default_model()
    config = small_config(model, pool={"dram_bytes": 256 << 20})
    with running(config, short_folder()) as client:
        second, answer = turns(client, tokens(3, 120, 40_000), tokens(4, 9, 40_000))
        chat = [{"role": "user", "content": "Tell me in five sentences how the sun works."}]
        told = _chat(client, chat, 120)
        wait_until_idle(client)
        before = client.prefill_status()["loaded_blocks"]
        saved_to = told["usage"]["total_tokens"] - 1
        more = {"role": "user", "content": "And the moon?"}
        _chat(client, [*chat, told["choices"][0]["message"], more], 8)
        hits = client.prefill_status()["loaded_blocks"] - before
        # The answer's end-of-turn token may come from the template, all before it was sampled.
        assert hits >= (saved_to - 1) // BLOCK > told["usage"]["prompt_tokens"] // BLOCK
    [cold] = reference_answers(model, config, [second], tmp_path / "cold")
    assert not cold.difference(answer)


def _chat(client: Client, messages: list[dict[str, Any]], count: int) -> dict[str, Any]:
    body = {
        "model": client.cluster.model_name,
        "messages": [{"role": one["role"], "content": one["content"]} for one in messages],
        "temperature": 0,
        "max_tokens": count,
    }
    response = httpx.post(f"{client.cluster.url}/v1/chat/completions", json=body, timeout=240)
    assert response.status_code == httpx.codes.OK, response.text
    return dict(response.json())
