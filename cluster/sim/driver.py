"""The simulated driver of the pure conductor: gives it events and the time, carries out its commands on devices.

As in `cluster.control.driver`, which does the same for the live cluster, there is no policy here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from random import Random
from typing import Any

from blake3 import blake3

from cluster.core.commands import (
    Abort,
    Command,
    Explanation,
    Place,
    Reject,
    RequestSnapshot,
    RetryAfter,
    WakeAt,
)
from cluster.core.conductor import Conductor
from cluster.core.events import (
    Arrive,
    Event,
    Finished,
    FirstToken,
    NodeSnapshot,
    PrefillFinished,
    PrefillStarted,
    Timer,
    WorkerJoined,
)
from cluster.core.log import entry
from cluster.core.state import ConductorConfig, Overload, Role, Slo, TenantId
from cluster.sim.clock import Clock
from cluster.sim.devices import DecodeEngine, Gaps, Job, Node, PrefillEngine, transfer
from cluster.sim.profiles import Profile
from cluster.sim.trace import TraceRow
from kvstore.core.blocks import BlockHash, NodeId, RequestId, Tier, WorkerId

TBT_SHARE = 0.1
"""A request's time between tokens is the mean of this share of its gaps, the slowest (Mooncake, FAST'25, section 5)."""
_MAX_NEW_TOKENS = 32_768
"""What every request allows itself: no policy may know how long an answer will be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One run. `rate` divides the trace's times between arrivals; `slowness` is the profile's error, seen by no policy.

    `prediction_error` is the standard deviation of each prefill's seconds around what the profile says, as a share.
    """

    profile: Profile
    prefill: int
    decode: int
    policy: str = "load"
    options: tuple[tuple[str, float], ...] = ()
    overload: Overload = Overload.RESERVED
    slo: Slo = Slo()
    rate: float = 1.0
    seed: int = 0
    prediction_error: float = 0.0
    slowness: float = 1.0
    chunk_tokens: int = 2048
    eviction: str = "lru"
    inflight_max: int = 1_000_000


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of one request. `refused` names the limit, `wasted` says that its prompt had been computed."""

    request: RequestId
    arrived_s: float
    tokens: int
    output_tokens: int
    refused: str | None = None
    refused_s: float | None = None
    wasted: bool = False
    ttft_s: float | None = None
    tbt_s: float | None = None
    finished_s: float | None = None
    cached_tokens: int = 0
    hits: dict[str, int] = field(default_factory=dict)
    """Blocks by where they came from: `dram` and `ssd` of the node itself, `peer`."""
    prefill: str | None = None
    decode: str | None = None
    explanation: Explanation | None = None

    def meets(self, slo: Slo) -> bool:
        return (
            self.finished_s is not None
            and self.ttft_s is not None
            and (slo.ttft_s is None or self.ttft_s <= slo.ttft_s)
            and (slo.tbt_s is None or (self.tbt_s or 0.0) <= slo.tbt_s)
        )


