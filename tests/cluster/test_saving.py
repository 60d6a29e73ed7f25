"""Answers' KV goes to the pool when they have ended: the next turn of a conversation finds it."""

import asyncio
import random
from typing import TYPE_CHECKING

import grpc
import pytest
from vllm import SamplingParams

from decode_worker import decode_pb2
from decode_worker.decode_pb2_grpc import DecodeWorkerStub
from kvstore.engine.wire import RequestOutputKind, encode_params
from kvstore.transfer import kv_pb2 as pb
from kvstore.transfer.server import OPTIONS
from tests.cluster.conftest import until

if TYPE_CHECKING:
    from tests.cluster.conftest import SmallCluster, Start

BLOCK_TOKENS = 4
LAYERS = 3
ANSWER_TOKENS = 5


def prompt(seed: int, tokens: int = 26) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(50_000) for _ in range(tokens)]


async def committed(cluster: "SmallCluster") -> int:
    return sum([(await node.Status(pb.Empty())).committed for node in cluster.nodes])


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("tokens", [1, 3, 4, 26, 28])
async def test_the_next_turn_finds_the_answer(start: "Start", tokens: int, nodes: int) -> None:
    cluster = await start(nodes=nodes)
    first = prompt(0, tokens)
    answer = list((await cluster.answered_right(first)).outputs[0].token_ids)
    await cluster.settled()
    computed = cluster.computed("prefill")
    second = [*first, *answer, *prompt(1, 7)]
    fed = len(first) + len(answer) - 1  # the last token of the answer has no KV
    again = await cluster.answered_right(second)
    assert (
        again.num_cached_tokens == fed // BLOCK_TOKENS * BLOCK_TOKENS > tokens // BLOCK_TOKENS * BLOCK_TOKENS
    )
    assert cluster.computed("prefill") - computed == len(second) - again.num_cached_tokens


async def test_a_conversation_of_many_turns(start: "Start") -> None:
    cluster = await start(prefill=2, decode=2, nodes=2)
    said = prompt(0, 9)
    for turn in range(6):
        answer = await cluster.answered_right(said)
        assert bool(turn) == bool(answer.num_cached_tokens)
        await cluster.settled()
        said = [*said, *answer.outputs[0].token_ids, *prompt(turn + 1, 5)]


async def test_several_answers_to_one_prompt_are_not_saved(start: "Start") -> None:
    cluster = await start()
    asked = cluster.request(prompt(0), RequestOutputKind.FINAL_ONLY, 8)
    asked.sampling_params.n = 2
    outputs = [output async for output in cluster.backend.generate(asked)]
    assert len(outputs[-1].outputs) == 2
    await cluster.settled()
    assert await committed(cluster) == 26 // BLOCK_TOKENS


async def test_without_room_the_answer_is_not_saved(start: "Start") -> None:
    """All slots are leased or being written when it ends."""
    cluster = await start(slots=10, decode_step_s=0.05)
    asking = asyncio.create_task(cluster.answered_right(prompt(0)))

    async def handed_off() -> bool:
        status = await cluster.node.Status(pb.Empty())
        return (status.committed, status.leases) == (6, 0)

    await until(handed_off, "the prompt is with the decode side")
    events = cluster.node.Events(pb.EventsRequest())
    names = list((await anext(aiter(events))).stored)
    events.cancel()
    leased = await cluster.node.Lease(
        pb.LeaseRequest(request_id="reads", holder="test", hashes=names, lease_s=60.0)
    )
    assert len(leased.slots) == 6
    others = [bytes([number]) * 32 for number in range(4)]
    await cluster.node.Reserve(
        pb.ReserveRequest(request_id="writes", worker_id="prefill-0", hashes=others, lease_s=60.0)
    )
    assert not asking.done(), "the answer ended too early to prove anything"
    await asking
    await until(lambda: not cluster.workers["decode-0"].engine.counters().running, "nothing held")
    assert await committed(cluster) == 6
    await cluster.node.Abandon(pb.AbandonRequest(request_id="writes", worker_id="prefill-0", stopped=True))
    await cluster.node.Release(pb.Holding(request_id="reads", holder="test"))


@pytest.mark.parametrize("steps", [0, 1, 2])
async def test_a_decode_worker_dies_while_it_saves(start: "Start", steps: int) -> None:
    """The answer is whole; what was being filled is freed with its writer."""
    cluster = await start()
    cluster.workers["decode-0"].engine.die_after(LAYERS + ANSWER_TOKENS + steps)
    await cluster.answered_right(prompt(0))
    await until(lambda: cluster.workers["decode-0"].engine.dead, "it died")

    async def freed() -> bool:
        return not (await cluster.node.Status(pb.Empty())).filling

    await until(freed, "its slots are free")
    cluster.workers["decode-0"].engine._held.clear()  # gone with its process
    assert await committed(cluster) == 26 // BLOCK_TOKENS


async def test_clients_leave_while_answers_are_made_and_saved(start: "Start") -> None:
    """`settled`, at the end of every test, sees what an engine still holds."""
    cluster = await start(decode=2, decode_step_s=0.002)
    chance = random.Random(3)

    async def one(number: int) -> None:
        asking = asyncio.create_task(cluster.answer(prompt(number), tokens=chance.randrange(1, 20)))
        await asyncio.wait([asking], timeout=chance.random() * 0.15)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    for round_ in range(5):
        await asyncio.gather(*(one(10 * round_ + number) for number in range(10)))
    await cluster.settled()
    await cluster.answered_right(prompt(1000))


async def test_a_gateway_that_names_no_root_gets_no_answer_saved(start: "Start") -> None:
    cluster = await start()
    request = decode_pb2.DecodeRequest(
        request_id="r",
        token_ids=prompt(0, 8),
        sampling_params=encode_params(SamplingParams(max_tokens=9)),
        load_timeout_s=1.0,
    )
    async with grpc.aio.insecure_channel(cluster.address("decode-0"), options=OPTIONS) as channel:
        replies = [reply async for reply in DecodeWorkerStub(channel).Decode(request)]
    assert len(replies) == 9
    await cluster.settled()
    assert await committed(cluster) == 0
