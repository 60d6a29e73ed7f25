"""What a cluster can take: found where it is known by arithmetic, searched no longer than needed, fair where asked."""

from dataclasses import replace

import pytest

from cluster.core.state import Slo
from cluster.sim.capacity import best, capacity, enough
from cluster.sim.driver import Scenario, Simulation
from cluster.sim.profiles import profile
from cluster.sim.trace import TraceRow

A800 = profile("llama-70b-8xa800")
ROWS = [TraceRow(1000 * i, 5120, 2, tuple(range(100 * i, 100 * i + 10))) for i in range(200)]
"""One prompt of 5,120 tokens a second, never the same; one takes 0.63 s of a prefill node."""
ONE = Scenario(profile=A800, prefill=1, decode=1, policy="load", slo=Slo(ttft_s=5.0, tbt_s=0.1))


def test_the_capacity_of_one_prefill_node_is_what_it_computes_in_a_second() -> None:
    c = A800.coefficients
    prompt_s = c.prefill_base_s + 5120 * c.prefill_token_s + 5120**2 / 2 * c.prefill_pair_s
    found = capacity(ONE, ROWS, precision=0.01)
    served = 0.9 * found.rate * prompt_s  # a tenth may be refused, and the queue at the end is computed too
    assert served == pytest.approx(1.0, rel=0.06)
    assert enough(Simulation(replace(ONE, rate=found.rate), ROWS).run(), fair=False)
    assert not enough(Simulation(replace(ONE, rate=found.rate * 1.02), ROWS).run(), fair=False)


def test_the_best_of_several_is_searched_and_the_others_only_as_far_as_needed() -> None:
    two, three = replace(ONE, prefill=2), replace(ONE, prefill=3)
    leader, found = best([three, ONE, two], ROWS, precision=0.05)
    assert leader.scenario == three
    assert [one.runs for one in found[1:]] == [1, 1]
    assert best([ONE, three], ROWS, precision=0.05)[0].scenario == three


def test_a_fair_capacity_serves_long_prompts_too() -> None:
    """Every fifth prompt is four times as long: a tenth may be refused, but not half of those."""
    mixed = [
        TraceRow(row.timestamp_ms, 20_480, 2, tuple(range(10**6 * i, 10**6 * i + 40))) if i % 5 == 0 else row
        for i, row in enumerate(ROWS)
    ]
    plain = capacity(ONE, mixed, precision=0.02).rate
    fair = capacity(ONE, mixed, fair=True, precision=0.02).rate
    assert fair < 0.95 * plain


def test_what_cannot_be_served_at_all_has_no_capacity() -> None:
    assert capacity(replace(ONE, slo=Slo(ttft_s=0.1)), ROWS[:20]).rate == 0.0
