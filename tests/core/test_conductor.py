"""What golden scripts cannot show: chance, learning, and the conductor's own alarms."""

from itertools import repeat

import pytest

from cluster.core.commands import Command, Place, Reject, RetryAfter, WakeAt
from cluster.core.conductor import Conductor
from cluster.core.cost import FIT_RATIO_MAX, Coefficients, Fit, Link, decode_step_s, fetch_s, prefill_s
from cluster.core.events import (
    Arrive,
    BlockStored,
    DecodeStarted,
    Event,
    Failed,
    Finished,
    NodeSnapshot,
    PrefillFinished,
    PrefillLost,
    PrefillStarted,
    Timer,
    WorkerJoined,
)
from cluster.core.log import decode
from cluster.core.state import Capacity, ConductorConfig, Role, Slo, TenantId
from kvstore.core.blocks import BlockHash, NodeId, RequestId, WorkerId

NODE = NodeId("node-0")


def conductor(policy: str = "load", chance: float = 0.0, prefill: int = 2, decode: int = 2) -> Conductor:
    made = Conductor(ConductorConfig(policy=policy), repeat(chance).__next__)
    for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
        for i in range(count):
            worker = WorkerId(f"{role.value}-{i}")
            capacity = Capacity(batch_max=2, kv_tokens_max=4096)
            made.handle(WorkerJoined(worker=worker, role=role, node=NODE, address="", capacity=capacity), 0)
    return made