@dataclass(slots=True)
class Result:
    """A whole run. `digest` names all events and commands of it, where it was recorded."""

    scenario: Scenario
    outcomes: list[Outcome]
    duration_s: float
    busy_s: dict[str, float]
    snapshot: dict[str, Any]
    digest: str = ""

    @property
    def good(self) -> int:
        return sum(outcome.meets(self.scenario.slo) for outcome in self.outcomes)

    @property
    def attainment(self) -> float:
        """Share of all arrivals that meet both limits; who is refused does not."""
        return self.good / len(self.outcomes)

    @property
    def refused(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.refused is not None]

    @property
    def served(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.refused is None]

    @property
    def hit_ratio(self) -> float:
        """Tokens of served prompts that were not computed."""
        served = self.served
        return sum(one.cached_tokens for one in served) / max(1, sum(one.tokens for one in served))

    def quartile_attainments(self) -> list[float]:
        """Attainment in each quarter of the requests by prompt length."""
        ordered = sorted(self.outcomes, key=lambda outcome: (outcome.tokens, outcome.request))
        cuts = [round(len(ordered) * quarter / 4) for quarter in range(5)]
        slo = self.scenario.slo
        return [
            sum(one.meets(slo) for one in ordered[start:end]) / max(1, end - start)
            for start, end in pairwise(cuts)
        ]

    def summary(self) -> dict[str, Any]:
        served = self.served
        ttfts = sorted(one.ttft_s for one in served if one.ttft_s is not None)
        tbts = sorted(one.tbt_s for one in served if one.tbt_s is not None)
        waits = sorted(one.refused_s for one in self.refused if one.refused_s is not None)
        reasons: dict[str, int] = {}
        for one in self.refused:
            reasons[one.refused or ""] = reasons.get(one.refused or "", 0) + 1
        return {
            "policy": self.scenario.policy,
            "prefill": self.scenario.prefill,
            "decode": self.scenario.decode,
            "rate": self.scenario.rate,
            "slo": asdict(self.scenario.slo),
            "requests": len(self.outcomes),
            "attainment": self.attainment,
            "attainment_by_quartile": self.quartile_attainments(),
            "goodput_per_s": self.good / self.duration_s if self.duration_s else 0.0,
            "refused": len(self.refused),
            "refused_by_reason": dict(sorted(reasons.items())),
            "wasted": sum(one.wasted for one in self.refused),
            "missed": sum(not one.meets(self.scenario.slo) for one in served),
            "hit_ratio": self.hit_ratio,
            "hit_blocks": {
                where: sum(one.hits.get(where, 0) for one in served) for where in ("dram", "ssd", "peer")
            },
            "ttft_s": _spread(ttfts),
            "tbt_s": _spread(tbts),
            "time_to_refuse_s": _spread(waits),
            "busy": {name: seconds / self.duration_s for name, seconds in self.busy_s.items()}
            if self.duration_s
            else {},
            "duration_s": self.duration_s,
        }


def _spread(ordered: Sequence[float]) -> dict[str, float]:
    if not ordered:
        return {}

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    return {"mean": sum(ordered) / len(ordered), "p50": at(0.5), "p90": at(0.9), "p99": at(0.99)}


@dataclass(slots=True)
class _Worker:
    """A worker's engine and the node it stands on."""

    node: Node
    engine: PrefillEngine | DecodeEngine


