"""What the connector counts in the engine core, through vLLM's own channel into the worker's metrics.

Counts do not depend on any request's output: a request that a stop string ends, that is aborted, or that is one of n
answers is counted all the same.
"""

from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

PREFIX = "moonpool:"
COUNTED = {
    "computed_prompt_tokens": "Prompt tokens that the engine computed, of requests that came with a plan.",
    "loads": "Requests whose KV was loaded from the arena.",
    "loaded_blocks": "Blocks loaded from the arena and verified.",
    "loaded_bytes": "Bytes of those.",
    "failed_blocks": "Blocks that did not verify, were no longer held, or came too late; they were computed.",
}


@dataclass
class ConnectorStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is untyped here
    """`data` maps a name of `COUNTED` to how much it grew since the last step."""

    data: dict[str, int] = field(default_factory=dict)

    def grow(self, name: str, amount: int) -> None:
        self.data[name] = self.data.get(name, 0) + amount

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "ConnectorStats":
        for name, amount in other.data.items():
            self.grow(name, amount)
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class ConnectorMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # as above
    """One Prometheus counter per name of `COUNTED`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._counters: dict[str, dict[int, Counter]] = {}
        for name, documentation in COUNTED.items():
            counter = self._counter_cls(
                name=PREFIX + name, documentation=documentation, labelnames=self._labelnames
            )
            self._counters[name] = {
                engine: counter.labels(*labels) for engine, labels in self.per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, amount in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(amount)
