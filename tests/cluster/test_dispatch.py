"""Requests through a cluster of many workers, and what becomes of them when parts of it fail."""

import asyncio
import json
import random
from collections import Counter
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from cluster.config import SchedulingConfig
from cluster.gateway.dispatch import ClusterBackend, _TokenClock
from cluster.gateway.request import Overloaded, Unavailable, UnservedRequest
from kvstore.engine.fake import fake_answer
from kvstore.engine.wire import RequestOutputKind
from kvstore.transfer import kv_pb2 as pb

if TYPE_CHECKING:
    from tests.cluster.conftest import SmallCluster, Start

BLOCK_TOKENS = 4


def prompt(seed: int, tokens: int = 26) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(50_000) for _ in range(tokens)]


def right(cluster: "SmallCluster", tokens: list[int], count: int) -> list[int]:
    return fake_answer(cluster.workers["decode-0"].engine.layout, tokens, count)


def failures(cluster: "SmallCluster") -> list[str]:
    return [attempt["failed"] for attempt in cluster.attempts() if "failed" in attempt]


async def test_a_hundred_requests_over_many_workers(start: "Start") -> None:
    cluster = await start(prefill=3, decode=3)
    lengths = [1, 3, 4, 5, 8, 31, 32, 33, 100, 127]
    prompts = [prompt(i, lengths[i % len(lengths)]) for i in range(100)]
    await asyncio.gather(*(cluster.answered_right(each) for each in prompts))
    await cluster.settled()
    placed = Counter(
        worker.member.role
        for worker in cluster.workers.values()
        if worker.engine.counters().computed_prompt_tokens
    )
    assert placed == {"prefill": 3, "decode": 3}, "every worker had work"
    assert cluster.computed("prefill") == sum(len(each) for each in prompts)
    assert cluster.computed("decode") == len(prompts), "one token each: all KV came from the pool"


async def test_prefixes_are_reused(start: "Start") -> None:
    cluster = await start(prefill=2, decode=2)
    shared = prompt(0, 8 * BLOCK_TOKENS)
    first = await cluster.answered_right([*shared, 1, 2])
    second = await cluster.answered_right([*shared, 3, 4, 5, 6, 7])
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, len(shared))
    assert cluster.computed("prefill") == len(shared) + 2 + 5


async def test_a_prompt_that_the_pool_holds_whole_needs_no_prefill(start: "Start") -> None:
    cluster = await start()
    whole = prompt(0, 8 * BLOCK_TOKENS)
    await cluster.answered_right(whole)
    await cluster.settled()
    again = await cluster.answered_right(whole)
    assert cluster.attempts()[0]["decision"]["prefill"] is None
    assert again.num_cached_tokens == len(whole)
    assert cluster.computed("prefill") == len(whole)
    assert cluster.computed("decode") == 2


async def test_a_wrong_block_gives_a_wrong_answer_only_when_nobody_verifies(start: "Start") -> None:
    """The proof that the answers above prove something."""
    cluster = await start()
    checking = cluster.workers["decode-0"]
    whole = prompt(0, 8 * BLOCK_TOKENS)
    await cluster.answered_right(whole)
    payload = checking.engine.arena.payload
    payload[:] ^= np.uint8(1)
    await cluster.answered_right(whole)
    assert checking.engine.counters().failed_blocks == 8
    await cluster.settled()  # its answer is saved
    await checking.stop()
    blind = await cluster.start_worker("decode", "decode-1", verify=False)
    await cluster.known(3)
    await cluster.answered_right(whole[:-1])  # stored anew, since what did not verify was forgotten
    await cluster.settled()
    payload[:] ^= np.uint8(1)
    output = await cluster.answer(whole[:-4])
    assert list(output.outputs[0].token_ids) != right(cluster, whole[:-4], 5)
    assert blind.engine.counters().failed_blocks == 0


async def test_tenants_share_nothing(start: "Start") -> None:
    cluster = await start(save_generated=False)
    whole = prompt(0, 8 * BLOCK_TOKENS + 1)
    for tenant in ("one", "two"):
        for cached in (0, 8 * BLOCK_TOKENS):
            computed = cluster.computed("prefill")
            output = await cluster.answered_right(whole, tenant)
            assert output.num_cached_tokens == cached, tenant
            assert cluster.computed("prefill") - computed == len(whole) - cached, tenant
    assert (await cluster.node.Status(pb.Empty())).committed == 2 * 8


