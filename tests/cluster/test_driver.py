"""The live conductor: who is in, what it survives, and that what it decided can be decided again from its log."""

import asyncio
import gc
import json
import random
import weakref
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest

from cluster.config import SchedulingConfig
from cluster.core.commands import Place
from cluster.core.conductor import Conductor
from cluster.core.events import Aborted, Arrive
from cluster.core.log import replay
from cluster.core.state import ConductorConfig, Slo, TenantId
from kvstore.core.blocks import RequestId
from kvstore.engine.fake import fake_answer
from tests.cluster.conftest import until

if TYPE_CHECKING:
    from tests.cluster.conftest import SmallCluster, Start


def prompt(seed: int, tokens: int = 26) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(50_000) for _ in range(tokens)]


async def test_a_conductor_that_restarts_is_found_again(start: "Start") -> None:
    cluster = await start(prefill=2, decode=2, decode_step_s=0.1)
    into: list[int] = []
    streaming = asyncio.create_task(cluster.stream(prompt(0), into, tokens=20))
    await asyncio.sleep(0.5)
    former = weakref.ref(cluster.driver)
    await cluster.stop_conductor()
    waiting = asyncio.create_task(cluster.answered_right(prompt(1)))
    await asyncio.sleep(0.3)
    await cluster.start_conductor(SchedulingConfig())
    await cluster.known(5)
    await cluster.answered_right(prompt(2))
    await streaming
    layout = cluster.workers["decode-0"].engine.layout
    assert into == fake_answer(layout, prompt(0), 20), "an answer under way needs no conductor"
    await waiting
    await cluster.settled()
    again = await cluster.answered_right([*prompt(2)[:24], 7])
    assert again.num_cached_tokens == 24, "what the node holds was learnt anew"
    gc.collect()
    assert former() is None, "something keeps the former conductor in memory"


async def test_who_withdraws_right_after_the_start_is_gone_at_once(start: "Start") -> None:
    """The time that is given after the directory was away is given to members that were known, not at the start."""
    cluster = await start(prefill=2, decode=1)
    await cluster.workers["prefill-1"].announcing.stop()

    async def gone() -> bool:
        return "prefill-1" not in {member["id"] for member in cluster.driver.status()["members"]}

    await until(gone, "the conductor knows that it left", seconds=3.0)


async def test_a_worker_of_another_model_or_of_other_shards_is_left_out(
    start: "Start", caplog: pytest.LogCaptureFixture
) -> None:
    cluster = await start(prefill=1, decode=1)
    with pytest.raises(grpc.aio.AioRpcError, match="serves model other, this node's other workers fake"):
        await cluster.start_worker("decode", "decode-1", fingerprint="other")
    cluster.announce(cluster.member("decode", "decode-2", fingerprint="other"))
    two_ranks = replace(cluster.member("decode", "decode-4"), tensor_parallel=2)
    cluster.announce(two_ranks)
    await cluster.start_worker("decode", "decode-3")
    await cluster.known(4)
    assert {member["id"] for member in cluster.driver.status()["members"]} == {
        "decode-0",
        "decode-3",
        "node-0",
        "prefill-0",
    }
    [told] = [line for line in caplog.messages if line.startswith("decode-4 is left out")]
    assert "tensor_parallel=2" in told.split("the cluster")[0]
    assert "tensor_parallel=0" in told.split("the cluster")[1]
    await asyncio.gather(*(cluster.answered_right(prompt(number)) for number in range(10)))


async def test_what_was_decided_is_decided_again_from_the_log(start: "Start", tmp_path: Path) -> None:
    """Live equals simulated, first form: reuse, a lost worker, a client that leaves, a refusal."""
    log = tmp_path / "events.jsonl"
    cluster = await start(prefill=3, decode=3, scheduling=SchedulingConfig(record_events=log))
    await asyncio.gather(*(cluster.answered_right(prompt(number % 10)) for number in range(30)))
    cluster.workers["decode-1"].engine.die_after(3)
    await asyncio.gather(*(cluster.answered_right(prompt(number)) for number in range(20, 26)))
    leaving = asyncio.create_task(cluster.answer(prompt(0)))
    await asyncio.sleep(0.01)
    leaving.cancel()
    await cluster.workers["prefill-0"].announcing.stop()
    await cluster.known(6)
    await cluster.settled()
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    kinds = {entry["event"]["type"] for entry in entries}
    assert kinds >= {"Arrive", "Failed", "Aborted", "WorkerLeft", "BlockStored", "NodeSnapshot", "Finished"}
    assert not list(replay(entries, fresh(cluster)))
    assert list(
        replay([entry for entry in entries if entry["event"]["type"] != "PrefillStarted"], fresh(cluster))
    )


async def test_a_policy_that_binds_late_answers_when_a_way_is_free(start: "Start", tmp_path: Path) -> None:
    """More at once than all workers take; one leaves the line; decode workers compute prompts too; replayed, the same."""
    log = tmp_path / "events.jsonl"
    scheduling = SchedulingConfig(policy="moonpool", record_events=log)
    cluster = await start(prefill=1, decode=2, decode_step_s=0.02, scheduling=scheduling)
    leaving = [asyncio.create_task(cluster.answer(prompt(number))) for number in range(30, 34)]
    everyone = asyncio.gather(*(cluster.answered_right(prompt(number)) for number in range(20)))
    await asyncio.sleep(0.01)
    for task in leaving:
        task.cancel()
    await everyone
    await cluster.settled()
    status = cluster.driver.status()["conductor"]
    assert status["waiting"] == 0
    assert not cluster.driver._undecided
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    late = [entry for entry in entries if entry["event"]["type"] != "Arrive"]
    assert any(command["type"] == "Place" for entry in late for command in entry["commands"])
    places = [one for entry in entries for one in entry["commands"] if one["type"] == "Place"]
    assert {place["prefill"] for place in places} == {None, "prefill-0"}
    assert not list(replay(entries, fresh(cluster, "moonpool")))


async def test_who_asks_again_is_answered_when_the_first_call_is_given_up(start: "Start") -> None:
    cluster = await start(decode_step_s=0.02, scheduling=SchedulingConfig(policy="moonpool"))
    busy = asyncio.gather(*(cluster.answered_right(prompt(number)) for number in range(20)))
    await asyncio.sleep(0.05)
    arrival = Arrive(
        request=RequestId("twice"), tenant=TenantId("t"), tokens=1, chain=(), max_new_tokens=1, slo=Slo()
    )
    first, second = [asyncio.create_task(cluster.driver.decide(arrival)) for _ in range(2)]
    await asyncio.sleep(0)
    assert not first.done(), "there is no line"
    first.cancel()
    decided = await asyncio.wait_for(second, 20.0)
    assert isinstance(decided.command, Place)
    cluster.driver.report(Aborted(request=arrival.request))
    await busy


def fresh(cluster: "SmallCluster", policy: str = SchedulingConfig().policy) -> Conductor:
    """A conductor as the driver made its own. The policies used here ask for no chance."""
    layout = cluster.workers["decode-0"].engine.layout

    def no_chance() -> float:
        raise AssertionError("this policy leaves nothing to chance")

    config = ConductorConfig(
        block_tokens=layout.block_tokens,
        kv_bytes_per_token=layout.block_bytes // layout.block_tokens,
        policy=policy,
        inflight_max=SchedulingConfig().inflight_max,
    )
    return Conductor(config, no_chance)
