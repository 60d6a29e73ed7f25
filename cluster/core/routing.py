"""Where a request could go, and what each way costs. A policy ranks; it neither admits nor places.

A policy is a function of (view, request, chance) that returns candidates, best first.  `chance` gives numbers in
[0, 1).  The view always has a decode worker, and a prefill worker where the request needs one.

How a way is priced.  Missing prefix blocks are read from SSD and travel while the request queues, and a request's KV
travels to another machine while it is computed, layer by layer; only what sticks out is waited for.  Engines load KV
from the memory of their own machine when all of it is there, which is never hidden.  Of each node's part of a chain,
all that lies beyond its prefix in DRAM counts as being read from its SSD.
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
from kvstore.core.prefix_index import Held

Chance = Callable[[], float]
Policy = Callable[[View, Arrive, Chance], list[Candidate]]

NOTHING = Held(0, 0)
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
    if longest is None or view.held[longest].blocks <= view.held.get(worker.node, NOTHING).blocks:
        return local
    remote = _prefill_from(view, request, worker, longest)
    return remote if remote.seconds < local.seconds else local


def _prefill_from(view: View, request: Arrive, worker: Worker, source: NodeId | None) -> _PrefillOffer:
    """Price one source. The engine must compute one token at least, so a full hit counts for one token less."""
    config = view.config
    near = view.held.get(worker.node, NOTHING)
    far = view.held[source] if source is not None and source != worker.node else near
    cached = min(far.blocks * config.block_tokens, request.tokens - 1)
    queue_s = worker.queue_s(view.now_s)
    travel_s = _read_s(view, near.blocks - near.dram)
    if far is not near:
        travel_s += _read_s(view, far.blocks - max(far.dram, near.blocks))
        travel_s += fetch_s((far.blocks - near.blocks) * _block_bytes(view), config.network)
    load_s = fetch_s(cached * config.kv_bytes_per_token, config.memory)
    return _PrefillOffer(
        worker=worker,
        source=source,
        cached_tokens=cached,
        queue_s=queue_s,
        fetch_s=max(0.0, travel_s - queue_s) + load_s,
        prefill_s=worker.prefill_s(cached, request.tokens - cached),
    )


def _block_bytes(view: View) -> int:
    return view.config.block_tokens * view.config.kv_bytes_per_token


def _read_s(view: View, blocks: int) -> float:
    """Seconds to bring so many blocks from an SSD into the DRAM beside it."""
    return fetch_s(blocks * _block_bytes(view), view.config.ssd)


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
    pool_fetch_s = 0.0
    if offer.worker is None and source is not None:
        pool_fetch_s = travel_s + _read_s(view, view.held[source].blocks - view.held[source].dram)
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
    """The node with the longest prefix; between equals the one with more of it in DRAM, then the first by id."""
    return min(
        view.held, key=lambda node: (-view.held[node].blocks, -view.held[node].dram, node), default=None
    )


def _holders_of_all(view: View, request: Arrive) -> list[NodeId]:
    """The nodes with every block of the request's chain, those with the most of it in DRAM first."""
    whole = [node for node, held in view.held.items() if held.blocks == len(request.chain)]
    return sorted(whole, key=lambda node: (-view.held[node].dram, node))


def _whole_source(view: View, request: Arrive, near: NodeId) -> NodeId:
    """Who gives the whole prompt's blocks to the node `near`: itself where it can, since it reads its SSD first."""
    holders = _holders_of_all(view, request)
    return near if near in holders else holders[0]