@dataclass(slots=True)
class Simulation:
    """Runs `rows` through a conductor of its own. `record` gets every event with its commands, as a live log has them."""

    scenario: Scenario
    rows: Sequence[TraceRow]
    record: Callable[[dict[str, Any]], None] | None = None
    progress: Callable[[int], None] | None = None
    clock: Clock = field(default_factory=Clock)
    _core: Conductor = field(init=False)
    _workers: dict[str, _Worker] = field(init=False, default_factory=dict)
    _nodes: dict[NodeId, Node] = field(init=False, default_factory=dict)
    _jobs: dict[RequestId, Job] = field(init=False, default_factory=dict)
    _outcomes: dict[RequestId, Outcome] = field(init=False, default_factory=dict)
    _digest: Any = field(init=False, default_factory=blake3)

    def run(self) -> Result:
        scenario, profile = self.scenario, self.scenario.profile
        self._core = Conductor(config(scenario), Random(scenario.seed).random)
        for role, count in ((Role.PREFILL, scenario.prefill), (Role.DECODE, scenario.decode)):
            for number in range(count):
                self._start(role, number)
        names: dict[int, BlockHash] = {}
        errors = Random(f"{scenario.seed} prediction errors")
        for number, row in enumerate(self.rows):
            arrived_s = row.timestamp_ms / 1000 / scenario.rate
            error = errors.gauss(0.0, scenario.prediction_error) if scenario.prediction_error else 0.0
            job = Job(
                request=RequestId(f"r{number:06d}"),
                tokens=row.input_tokens,
                output_tokens=max(1, row.output_tokens),
                chain=_chain(row, profile.block_tokens, names),
                arrived_s=arrived_s,
                slowness=scenario.slowness * max(0.1, 1.0 + error),
            )
            self.clock.at(arrived_s, lambda job=job: self._arrive(job))  # type: ignore[misc]
        self.clock.run()
        self._core.check()
        busy_s = {name: worker.engine.busy_s for name, worker in self._workers.items()}
        return Result(
            scenario,
            list(self._outcomes.values()),
            max(one.finished_s or one.arrived_s for one in self._outcomes.values()),
            busy_s,
            self._core.snapshot(),
            self._digest.hexdigest() if self.record is not None else "",
        )

    # -- members ----------------------------------------------------------------------------------------------

    def _start(self, role: Role, number: int) -> None:
        scenario, profile = self.scenario, self.scenario.profile
        name = f"{role.value}-{number:04d}"
        node = Node(NodeId(f"node-{name}"), profile, scenario.eviction, self.clock, self._tell)
        self._nodes[node.id] = node
        engine = (
            PrefillEngine(profile, self.clock, self)
            if role is Role.PREFILL
            else DecodeEngine(profile, self.clock, self, scenario.chunk_tokens)
        )
        self._workers[name] = _Worker(node, engine)
        self._tell(
            WorkerJoined(
                worker=WorkerId(name),
                role=role,
                node=node.id,
                address=name,
                capacity=profile.capacity,
                coefficients=profile.coefficients,
            )
        )

    # -- the core ---------------------------------------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        now = self.clock.now
        commands = self._core.handle(event, now)
        if self.record is not None:
            line = entry(event, now, commands)
            self._digest.update(json.dumps(line).encode())
            self.record(line)
        for command in commands:
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        match command:
            case Place():
                self._placed(command)
            case RetryAfter() | Reject():
                self._refused(command.request, command.reason, command.explanation)
            case Abort():
                self._jobs[command.request].over = True
                self._outcomes[command.request].wasted = True
                self._refused(command.request, command.reason, None)
            case RequestSnapshot():
                self._snapshot(self._nodes[command.node])
            case WakeAt():
                self.clock.at(command.at_s, lambda: self._wake(command.at_s))

    def _wake(self, at_s: float) -> None:
        if self._jobs:  # all that is left to wake for is theirs
            self._tell(Timer(at_s=at_s))

    def _snapshot(self, node: Node) -> None:
        in_dram = tuple(node.machine.names(Tier.DRAM))
        on_disk = tuple(name for name in node.machine.names() if not node.machine.has(name, Tier.DRAM))
        self._tell(NodeSnapshot(node=node.id, hashes=in_dram, sequence=node.sequence, ssd=on_disk))

    # -- requests -----------------------------------------------------------------------------------------------

    def _arrive(self, job: Job) -> None:
        self._jobs[job.request] = job
        self._outcomes[job.request] = Outcome(
            request=job.request,
            arrived_s=job.arrived_s,
            tokens=job.tokens,
            output_tokens=job.output_tokens,
        )
        if self.progress is not None:
            self.progress(len(self._outcomes))
        self._tell(
            Arrive(
                request=job.request,
                tenant=TenantId("trace"),
                tokens=job.tokens,
                chain=job.chain,
                max_new_tokens=_MAX_NEW_TOKENS,
                slo=self.scenario.slo,
            )
        )

    def _refused(self, request: RequestId, reason: str, explanation: Explanation | None) -> None:
        outcome = self._outcomes[request]
        outcome.refused = reason
        outcome.refused_s = self.clock.now - outcome.arrived_s
        outcome.explanation = explanation or outcome.explanation
        self._jobs.pop(request, None)

    def _placed(self, place: Place) -> None:
        job, outcome = self._jobs[place.request], self._outcomes[place.request]
        outcome.prefill, outcome.decode = place.prefill, place.decode
        outcome.explanation = place.explanation
        worker = self._workers[place.prefill or place.decode]
        fetched_s = self._fetch(job, worker.node, place.source)
        outcome.cached_tokens = job.cached_tokens
        worker.engine.prefill(job, fetched_s, place.step_s_max)

    def _fetch(self, job: Job, node: Node, source: NodeId | None) -> float:
        """Bring the chain's beginning to `node`; when all that it will have is there."""
        in_dram = node.prefix(job.chain)
        blocks, ready_s = node.ask(job.chain)
        hits = self._outcomes[job.request].hits
        hits["dram"], hits["ssd"] = in_dram, blocks - in_dram
        if source is not None and source != node.id:
            far, far_ready_s = self._nodes[source].ask(job.chain)
            if far > blocks:
                kv_bytes = (far - blocks) * self.scenario.profile.block_bytes
                arrived_s = transfer(max(self.clock.now, far_ready_s), self._nodes[source], node, kv_bytes)
                hits["peer"] = far - blocks
                blocks, ready_s = far, max(ready_s, arrived_s)
        job.cached_tokens = min(blocks * self.scenario.profile.block_tokens, job.tokens - 1)
        return ready_s

    # -- what engines do ------------------------------------------------------------------------------------------

    def prefill_started(self, job: Job) -> None:
        self._tell(PrefillStarted(request=job.request, attempt=job.attempt))

    def prefilled(self, job: Job, seconds: float) -> None:
        outcome, profile, now = self._outcomes[job.request], self.scenario.profile, self.clock.now
        decode = self._workers[outcome.decode or ""]
        node = self._workers[outcome.prefill or outcome.decode or ""].node
        node.store(job.chain)
        self._tell(
            PrefillFinished(
                request=job.request,
                attempt=job.attempt,
                observed_s=seconds,
                computed_tokens=job.computed_tokens,
                cached_tokens=job.cached_tokens,
            )
        )
        if job.over or outcome.prefill is None:
            return
        # The hand-off has followed the prefill layer by layer, so that only the last one is still to come, or what the
        # network could not carry meanwhile.
        lacking = job.tokens - decode.node.prefix(job.chain) * profile.block_tokens
        kv_bytes = lacking * profile.kv_bytes_per_token
        followed_s = transfer(now - seconds, node, decode.node, kv_bytes)
        last_s = now + kv_bytes / profile.layers / profile.network.bytes_per_s
        load_s = job.tokens * profile.kv_bytes_per_token / profile.memory.bytes_per_s
        self.clock.at(max(followed_s, last_s) + load_s, lambda: self._handed_off(job, decode))

    def _handed_off(self, job: Job, worker: _Worker) -> None:
        worker.node.store(job.chain)
        assert isinstance(worker.engine, DecodeEngine), "a hand-off to a prefill worker"
        if not job.over:
            worker.engine.join(job)

    def first_token(self, job: Job) -> None:
        ttft_s = self.clock.now - job.arrived_s
        self._outcomes[job.request].ttft_s = ttft_s
        self._tell(FirstToken(request=job.request, attempt=job.attempt, ttft_s=ttft_s))

    def finished(self, job: Job, gaps: Gaps) -> None:
        outcome = self._outcomes[job.request]
        outcome.tbt_s, outcome.finished_s = gaps.slowest_s(TBT_SHARE), self.clock.now
        del self._jobs[job.request]
        self._tell(
            Finished(
                request=job.request,
                attempt=job.attempt,
                output_tokens=job.output_tokens,
                tbt_mean_s=gaps.mean_s,
                tbt_p99_s=gaps.slowest_s(0.01),
            )
        )


def config(scenario: Scenario) -> ConductorConfig:
    """The conductor's configuration in this run; its log replays through a fresh conductor that has the same one."""
    profile = scenario.profile
    return ConductorConfig(
        block_tokens=profile.block_tokens,
        kv_bytes_per_token=profile.kv_bytes_per_token,
        policy=scenario.policy,
        options=scenario.options,
        overload=scenario.overload,
        chunk_tokens=scenario.chunk_tokens,
        inflight_max=scenario.inflight_max,
        request_s_max=1e9,
        output_tokens_guess=256,
        explained_max=4,
        memory=profile.memory,
        network=profile.network,
        ssd=profile.ssd,
    )


def _chain(row: TraceRow, block_tokens: int, names: dict[int, BlockHash]) -> tuple[BlockHash, ...]:
    """Names of the row's full blocks."""
    if row.block_tokens != block_tokens:
        raise ValueError(f"the trace's blocks have {row.block_tokens} tokens, the profile's {block_tokens}")
    for hash_id in row.hash_ids:
        if hash_id not in names:
            names[hash_id] = BlockHash(hash_id.to_bytes(32, "big"))
    return tuple(names[hash_id] for hash_id in row.hash_ids[: row.input_tokens // block_tokens])
