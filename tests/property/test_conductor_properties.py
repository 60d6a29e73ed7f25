"""The conductor under any sequence of events: invariants, a model that counts by hand, and exact repetition."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any, get_args

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from cluster.core.commands import Abort, Candidate, Command, Place, Reject, RetryAfter
from cluster.core.conductor import Conductor
from cluster.core.cost import FIT_WEIGHT
from cluster.core.events import (
    Aborted,
    Arrive,
    BlockRemoved,
    BlockStored,
    DecodeStarted,
    DirectoryFound,
    DirectoryLost,
    Event,
    Failed,
    Finished,
    FirstToken,
    NodeLeft,
    NodeSnapshot,
    PrefillFinished,
    PrefillLost,
    PrefillStarted,
    Timer,
    WorkerJoined,
    WorkerLeft,
)
from cluster.core.log import decode, encode, entry, replay
from cluster.core.policies import POLICIES
from cluster.core.state import Capacity, ConductorConfig, Role, Slo, TenantId
from kvstore.core.blocks import BlockHash, NodeId, RequestId, Tier, WorkerId

CONFIG = ConductorConfig(inflight_max=6, request_s_max=30.0, explained_max=3)
ROLES = {f"{role}-{i}": role for role in Role for i in range(2)}
CHAIN = tuple(BlockHash(bytes([i]) * 32) for i in range(6))

requests = st.sampled_from([RequestId(f"r{i}") for i in range(8)])
attempts = st.sampled_from([1, 1, 1, 2, 3])
workers = st.sampled_from([WorkerId(name) for name in ROLES])
nodes = st.sampled_from([NodeId("node-0"), NodeId("node-1")])
seconds = st.floats(0.001, 20)
some_blocks = st.integers(0, len(CHAIN)).map(lambda count: CHAIN[:count])
limits = st.none() | st.floats(0.05, 20)


def joined(worker: WorkerId, port: int) -> WorkerJoined:
    return WorkerJoined(
        worker=worker,
        role=ROLES[worker],
        node=NodeId(f"node-{worker[-1]}"),
        address=f"127.0.0.1:{port}",
        capacity=Capacity(batch_max=2, kv_tokens_max=400),
    )


@st.composite
def arrivals(draw: st.DrawFn) -> Arrive:
    chain = draw(some_blocks)
    tail = draw(st.sampled_from([0, 0, 1, 31])) if chain else draw(st.integers(1, 31))
    return Arrive(
        request=draw(requests),
        attempt=draw(attempts),
        tenant=TenantId("t"),
        tokens=len(chain) * CONFIG.block_tokens + tail,
        chain=chain,
        max_new_tokens=draw(st.integers(0, 300)),
        slo=Slo(ttft_s=draw(limits), tbt_s=draw(limits)),
    )


about = {"request": requests, "attempt": attempts}
pool = {"node": nodes, "hashes": some_blocks, "sequence": st.integers(1, 12)}
events: st.SearchStrategy[Event] = st.one_of(
    arrivals(),
    arrivals(),
    st.builds(PrefillStarted, **about),
    st.builds(
        PrefillFinished,
        **about,
        observed_s=seconds,
        computed_tokens=st.integers(0, 200),
        cached_tokens=st.integers(0, 200),
    ),
    st.builds(PrefillLost, **about, reason=st.just("died")),
    st.builds(DecodeStarted, **about),
    st.builds(FirstToken, **about, ttft_s=seconds),
    st.builds(Finished, **about, output_tokens=st.integers(0, 400), tbt_mean_s=limits, tbt_p99_s=limits),
    st.builds(Failed, **about, stage=st.just("prefill"), reason=st.just("lost")),
    st.builds(Aborted, request=requests),
    st.builds(joined, workers, st.sampled_from([7000, 7000, 7000, 7001])),
    st.builds(WorkerLeft, worker=workers, reason=st.just("lease expired")),
    st.builds(NodeLeft, node=nodes, reason=st.just("lease expired")),
    st.builds(BlockStored, **pool, tier=st.sampled_from(Tier)),
    st.builds(BlockRemoved, **pool),
    st.builds(NodeSnapshot, **pool, ssd=some_blocks),
    st.builds(DirectoryLost),
    st.builds(DirectoryFound),
    st.builds(Timer, at_s=st.floats(0, 100)),
)
histories = st.lists(st.tuples(st.sampled_from([0.0, 0.01, 0.7, 5.0]), events), max_size=60)


def fresh(policy: str) -> Conductor:
    return Conductor(replace(CONFIG, policy=policy), cycle([0.1, 0.9, 0.4]).__next__)


@dataclass
class Flight:
    place: Place
    placed_s: float
    context_tokens: int
    prefill: WorkerId | None
    started_s: float | None = None

    @property
    def prefill_s(self) -> float:
        assert self.place.explanation.chosen is not None
        return round(self.place.explanation.chosen.cost.prefill_s * 1e6) / 1e6


class Model:
    """What the loads must be, counted anew from every flight each time."""

    def __init__(self) -> None:
        self.flights: dict[RequestId, Flight] = {}
        self.workers: dict[WorkerId, WorkerJoined] = {}
        self.arrivals: dict[tuple[RequestId, int], Arrive] = {}
        self.output_tokens = float(CONFIG.output_tokens_guess)

    def saw(self, event: Event, now: float, commands: list[Command]) -> None:
        lost = {r for r, f in self.flights.items() if f.placed_s + CONFIG.request_s_max <= now}
        self.forget(lost)
        flight = self.flights.get(getattr(event, "request", RequestId("")))
        match event:
            case Arrive():
                self.arrived(event, commands)
            case WorkerJoined():
                if event.worker in self.workers and self.workers[event.worker] != event:
                    lost |= self.on(event.worker)
                self.workers[event.worker] = event
            case WorkerLeft():
                lost |= self.on(event.worker)
                self.workers.pop(event.worker, None)
            case Aborted():
                self.flights.pop(event.request, None)
            case _ if flight is not None and getattr(event, "attempt", None) == flight.place.attempt:
                self.progressed(event, now, flight)
        assert {command.request for command in commands if isinstance(command, Abort)} == lost
        self.forget(lost - {getattr(event, "request", None)})
        for place in commands:
            if isinstance(place, Place) and self.place_of(place.request) != place:
                self.placed(place, now)

    def place_of(self, request: RequestId) -> Place | None:
        return self.flights[request].place if request in self.flights else None

    def forget(self, lost: set[RequestId]) -> None:
        for request in lost:
            self.flights.pop(request, None)

    def on(self, worker: WorkerId) -> set[RequestId]:
        return {r for r, f in self.flights.items() if worker in (f.prefill, f.place.decode)}

    def arrived(self, event: Arrive, commands: list[Command]) -> None:
        self.arrivals[event.request, event.attempt] = event
        old = self.flights.get(event.request)
        if old is None or event.attempt > old.place.attempt:
            self.flights.pop(event.request, None)
            return
        places = [one for one in commands if isinstance(one, Place) and one.request == event.request]
        assert places == ([old.place] if event.attempt == old.place.attempt else [])

    def placed(self, place: Place, now: float) -> None:
        event = self.arrivals[place.request, place.attempt]
        context = event.tokens + round(min(self.output_tokens, event.max_new_tokens))
        chosen = place.explanation.chosen
        assert chosen is not None
        computes = place.prefill or (place.decode if chosen.cost.prefill_s else None)
        self.flights[event.request] = Flight(place, now, context, computes)

    def progressed(self, event: Event, now: float, flight: Flight) -> None:
        match event:
            case PrefillStarted():
                flight.started_s = now if flight.started_s is None else flight.started_s
            case PrefillFinished() | DecodeStarted() | FirstToken():
                flight.prefill = None
            case Finished() | Failed():
                if isinstance(event, Finished):
                    self.output_tokens += FIT_WEIGHT * (event.output_tokens - self.output_tokens)
                del self.flights[flight.place.request]

    def agrees_with(self, shown: dict[str, Any], now: float) -> None:
        assert sum(shown["inflight"].values()) == len(self.flights)
        assert [row["worker"] for row in shown["workers"]] == sorted(self.workers)
        for row in shown["workers"]:
            queued = [f for f in self.flights.values() if f.prefill == row["worker"]]
            streams = [f for f in self.flights.values() if f.place.decode == row["worker"]]
            both = sum(f in streams for f in queued)
            assert row["requests"] == len(queued) + len(streams) - both
            assert row["context_tokens"] == sum(f.context_tokens for f in streams)
            most_s = sum(f.prefill_s for f in queued)
            started = [min(now - f.started_s, f.prefill_s) for f in queued if f.started_s is not None]
            assert most_s - max(started, default=0) - 1e-6 <= row["queue_s"] <= most_s + 1e-6


def sane(candidate: Candidate, request: Arrive) -> None:
    cost = candidate.cost
    terms = [cost.queue_s, cost.fetch_s, cost.prefill_s, cost.handoff_s, cost.decode_wait_s, cost.tbt_s]
    assert min(terms) >= 0
    assert cost.ttft_s == pytest.approx(sum(terms))
    assert 0 <= candidate.cached_tokens <= request.tokens
    assert (candidate.source is None) == (candidate.cached_tokens == 0)


def judged(answer: Place | RetryAfter | Reject, request: Arrive) -> None:
    why, slo = answer.explanation, request.slo
    for candidate in why.candidates:
        sane(candidate, request)
    if not isinstance(answer, Place):
        assert why.chosen is None
        assert why.limit is None or why.limit.predicted >= why.limit.allowed
        assert (
            not isinstance(answer, RetryAfter) or CONFIG.retry_s_min <= answer.seconds <= CONFIG.retry_s_max
        )
        return
    assert why.chosen is not None
    assert why.chosen in why.candidates
    assert why.chosen != why.runner_up
    assert slo.ttft_s is None or why.chosen.cost.ttft_s <= slo.ttft_s
    assert slo.tbt_s is None or why.chosen.cost.tbt_s <= slo.tbt_s
    decode_computes = POLICIES[why.policy].at_decode
    assert answer.prefill is not None or decode_computes or answer.cached_tokens_expected == request.tokens


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(history=histories)
def test_any_history(policy: str, history: list[tuple[float, Event]]) -> None:
    conductor, model, now, log = fresh(policy), Model(), 0.0, []
    everyone: list[Event] = [joined(WorkerId(name), 7000) for name in ROLES]
    for pause, event in [(0.0, event) for event in everyone] + history:
        now += pause
        known_before = dict(model.flights)
        commands = conductor.handle(event, now)
        log.append(json.loads(json.dumps(entry(event, now, commands))))
        conductor.check()
        model.saw(event, now, commands)
        model.agrees_with(conductor.snapshot(), now)
        for answer in commands:
            if isinstance(answer, Place | RetryAfter | Reject):
                known = known_before.get(answer.request)
                if known is None or answer != known.place:
                    judged(answer, model.arrivals[answer.request, answer.attempt])
        for command in commands:
            assert decode(json.loads(json.dumps(encode(command)))) == command
    assert list(replay(log, fresh(policy))) == []


@pytest.mark.parametrize("kind", get_args(Event), ids=lambda kind: kind.__name__)
def test_an_event_comes_back_from_json(kind: type[Event]) -> None:
    @given(st.builds(kind))
    def comes_back(event: Event) -> None:
        assert repr(decode(json.loads(json.dumps(encode(event))))) == repr(event)

    comes_back()


def test_replay_shows_an_answer_that_differs() -> None:
    conductor = fresh("load")
    event = joined(WorkerId("decode-0"), 7000)
    log = [entry(event, 1.0, conductor.handle(event, 1.0))]
    log[0]["commands"] = []
    [(number, again)] = replay(log, fresh("load"))
    assert number == 0
    assert again["commands"][0] == {"type": "RequestSnapshot", "node": "node-0"}


RUN = """
import json, random
from cluster.core.conductor import Conductor
from cluster.core.events import *
from cluster.core.log import entry
from cluster.core.policies import POLICIES
from cluster.core.state import *
from kvstore.core.blocks import BlockHash

