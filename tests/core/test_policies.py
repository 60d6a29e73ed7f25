"""What each policy takes, on a cluster small enough to see why; options; Mooncake's modes of overload."""

from itertools import repeat
from random import Random
from typing import Any

import pytest

from cluster.core.commands import Abort, Candidate, Place, Reject, RetryAfter
from cluster.core.conductor import Conductor
from cluster.core.cost import Coefficients, Fit, Link, decode_step_s, prefill_s
from cluster.core.events import (
    Aborted,
    Arrive,
    BlockStored,
    FirstToken,
    PrefillFinished,
    PrefillStarted,
    Timer,
    WorkerJoined,
)
from cluster.core.policies import POLICIES, policy
from cluster.core.routing import SHORTLIST, best_few, best_offer, longest
from cluster.core.state import Capacity, ConductorConfig, Overload, Role, Slo, TenantId
from kvstore.core.blocks import BlockHash, NodeId, RequestId, WorkerId

CHAIN = tuple(BlockHash(bytes([i]) * 32) for i in range(64))
OTHER = tuple(BlockHash(bytes([100 + i]) * 32) for i in range(64))
FAST = Link(latency_s=0.0, bytes_per_s=1e9)


def cluster(name: str, prefill: int = 2, decode: int = 2, **config: Any) -> Conductor:
    """Worker N of a role stands alone on node pN or dN."""
    made = Conductor(ConductorConfig(policy=name, network=FAST, **config), repeat(0.5).__next__)
    for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
        for i in range(count):
            made.handle(
                WorkerJoined(
                    worker=WorkerId(f"{role.value}-{i}"),
                    role=role,
                    node=NodeId(f"{role.value[0]}{i}"),
                    address="",
                    capacity=Capacity(batch_max=8, kv_tokens_max=8192),
                ),
                0,
            )
    return made


def hold(made: Conductor, node: str, blocks: int) -> None:
    made.handle(BlockStored(node=NodeId(node), hashes=CHAIN[:blocks], sequence=1), 0)


def arrive(
    name: str, blocks: int = 10, slo: Slo | None = None, chain: tuple[BlockHash, ...] = CHAIN
) -> Arrive:
    return Arrive(
        request=RequestId(name),
        tenant=TenantId("t"),
        tokens=32 * blocks + 1,
        chain=chain[:blocks],
        max_new_tokens=128,
        slo=slo or Slo(),
    )


def answer(made: Conductor, event: Arrive, now: float = 0) -> Place | RetryAfter | Reject:
    [one] = [c for c in made.handle(event, now) if isinstance(c, Place | RetryAfter | Reject)]
    made.check()
    return one


def place(made: Conductor, event: Arrive, now: float = 0) -> Place:
    placed = answer(made, event, now)
    assert isinstance(placed, Place)
    return placed


def chosen(placed: Place) -> Candidate:
    assert placed.explanation.chosen is not None
    return placed.explanation.chosen


@pytest.mark.parametrize("name", POLICIES)
def test_an_unknown_option_is_an_error_that_names_it(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' has no option 'colour'"):
        cluster(name, options=(("colour", 1.0),))
    cluster(name, options=tuple(POLICIES[name].options.items()))


def test_an_unknown_policy_is_an_error_that_names_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"'astrology' is none of load, moonpool, .*kvcache_centric"):
        policy("astrology", {})


def test_load_balance_minds_only_the_queue() -> None:
    made = cluster("load_balance")
    hold(made, "p0", 10)
    assert [place(made, arrive(f"r{i}")).prefill for i in range(3)] == ["prefill-0", "prefill-1", "prefill-0"]


def test_cache_aware_goes_to_the_cache_until_its_queue_is_longer_than_computing_anew() -> None:
    made = cluster("cache_aware")
    hold(made, "p1", 10)
    placed = [place(made, arrive(f"r{i}")) for i in range(150)]
    assert placed[0].prefill == "prefill-1"
    assert chosen(placed[0]).cached_tokens == 320
    anew = next(each for each in placed if each.prefill == "prefill-0")
    assert chosen(anew).cached_tokens == 0, "it brings nothing from elsewhere"
    assert chosen(placed[placed.index(anew) - 1]).cost.queue_s > 1.0


@pytest.mark.parametrize(
    ("own", "threshold", "brought"), [(0, 4.0, True), (2, 4.0, True), (3, 4.0, False), (3, 3.0, True)]
)
def test_algorithm_1_brings_the_longest_prefix_where_the_own_is_so_much_shorter(
    own: int, threshold: float, brought: bool
) -> None:
    made = cluster("kvcache_centric", prefill=1, options=(("threshold", threshold),))
    hold(made, "p0", own)
    hold(made, "d1", 10)
    placed = place(made, arrive("r"))
    assert placed.prefill == "prefill-0"
    assert placed.source == ("d1" if brought else "p0")
    assert placed.cached_tokens_expected == 32 * (10 if brought else own)


