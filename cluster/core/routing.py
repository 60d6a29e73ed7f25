"""Where a request could go, and what each way costs. A policy ranks; it neither admits nor places.

A policy is a function of (view, request, chance) that returns candidates, best first.  `chance` gives numbers in
[0, 1).  The view always has a decode worker, and a prefill worker where the request needs one.

How a way is priced.  Missing prefix blocks travel while the request queues, and a request's KV travels to another
machine while it is computed, layer by layer; only what sticks out is waited for.  Engines load KV from the memory of
their own machine when all of it is there, which is never hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from cluster.core.commands import Candidate, Cost
from cluster.core.cost import fetch_s
from cluster.core.events import Arrive
from cluster.core.state import View, Worker
from kvstore.core.blocks import NodeId

Chance = Callable[[], float]
Policy = Callable[[View, Arrive, Chance], list[Candidate]]

SHORTLIST = 4
"""Pairs are priced among this many best workers of each role: prices of pairs differ only by their hand-off."""


def needs_prefill(view: View, request: Arrive) -> bool:
    """False where blocks in the pool hold every prompt token. A second attempt trusts no such promise."""
    whole = request.tokens == len(request.chain) * view.config.block_tokens
    return request.attempt > 1 or not whole or not _holders_of_all(view, request)


def load(view: View, request: Arrive, chance: Chance) -> list[Candidate]:
    """Least predicted time to first token; between equals, least time between tokens."""
    offers = sorted(_prefill_offers(view, request), key=lambda offer: (offer.seconds, offer.name))[:SHORTLIST]
    decode = sorted(view.decode, key=lambda worker: (sum(_decode_s(view, worker)), worker.id))[:SHORTLIST]
    candidates = [_pair(view, request, offer, worker) for offer in offers for worker in decode]
    return sorted(candidates, key=_rank)


def random(view: View, request: Arrive, chance: Chance) -> list[Candidate]:
    """Any prefill worker, any decode worker (Mooncake, section 7: the first baseline)."""
    offers = _prefill_offers(view, request)
    offer = offers[int(chance() * len(offers))]
    return [_pair(view, request, offer, view.decode[int(chance() * len(view.decode))])]


def round_robin(view: View, request: Arrive, chance: Chance) -> list[Candidate]:
    """Each worker of a role in its turn."""
    offers = _prefill_offers(view, request)
    offer = offers[view.placements % len(offers)]
    return [_pair(view, request, offer, view.decode[view.placements % len(view.decode)])]


POLICIES: dict[str, Policy] = {"load": load, "random": random, "round_robin": round_robin}


@dataclass(frozen=True, slots=True)
class _PrefillOffer:
    """What one prefill worker, or none at all, would do with the request."""

    worker: Worker | None
    source: NodeId | None
    cached_tokens: int
    queue_s: float
    fetch_s: float
    prefill_s: float

    @property
    def seconds(self) -> float:
        return self.queue_s + self.fetch_s + self.prefill_s

    @property
    def name(self) -> str:
        return self.worker.id if self.worker else ""


def _rank(candidate: Candidate) -> tuple[float, float, str, str]:
    return (candidate.cost.ttft_s, candidate.cost.tbt_s, candidate.prefill or "", candidate.decode)


def _prefill_offers(view: View, request: Arrive) -> list[_PrefillOffer]:
    if not needs_prefill(view, request):
        return [_PrefillOffer(None, None, request.tokens, 0.0, 0.0, 0.0)]
    longest = _longest(view)
    return [_prefill_offer(view, request, worker, longest) for worker in view.prefill]


def _prefill_offer(view: View, request: Arrive, worker: Worker, longest: NodeId | None) -> _PrefillOffer:
    """The quicker of using what the worker's own node holds, and bringing the longest prefix from elsewhere."""
    local = _prefill_from(view, request, worker, worker.node if worker.node in view.held else None)
    if longest is None or view.held[longest] <= view.held.get(worker.node, 0):
        return local
    remote = _prefill_from(view, request, worker, longest)
    return remote if remote.seconds < local.seconds else local


