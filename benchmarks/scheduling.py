"""What scheduling is worth on published traces: `python -m benchmarks.scheduling --json FILE [--quick]`.

Everything here is simulated with the conductor that runs the live cluster (`cluster.sim`); docs/scheduling.md says what
the rows mean. The traces are Mooncake's (FAST'25), in `../shared/traces` or where `--traces` says.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.report import Report, Row, Setting, show
from cluster.sim.cache import hit_ratio
from cluster.sim.trace import TraceRow, read_trace, spread_arrivals

TRACES = {"conversation": "conversation_trace.jsonl.gz", "synthetic": "synthetic_trace.jsonl"}
_FOLDER = Path(__file__).resolve().parents[2] / "shared" / "traces"

HIT_RATIOS = {
    "conversation": {None: 0.366, 100_000: 0.364, 50_000: 0.355, 30_000: 0.326, 10_000: 0.211, 1_000: 0.044},
    "synthetic": {None: 0.640, 100_000: 0.640, 50_000: 0.640, 30_000: 0.624, 10_000: 0.423, 1_000: 0.082},
}
"""Of one global LRU pool, by its blocks; None: without end. Found by an earlier, separate simulation."""


def hit_rows(name: str, trace: Sequence[TraceRow]) -> Iterator[Row]:
    for blocks, expected in HIT_RATIOS[name].items():
        found = hit_ratio(trace, blocks or 10**9)
        yield Row(
            name=f"{name}: block hit ratio at {f'{blocks:,}' if blocks else 'any number of'} blocks, off by",
            value=abs(found - expected),
            unit="",
            op="<=",
            bar=0.002,
            bound=0.0,
            why=f"one pool, LRU: {found:.4f}, expected {expected}",
            samples=({"hit_ratio": found, "expected": expected},),
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where the rows go")
    parser.add_argument("--quick", action="store_true", help="fewer seeds and shapes: minutes, not an hour")
    parser.add_argument("--traces", type=Path, default=_FOLDER, help="folder of the published traces")
    arguments = parser.parse_args()
    setting = Setting.here(seed=0, configuration="quick" if arguments.quick else "whole")
    traces = {
        name: spread_arrivals(list(read_trace(arguments.traces / file)), 0) for name, file in TRACES.items()
    }
    rows = [row for name, trace in traces.items() for row in hit_rows(name, trace)]
    report = Report("scheduling", setting, tuple(rows))
    report.write(arguments.json)
    show([report], Console())
    return 0 if report.passes else 1


if __name__ == "__main__":
    raise SystemExit(main())
