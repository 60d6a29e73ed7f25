"""The policies, by name in `POLICIES`: each ranks the ways to serve one request; none admits or places.

`rank` is a function of (view, request, chance, options) that returns candidates, best first: `chance` gives numbers in
[0, 1), options are keywords with defaults.  A policy of others is as they published it, with its own cost function, and
offers the one way that it would take; the seconds that explain and judge it are ours for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, signature
from math import inf
from typing import Any

from cluster.core.commands import Candidate
from cluster.core.events import Arrive
from cluster.core.routing import (
    NOTHING,
    SHORTLIST,
    Chance,
    Offer,
    at_decode,
    best_few,
    best_offer,
    decode_s,
    local_offer,
    local_offers,
    longest,
    needs_prefill,
    offer_from,
    pair,
    pool_alone,
    quickest,
)
from cluster.core.state import Role, View, Worker

Rank = Callable[..., list[Candidate]]


@dataclass(frozen=True, slots=True)
class Policy:
    """`at_decode`: decode workers compute prompts, so that no prefill worker is needed.

    With `order` requests wait in one line, smallest first, until `rank` has a way for the first of them that is free
    now; without, each is bound to workers as it comes. It is a function of (seconds to compute, arrival, options).
    `wait_s` says how long, of (seconds that its limit leaves it on an idle cluster, options).
    `busy` says of (workers, options) that there can be no way for anybody, so that nobody need be tried.
    """

    rank: Rank
    at_decode: bool = False
    order: Callable[..., float] | None = None
    wait_s: Callable[..., float] = lambda slack_s: slack_s
    busy: Callable[..., bool] = lambda workers: False

    @property
    def options(self) -> dict[str, float]:
        """By name, with their defaults."""
        functions = (self.rank, self.wait_s, self.busy, *(() if self.order is None else (self.order,)))
        return {name: default for function in functions for name, default in _options(function).items()}


def _options(function: Callable[..., object]) -> dict[str, float]:
    parameters = signature(function).parameters.values()
    return {one.name: one.default for one in parameters if one.kind is Parameter.KEYWORD_ONLY}


def policy(name: str, options: Mapping[str, float]) -> Policy:
    """The policy of that name with these options. Raises ValueError naming a policy or option that there is not."""
    if name not in POLICIES:
        raise ValueError(f"policy {name!r} is none of {', '.join(POLICIES)}")
    chosen = POLICIES[name]
    for option in options:
        if option not in chosen.options:
            known = ", ".join(chosen.options) or "none"
            raise ValueError(f"policy {name!r} has no option {option!r}; it has {known}")

    def bound(function: Callable[..., Any]) -> Callable[..., Any]:
        return partial(function, **{name: options[name] for name in options if name in _options(function)})

    order = bound(chosen.order) if chosen.order is not None else None
    return Policy(bound(chosen.rank), chosen.at_decode, order, bound(chosen.wait_s), bound(chosen.busy))


# -- ours -----------------------------------------------------------------------------------------------------------


def load(view: View, request: Arrive, chance: Chance) -> list[Candidate]:
    """Least predicted time to first token; between equals, least time between tokens."""
    alone = not needs_prefill(view, request)
    offers = [pool_alone()] if alone else best_few(view, request, view.prefill)
    decode = sorted(view.decode, key=lambda worker: (sum(decode_s(view, worker)), worker.id))[:SHORTLIST]
    candidates = [pair(view, request, offer, worker) for offer in offers for worker in decode]
    return sorted(candidates, key=quickest)


def moonpool(
    view: View,
    request: Arrive,
    chance: Chance,
    *,
    depth: float = 2,
    elastic: float = 1,
    step_share: float = 0.9,
) -> list[Candidate]:
    """The quickest way that is free now, in seconds; none where all are busy: then the request waits in the line.

    A prefill worker is free below `depth` prompts, so that cached blocks travel while the one before is computed. With
    `elastic` decode workers compute prompts too, one at a time, in what `step_share` of the time between tokens that
    their streams are allowed leaves beside a step.
    """
    decode = [worker for worker in view.decode if _takes_a_stream(view, worker, request)]
    if not decode:
        return []
    if not needs_prefill(view, request):
        return [
            pair(view, request, pool_alone(), min(decode, key=lambda one: (sum(decode_s(view, one)), one.id)))
        ]
    source = longest(view)
    free = [worker for worker in view.prefill if _is_free(worker, depth, elastic)]
    offers = best_few(view, request, free)
    roomy = sorted(decode, key=lambda worker: (sum(decode_s(view, worker)), worker.id))[:SHORTLIST]
    candidates = [pair(view, request, offer, worker) for offer in offers for worker in roomy]
    for worker in decode:
        step_s_max = _step_s_max(worker, request, step_share)
        crowded = step_s_max is not None and worker.step_s() > ELASTIC_SHARE_MAX * step_s_max
        if _is_free(worker, depth, elastic) and not crowded:
            candidates.append(at_decode(view, request, best_offer(view, request, worker, source), step_s_max))
    return sorted(candidates, key=quickest)


def _is_free(worker: Worker, depth: float, elastic: float) -> bool:
    if worker.role is Role.PREFILL:
        return len(worker.queue_us) < depth
    return bool(elastic) and not worker.queue_us


def all_busy(workers: Iterable[Worker], *, depth: float = 2, elastic: float = 1) -> bool:
    return not any(_is_free(worker, depth, elastic) for worker in workers)


ELASTIC_SHARE_MAX = 0.7
"""Of a step's bound that its batch may take where prompts are still computed beside it."""
KV_SHARE_MAX = 0.95
"""Of a decode worker's KV that is promised: answers may be longer than expected."""


