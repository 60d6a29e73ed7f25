"""Whether a request may come in: refused early, with the limit that failed, rather than served late.

`gate` asks before anything is priced, `judge` after: it takes the best candidate that keeps the request's SLO.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from cluster.core.commands import Candidate, Explanation, Limit, Reject, RetryAfter
from cluster.core.events import Arrive
from cluster.core.state import Overload, Slo, View


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit:
    chosen: Candidate
    explanation: Explanation


def gate(
    view: View, request: Arrive, any_prefill: bool, any_decode: bool, prefill_needed: bool
) -> RetryAfter | Reject | None:
    """What no candidate could change: membership long unknown, too much in flight, a role without workers, a request
    too long for any.

    `any_prefill` and `any_decode` count every worker, the view only those that could hold this request.
    """
    config = view.config
    unknown_s = view.now_s - view.directory_lost_s
    if unknown_s > config.directory_grace_s:
        limit = Limit(term="directory_grace_s", predicted=unknown_s, allowed=config.directory_grace_s)
        why = Explanation(policy=config.policy, limit=limit)
        return _retry(view, request, config.retry_s_no_worker, "who is in the cluster is unknown", why)
    if view.inflight >= config.inflight_max:
        limit = Limit(term="inflight_max", predicted=view.inflight + 1, allowed=config.inflight_max)
        why = Explanation(policy=config.policy, limit=limit)
        return _retry(view, request, config.retry_s_min, limit.term, why)
    needed = [("decode", view.decode, any_decode)]
    if prefill_needed:
        needed.append(("prefill", view.prefill, any_prefill))
    why = Explanation(policy=config.policy)
    for role, fitting, any_worker in needed:
        if not any_worker:
            return _retry(view, request, config.retry_s_no_worker, f"no {role} worker", why)
        if not fitting:
            return _reject(request, f"longer than any {role} worker holds", why)
    return None


def judge(view: View, request: Arrive, ranked: Sequence[Candidate]) -> Admit | RetryAfter | Reject:
    """Admit the first of `ranked` that keeps the SLO; else say what the best one misses, and when to come again.

    How much of the SLO is asked for now is the mode of overload (`Overload`).
    """
    assert ranked, "a policy must offer a candidate"
    slo = _asked_now(request.slo, view.config.overload)
    explained = tuple(ranked[: view.config.explained_max])
    for position, candidate in enumerate(ranked):
        if _missed(candidate, slo, view.config.overload) is None:
            others = [other for other in ranked[:2] if other is not candidate]
            return Admit(
                chosen=candidate,
                explanation=Explanation(
                    policy=view.config.policy,
                    candidates=explained if position < len(explained) else (*explained[:-1], candidate),
                    chosen=candidate,
                    runner_up=others[0] if others else None,
                ),
            )
    best = ranked[0]
    limit = _missed(best, slo, view.config.overload)
    assert limit is not None
    explanation = Explanation(policy=view.config.policy, candidates=explained, limit=limit)
    seconds = _ttft_over_s(best, limit) if limit.term == "ttft_s" else _tbt_over_s(view, best, limit)
    if seconds is None:
        return _reject(request, f"{limit.term} would be missed on an idle cluster too", explanation)
    return _retry(view, request, seconds, limit.term, explanation)


def line(
    view: View, request: Arrive, ahead_s: float, wait_s_max: float, best: Candidate
) -> RetryAfter | Reject | None:
    """Whether a request may stand in the line: refused where it would wait `ahead_s`, and may only `wait_s_max`.

    `best` is what it would cost on an idle cluster.
    """
    slo = _asked_now(request.slo, view.config.overload)
    alone = _missed(best, slo, view.config.overload)
    if alone is not None:
        why = Explanation(policy=view.config.policy, candidates=(best,), limit=alone)
        return _reject(request, f"{alone.term} would be missed on an idle cluster too", why)
    if ahead_s <= wait_s_max:
        return None
    why = Explanation(policy=view.config.policy, candidates=(best,), limit=_waits(ahead_s, wait_s_max))
    return _retry(view, request, ahead_s - wait_s_max, "queue_s", why)


def waited(view: View, request: Arrive, waited_s: float) -> RetryAfter:
    """A request has waited as long as it may. Shorter ones went first."""
    why = Explanation(policy=view.config.policy, limit=_waits(waited_s, waited_s))
    return _retry(view, request, waited_s, "queue_s", why)


def _waits(predicted_s: float, allowed_s: float) -> Limit:
    return Limit(term="queue_s", predicted=predicted_s, allowed=allowed_s)


def _asked_now(slo: Slo, overload: Overload) -> Slo:
    match overload:
        case Overload.OFF:
            return Slo()
        case Overload.NONE:
            return Slo(ttft_s=slo.ttft_s)
        case _:
            return slo


def _missed(candidate: Candidate, slo: Slo, overload: Overload) -> Limit | None:
    """Mooncake's time to first token ends with the prefill: its modes do not see a wait for the decode worker."""
    cost = candidate.cost
    sees_wait = overload in (Overload.RESERVED, Overload.OFF)
    ttft_s = cost.ttft_s if sees_wait else cost.ttft_s - cost.decode_wait_s
    if slo.ttft_s is not None and ttft_s > slo.ttft_s:
        return Limit(term="ttft_s", predicted=ttft_s, allowed=slo.ttft_s)
    if slo.tbt_s is not None and cost.tbt_s > slo.tbt_s:
        return Limit(term="tbt_s", predicted=cost.tbt_s, allowed=slo.tbt_s)
    return None


def _ttft_over_s(best: Candidate, limit: Limit) -> float | None:
    """Seconds until enough of the queues before it has drained; None where even all of it would not do."""
    over_s = limit.predicted - limit.allowed
    return over_s if over_s <= best.cost.queue_s + best.cost.decode_wait_s else None


def _tbt_over_s(view: View, best: Candidate, limit: Limit) -> float | None:
    """Seconds until enough streams of the decode worker have ended, one after another; None where all would not do."""
    worker = next(worker for worker in view.decode if worker.id == best.decode)
    streams = len(worker.streams)
    if not streams:
        return None
    empty_s = worker.step_s(1 - streams, view.context_tokens - worker.context_tokens)
    if empty_s > limit.allowed:
        return None
    stream_s = (limit.predicted - empty_s) / streams
    ends = ceil((limit.predicted - limit.allowed) / stream_s) if stream_s > 0 else 1
    return ends * view.output_tokens * limit.predicted / streams


def _retry(view: View, request: Arrive, seconds: float, reason: str, explanation: Explanation) -> RetryAfter:
    return RetryAfter(
        request=request.request,
        attempt=request.attempt,
        seconds=min(max(seconds, view.config.retry_s_min), view.config.retry_s_max),
        reason=reason,
        explanation=explanation,
    )


def _reject(request: Arrive, reason: str, explanation: Explanation) -> Reject:
    return Reject(request=request.request, attempt=request.attempt, reason=reason, explanation=explanation)