@pytest.mark.parametrize(
    "steps", [0, 1, 4], ids=["after its plan", "in the first chunk", "in the second chunk"]
)
async def test_a_prefill_worker_dies(start: "Start", steps: int) -> None:
    """Before the decode side, which finds that the KV will not come, has computed all of it by itself."""
    cluster = await start(prefill=2, decode=1, chunk_tokens=8, prefill_token_s=0.01)
    cluster.workers["prefill-0"].engine.die_after(steps)
    await cluster.answered_right(prompt(0))
    assert [failed.split(":")[0] for failed in failures(cluster)] == ["prefill"]
    assert [each["decision"]["prefill"] for each in cluster.attempts()] == ["prefill-0", "prefill-1"]


async def test_a_prefill_worker_is_gone_before_it_is_asked(start: "Start") -> None:
    cluster = await start(prefill=2, decode=1)
    await cluster.workers["prefill-0"].vanish()
    await cluster.answered_right(prompt(0))
    assert [each["decision"]["prefill"] for each in cluster.attempts()] == ["prefill-0", "prefill-1"]
    await cluster.answered_right(prompt(1))
    assert len(cluster.attempts()) == 1, "who has just failed is not asked again"


async def test_a_decode_worker_dies_before_the_first_token(start: "Start") -> None:
    cluster = await start(prefill=1, decode=2)
    cluster.workers["decode-0"].engine.die_after(0)
    await cluster.answered_right(prompt(0))
    assert [failed.split(":")[0] for failed in failures(cluster)] == ["decode"]
    assert [each["decision"]["decode"] for each in cluster.attempts()] == ["decode-0", "decode-1"]


async def test_a_decode_worker_is_gone_before_it_is_asked(start: "Start") -> None:
    cluster = await start(prefill=1, decode=2)
    await cluster.workers["decode-0"].vanish()
    into: list[int] = []
    await cluster.stream(prompt(0), into)
    assert into == right(cluster, prompt(0), 5)
    assert [each["decision"]["decode"] for each in cluster.attempts()] == ["decode-0", "decode-1"]


LAYERS = 3  # the decode side's last prompt token takes as many steps


async def test_an_answer_begun_is_not_begun_again(start: "Start") -> None:
    cluster = await start(prefill=1, decode=2)
    cluster.workers["decode-0"].engine.die_after(LAYERS + 2)
    into: list[int] = []
    with pytest.raises(Unavailable, match="decode worker was lost in the middle of the answer"):
        await cluster.stream(prompt(0), into)
    assert into == right(cluster, prompt(0), 5)[:2]
    assert len(cluster.attempts()) == 1


async def test_an_answer_that_nobody_saw_is_begun_again(start: "Start") -> None:
    cluster = await start(prefill=1, decode=2)
    cluster.workers["decode-0"].engine.die_after(LAYERS + 2)
    await cluster.answered_right(prompt(0))
    assert [each["decision"]["decode"] for each in cluster.attempts()] == ["decode-0", "decode-1"]


async def test_the_conductor_hears_of_a_lost_prefill_from_the_prefill_side(
    start: "Start", tmp_path: Path
) -> None:
    log = tmp_path / "events"
    cluster = await start(prefill=2, decode=1, scheduling=SchedulingConfig(record_events=log))
    await cluster.workers["prefill-0"].vanish()
    await cluster.answered_right(prompt(0))
    await cluster.settled()
    events = [json.loads(line)["event"] for line in log.read_text().splitlines()]
    assert [event["attempt"] for event in events if event["type"] == "PrefillLost"] == [1]


async def test_two_gateways_may_serve_one_request_id(start: "Start") -> None:
    """Clients choose ids, and choose one again: neither request may be taken for the other, anywhere."""
    cluster = await start(prefill=2, decode=2, decode_step_s=0.02, prefill_token_s=0.002)
    other = ClusterBackend(cluster.address("conductor"), 10.0)
    following = asyncio.create_task(other.run())
    try:
        while other.ready() is not None:  # a gateway offers a question, not an event
            await asyncio.sleep(0.02)

        async def one(backend: ClusterBackend, number: int) -> None:
            asked = cluster.request(prompt(number), RequestOutputKind.FINAL_ONLY, 5)
            async with aclosing(backend.generate(replace(asked, request_id="same"))) as outputs:
                [output] = [output async for output in outputs]
            assert list(output.outputs[0].token_ids) == right(cluster, prompt(number), 5)
            story = backend.explain("same")
            assert story is not None
            assert isinstance(story["attempts"], list)
            assert len(story["attempts"]) == 1

        await asyncio.gather(one(cluster.backend, 0), one(other, 1))
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