def shortest_first(compute_s: float, arrived_s: float, *, ageing: float = 0.5) -> float:
    """Least to compute first; a second of waiting is worth `ageing` seconds of it, so that nobody waits for ever.

    Too little ageing serves the short ones only, and long prompts that many others begin with are never cached.
    """
    return compute_s + ageing * arrived_s


def patient(slack_s: float, *, patience: float = 0.3) -> float:
    """A share of it: a longer line serves no more, only later, and a refusal is worth more early."""
    return patience * slack_s


def _takes_a_stream(view: View, worker: Worker, request: Arrive) -> bool:
    """Now: with room for its KV, and time between tokens for all."""
    if len(worker.streams) >= worker.capacity.batch_max:
        return False
    kv_tokens = worker.context_tokens + view.context_tokens
    if worker.streams and kv_tokens > KV_SHARE_MAX * worker.capacity.kv_tokens_max:
        return False
    limit_s = _limit_s(worker, request)
    return not worker.streams or limit_s is None or worker.step_s(1, view.context_tokens) <= limit_s


def _limit_s(worker: Worker, request: Arrive) -> float | None:
    own = () if request.slo.tbt_s is None else (request.slo.tbt_s,)
    return min((*worker.tbt_limits, *own), default=None)


def _step_s_max(worker: Worker, request: Arrive, share: float) -> float | None:
    limit_s = _limit_s(worker, request)
    return None if limit_s is None else share * limit_s


# -- Mooncake's (arXiv, section 6; FAST'25, section 4) ------------------------------------------------------------------


def random(view: View, request: Arrive, chance: Chance) -> list[Candidate]:
    """Any prefill worker, any decode worker."""
    offers = local_offers(view, request)
    offer = offers[int(chance() * len(offers))]
    return [pair(view, request, offer, view.decode[int(chance() * len(view.decode))])]


def round_robin(view: View, request: Arrive, chance: Chance) -> list[Candidate]:
    """Each worker of a role in its turn."""
    offers = local_offers(view, request)
    offer = offers[view.placements % len(offers)]
    return [pair(view, request, offer, view.decode[view.placements % len(view.decode)])]


def load_balance(view: View, request: Arrive, chance: Chance) -> list[Candidate]:
    """The prefill worker with the shortest queue, whatever it holds."""
    offer = min(local_offers(view, request), key=lambda offer: (offer.queue_s, offer.name))
    return [pair(view, request, offer, _least_tbt(view))]


def cache_aware(view: View, request: Arrive, chance: Chance) -> list[Candidate]:
    """Least queue and prefill with what each worker's own node holds: Algorithm 1 without transfers."""
    offer = min(local_offers(view, request), key=lambda offer: (offer.queue_s + offer.prefill_s, offer.name))
    return [pair(view, request, offer, _least_tbt(view))]