def test_coupled_needs_no_prefill_worker_and_counts_the_steps_between_its_chunks() -> None:
    made = cluster("vllm_coupled", prefill=0, chunk_tokens=32)
    first, second = place(made, arrive("r0")), place(made, arrive("r1"))
    assert (first.prefill, first.decode, second.decode) == (None, "decode-0", "decode-1")
    third = chosen(place(made, arrive("r2")))
    assert third.cost.queue_s > 0, "it waits for the prompt before it"
    assert third.cost.prefill_s > 1.5 * prefill_s(Coefficients(), 0, 321), "a step goes between two chunks"
    made.handle(PrefillStarted(request=RequestId("r0"), attempt=1), 0)
    made.handle(
        PrefillFinished(
            request=RequestId("r0"), attempt=1, observed_s=2, computed_tokens=321, cached_tokens=0
        ),
        2,
    )
    assert [row["queue_s"] for row in made.snapshot()["workers"]] != [0, 0]
    made.check()


def test_dynamo_weighs_overlap_against_the_queue() -> None:
    made = cluster("dynamo")
    hold(made, "p1", 10)
    assert place(made, arrive("r0")).prefill == "prefill-1"
    blind = cluster("dynamo", options=(("overlap_weight", 0.0),))
    hold(blind, "p1", 10)
    assert place(blind, arrive("r0")).prefill == "prefill-0", "all cost nothing, and this is the first"


def test_llm_d_adds_its_scores() -> None:
    made = cluster("llm_d")
    hold(made, "p1", 10)
    assert place(made, arrive("r0")).prefill == "prefill-1", "queues are equal, the prefix is worth 3"
    assert place(made, arrive("r1")).prefill == "prefill-1", "3 for the prefix against 2 for the queue"
    short = cluster("llm_d")
    hold(short, "p1", 6)
    assert [place(short, arrive(f"r{i}")).prefill for i in range(2)] == ["prefill-1", "prefill-0"]


def two_steps_s() -> float:
    return decode_step_s(Coefficients(), 2, 2 * (321 + 128))


def overloaded(mode: Overload, decoding: bool) -> tuple[Conductor, Place | RetryAfter | Reject]:
    """One decode worker has a stream, or will have; the second request could bear no other stream beside it."""
    made = cluster("kvcache_centric", decode=1, overload=mode)
    place(made, arrive("r0"))
    if decoding:
        made.handle(FirstToken(request=RequestId("r0"), attempt=1, ttft_s=1.0), 1.0)
    return made, answer(made, arrive("r1", slo=Slo(ttft_s=60.0, tbt_s=0.99 * two_steps_s())), 1.0)


@pytest.mark.parametrize(
    ("mode", "before", "decoding"),
    [
        (Overload.OFF, True, True),
        (Overload.NONE, True, True),
        (Overload.EARLY, True, False),  # it sees only what decodes already
        (Overload.PREDICTIVE, False, False),
        (Overload.RESERVED, False, False),
    ],
)
def test_what_the_modes_see_at_arrival(mode: Overload, before: bool, decoding: bool) -> None:
    """`before`: placed while another prompt is being computed; `decoding`: and while it decodes."""
    assert isinstance(overloaded(mode, decoding=False)[1], Place) is before
    assert isinstance(overloaded(mode, decoding=True)[1], Place) is decoding


@pytest.mark.parametrize(("mode", "aborted"), [(Overload.OFF, False), (Overload.NONE, True)])
def test_without_early_rejection_the_prompt_may_be_wasted(mode: Overload, aborted: bool) -> None:
    made, placed = overloaded(mode, decoding=True)
    assert isinstance(placed, Place)
    done = PrefillFinished(
        request=RequestId("r1"), attempt=1, observed_s=2, computed_tokens=321, cached_tokens=0
    )
    commands = made.handle(done, 3.0)
    made.check()
    assert [type(command) for command in commands if isinstance(command, Abort)] == [Abort] * aborted
    assert made.snapshot()["counts"]["wasted"] == aborted


def answers(commands: list[Any]) -> dict[str, Any]:
    return {c.request: c for c in commands if isinstance(c, Place | RetryAfter | Reject)}


def finish_prefill(made: Conductor, name: str, now: float) -> dict[str, Any]:
    done = PrefillFinished(
        request=RequestId(name), attempt=1, observed_s=1.0, computed_tokens=321, cached_tokens=0
    )
    commands = made.handle(done, now)
    made.check()
    return answers(commands)


def test_moonpool_lets_wait_who_finds_all_busy_and_takes_the_shortest_first() -> None:
    made = cluster("moonpool", prefill=1, decode=1, options=(("elastic", 0.0), ("depth", 1.0)))
    assert place(made, arrive("r0", 10)).prefill == "prefill-0"
    long, short = arrive("long", 20), arrive("short", 5)
    assert answers(made.handle(long, 1)) == answers(made.handle(short, 2)) == {}
    assert made.handle(short, 2.5) == [], "asked again, it waits on"
    assert made.snapshot()["waiting"] == 2
    [placed] = finish_prefill(made, "r0", 3).values()
    assert placed.request == "short"
    assert chosen(placed).cost.queue_s == 1.0, "what it waited counts"


