"""Where a request could go, and what each way costs in seconds: what policies (`policies.py`) are made of.

How a way is priced.  Missing prefix blocks are read from SSD and travel while the request queues, and a request's KV
travels to another machine while it is computed, layer by layer; only what sticks out is waited for.  Engines load KV
from the memory of their own machine when all of it is there, which is never hidden.  Of each node's part of a chain,
all that lies beyond its prefix in DRAM counts as being read from its SSD.

A prompt may be computed by the decode worker itself, in chunks beside the steps of its batch: then each chunk waits for
a step, which is counted as part of the prefill.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

from cluster.core.commands import Candidate, Cost
from cluster.core.cost import fetch_s, prefill_s
from cluster.core.events import Arrive
from cluster.core.state import Overload, Role, Stream, View, Worker
from kvstore.core.blocks import NodeId
from kvstore.core.prefix_index import Held

Chance = Callable[[], float]

NOTHING = Held(0, 0)
CHUNK_SHARE_MIN = 0.05
"""Of a bounded step; what a chunk gets where the batch alone takes longer."""
SHORTLIST = 4
"""Pairs are priced among this many best workers of each role: prices of pairs differ only by their hand-off."""


def needs_prefill(view: View, request: Arrive) -> bool:
    """False where blocks in the pool hold every prompt token. A second attempt trusts no such promise."""
    whole = request.tokens == len(request.chain) * view.config.block_tokens
    return request.attempt > 1 or not whole or not _holders_of_all(view, request)


@dataclass(frozen=True, slots=True)
class Offer:
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


def quickest(candidate: Candidate) -> tuple[float, float, str, str]:
    return (candidate.cost.ttft_s, candidate.cost.tbt_s, candidate.prefill or "", candidate.decode)


def pool_alone() -> Offer:
    """No prompt token is left to compute."""
    return Offer(None, None, 0, 0.0, 0.0, 0.0)


def best_few(view: View, request: Arrive, workers: Sequence[Worker]) -> list[Offer]:
    """The `SHORTLIST` quickest of `best_offer` of these workers, the quickest first.

    What a worker could do without waiting for bytes is a bound that is quick to say: most workers are priced no further.
    """
    source = longest(view)
    blocks = view.held[source].blocks if source is not None else 0
    cached = min(blocks * view.config.block_tokens, request.tokens - 1)
    bare_s = {
        coefficients: prefill_s(coefficients, cached, request.tokens - cached)
        for coefficients in dict.fromkeys(worker.coefficients for worker in workers)
    }
    bounds = sorted(
        (worker.queue_s(view.now_s) + worker.fit.scale * bare_s[worker.coefficients], worker.id, number)
        for number, worker in enumerate(workers)
    )
    few: list[tuple[float, str, int, Offer]] = []
    for bound_s, _, number in bounds:
        if len(few) == SHORTLIST and few[-1][0] < bound_s:
            break
        offer = best_offer(view, request, workers[number], source)
        insort(few, (offer.seconds, offer.name, number, offer))
        del few[SHORTLIST:]
    return [offer for *_, offer in few]


def local_offers(view: View, request: Arrive) -> list[Offer]:
    """What each prefill worker can do with what its own node holds."""
    if not needs_prefill(view, request):
        return [pool_alone()]
    return [local_offer(view, request, worker) for worker in view.prefill]


def local_offer(view: View, request: Arrive, worker: Worker) -> Offer:
    return offer_from(view, request, worker, worker.node if worker.node in view.held else None)


def best_offer(view: View, request: Arrive, worker: Worker, source: NodeId | None) -> Offer:
    """The quicker of using what the worker's own node holds, and bringing the longest prefix from `source`."""
    local = local_offer(view, request, worker)
    if source is None or view.held[source].blocks <= view.held.get(worker.node, NOTHING).blocks:
        return local
    remote = offer_from(view, request, worker, source)
    return remote if remote.seconds < local.seconds else local


def offer_from(view: View, request: Arrive, worker: Worker, source: NodeId | None) -> Offer:
    """Price one source. The engine must compute one token at least, so a full hit counts for one token less."""
    config = view.config
    near = view.held.get(worker.node, NOTHING)
    far = view.held[source] if source is not None and source != worker.node else near
    cached = min(far.blocks * config.block_tokens, request.tokens - 1)
    queue_s = worker.queue_s(view.now_s)
    travel_s = read_s(view, near.blocks - near.dram)
    if far is not near:
        travel_s += read_s(view, far.blocks - max(far.dram, near.blocks))
        travel_s += fetch_s((far.blocks - near.blocks) * _block_bytes(view), config.network)
    load_s = fetch_s(cached * config.kv_bytes_per_token, config.memory)
    return Offer(
        worker=worker,
        source=source,
        cached_tokens=cached,
        queue_s=queue_s,
        fetch_s=max(0.0, travel_s - queue_s) + load_s,
        prefill_s=worker.prefill_s(cached, request.tokens - cached),
    )


def _block_bytes(view: View) -> int:
    return view.config.block_tokens * view.config.kv_bytes_per_token


def read_s(view: View, blocks: int) -> float:
    """Seconds to bring so many blocks from an SSD into the DRAM beside it."""
    return fetch_s(blocks * _block_bytes(view), view.config.ssd)