def kvcache_centric(
    view: View, request: Arrive, chance: Chance, *, threshold: float = 4.0
) -> list[Candidate]:
    """Algorithm 1: a worker whose own prefix is `threshold` times shorter than the longest one gets that one brought.

    Its terms are summed as printed there: transfer + queue + prefill; a prefix of no block is infinitely shorter.
    """
    if not needs_prefill(view, request):
        return [pair(view, request, pool_alone(), _least_tbt(view))]
    source = longest(view)
    best = view.held[source].blocks if source is not None else 0

    def priced(worker: Worker) -> tuple[float, str, Offer]:
        own = view.held.get(worker.node, NOTHING).blocks
        ratio = best / own if own else inf if best else 0.0
        if ratio <= threshold or best <= own:
            offer = local_offer(view, request, worker)
            return offer.queue_s + offer.prefill_s, worker.id, offer
        offer = offer_from(view, request, worker, source)
        kv_bytes = (best - own) * view.config.block_tokens * view.config.kv_bytes_per_token
        transfer_s = kv_bytes / view.config.network.bytes_per_s
        return transfer_s + offer.queue_s + offer.prefill_s, worker.id, offer

    offer = min(map(priced, view.prefill), key=lambda one: one[:2])[2]
    return [pair(view, request, offer, _least_tbt(view))]


# -- others' ---------------------------------------------------------------------------------------------------------


def vllm_coupled(view: View, request: Arrive, chance: Chance) -> list[Candidate]:
    """Prompt and answer on one engine, the one with the least to compute, between equals the fewest streams.

    Whether prompts are cut into chunks and prefixes kept is the engine's setting.
    """
    worker = min(view.decode, key=lambda worker: (worker.queue_s(view.now_s), len(worker.streams), worker.id))
    return [at_decode(view, request, local_offer(view, request, worker))]


def dynamo(view: View, request: Arrive, chance: Chance, *, overlap_weight: float = 1.0) -> list[Candidate]:
    """NVIDIA Dynamo's KV router: overlap_weight x (blocks to compute, queued ones too) + active blocks, at temperature 0.

    Split into prefill and decode, the prefill side leaves out active blocks, the decode side counts nothing else. What
    is queued is known here in seconds, and counts as the blocks that take as long.
    """

    def cost(offer: Offer) -> float:
        assert offer.worker is not None
        block_s = view.config.block_tokens * offer.worker.coefficients.prefill_token_s
        own = view.held.get(offer.worker.node, NOTHING).blocks
        new = request.tokens / view.config.block_tokens - own
        return overlap_weight * (new + offer.queue_s / block_s)

    decode = min(view.decode, key=lambda worker: (worker.context_tokens, worker.id))
    if not needs_prefill(view, request):
        return [pair(view, request, pool_alone(), decode)]
    offer = min(local_offers(view, request), key=lambda offer: (cost(offer), offer.name))
    return [pair(view, request, offer, decode)]


def llm_d(
    view: View,
    request: Arrive,
    chance: Chance,
    *,
    queue_weight: float = 2.0,
    kv_weight: float = 2.0,
    prefix_weight: float = 3.0,
) -> list[Candidate]:
    """llm-d's usual profile: a weighted sum of scores in 0..1 for queue, KV in use and precise prefix; the most wins.

    The decode worker is chosen first. Ties go to the first by id, not at random.
    """
    blocks = max(1, len(request.chain))

    def score(worker: Worker, waiting: float, most: float) -> float:
        queue = 1 - waiting / most if most else 1.0
        kv = 1 - min(1.0, worker.context_tokens / worker.capacity.kv_tokens_max)
        prefix = view.held.get(worker.node, NOTHING).blocks / blocks
        return queue_weight * queue + kv_weight * kv + prefix_weight * prefix

    most_streams = max(len(worker.streams) for worker in view.decode)
    decode = min(view.decode, key=lambda one: (-score(one, len(one.streams), most_streams), one.id))
    if not needs_prefill(view, request):
        return [pair(view, request, pool_alone(), decode)]
    most_queued = max(len(worker.queue_us) for worker in view.prefill)
    prefill = min(view.prefill, key=lambda one: (-score(one, len(one.queue_us), most_queued), one.id))
    return [pair(view, request, local_offer(view, request, prefill), decode)]


POLICIES: dict[str, Policy] = {
    "load": Policy(load),
    "moonpool": Policy(moonpool, at_decode=True, order=shortest_first, wait_s=patient, busy=all_busy),
    "random": Policy(random),
    "round_robin": Policy(round_robin),
    "load_balance": Policy(load_balance),
    "cache_aware": Policy(cache_aware),
    "kvcache_centric": Policy(kvcache_centric),
    "vllm_coupled": Policy(vllm_coupled, at_decode=True),
    "dynamo": Policy(dynamo),
    "llm_d": Policy(llm_d),
}


def _least_tbt(view: View) -> Worker:
    """Mooncake's SelectDecodingInstance is specified as balancing the predicted time between tokens."""
    return min(view.decode, key=lambda worker: (sum(decode_s(view, worker)), worker.id))
