"""Many runs at once: every combination of policies, rates and shapes, in processes of their own."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from cluster.core.log import encode_explanation
from cluster.core.policies import policy
from cluster.sim.driver import Outcome, Scenario, Simulation
from cluster.sim.trace import TraceRow, read_trace, spread_arrivals


@dataclass(frozen=True, slots=True)
class Ran:
    """What is kept of a run: its figures, and each request's in a row (see `REQUEST_FIELDS`)."""

    trace: str
    summary: dict[str, Any]
    requests: tuple[tuple[Any, ...], ...]

    @property
    def name(self) -> str:
        s = self.summary
        return f"{s['policy']} {s['prefill']}+{s['decode']} {self.trace} ×{s['rate']:g}"


REQUEST_FIELDS = (
    "arrived_s",
    "tokens",
    "output_tokens",
    "refused",
    "refused_s",
    "ttft_s",
    "tbt_s",
    "finished_s",
)


def load_trace(path: Path, requests: int | None, seed: int) -> list[TraceRow]:
    """The first `requests` of a trace, all where None, with arrivals spread. Raises TraceError and OSError."""
    return spread_arrivals(list(read_trace(path)), seed)[:requests]


def scenarios(
    base: Scenario, policies: Sequence[str], rates: Sequence[float], shapes: Sequence[tuple[int, int]]
) -> list[Scenario]:
    """All combinations. Raises ValueError for a policy or an option that there is not, and for an impossible shape."""
    made = []
    for name, rate, (prefill, decode) in product(policies, rates, shapes):
        chosen = policy(name, dict(base.options))
        if rate <= 0:
            raise ValueError(f"rate {rate:g} is not above 0")
        if decode < 1 or (prefill < 1 and not chosen.at_decode):
            raise ValueError(f"policy {name!r} cannot work with {prefill} prefill and {decode} decode nodes")
        made.append(replace(base, policy=name, rate=rate, prefill=prefill, decode=decode))
    return made


def run_one(scenario: Scenario, trace: Path, requests: int | None) -> Ran:
    rows = load_trace(trace, requests, scenario.seed)
    result = Simulation(scenario, rows).run()
    table = tuple(tuple(getattr(one, name) for name in REQUEST_FIELDS) for one in result.outcomes)
    return Ran(trace.name.split(".")[0], result.summary(), table)


def run_all(
    todo: Sequence[tuple[Scenario, Path]],
    requests: int | None,
    processes: int | None,
    done: Callable[[Ran], None] = lambda ran: None,
) -> list[Ran]:
    """All of them, in the order given; `done` hears of each as it ends."""
    workers = min(len(todo), processes or os.cpu_count() or 1)
    if workers <= 1:
        return [_told(run_one(scenario, trace, requests), done) for scenario, trace in todo]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(run_one, scenario, trace, requests) for scenario, trace in todo]
        for future in as_completed(futures):
            done(future.result())
        return [future.result() for future in futures]


def _told(ran: Ran, done: Callable[[Ran], None]) -> Ran:
    done(ran)
    return ran


def explained(scenario: Scenario, rows: Sequence[TraceRow], number: int) -> dict[str, Any]:
    """Request `number` of the trace: what was decided for it, and what happened. Raises ValueError: no such one."""
    if not 0 <= number < len(rows):
        raise ValueError(f"there is no request {number}: the trace has 0 to {len(rows) - 1}")
    outcome = Simulation(scenario, rows).run().outcomes[number]
    return story(outcome)


def story(outcome: Outcome) -> dict[str, Any]:
    fields = {
        name: getattr(outcome, name)
        for name in ("request", "prefill", "decode", "cached_tokens", "hits", "wasted")
    }
    happened = {name: getattr(outcome, name) for name in REQUEST_FIELDS}
    why = outcome.explanation
    return {**fields, **happened, "explanation": encode_explanation(why) if why is not None else None}


def write_json(path: Path, runs: Iterable[Ran]) -> None:
    path.write_text(json.dumps([{"trace": ran.trace, **ran.summary} for ran in runs], indent=2) + "\n")
