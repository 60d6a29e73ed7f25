"""What the gateway measures, in one Prometheus registry of its own."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Metrics:
    """The gateway's counters.

    An answer that is not streamed leaves the engine in one piece, so times to and between tokens are observed for
    streamed answers only.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "moonpool_requests",
            "HTTP requests by route and outcome",
            ("route", "outcome"),
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "moonpool_requests_in_flight", "HTTP requests being served", registry=self.registry
        )
        self.e2e_s = Histogram(
            "moonpool_e2e_seconds",
            "From the request's arrival to its last byte",
            ("route",),
            buckets=SECONDS,
            registry=self.registry,
        )
        self.ttft_s = Histogram(
            "moonpool_ttft_seconds",
            "From the request's arrival to its first token (streamed)",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.tbt_s = Histogram(
            "moonpool_tbt_seconds", "Between tokens (streamed)", buckets=SECONDS, registry=self.registry
        )
        self.prompt_tokens = Counter(
            "moonpool_prompt_tokens", "Prompt tokens accepted", registry=self.registry
        )
        self.generated_tokens = Counter(
            "moonpool_generated_tokens", "Tokens generated", registry=self.registry
        )


class AnswerClock:
    """Times one answer's tokens as they leave the backend."""

    def __init__(self, metrics: Metrics, arrival_s: float, streamed: bool) -> None:
        self._metrics = metrics
        self._streamed = streamed
        self._last_s: dict[int, float] = {}
        self._arrival_s = arrival_s

    def tokens(self, index: int, count: int) -> None:
        """`count` tokens of choice `index` have just arrived, at once. The gap before them is shared among them."""
        now_s = time.time()
        self._metrics.generated_tokens.inc(count)
        if not self._streamed or count == 0:
            return
        if not self._last_s:
            self._metrics.ttft_s.observe(max(0.0, now_s - self._arrival_s))
        elif index in self._last_s:
            for _ in range(count):
                self._metrics.tbt_s.observe(max(0.0, now_s - self._last_s[index]) / count)
        self._last_s[index] = now_s
