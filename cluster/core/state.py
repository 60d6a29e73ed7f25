"""What the conductor knows: ids, limits, workers and their load, and the view that policies read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

from cluster.core.cost import Coefficients, Fit, Link, decode_step_s, prefill_s
from kvstore.core.blocks import NodeId, RequestId, WorkerId
from kvstore.core.prefix_index import Held

TenantId = NewType("TenantId", str)


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class Overload(StrEnum):
    """What of the decode workers' load counts when it is asked whether an SLO will be kept.

    The middle three are Mooncake's (arXiv, section 7); all three look once more when the prompt is done.
    """

    OFF = "off"
    """Nothing is refused for its SLO."""
    NONE = "none"
    """At arrival only the prefill's; the time between tokens when the prompt is done, which may then be wasted."""
    EARLY = "early"
    """At arrival also the streams that decode now."""
    PREDICTIVE = "predictive"
    """At arrival also the streams that will decode when this prompt is done, if all answers take equally long."""
    RESERVED = "reserved"
    """All that was placed on the worker and is not over: what is admitted is not refused later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """A request's limits; None is no limit."""

    ttft_s: float | None = None
    tbt_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What one engine holds at once: streams in a batch, and tokens of KV."""

    batch_max: int
    kv_tokens_max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConductorConfig:
    """The conductor's part of the configuration tree. Defaults suit the CPU default model."""

    block_tokens: int = 32
    kv_bytes_per_token: int = 46_080
    policy: str = "load"
    options: tuple[tuple[str, float], ...] = ()
    overload: Overload = Overload.RESERVED
    chunk_tokens: int = 2048
    inflight_max: int = 256
    request_s_max: float = 3600.0
    output_tokens_guess: int = 128
    retry_s_min: float = 1.0
    retry_s_max: float = 60.0
    retry_s_no_worker: float = 5.0
    snapshot_retry_s: float = 2.0
    suspect_s: float = 5.0
    directory_grace_s: float = 60.0
    explained_max: int = 8
    memory: Link = Link(latency_s=1e-4, bytes_per_s=5e9)
    network: Link = Link(latency_s=1e-3, bytes_per_s=1e9)
    ssd: Link = Link(latency_s=1e-3, bytes_per_s=1.5e9)


@dataclass(slots=True, kw_only=True)
class Stream:
    """A request placed on a decode worker: the tokens of KV it will hold, when it is to start, and when it did."""

    context_tokens: int
    ready_s: float = 0.0
    since_s: float | None = None
    tbt_s: float | None = None
    """Its limit."""


@dataclass(slots=True, kw_only=True)
class Worker:
    """One engine and the work it was given. Load is kept in whole numbers, so that it never drifts from its sum.

    `queue_us`: predicted microseconds of every prefill placed here and not finished, in order of placement.
    `streams`: every request placed here for decoding. `tbt_limits`: the times between tokens that they are allowed, and
    how many of them each.
    """

    id: WorkerId
    role: Role
    node: NodeId
    address: str
    capacity: Capacity
    coefficients: Coefficients
    fit: Fit = Fit()
    queue_us: dict[RequestId, int] = field(default_factory=dict)
    queued_us: int = 0
    streams: dict[RequestId, Stream] = field(default_factory=dict)
    context_tokens: int = 0
    tbt_limits: dict[float, int] = field(default_factory=dict)
    running: RequestId | None = None
    running_since_s: float = 0.0
    suspect_until_s: float = 0.0

    def queue_s(self, now_s: float) -> float:
        """Predicted seconds until everything placed here is prefilled; the running one counts for what is left."""
        running_us = self.queue_us[self.running] if self.running is not None else 0
        return self.queued_us / 1e6 - min(now_s - self.running_since_s, running_us / 1e6)

    def prefill_s(self, cached_tokens: int, new_tokens: int) -> float:
        return self.fit.scale * prefill_s(self.coefficients, cached_tokens, new_tokens)

    def step_s(self, more_streams: int = 0, more_tokens: int = 0) -> float:
        """Predicted seconds of a decode step with that much added; a batch never exceeds its maximum."""
        batch = min(len(self.streams) + more_streams, self.capacity.batch_max)
        context = min(self.context_tokens + more_tokens, self.capacity.kv_tokens_max)
        return self.fit.scale * decode_step_s(self.coefficients, batch, context)

    def empty_step_s(self, context_tokens: int) -> float:
        """Predicted seconds of a decode step of one stream alone."""
        return self.fit.scale * decode_step_s(self.coefficients, 1, context_tokens)

    def step_with_s(self, streams: Sequence[Stream], more_tokens: int) -> float:
        """Predicted seconds of a decode step of these streams and one more."""
        others = sum(stream.context_tokens for stream in streams) - self.context_tokens
        return self.step_s(len(streams) + 1 - len(self.streams), others + more_tokens)

    def queue(self, request: RequestId, prefill_us: int) -> None:
        self.queue_us[request] = prefill_us
        self.queued_us += prefill_us

    def start(self, request: RequestId, now_s: float) -> None:
        if request in self.queue_us:
            self.running, self.running_since_s = request, now_s

    def stream(self, request: RequestId, stream: Stream) -> None:
        self.streams[request] = stream
        self.context_tokens += stream.context_tokens
        if stream.tbt_s is not None:
            self.tbt_limits[stream.tbt_s] = self.tbt_limits.get(stream.tbt_s, 0) + 1

    def computed(self, request: RequestId) -> None:
        """Its prompt is done, or not wanted any more."""
        self.queued_us -= self.queue_us.pop(request, 0)
        if self.running == request:
            self.running = None

    def release(self, request: RequestId) -> None:
        """Take the request's load off, whatever it was; a request that is not here changes nothing."""
        self.computed(request)
        stream = self.streams.pop(request, None)
        if stream is None:
            return
        self.context_tokens -= stream.context_tokens
        if stream.tbt_s is not None:
            self.tbt_limits[stream.tbt_s] -= 1
            if not self.tbt_limits[stream.tbt_s]:
                del self.tbt_limits[stream.tbt_s]

    def check(self) -> None:
        assert self.queued_us == sum(self.queue_us.values()), (
            f"{self.id}: queue is not the sum of its requests"
        )
        assert self.context_tokens == sum(stream.context_tokens for stream in self.streams.values()), (
            f"{self.id}: context is not the sum of its streams"
        )
        limits = [stream.tbt_s for stream in self.streams.values() if stream.tbt_s is not None]
        assert self.tbt_limits == {limit_s: limits.count(limit_s) for limit_s in limits}, (
            f"{self.id}: limits are not those of its streams"
        )
        assert self.running is None or self.running in self.queue_us, f"{self.id} runs what it was not given"
        assert self.role is Role.DECODE or not self.streams, f"{self.id} has work of another role"


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """All that a policy may look at, for one request. It must change none of it.

    `prefill` and `decode` are the workers that could take this request, by id; `held` is how many leading blocks of
    its chain each node holds; `context_tokens` is how many tokens of KV it is expected to end with; `output_tokens`
    is how many tokens an answer has on average; membership has not been known since `directory_lost_s`, if that is
    over.
    """

    now_s: float
    directory_lost_s: float
    config: ConductorConfig
    prefill: tuple[Worker, ...]
    decode: tuple[Worker, ...]
    held: Mapping[NodeId, Held]
    inflight: int
    placements: int
    context_tokens: int
    output_tokens: float