rng = random.Random(7)
for policy in POLICIES:
    conductor, now = Conductor(ConductorConfig(policy=policy), rng.random), 0.0
    def tell(event):
        print(json.dumps(entry(event, now, conductor.handle(event, now))))
    for i in range(12):
        tell(WorkerJoined(worker=f"w{i}", role=list(Role)[i % 2], node=f"n{i % 5}", address=f"h:{i}",
                          capacity=Capacity(batch_max=4, kv_tokens_max=8000)))
    chains = [tuple(BlockHash(rng.randbytes(32)) for _ in range(20)) for _ in range(10)]
    sequence = {}
    for i in range(200):
        now += rng.expovariate(4)
        chain, node = rng.choice(chains)[: rng.randrange(21)], f"n{rng.randrange(5)}"
        sequence[node] = sequence.get(node, 0) + rng.choice([1, 1, 1, 1, 2])
        tell(BlockStored(node=node, hashes=chain, sequence=sequence[node]))
        tell(NodeSnapshot(node=node, hashes=chain, sequence=sequence[node]))
        tell(Arrive(request=f"r{i}", tenant="t", tokens=32 * len(chain) + rng.choice([0, 5] if chain else [5]), chain=chain,
                    max_new_tokens=100, slo=Slo(ttft_s=rng.choice([None, 10]))))
        if i % 50 == 49:
            tell(WorkerLeft(worker=f"w{i % 12}", reason="test"))
    print(json.dumps(conductor.snapshot()))
"""


def test_the_same_in_every_process() -> None:
    """Neither the order of a set nor a hash of this process decides anything."""
    outputs = [
        subprocess.run(
            [sys.executable, "-c", RUN],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0].count('"Place"') > 100 * len(POLICIES)
    assert outputs[0] == outputs[1]
