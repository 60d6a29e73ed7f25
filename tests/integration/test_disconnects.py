"""Clients that leave, at any moment: nothing may stay behind on any owner."""

import asyncio
import json
import random

import httpx
import pytest

from tests.integration.conftest import Client, wait_until_idle

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

REQUESTS = 200
AT_ONCE = 24


async def one(
    api: httpx.AsyncClient, model: str, rng: random.Random, leaves: bool, gate: asyncio.Semaphore
) -> str:
    prompt = [rng.randrange(4, 250) for _ in range(rng.choice([3, 32, 70, 200, 400]))]
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": rng.choice([1, 8, 24]),
        "temperature": rng.choice([0.0, 0.7]),
        "ignore_eos": True,
        "stream": rng.random() < 0.7,
        "n": 1,
    }
    patience_s = rng.expovariate(1 / 0.6) if leaves else 240.0
    async with gate:
        try:
            async with asyncio.timeout(patience_s):
                response = await api.post("/v1/completions", json=body)
        except TimeoutError:
            return "left"
    assert response.status_code == httpx.codes.OK, response.text
    if body["stream"]:
        events = [line for line in response.text.splitlines() if line.startswith("data: ")]
        assert events[-1] == "data: [DONE]", events[-3:]
        assert "error" not in json.loads(events[0].removeprefix("data: "))
    return "answered"


async def crowd(client: Client) -> list[str]:
    rng = random.Random(5)
    gate = asyncio.Semaphore(AT_ONCE)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=client.cluster.url, timeout=240, limits=limits) as api:
        calls = [
            one(api, client.cluster.model_name, random.Random(rng.random()), number % 3 == 0, gate)
            for number in range(REQUESTS)
        ]
        return await asyncio.gather(*calls)


def test_a_third_of_200_clients_leave(tiny_cluster: Client) -> None:
    outcomes = asyncio.run(crowd(tiny_cluster))
    assert outcomes.count("answered") + outcomes.count("left") == REQUESTS
    assert outcomes.count("left") >= REQUESTS // 8, "too few left to prove anything"
    assert all(outcome == "answered" for number, outcome in enumerate(outcomes) if number % 3)
    wait_until_idle(tiny_cluster)
    slots = tiny_cluster.node_status()
    assert slots.free + slots.committed == slots.slots
