"""The simulator: one conductor, two clocks; the same run twice is the same; devices take the time that they should."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from random import Random
from typing import Any

import pytest

from cluster.core.conductor import Conductor
from cluster.core.cost import decode_step_s, fetch_s, prefill_s
from cluster.core.log import replay
from cluster.core.policies import POLICIES
from cluster.core.state import Slo
from cluster.sim.devices import Gaps
from cluster.sim.driver import Result, Scenario, Simulation, config
from cluster.sim.profiles import PROFILES, profile
from cluster.sim.trace import TraceRow, generate_conversations

A800 = profile("llama-70b-8xa800")
ROWS = list(islice(generate_conversations(seed=1), 120))
BUSY = Scenario(profile=A800, prefill=2, decode=2, slo=Slo(ttft_s=2.0, tbt_s=0.05), rate=40.0)


def run(scenario: Scenario, rows: Sequence[TraceRow]) -> Result:
    return Simulation(scenario, rows).run()


def recorded(scenario: Scenario) -> tuple[Result, list[dict[str, Any]]]:
    log: list[dict[str, Any]] = []
    return Simulation(scenario, ROWS, log.append).run(), log


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_says_where_it_is_from_and_makes_sense(name: str) -> None:
    given = profile(name)
    assert len(given.source) > 100
    assert 0 < prefill_s(given.coefficients, 0, 1000) < prefill_s(given.coefficients, 1000, 2000)
    assert decode_step_s(given.coefficients, 8, 8000) < 8 * decode_step_s(given.coefficients, 1, 1000)


def test_an_unknown_profile_is_an_error_that_names_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"'abacus' is neither .* one of .*llama-70b-8xa800"):
        profile("abacus")


def test_the_a800_prefills_70b_at_half_its_flops() -> None:
    """2 x 70.6e9 FLOP a token of 8 x 312 TFLOP/s: 8,840 tokens/s before attention."""
    assert prefill_s(A800.coefficients, 0, 8840) == pytest.approx(
        1.0 + 0.02 + 0.5 * 8840**2 * 2.1e-9, rel=0.01
    )


def test_one_request_alone_takes_what_its_parts_take() -> None:
    row = TraceRow(0, 5120, 11, tuple(range(10)))
    [outcome] = run(replace(BUSY, slo=Slo()), [row]).outcomes
    c, kv_bytes = A800.coefficients, 5120 * A800.kv_bytes_per_token
    last_layer_s = kv_bytes / A800.layers / A800.network.bytes_per_s
    load_s = kv_bytes / A800.memory.bytes_per_s
    before_s = prefill_s(c, 0, 5120) + last_layer_s + load_s
    assert outcome.ttft_s == pytest.approx(before_s + decode_step_s(c, 1, 5120), rel=1e-3)
    assert outcome.tbt_s == pytest.approx(decode_step_s(c, 1, 5130), rel=1e-3)
    assert outcome.finished_s == pytest.approx(before_s + 11 * decode_step_s(c, 1, 5125), rel=1e-3)


def test_the_second_turn_computes_only_what_is_new() -> None:
    first = TraceRow(0, 5120, 11, tuple(range(10)))
    second = TraceRow(60_000, 6144, 11, tuple(range(12)))
    outcomes = run(replace(BUSY, slo=Slo()), [first, second]).outcomes
    assert [outcome.cached_tokens for outcome in outcomes] == [0, 5120]
    loaded_s = fetch_s(5120 * A800.kv_bytes_per_token, A800.memory)
    assert (outcomes[1].ttft_s or 0) > loaded_s + prefill_s(A800.coefficients, 5120, 1024)
    assert (outcomes[1].ttft_s or 9) < (outcomes[0].ttft_s or 0)


def test_blocks_come_back_from_the_ssd() -> None:
    """DRAM for 12 blocks: the second prompt pushes the first one out, and the third asks for it again."""
    small = replace(A800, dram_blocks=12, ssd_blocks=1000)
    rows = [
        TraceRow(60_000 * i, 5120, 2, tuple(range(start, start + 10))) for i, start in enumerate((0, 100, 0))
    ]
    with_ssd = run(replace(BUSY, profile=small, prefill=1, decode=1, slo=Slo()), rows)
    without = run(replace(BUSY, profile=replace(small, ssd_blocks=0), prefill=1, decode=1, slo=Slo()), rows)
    assert without.outcomes[2].cached_tokens == 2 * 512
    assert with_ssd.outcomes[2].cached_tokens == 5119


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_twice_and_from_its_log(policy: str) -> None:
    scenario = replace(BUSY, policy=policy, prediction_error=0.3)
    once, log = recorded(scenario)
    again, _ = recorded(scenario)
    assert once.digest == again.digest
    assert [outcome.ttft_s for outcome in once.outcomes] == [outcome.ttft_s for outcome in again.outcomes]
    other, _ = recorded(replace(scenario, seed=1))
    assert other.digest != once.digest
    fresh = Conductor(config(scenario), Random(scenario.seed).random)
    assert list(replay((json.loads(json.dumps(line)) for line in log), fresh)) == []


def test_every_request_has_an_end() -> None:
    result = run(BUSY, ROWS)
    assert len(result.outcomes) == len(ROWS)
    for outcome in result.outcomes:
        assert (outcome.refused is None) == (outcome.finished_s is not None)
    assert result.refused, "at this rate some must be refused"
    assert result.summary()["refused"] + len(result.served) == len(ROWS)


def test_no_gap_is_lost() -> None:
    """As many gaps as tokens after the first, and their sum is the time from the first token to the last."""
    seen: list[tuple[int, float, float]] = []

    class Watching(Simulation):
        def finished(self, job: Any, gaps: Gaps) -> None:
            total = sum(seconds * many for seconds, many in gaps.runs)
            seen.append((gaps.count - (job.output_tokens - 1), total, self.clock.now))
            super().finished(job, gaps)

    result = Watching(replace(BUSY, slo=Slo()), ROWS).run()
    ends = {one.finished_s: one for one in result.outcomes}
    assert len(seen) == len(ROWS)
    for surplus, total, ended_s in seen:
        one = ends[ended_s]
        assert surplus == 0
        if len([o for o in result.outcomes if o.finished_s == ended_s]) == 1:
            assert total == pytest.approx(ended_s - one.arrived_s - (one.ttft_s or 0), abs=1e-6)


def test_the_slowest_share_of_gaps() -> None:
    gaps = Gaps([(0.01, 17), (0.5, 1), (0.1, 2)])
    assert gaps.count == 20
    assert gaps.slowest_s(0.1) == pytest.approx((0.5 + 0.1) / 2)
    assert gaps.slowest_s(0.01) == 0.5
    assert Gaps([]).slowest_s(0.1) is None