def test_the_gaps_of_n_answers_are_those_of_each() -> None:
    now_s = iter([0.0, 0.0, 1.0, 1.0, 2.0, 2.0]).__next__
    clock = _TokenClock(now_s)
    for _ in range(
        3
    ):  # a step of the engine gives each answer a token; they may come in outputs of their own
        clock.count({0: 1})
        clock.count({1: 1})
    assert (clock.tokens, clock.mean_gap_s()) == (6, 1.0)


async def test_each_attempt_has_its_first_token(start: "Start") -> None:
    """The conductor learns from both; what the second is measured against is its own prediction."""
    cluster = await start(prefill=1, decode=2)
    cluster.workers["decode-0"].engine.die_after(LAYERS + 2)
    await cluster.answered_right(prompt(0))
    await cluster.settled()
    assert cluster.driver.status()["conductor"]["ttft_fit"]["samples"] == 2


async def test_every_worker_fails(start: "Start") -> None:
    cluster = await start(prefill=1, decode=1)
    await cluster.workers["decode-0"].vanish()
    with pytest.raises(Unavailable, match="no worker could serve the request in 3 attempts"):
        await cluster.answer(prompt(0))


async def test_a_worker_that_leaves_ends_what_it_had(start: "Start") -> None:
    """The conductor's word, not a broken call: the worker hangs, and its membership is withdrawn."""
    cluster = await start(prefill=2, decode=1, prefill_token_s=1.0)
    cluster.workers["prefill-1"].engine._prefill_token_s = 0.0
    asking = asyncio.create_task(cluster.answered_right(prompt(0)))
    await asyncio.sleep(0.2)
    await cluster.workers["prefill-0"].announcing.stop()
    await asking
    assert failures(cluster) == ["placement: the conductor ended the attempt"]


async def test_clients_leave_at_random_moments(start: "Start") -> None:
    cluster = await start(
        prefill=2, decode=2, slots=60, prefill_token_s=0.001, decode_step_s=0.005, chunk_tokens=8
    )
    chance = random.Random(1)

    async def one(number: int) -> None:
        await asyncio.sleep(chance.random())
        asking = asyncio.create_task(cluster.answered_right(prompt(number % 20, 30)))
        if number % 3 == 0:
            await asyncio.sleep(chance.random() * 0.3)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        else:
            await asking

    await asyncio.gather(*(one(number) for number in range(60)))
    await cluster.settled()
    await cluster.answered_right(prompt(1000))


async def test_a_full_arena_makes_requests_wait(start: "Start") -> None:
    """Each prompt takes 7 of 10 slots until its answer begins, so two never fit."""
    cluster = await start(prefill=2, decode=1, slots=10, prefill_token_s=0.002)
    await asyncio.gather(*(cluster.answered_right(prompt(number)) for number in range(6)))
    assert not failures(cluster)


async def test_a_prompt_larger_than_the_arena_is_refused(start: "Start") -> None:
    cluster = await start(slots=5)
    with pytest.raises(UnservedRequest, match="needs 7 blocks of KV, this node's arena has 5 in all"):
        await cluster.answer(prompt(0))
    await cluster.settled()
    await cluster.answered_right(prompt(0, 20))


async def test_a_prompt_longer_than_the_model_takes_is_refused(start: "Start") -> None:
    cluster = await start(max_model_len=20)
    with pytest.raises(UnservedRequest, match="the prompt has 26 tokens"):
        await cluster.answer(prompt(0))


async def test_too_much_in_flight(start: "Start") -> None:
    cluster = await start(decode_step_s=0.05, scheduling=SchedulingConfig(inflight_max=2))
    running = [asyncio.create_task(cluster.answered_right(prompt(number))) for number in range(2)]
    await asyncio.sleep(0.1)
    with pytest.raises(Overloaded, match="inflight_max") as refused:
        await cluster.answer(prompt(3))
    assert refused.value.retry_after_s > 0
    await asyncio.gather(*running)
    await cluster.settled()
    await cluster.answered_right(prompt(3))
