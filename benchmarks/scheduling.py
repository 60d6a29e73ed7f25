"""What scheduling is worth on published traces: `python -m benchmarks.scheduling --json FILE [--quick] [--only GROUP]`.

Everything here is simulated with the conductor that runs the live cluster (`cluster.sim`); docs/scheduling.md says what
the rows mean. The traces are Mooncake's (FAST'25), in `../shared/traces` or where `--traces` says.

Capacities are searched on the beginning of a trace. Each policy gets its best split of the nodes, then Algorithm 1 its
best threshold and mode of rejection; the grids are printed. Seeds move arrivals within their 3 seconds and draw the
errors of prefill times; the split is chosen with the first seed.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from math import exp, log, sqrt
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, stdev

from rich.console import Console
from rich.progress import track

from benchmarks.report import Report, Row, Setting, show
from cluster.core.state import Overload, Slo
from cluster.sim.cache import hit_ratio
from cluster.sim.capacity import Capacity, best, capacity
from cluster.sim.driver import Result, Scenario, Simulation
from cluster.sim.profiles import Profile, profile
from cluster.sim.trace import TraceRow, read_trace, spread_arrivals

TRACES = {"conversation": "conversation_trace.jsonl.gz", "synthetic": "synthetic_trace.jsonl"}
_FOLDER = Path(__file__).resolve().parents[2] / "shared" / "traces"
TTFT_S = 30.0
ERROR = 0.1
"""Standard deviation of a prefill's seconds around what is predicted."""
WHOLE = 1_000_000
"""Tokens of a chunk that hold any prompt: an engine that does not cut prompts into chunks."""


@dataclass(frozen=True, slots=True)
class Scope:
    """How much is simulated: `requests` of a trace in a search."""

    folder: Path
    requests: int
    seeds: int
    nodes: tuple[int, ...]
    tbts_s: tuple[float, ...]
    precision: float


@cache
def trace(folder: Path, name: str, seed: int) -> list[TraceRow]:
    return spread_arrivals(list(read_trace(folder / TRACES[name])), seed)


def a800() -> Profile:
    return profile("llama-70b-8xa800")


def base(tbt_s: float, seed: int = 0) -> Scenario:
    slo = Slo(ttft_s=TTFT_S, tbt_s=tbt_s)
    return Scenario(profile=a800(), prefill=1, decode=1, slo=slo, seed=seed, prediction_error=ERROR)


