"""How much a cluster can take: the largest multiple of a trace's rate at which enough arrivals meet both limits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from cluster.sim.driver import Result, Scenario, Simulation
from cluster.sim.trace import TraceRow

SHARE = 0.9
"""Of all arrivals; a refused request is a miss."""
FAIR_SHARE = 0.8
"""Of the arrivals in each quarter by prompt length, for a capacity that is fair."""
RATE_MIN, RATE_MAX = 1 / 16, 256.0


@dataclass(frozen=True, slots=True)
class Capacity:
    """`rate` is a multiple of the trace's; 0 where even the smallest is too much. `runs` simulations found it."""

    scenario: Scenario
    rate: float
    runs: int


def enough(result: Result, fair: bool) -> bool:
    if result.attainment < SHARE:
        return False
    return not fair or min(result.quartile_attainments()) >= FAIR_SHARE


def capacity(
    scenario: Scenario,
    rows: Sequence[TraceRow],
    *,
    fair: bool = False,
    precision: float = 0.02,
    guess: float = 2.0,
) -> Capacity:
    """The largest rate, to within `precision` of it, doubled and halved from `guess` and then bisected.

    It takes attainment to fall as the rate grows, which it does but for noise.
    """
    runs = 0

    def keeps(rate: float) -> bool:
        nonlocal runs
        runs += 1
        return enough(Simulation(replace(scenario, rate=rate), rows).run(), fair)

    low = high = guess
    if keeps(guess):
        while high < RATE_MAX and (high == low or keeps(high)):
            low, high = high, high * 1.4
    else:
        while low > RATE_MIN and (high == low or not keeps(low)):
            high, low = low, low / 1.4
        if low <= RATE_MIN:
            return Capacity(scenario, 0.0, runs)
    while high / low > 1 + precision:
        middle = (low * high) ** 0.5
        if keeps(middle):
            low = middle
        else:
            high = middle
    return Capacity(scenario, low, runs)


def best(
    scenarios: Iterable[Scenario], rows: Sequence[TraceRow], *, fair: bool = False, precision: float = 0.02
) -> tuple[Capacity, list[Capacity]]:
    """The scenario with the largest capacity, and all of them.

    One that does not reach the best so far at that very rate is not searched further: its capacity counts as less.
    """
    found: list[Capacity] = []
    leader: Capacity | None = None
    for scenario in scenarios:
        if leader is not None:
            result = Simulation(replace(scenario, rate=max(leader.rate, RATE_MIN)), rows).run()
            if not enough(result, fair):
                found.append(Capacity(scenario, 0.0, 1))
                continue
        guess = leader.rate * 1.02 if leader is not None and leader.rate else 2.0
        one = capacity(scenario, rows, fair=fair, precision=precision, guess=guess)
        found.append(one)
        if leader is None or one.rate > leader.rate:
            leader = one
    assert leader is not None, "no scenario to choose from"
    return leader, found