def _prefill_from(view: View, request: Arrive, worker: Worker, source: NodeId | None) -> _PrefillOffer:
    """Price one source. The engine must compute one token at least, so a full hit counts for one token less."""
    config = view.config
    held = view.held[source] * config.block_tokens if source is not None else 0
    cached = min(held, request.tokens - 1)
    missing = held - view.held.get(worker.node, 0) * config.block_tokens if source != worker.node else 0
    queue_s = worker.queue_s(view.now_s)
    travel_s = fetch_s(missing * config.kv_bytes_per_token, config.network)
    load_s = fetch_s(cached * config.kv_bytes_per_token, config.memory)
    return _PrefillOffer(
        worker=worker,
        source=source,
        cached_tokens=cached,
        queue_s=queue_s,
        fetch_s=max(0.0, travel_s - queue_s) + load_s,
        prefill_s=worker.prefill_s(cached, request.tokens - cached),
    )


def _decode_s(view: View, worker: Worker) -> tuple[float, float]:
    """(seconds until the request could join the batch, seconds of a step with it in)."""
    step_s = worker.step_s(1, view.context_tokens)
    streams = len(worker.streams)
    if not streams:
        return 0.0, step_s
    tokens_over = max(0, worker.context_tokens + view.context_tokens - worker.capacity.kv_tokens_max)
    streams_over = max(
        streams + 1 - worker.capacity.batch_max,
        ceil(tokens_over * streams / max(worker.context_tokens, 1)),
        0,
    )
    between_ends_s = view.output_tokens * step_s / min(streams, worker.capacity.batch_max)
    return streams_over * between_ends_s, step_s


def _pair(view: View, request: Arrive, offer: _PrefillOffer, decode: Worker) -> Candidate:
    """One way, priced: the offer of a prefill worker (or of the pool alone) joined with a decode worker."""
    config = view.config
    prompt_bytes = request.tokens * config.kv_bytes_per_token
    load_s = fetch_s(prompt_bytes, config.memory)
    wait_s, step_s = _decode_s(view, decode)
    source = offer.source if offer.worker else _whole_source(view, request, decode.node)
    from_node = offer.worker.node if offer.worker else source
    travel_s = fetch_s(prompt_bytes, config.network) if from_node != decode.node else 0.0
    pool_fetch_s = 0.0 if offer.worker else travel_s
    handoff_s = load_s + (max(0.0, travel_s - offer.prefill_s) if offer.worker else 0.0)
    before_decode_s = offer.seconds + pool_fetch_s + handoff_s
    decode_wait_s = max(0.0, wait_s - before_decode_s)
    return Candidate(
        prefill=offer.worker.id if offer.worker else None,
        decode=decode.id,
        source=source,
        cached_tokens=offer.cached_tokens,
        cost=Cost(
            queue_s=offer.queue_s,
            fetch_s=offer.fetch_s + pool_fetch_s,
            prefill_s=offer.prefill_s,
            handoff_s=handoff_s,
            decode_wait_s=decode_wait_s,
            tbt_s=step_s,
            ttft_s=before_decode_s + decode_wait_s + step_s,
        ),
    )


def _longest(view: View) -> NodeId | None:
    """The node with the longest prefix, the first by id between equals."""
    return min(view.held, key=lambda node: (-view.held[node], node), default=None)


def _holders_of_all(view: View, request: Arrive) -> list[NodeId]:
    return sorted(node for node, blocks in view.held.items() if blocks == len(request.chain))


def _whole_source(view: View, request: Arrive, near: NodeId) -> NodeId:
    """Who gives the whole prompt's blocks to the node `near`: itself where it can."""
    holders = _holders_of_all(view, request)
    return near if near in holders else holders[0]