def splits(scenario: Scenario, nodes: int) -> list[Scenario]:
    """One decode node up to a third of all, those first that are usually best."""
    counts = sorted(range(1, nodes // 3 + 1), key=lambda count: abs(count - 0.2 * nodes))
    return [replace(scenario, prefill=nodes - count, decode=count) for count in counts]


def algorithm_1(scenario: Scenario, nodes: int, rows: Sequence[TraceRow], precision: float) -> Capacity:
    """Mooncake's, with its best split, then its best threshold and mode of rejection."""
    plain = replace(scenario, policy="kvcache_centric", overload=Overload.EARLY)
    leader, _ = best(splits(plain, nodes), rows, precision=precision)
    variants = [
        leader.scenario,
        *(replace(leader.scenario, overload=mode) for mode in (Overload.PREDICTIVE, Overload.RESERVED)),
        *(replace(leader.scenario, options=(("threshold", value),)) for value in (1.5, 16.0)),
    ]
    return best(variants, rows, precision=precision)[0]


def moonpool(scenario: Scenario, nodes: int, rows: Sequence[TraceRow], precision: float) -> Capacity:
    return best(splits(replace(scenario, policy="moonpool"), nodes), rows, precision=precision)[0]


def coupled(scenario: Scenario, nodes: int, rows: Sequence[TraceRow], precision: float) -> Capacity:
    """VLLM as in Mooncake's comparison (v0.5.1): prompts whole, the prefix cache in what HBM has left beside streams."""
    hbm = replace(scenario.profile, dram_blocks=scenario.profile.capacity.kv_tokens_max // 1024)
    whole = replace(scenario, policy="vllm_coupled", prefill=0, decode=nodes, chunk_tokens=WHOLE, profile=hbm)
    return capacity(whole, rows, precision=precision)


def named(found: Capacity) -> str:
    s = found.scenario
    options = "".join(f" {name} {value:g}" for name, value in s.options)
    return f"{s.prefill}+{s.decode} {s.overload.value}{options}: ×{found.rate:.2f}"


# -- groups of rows ---------------------------------------------------------------------------------------------------

HIT_RATIOS = {
    "conversation": {None: 0.366, 100_000: 0.364, 50_000: 0.355, 30_000: 0.326, 10_000: 0.211, 1_000: 0.044},
    "synthetic": {None: 0.640, 100_000: 0.640, 50_000: 0.640, 30_000: 0.624, 10_000: 0.423, 1_000: 0.082},
}
"""Of one global LRU pool, by its blocks; None: without end. Found by an earlier, separate simulation."""


def hits(scope: Scope, name: str) -> Iterator[Row]:
    for blocks, expected in HIT_RATIOS[name].items():
        found = hit_ratio(trace(scope.folder, name, 0), blocks or 10**9)
        yield Row(
            name=f"{name}: hit ratio at {f'{blocks:,}' if blocks else 'endless'} blocks, off by",
            value=abs(found - expected),
            unit="",
            op="<=",
            bar=0.002,
            bound=0.0,
            why=f"one pool, LRU: {found:.4f}, expected {expected}",
            samples=({"hit_ratio": found, "expected": expected},),
        )


PAPER_TTFTS_S = {"random": 92.07, "load_balance": 60.41, "cache_aware": 14.36, "kvcache_centric": 6.26}
"""Mooncake, arXiv, section 8: 8 prefill and 8 decode nodes, another trace of theirs."""


def ordering(scope: Scope) -> Iterator[Row]:
    """Mean TTFT of the conversation trace on 8+8 nodes; nothing is refused."""
    rows = trace(scope.folder, "conversation", 0)[: 4 * scope.requests]
    scenario = replace(base(0.1), prefill=8, decode=8, overload=Overload.OFF, rate=1.5)
    found: dict[str, float] = {}
    for name in PAPER_TTFTS_S:
        found[name] = Simulation(replace(scenario, policy=name), rows).run().summary()["ttft_s"]["mean"]
    names = list(found)
    for worse, better in pairwise(names):
        yield Row(
            name=f"mean TTFT of {worse} ÷ {better}",
            value=found[worse] / found[better],
            unit="×",
            op=">=",
            bar=1.0,
            bound=PAPER_TTFTS_S[worse] / PAPER_TTFTS_S[better],
            why=f"the paper's, of another trace; here {found[worse]:.2f} s and {found[better]:.2f} s",
            samples=({"worse_s": found[worse], "better_s": found[better]},),
        )


PAPER_REFUSED = {Overload.NONE: 4183, Overload.EARLY: 3771, Overload.PREDICTIVE: 3589}
"""Mooncake, arXiv, section 8: twice the trace's rate, 8+8 nodes."""


def overload(scope: Scope) -> Iterator[Row]:
    """Algorithm 1 under twice what a decode-bound shape can take, in Mooncake's three modes."""
    rows = trace(scope.folder, "conversation", 0)[: 4 * scope.requests]
    scenario = replace(base(0.05), policy="kvcache_centric", prefill=12, decode=1, rate=3.0)
    found = {mode: Simulation(replace(scenario, overload=mode), rows).run() for mode in PAPER_REFUSED}
    for worse, better in ((Overload.NONE, Overload.EARLY), (Overload.EARLY, Overload.PREDICTIVE)):
        for what, count in (("refused", _refused), ("wasted prompts", _wasted)):
            most, least = count(found[worse]), count(found[better])
            yield Row(
                name=f"{what}, {worse.value} ÷ {better.value}, decode-bound",
                value=most / max(1, least),
                unit="×",
                op=">=",
                bar=1.0,
                bound=PAPER_REFUSED[worse] / PAPER_REFUSED[better],
                why=f"the paper's ratio of refused requests; here {most} and {least} of {len(rows)}",
                samples=({worse.value: most, better.value: least},),
            )


def _refused(result: Result) -> int:
    return len(result.refused)


def _wasted(result: Result) -> int:
    return sum(one.wasted for one in result.refused)


PAPER_GAINS = {
    "conversation": {0.1: 5.98, 0.2: 2.57, 0.3: 1.59},
    "synthetic": {0.1: 1.62, 0.2: 1.40, 0.3: 1.28},
}
"""Mooncake, FAST'25, section 5: effective capacity over coupled vLLM, by the time between tokens."""


def against_coupled(scope: Scope, name: str) -> Iterator[Row]:
    """Algorithm 1 over coupled vLLM on as many nodes."""
    rows, nodes = trace(scope.folder, name, 0)[: scope.requests], scope.nodes[-1]
    gains: dict[float, float] = {}
    for tbt_s in (0.1, 0.2, 0.3):
        ours = algorithm_1(base(tbt_s), nodes, rows, scope.precision)
        theirs = coupled(base(tbt_s), nodes, rows, scope.precision)
        gains[tbt_s] = ours.rate / theirs.rate if theirs.rate else float(2**10)
        yield Row(
            name=f"{name}: Algorithm 1 ÷ coupled vLLM, {1000 * tbt_s:.0f} ms",
            value=gains[tbt_s],
            unit="×",
            op=">=",
            bar=1.0,
            bound=PAPER_GAINS[name][tbt_s],
            why=f"the paper's gain; here {named(ours)}, coupled ×{theirs.rate:.2f} on {nodes} nodes",
            samples=({"algorithm_1": ours.rate, "coupled": theirs.rate},),
        )
    yield Row(
        name=f"{name}: that gain at 100 ms ÷ at 300 ms",
        value=gains[0.1] / gains[0.3],
        unit="×",
        op=">=",
        bar=1.5,
        bound=PAPER_GAINS[name][0.1] / PAPER_GAINS[name][0.3],
        why="the paper's",
        samples=({"at_100_ms": gains[0.1], "at_300_ms": gains[0.3]},),
    )


def gain(scope: Scope, name: str, nodes: int, tbt_s: float) -> Iterator[Row]:
    """`moonpool` over Algorithm 1: capacity, fair capacity, and what happens at twice that."""
    rows = trace(scope.folder, name, 0)[: scope.requests]
    theirs = algorithm_1(base(tbt_s), nodes, rows, scope.precision)
    ours = moonpool(base(tbt_s), nodes, rows, scope.precision)
    at = f"{name}, {nodes} nodes, {1000 * tbt_s:.0f} ms"
    plain, fair = [ours.rate / theirs.rate], list[float]()
    for seed in range(scope.seeds):
        seeded = trace(scope.folder, name, seed)[: scope.requests]
        search = partial(capacity, rows=seeded, precision=scope.precision)
        if seed:
            plain.append(
                search(replace(ours.scenario, seed=seed), guess=ours.rate).rate
                / search(replace(theirs.scenario, seed=seed), guess=theirs.rate).rate
            )
        if seed == 0:
            fair.append(
                search(ours.scenario, fair=True, guess=ours.rate).rate
                / search(theirs.scenario, fair=True, guess=theirs.rate).rate
            )
    grid = f"moonpool {named(ours)}, Algorithm 1 {named(theirs)}"
    yield _ratio(
        f"capacity ÷ Algorithm 1: {at}",
        plain,
        1.10,
        1.33,
        f"fluid bound of a pilot; {grid}{_interval(plain)}",
    )
    yield _ratio(f"fair capacity ÷ Algorithm 1: {at}", fair, 1.05, 1.33, "as above")
    twice = 2 * theirs.rate
    over = [Simulation(replace(one.scenario, rate=twice), rows).run() for one in (ours, theirs)]
    mine, other = (result.summary() for result in over)
    yield _at_most(
        f"mean TTFT ÷ Algorithm 1 at 2×: {at}", mine["ttft_s"]["mean"] / other["ttft_s"]["mean"], 0.3
    )
    yield _at_most(f"refused ÷ Algorithm 1 at 2×: {at}", mine["refused"] / other["refused"], 0.85)
    yield _at_most(f"accepted that miss at 2×: {at}", mine["missed"] / max(1, len(over[0].served)), 0.01)


def against_others(scope: Scope, name: str) -> Iterator[Row]:
    """`moonpool` over every other policy, each with its best split."""
    rows, nodes, tbt_s = trace(scope.folder, name, 0)[: scope.requests], scope.nodes[-1], 0.1
    ours = moonpool(base(tbt_s), nodes, rows, scope.precision)
    for policy in ("random", "round_robin", "load_balance", "cache_aware", "dynamo", "llm_d", "load"):
        theirs, _ = best(splits(replace(base(tbt_s), policy=policy), nodes), rows, precision=scope.precision)
        why = f"no more than all; moonpool {named(ours)}, {policy} {named(theirs)}"
        yield _ratio(f"{name}: capacity ÷ {policy}", [ours.rate / theirs.rate], 1.0, 2.0, why)


def swiftkv(scope: Scope, name: str) -> Iterator[Row]:
    """`moonpool` on a model whose prompt tokens skip half of the layers, over Algorithm 1 on the plain one."""
    rows, nodes, tbt_s = trace(scope.folder, name, 0)[: scope.requests], scope.nodes[-1], 0.1
    c = a800().coefficients
    half = replace(c, prefill_token_s=c.prefill_token_s / 2, prefill_pair_s=c.prefill_pair_s / 2)
    ours = moonpool(
        replace(base(tbt_s), profile=replace(a800(), coefficients=half)), nodes, rows, scope.precision
    )
    theirs = algorithm_1(base(tbt_s), nodes, rows, scope.precision)
    why = f"half the FLOPs of prefill, all of decode; moonpool {named(ours)}, Algorithm 1 {named(theirs)}"
    yield _ratio(
        f"{name}: moonpool with SwiftKV 50 % ÷ Algorithm 1", [ours.rate / theirs.rate], 1.8, 2.6, why
    )


def _ratio(name: str, ratios: Sequence[float], bar: float, bound: float, why: str) -> Row:
    value = exp(fmean(log(ratio) for ratio in ratios))
    return Row(name, value, "×", ">=", bar, bound, why, tuple({"ratio": ratio} for ratio in ratios))


def _at_most(name: str, value: float, bar: float) -> Row:
    return Row(name, value, "×", "<=", bar, 0.0, "nothing refused, nothing late", ({"ratio": value},))


def _interval(values: Sequence[float]) -> str:
    """95 % by Student's t, over seeds."""
    t = {2: 12.7, 3: 4.30, 4: 3.18, 5: 2.78}.get(len(values))
    if t is None:
        return ""
    half = t * stdev(values) / sqrt(len(values))
    return f"; {fmean(values):.3f} ± {half:.3f} over {len(values)} seeds"


# -- all of it ------------------------------------------------------------------------------------------------------------


def jobs(scope: Scope) -> list[tuple[str, Callable[[], Iterator[Row]]]]:
    """(group, rows) of everything, each to be run in any process."""
    todo: list[tuple[str, Callable[[], Iterator[Row]]]] = [
        ("hits", partial(hits, scope, name)) for name in TRACES
    ]
    todo += [("ordering", partial(ordering, scope)), ("overload", partial(overload, scope))]
    todo += [
        ("gain", partial(gain, scope, name, nodes, tbt_s))
        for name in TRACES
        for nodes in scope.nodes
        for tbt_s in scope.tbts_s
    ]
    for group, rows in (("coupled", against_coupled), ("others", against_others), ("swiftkv", swiftkv)):
        todo += [(group, partial(rows, scope, name)) for name in TRACES]
    return todo


def _all_rows(make: Callable[[], Iterator[Row]]) -> list[Row]:
    return list(make())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where the rows go")
    parser.add_argument(
        "--quick", action="store_true", help="fewer seeds, nodes and requests: minutes, not an hour"
    )
    parser.add_argument("--only", action="append", help="only this group of rows; may be given several times")
    parser.add_argument("--traces", type=Path, default=_FOLDER, help="folder of the published traces")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    scope = Scope(arguments.traces, 2000, 5, (8, 16), (0.1, 0.2, 0.3), 0.02)
    if arguments.quick:
        scope = replace(scope, requests=800, seeds=1, nodes=(8,), tbts_s=(0.1,), precision=0.04)
    todo = jobs(scope)
    groups = list(dict.fromkeys(group for group, _ in todo))
    if unknown := [group for group in arguments.only or () if group not in groups]:
        parser.error(f"{', '.join(unknown)} is none of the groups {', '.join(groups)}")
    makes = [make for group, make in todo if not arguments.only or group in arguments.only]
    setting = Setting.here(
        seed=0, configuration=f"{scope.requests} requests, {scope.seeds} seeds, error {ERROR:.0%}"
    )
    console = Console(stderr=True)
    with ProcessPoolExecutor(arguments.processes, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(_all_rows, make) for make in makes]
        rows = [row for future in track(futures, "simulating", console=console) for row in future.result()]
    report = Report("scheduling", setting, tuple(rows))
    report.write(arguments.json)
    show([report], Console())
    return 0 if report.passes else 1


if __name__ == "__main__":
    raise SystemExit(main())