def test_ageing_lets_the_long_one_pass_in_the_end() -> None:
    made = cluster(
        "moonpool", prefill=1, decode=1, options=(("elastic", 0.0), ("depth", 1.0), ("ageing", 1.0))
    )
    place(made, arrive("r0", 10))
    made.handle(arrive("long", 20), 0)
    made.handle(arrive("late", 5), 10)
    assert list(finish_prefill(made, "r0", 11)) == ["long"]


def test_who_may_not_wait_for_so_long_is_told_at_once_and_who_has_waited_too_long_then() -> None:
    """Ten blocks take about 2 s alone, sixty 12 s; of what the limit leaves beside that half may be waited."""
    options = (("elastic", 0.0), ("depth", 1.0), ("patience", 0.5))
    made = cluster("moonpool", prefill=1, decode=1, options=options)
    place(made, arrive("r0", 60))
    hasty = answer(made, arrive("hasty", 10, Slo(ttft_s=12.0)))
    assert isinstance(hasty, RetryAfter)
    assert hasty.reason == "queue_s"
    assert isinstance(answer(made, arrive("never", 60, Slo(ttft_s=6.0))), Reject)
    assert answers(made.handle(arrive("patient", 10, Slo(ttft_s=30.0)), 0)) == {}
    made.handle(PrefillStarted(request=RequestId("r0"), attempt=1), 0)
    assert answers(made.handle(Timer(at_s=13.5), 13.5)) == {}
    [refused] = answers(made.handle(Timer(at_s=14.5), 14.5)).values()
    assert (refused.request, refused.reason) == ("patient", "queue_s")
    made.check()


def test_decode_workers_compute_prompts_inside_the_time_their_streams_allow() -> None:
    slo = Slo(ttft_s=60.0, tbt_s=0.3)
    made = cluster("moonpool", prefill=1, decode=1, options=(("depth", 1.0),))
    assert place(made, arrive("r0", 10, slo)).prefill == "prefill-0"
    second = place(made, arrive("r1", 10, slo, OTHER))
    assert (second.prefill, second.decode) == (None, "decode-0")
    assert second.step_s_max == pytest.approx(0.27)
    assert chosen(second).cost.tbt_s <= 0.3
    assert answers(made.handle(arrive("r2", 10, slo), 0)) == {}, "one prompt at a time"
    strict = cluster("moonpool", prefill=1, decode=1, options=(("depth", 1.0),))
    place(strict, arrive("r0", 10, Slo(tbt_s=0.16)))
    assert answers(strict.handle(arrive("r1", 10, slo, OTHER), 0)) == {}, "a step leaves too little of 0.16 s"


def test_who_leaves_the_line_is_forgotten() -> None:
    made = cluster("moonpool", prefill=1, decode=1, options=(("elastic", 0.0), ("depth", 1.0)))
    place(made, arrive("r0"))
    made.handle(arrive("r1"), 0)
    made.handle(Aborted(request=RequestId("r1")), 1)
    assert finish_prefill(made, "r0", 2) == {}
    assert made.snapshot()["counts"]["aborted"] == 1


def test_what_is_being_computed_is_waited_for_and_not_computed_twice() -> None:
    made = cluster("moonpool", prefill=2, decode=1, options=(("elastic", 0.0),))
    place(made, arrive("first", 10))
    assert answers(made.handle(arrive("same", 10), 1)) == {}, (
        "a worker is free, but nine tenths are under way"
    )
    assert answers(made.handle(arrive("other", 10, None, OTHER), 1)) != {}
    made.handle(BlockStored(node=NodeId("p0"), hashes=CHAIN[:10], sequence=1), 2)
    [placed] = finish_prefill(made, "first", 2).values()
    assert (placed.request, placed.cached_tokens_expected, placed.source) == ("same", 320, "p0")


def test_who_finds_more_of_its_prompt_cached_moves_forward() -> None:
    made = cluster("moonpool", prefill=1, decode=1, options=(("elastic", 0.0), ("depth", 1.0)))
    place(made, arrive("busy", 10))
    made.handle(arrive("long", 40, None, OTHER), 0)
    made.handle(arrive("short", 20, None, tuple(reversed(CHAIN))), 0)
    made.handle(BlockStored(node=NodeId("d0"), hashes=OTHER[:35], sequence=1), 1)
    made.check()
    assert list(finish_prefill(made, "busy", 2)) == ["long"]


def test_the_few_best_are_those_that_pricing_all_would_find() -> None:
    """Random queues, corrections and caches: no worker that is among the best is passed over."""
    chance = Random(5)
    for _ in range(200):
        made = cluster("load", prefill=12)
        for number in range(12):
            worker = made._workers[WorkerId(f"prefill-{number}")]
            worker.queue(RequestId("queued"), chance.choice([0, 0, 10_000, 900_000]))
            worker.fit = Fit(scale=chance.choice([1.0, 1.0, 0.5, 2.0]))
            hold(made, f"p{number}", chance.choice([0, 0, 5, 10]))
        view, request = made._view(arrive("r")), arrive("r")
        every = [best_offer(view, request, worker, longest(view)) for worker in view.prefill]
        every.sort(key=lambda offer: (offer.seconds, offer.name))
        assert best_few(view, request, view.prefill) == every[:SHORTLIST]