def decode_s(view: View, worker: Worker) -> tuple[float, float]:
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


def pair(view: View, request: Arrive, offer: Offer, decode: Worker) -> Candidate:
    """One way, priced: the offer of a prefill worker (or of the pool alone) joined with a decode worker."""
    config = view.config
    prompt_bytes = request.tokens * config.kv_bytes_per_token
    load_s = fetch_s(prompt_bytes, config.memory)
    wait_s = decode_s(view, decode)[0]
    source = offer.source if offer.worker else _whole_source(view, request, decode.node)
    from_node = offer.worker.node if offer.worker else source
    travel_s = fetch_s(prompt_bytes, config.network) if from_node != decode.node else 0.0
    pool_fetch_s = 0.0
    if offer.worker is None and source is not None:
        pool_fetch_s = travel_s + read_s(view, view.held[source].blocks - view.held[source].dram)
    handoff_s = load_s + (max(0.0, travel_s - offer.prefill_s) if offer.worker else 0.0)
    before_decode_s = offer.seconds + pool_fetch_s + handoff_s
    decode_wait_s = max(0.0, wait_s - before_decode_s)
    step_s = judged_step_s(view, decode, view.now_s + before_decode_s)
    return Candidate(
        prefill=offer.worker.id if offer.worker else None,
        decode=decode.id,
        source=source,
        cached_tokens=offer.cached_tokens if offer.worker else request.tokens,
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


def at_decode(view: View, request: Arrive, offer: Offer, step_s_max: float | None = None) -> Candidate:
    """One way, priced: `offer` is of a decode worker, which computes the prompt in chunks beside its steps.

    A chunk has `chunk_tokens`, or what takes as long as `step_s_max` leaves.
    """
    decode = offer.worker
    assert decode is not None, "nobody computes the prompt"
    step_s = judged_step_s(view, decode, view.now_s + offer.seconds)
    beside_s = decode.step_s() if decode.streams else 0.0
    if step_s_max is None:
        chunk_s = decode.prefill_s(0, view.config.chunk_tokens)
    else:
        chunk_s = max(step_s_max - beside_s, CHUNK_SHARE_MIN * step_s_max)
        step_s = max(step_s, step_s_max)
    prefill_s = offer.prefill_s * (1 + beside_s / chunk_s)
    before_decode_s = offer.queue_s + offer.fetch_s + prefill_s
    decode_wait_s = max(0.0, decode_s(view, decode)[0] - before_decode_s)
    return Candidate(
        prefill=None,
        decode=decode.id,
        source=offer.source,
        cached_tokens=offer.cached_tokens,
        cost=Cost(
            queue_s=offer.queue_s,
            fetch_s=offer.fetch_s,
            prefill_s=prefill_s,
            handoff_s=0.0,
            decode_wait_s=decode_wait_s,
            tbt_s=step_s,
            ttft_s=before_decode_s + decode_wait_s + step_s,
        ),
        step_s_max=step_s_max,
    )


def idle(view: View, request: Arrive, at_decode: bool) -> Candidate:
    """The request on the quickest workers if they had nothing else to do, with the longest prefix that is anywhere."""
    config, source = view.config, longest(view)
    blocks = view.held[source].blocks if source is not None else 0
    cached = min(blocks * config.block_tokens, request.tokens - 1)
    computes = min(
        [*view.prefill, *(view.decode if at_decode else ())],
        key=lambda worker: (worker.prefill_s(cached, request.tokens - cached), worker.id),
    )
    step_s, _, decode = min(
        (worker.empty_step_s(view.context_tokens), worker.id, worker) for worker in view.decode
    )
    prefill_s = computes.prefill_s(cached, request.tokens - cached)
    fetch = fetch_s(cached * config.kv_bytes_per_token, config.memory)
    handoff_s = fetch_s(request.tokens * config.kv_bytes_per_token, config.memory)
    return Candidate(
        prefill=computes.id if computes.role is Role.PREFILL else None,
        decode=decode.id,
        source=source if cached else None,
        cached_tokens=cached,
        cost=Cost(
            queue_s=0.0,
            fetch_s=fetch,
            prefill_s=prefill_s,
            handoff_s=handoff_s,
            decode_wait_s=0.0,
            tbt_s=step_s,
            ttft_s=fetch + prefill_s + handoff_s + step_s,
        ),
    )


def judged_step_s(view: View, worker: Worker, ready_s: float) -> float:
    """Seconds of a step with the request in, as the mode of overload sees the worker; `ready_s`: it could start then."""
    match view.config.overload:
        case Overload.EARLY:
            streams = [stream for stream in worker.streams.values() if stream.since_s is not None]
        case Overload.PREDICTIVE:
            streams = predicted_streams(view, worker, ready_s)
        case _:
            return worker.step_s(1, view.context_tokens)
    return worker.step_with_s(streams, view.context_tokens)


def predicted_streams(view: View, worker: Worker, ready_s: float) -> list[Stream]:
    """Who will decode then: whose prompt is done by then, and whose answer, of mean length, is not."""
    answer_s = view.output_tokens * worker.step_s()
    return [
        stream
        for stream in worker.streams.values()
        if (start_s := stream.ready_s if stream.since_s is None else stream.since_s)
        <= ready_s
        < start_s + answer_s
    ]


def longest(view: View) -> NodeId | None:
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