def arrive(name: str, tokens: int = 64, slo: Slo | None = None) -> Arrive:
    chain = tuple(BlockHash(f"{name}.{i}".encode().ljust(32)) for i in range(tokens // 32))
    return Arrive(
        request=RequestId(name),
        tenant=TenantId("t"),
        tokens=tokens,
        chain=chain,
        max_new_tokens=128,
        slo=slo or Slo(),
    )


def only(commands: list[Command]) -> Place | RetryAfter | Reject:
    [answer] = [command for command in commands if isinstance(command, Place | RetryAfter | Reject)]
    return answer


def place(made: Conductor, event: Arrive, now: float = 0) -> Place:
    answer = only(made.handle(event, now))
    assert isinstance(answer, Place)
    return answer


def serve(made: Conductor, name: str, now: float, slowness: float) -> None:
    """Serve one request of 64 tokens, `slowness` times slower than the coefficients say."""
    request, attempt = RequestId(name), 1
    place(made, arrive(name), now)
    prefill_seconds = slowness * prefill_s(Coefficients(), 0, 64)
    step_s = slowness * decode_step_s(Coefficients(), 1, 64 + 128)
    events: list[Event] = [
        PrefillStarted(request=request, attempt=attempt),
        PrefillFinished(
            request=request, attempt=attempt, observed_s=prefill_seconds, computed_tokens=64, cached_tokens=0
        ),
        DecodeStarted(request=request, attempt=attempt),
        Finished(request=request, attempt=attempt, output_tokens=128, tbt_mean_s=step_s, tbt_p99_s=step_s),
    ]
    for event in events:
        made.handle(event, now)


def test_costs_are_the_design_s_formulas() -> None:
    fitted = Coefficients(
        prefill_base_s=1,
        prefill_token_s=10,
        prefill_pair_s=100,
        step_base_s=1,
        step_stream_s=10,
        step_token_s=100,
    )
    assert prefill_s(fitted, cached_tokens=3, new_tokens=4) == 1 + 10 * 4 + 100 * 4 * (3 + 4 / 2)
    assert decode_step_s(fitted, batch=2, context_tokens=5) == 1 + 10 * 2 + 100 * 5
    assert fetch_s(300, Link(latency_s=2, bytes_per_s=100)) == 5
    assert fetch_s(0, Link(latency_s=2, bytes_per_s=100)) == 0


def test_the_default_coefficients_are_those_measured_on_one_core() -> None:
    """Prefill about 190 tokens/s; decode 8 tokens/s for one stream and 45 for eight."""
    assert 256 / prefill_s(Coefficients(), 0, 256) == pytest.approx(190, rel=0.1)
    assert 1 / decode_step_s(Coefficients(), 1, 200) == pytest.approx(8, rel=0.05)
    assert 8 / decode_step_s(Coefficients(), 8, 8 * 200) == pytest.approx(45, rel=0.1)


def test_load_spreads_equal_requests() -> None:
    made = conductor()
    placed = [place(made, arrive(f"r{i}")) for i in range(4)]
    assert sorted(each.prefill or "" for each in placed) == [
        "prefill-0",
        "prefill-0",
        "prefill-1",
        "prefill-1",
    ]
    assert sorted(each.decode for each in placed) == ["decode-0", "decode-0", "decode-1", "decode-1"]


def test_load_prefers_the_decode_worker_with_a_free_place() -> None:
    made = conductor(prefill=1, decode=1)
    for i in range(2):
        place(made, arrive(f"r{i}"))
    waiting = place(made, arrive("r2")).explanation.chosen
    assert waiting is not None
    assert waiting.cost.decode_wait_s > 0, "a batch of two is full"
    capacity = Capacity(batch_max=2, kv_tokens_max=4096)
    made.handle(
        WorkerJoined(worker=WorkerId("late"), role=Role.DECODE, node=NODE, address="", capacity=capacity), 0
    )
    free = place(made, arrive("r3")).explanation.chosen
    assert free is not None
    assert (free.decode, free.cost.decode_wait_s) == ("late", 0)


@pytest.mark.parametrize(("chance", "index"), [(0.0, 0), (0.49, 0), (0.5, 1), (0.999, 1)])
def test_random_follows_the_chance_it_is_given(chance: float, index: int) -> None:
    placed = place(conductor("random", chance), arrive("r"))
    assert (placed.prefill, placed.decode) == (f"prefill-{index}", f"decode-{index}")


def test_round_robin_takes_turns() -> None:
    made = conductor("round_robin", prefill=3)
    placed = [place(made, arrive(f"r{i}")) for i in range(4)]
    assert [each.prefill for each in placed] == ["prefill-0", "prefill-1", "prefill-2", "prefill-0"]
    assert [each.decode for each in placed] == ["decode-0", "decode-1", "decode-0", "decode-1"]


@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_who_just_failed_gets_no_work_while_another_exists(stage: str) -> None:
    made = conductor()
    first = place(made, arrive("r"))
    made.handle(Failed(request=RequestId("r"), attempt=1, stage=stage, reason="gone"), 10.0)

    def worker(placed: Place) -> str | None:
        return placed.prefill if stage == "prefill" else placed.decode

    suspect, until_s = worker(first), 10.0 + made.config.suspect_s
    early = {worker(place(made, arrive(f"early-{i}"), until_s - 0.1)) for i in range(8)}
    assert suspect not in early
    assert worker(place(made, arrive("late"), until_s)) == suspect, "trusted again, and the one without work"


def test_a_prefill_worker_that_decode_outran_is_suspect_and_the_answer_goes_on() -> None:
    made = conductor()
    first = place(made, arrive("r"))
    made.handle(PrefillLost(request=RequestId("r"), attempt=1, reason="gone"), 1.0)
    assert first.prefill not in {place(made, arrive(f"next-{i}"), 1.0).prefill for i in range(8)}
    made.handle(
        Finished(request=RequestId("r"), attempt=1, output_tokens=1, tbt_mean_s=None, tbt_p99_s=None), 2.0
    )
    assert (made.snapshot()["counts"]["finished"], made.snapshot()["counts"]["failed"]) == (1, 0)
    made.check()


def test_who_just_failed_gets_work_where_nobody_else_could_do_it() -> None:
    made = conductor(prefill=1, decode=2)
    place(made, arrive("r"))
    made.handle(Failed(request=RequestId("r"), attempt=1, stage="prefill", reason="gone"), 0)
    assert place(made, arrive("s")).prefill == "prefill-0"


def test_a_fit_follows_what_is_observed_and_reports_the_error_left() -> None:
    fit = Fit()
    for _ in range(40):
        fit = fit.observe(predicted_s=1.0, observed_s=2.0)
    assert fit.scale == pytest.approx(2, rel=1e-3)
    assert fit.error < 0.01
    assert fit.samples == 40


def test_one_stall_teaches_little() -> None:
    assert Fit().observe(predicted_s=1.0, observed_s=1e9).scale < FIT_RATIO_MAX / 2
    assert Fit().observe(predicted_s=1.0, observed_s=0.0) == Fit()


def test_predictions_follow_a_slow_machine() -> None:
    made = conductor(prefill=1, decode=1)
    before = place(made, arrive("before")).explanation.chosen
    made = conductor(prefill=1, decode=1)
    for i in range(30):
        serve(made, f"r{i}", float(i), slowness=2.0)
    after = place(made, arrive("after"), 30).explanation.chosen
    assert before is not None
    assert after is not None
    assert after.cost.prefill_s == pytest.approx(2 * before.cost.prefill_s, rel=0.01)
    assert after.cost.tbt_s == pytest.approx(2 * before.cost.tbt_s, rel=0.01)
    assert [row["fit"]["samples"] for row in made.snapshot()["workers"]] == [30, 30]


def test_a_lasting_refusal_is_doubted_until_the_worker_can_show_what_it_does() -> None:
    """Only served requests correct the fit: without doubt, one slow hour would refuse everything for ever."""
    made = conductor(prefill=1, decode=1)
    for i in range(30):
        serve(made, f"r{i}", float(i), slowness=3.0)
    answers = [only(made.handle(arrive(f"s{i}", slo=Slo(ttft_s=1.0)), 31)) for i in range(40)]
    assert isinstance(answers[0], Reject)
    assert isinstance(answers[-1], Place | RetryAfter)


def test_an_impossible_wish_leaves_the_fit_alone() -> None:
    made = conductor(prefill=1, decode=1)
    for i in range(30):
        serve(made, f"r{i}", float(i), slowness=3.0)
    before = made.snapshot()["workers"]
    for i in range(40):
        assert isinstance(only(made.handle(arrive(f"s{i}", slo=Slo(ttft_s=1e-3)), 29)), Reject)
    assert made.snapshot()["workers"] == before


def test_the_expected_answer_length_is_learnt() -> None:
    made = conductor(prefill=1, decode=1)
    for i in range(40):
        place(made, arrive(f"r{i}"))
        made.handle(
            Finished(
                request=RequestId(f"r{i}"), attempt=1, output_tokens=10, tbt_mean_s=None, tbt_p99_s=None
            ),
            0,
        )
    assert made.snapshot()["output_tokens_expected"] == pytest.approx(10, rel=0.01)


def test_retry_after_is_long_enough() -> None:
    """Who comes back after the time named is let in, where nothing else happened than that the queue drained."""
    made = conductor(prefill=1, decode=1)
    place(made, arrive("long", tokens=1600))
    made.handle(PrefillStarted(request=RequestId("long"), attempt=1), 0)
    refused = only(made.handle(arrive("r", slo=Slo(ttft_s=3.0)), 0))
    assert isinstance(refused, RetryAfter)
    early = only(made.handle(arrive("r", slo=Slo(ttft_s=3.0)), refused.seconds - 0.1))
    assert isinstance(early, RetryAfter)
    assert isinstance(only(made.handle(arrive("r", slo=Slo(ttft_s=3.0)), refused.seconds + 1e-6)), Place)


def test_timers_do_not_multiply() -> None:
    """Two hours of gaps and of requests that nobody ends: a driver never has more than a few timers to keep."""
    made, timers = conductor(), list[float]()
    for minute in range(120):
        now = minute * 60.0
        for due_s in sorted(due_s for due_s in timers if due_s <= now):
            timers.remove(due_s)
            timers += wakes(made.handle(Timer(at_s=due_s), due_s))
        gap = BlockStored(node=NODE, hashes=(), sequence=2 * minute + 2)
        snapshot = NodeSnapshot(node=NODE, hashes=(), sequence=2 * minute + 2)
        for event in (arrive(f"r{minute}"), gap, snapshot):
            timers += wakes(made.handle(event, now))
        made.check()
        assert len(timers) <= 3
    assert sum(made.snapshot()["inflight"].values()) == 60


def wakes(commands: list[Command]) -> list[float]:
    return [command.at_s for command in commands if isinstance(command, WakeAt)]


def test_the_clock_does_not_go_back() -> None:
    made = conductor()
    made.handle(arrive("r"), 5)
    with pytest.raises(AssertionError, match="clock went back"):
        made.handle(arrive("s"), 4)


def test_a_chain_must_name_the_full_blocks_of_the_prompt() -> None:
    wrong = Arrive(request=RequestId("r"), tenant=TenantId("t"), tokens=64, chain=(), max_new_tokens=1)
    with pytest.raises(AssertionError, match="chain and length differ"):
        conductor().handle(wrong, 0)


def test_check_sees_a_load_that_nobody_brought() -> None:
    made = conductor()
    place(made, arrive("r"))
    made.check()
    made._workers[WorkerId("prefill-0")].queued_us += 1
    with pytest.raises(AssertionError, match="not the sum"):
        made.check()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"type": "Exploded"}, "not an event or command: 'Exploded'"),
        ({"type": "Timer"}, "at_s"),
        ({"type": "Timer", "at_s": 1, "color": "red"}, "Timer has no color"),
        ({"type": "WorkerLeft", "worker": None, "reason": "x"}, "None is no str"),
        ({"type": "Timer", "at_s": "soon"}, "'soon' is no float"),
        ({"type": "BlockStored", "node": "n", "hashes": None, "sequence": 1}, "not iterable"),
        ({"type": "BlockStored", "node": "n", "hashes": ["xy"], "sequence": 1}, "hex"),
    ],
)
def test_a_log_that_is_not_ours_is_refused(data: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode(data)
