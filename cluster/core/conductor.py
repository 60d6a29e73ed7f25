"""The conductor: a pure machine that decides where every request is served. Events in, commands out.

    Arrive ──► gate ──► match ──► price and rank ──► judge ──► Place | RetryAfter | Reject
               (admission)  (prefix index)  (routing policy)  (admission)

Rules.
- `handle` is synchronous and total: any event may come late, twice, or about something unknown, and is then ignored.
- `now` never goes backwards; it, `chance` and the events are the only inputs. Equal inputs give equal commands.
- One request has one placement at most. A new attempt replaces the old one; what is said of the old one is ignored.
- The conductor decides, the gateway owns: an `Abort` says that an attempt is over, what follows is a fresh `Arrive`.

A policy with an order binds late: requests wait in one line, smallest first, until a way is free for one of them, or
until they have waited as long as the policy lets them; then the answer comes with a later event. The first few of
the line are tried, so that one that fits nowhere now holds up nobody.

A placement's life.  Its prefill counts in the prefill worker's queue until `PrefillFinished`; its KV counts in the
decode worker from the start, since that room is spoken for.  Both end with the attempt, however it ends.

    queued ──PrefillStarted──► prefilling ──PrefillFinished──► handing off ──DecodeStarted──► decoding ──► (gone)
                                                                ▲
    no prefill needed ──────────────────────────────────────────┘
"""

from __future__ import annotations

from bisect import bisect, bisect_left, insort
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from heapq import heappop, heappush
from itertools import takewhile
from typing import Any, assert_never

from cluster.core.admission import Admit, gate, judge, line, waited
from cluster.core.commands import (
    Abort,
    Candidate,
    Command,
    Explanation,
    Place,
    Reject,
    RequestSnapshot,
    RetryAfter,
    WakeAt,
)
from cluster.core.cost import FIT_WEIGHT, Fit, prefill_s
from cluster.core.events import (
    Aborted,
    Arrive,
    BlockRemoved,
    BlockStored,
    DecodeStarted,
    DirectoryFound,
    DirectoryLost,
    Event,
    Failed,
    Finished,
    FirstToken,
    NodeLeft,
    NodeSnapshot,
    PrefillFinished,
    PrefillLost,
    PrefillStarted,
    Timer,
    WorkerJoined,
    WorkerLeft,
)
from cluster.core.policies import policy
from cluster.core.routing import Chance, idle, needs_prefill
from cluster.core.state import ConductorConfig, Overload, Role, Slo, Stream, View, Worker
from kvstore.core.blocks import BlockHash, NodeId, RequestId, WorkerId
from kvstore.core.prefix_index import PrefixIndex


class Stage(StrEnum):
    QUEUED = "queued"
    PREFILLING = "prefilling"
    HANDING_OFF = "handing off"
    DECODING = "decoding"


@dataclass(slots=True, kw_only=True)
class Flight:
    """One attempt of one request that was placed and is not over. `step_s` is the uncorrected step at its start.

    `computes` is who computes the prompt, the prefill worker or the decode worker itself; None where it is all there.
    """

    place: Place
    slo: Slo
    placed_s: float
    computes: WorkerId | None
    stage: Stage
    new_blocks: tuple[BlockHash, ...] = ()
    step_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Waiting:
    """A request in the line: its place there, what it would take on an idle cluster, until when it may wait.

    `cached` of its first blocks are somewhere in the pool; the next one is the first that has to be computed.
    """

    event: Arrive
    arrived_s: float
    key: tuple[float, RequestId]
    compute_s: float
    too_late_s: float
    cached: int


LINE_TRIED = 8
"""How many of the line are tried for a way that is free."""
_FREES_NOTHING = (BlockStored, BlockRemoved, NodeSnapshot, PrefillStarted, DirectoryLost, DirectoryFound)


class Conductor:
    """Owns the workers' loads, the flights and the copy of who holds what. See the module's rules."""

    def __init__(self, config: ConductorConfig, chance: Chance) -> None:
        self.config = config
        self.index = PrefixIndex()
        self._chance = chance
        self._policy = policy(config.policy, dict(config.options))
        self._now_s = float("-inf")
        self._workers: dict[WorkerId, Worker] = {}
        self._flights: dict[RequestId, Flight] = {}
        self._waiting: dict[RequestId, Waiting] = {}
        self._line: list[tuple[float, RequestId]] = []
        self._wanting: dict[
            BlockHash, dict[RequestId, None]
        ] = {}  # who waits, by the first block to be computed
        self._computing: dict[BlockHash, int] = {}  # blocks of prompts that are placed and not computed yet
        self._too_late: list[
            tuple[float, RequestId]
        ] = []  # a heap; of who waits no more, entries stay till then
        self._snapshots_asked_s: dict[NodeId, float] = {}
        self._wakes_s: list[float] = []  # asked for and not due yet, the next one last
        self._directory_lost_s = float("inf")
        self._output_tokens = float(config.output_tokens_guess)
        self._ttft_fit = Fit()
        self._counts = {
            "placed": 0,
            "retried": 0,
            "rejected": 0,
            "finished": 0,
            "failed": 0,
            "aborted": 0,
            "wasted": 0,
        }

    # -- events in, commands out

    def handle(self, event: Event, now: float) -> list[Command]:
        """What to do about `event`, which is known at `now` seconds. Raises nothing but AssertionError, for a bug."""
        assert now >= self._now_s, f"the clock went back from {self._now_s} to {now}"
        self._now_s = now
        commands = [*self._overdue(), *self._handle(event)]
        if (
            self._line
            and not isinstance(event, _FREES_NOTHING)
            and not self._policy.busy(self._workers.values())
        ):
            commands += self._bind()
        return [*commands, *self._next_wake()]

    def _handle(self, event: Event) -> list[Command]:
        match event:
            case Arrive():
                return self._arrive(event)
            case (
                PrefillStarted()
                | PrefillFinished()
                | PrefillLost()
                | DecodeStarted()
                | FirstToken()
                | Finished()
                | Failed()
            ):
                return self._progress(event)
            case Aborted():
                return self._aborted(event)
            case BlockStored():
                return self._stored(event)
            case BlockRemoved():
                return self._seen(event.node, self.index.removed(event.node, event.hashes, event.sequence))
            case NodeSnapshot():
                self._snapshots_asked_s.pop(event.node, None)
                complete = self.index.replace(event.node, event.hashes, event.sequence, event.ssd)
                return self._seen(event.node, complete)
            case NodeLeft():
                self._snapshots_asked_s.pop(event.node, None)
                self.index.drop(event.node)
                return []
            case DirectoryLost():
                self._directory_lost_s = min(self._directory_lost_s, self._now_s)
                return []
            case DirectoryFound():
                self._directory_lost_s = float("inf")
                return []
            case WorkerJoined():
                return self._joined(event)
            case WorkerLeft():
                return self._left(event.worker, f"{event.worker} left: {event.reason}")
            case Timer():
                return []  # whatever is due was done on the way here
        assert_never(event)

    # -- placing

    def _arrive(self, event: Arrive) -> list[Command]:
        assert event.tokens // self.config.block_tokens == len(event.chain), (
            f"{event.request}: chain and length differ"
        )
        flight = self._flights.get(event.request)
        if flight is not None and event.attempt < flight.place.attempt:
            return []
        if flight is not None and event.attempt == flight.place.attempt:
            return [flight.place]  # the gateway asked again: the same answer
        waiting = self._waiting.get(event.request)
        if waiting is not None and event.attempt <= waiting.event.attempt:
            return []
        self._end(event.request)
        answer = self._decide(event)
        return [self._counted(answer)] if answer is not None else []

    def _counted(self, answer: Place | RetryAfter | Reject) -> Place | RetryAfter | Reject:
        match answer:
            case Place():
                self._counts["placed"] += 1
            case RetryAfter():
                self._counts["retried"] += 1
            case Reject():
                self._counts["rejected"] += 1
        return answer

    def _decide(self, event: Arrive) -> Place | RetryAfter | Reject | None:
        """None: it stands in the line."""
        view = self._view(event)
        roles = [worker.role for worker in self._workers.values()]
        needed = not self._policy.at_decode and needs_prefill(view, event)
        refusal = gate(view, event, Role.PREFILL in roles, Role.DECODE in roles, needed)
        if refusal is not None:
            return refusal
        if self._policy.order is not None:
            return self._line_up(view, event)
        verdict = judge(view, event, self._policy.rank(view, event, self._chance))
        if isinstance(verdict, Reject):
            self._doubt(verdict.explanation)
        return self._place(view, verdict, event) if isinstance(verdict, Admit) else verdict

    # -- the line

    def _line_up(self, view: View, event: Arrive) -> RetryAfter | Reject | None:
        waiting, best = self._standing(view, event, self._now_s)
        ahead = self._line[: bisect(self._line, waiting.key)]
        computing = [*view.prefill, *view.decode] if self._policy.at_decode else list(view.prefill)
        ahead_s = sum(self._waiting[request].compute_s for _, request in ahead)
        ahead_s += sum(worker.queue_s(self._now_s) for worker in computing)
        refusal = line(view, event, ahead_s / len(computing), waiting.too_late_s - self._now_s, best)
        if refusal is not None:
            self._doubt(refusal.explanation)
            return refusal
        self._stand(waiting)
        return None

    def _standing(self, view: View, event: Arrive, arrived_s: float) -> tuple[Waiting, Candidate]:
        """Where the request stands by what the pool holds now; and what it would cost on an idle cluster."""
        assert self._policy.order is not None, "a policy that binds at once"
        best = idle(view, event, self._policy.at_decode)
        compute_s = best.cost.prefill_s
        limit_s = None if self.config.overload is Overload.OFF else event.slo.ttft_s
        waiting = Waiting(
            event=event,
            arrived_s=arrived_s,
            key=(self._policy.order(compute_s, arrived_s), event.request),
            compute_s=compute_s,
            too_late_s=arrived_s + self._policy.wait_s(max(0.0, limit_s - best.cost.ttft_s))
            if limit_s is not None
            else float("inf"),
            cached=max((held.blocks for held in view.held.values()), default=0),
        )
        return waiting, best

    def _stand(self, waiting: Waiting) -> None:
        request, chain = waiting.event.request, waiting.event.chain
        self._waiting[request] = waiting
        insort(self._line, waiting.key)
        heappush(self._too_late, (waiting.too_late_s, request))
        if waiting.cached < len(chain):
            self._wanting.setdefault(chain[waiting.cached], {})[request] = None

    def _came(self, blocks: Sequence[BlockHash]) -> None:
        """Who waits and has less to compute now stands further in front."""
        wanted = [request for block in blocks if block in self._wanting for request in self._wanting[block]]
        for request in wanted:
            before = self._leave_line(request)
            assert before is not None, f"{request} wants a block and does not wait"
            view = self._view(before.event)
            if view.decode and (view.prefill or self._policy.at_decode):
                self._stand(self._standing(view, before.event, before.arrived_s)[0])
            else:
                self._stand(before)

    def _comes(self, waiting: Waiting) -> bool:
        """Is most of what it would compute being computed for another?"""
        new = waiting.event.chain[waiting.cached :]
        shared = sum(1 for _ in takewhile(self._computing.__contains__, new))
        return 2 * shared > len(new)

    def _bind(self) -> list[Command]:
        """Place whom there is a free way for, the first of the line first."""
        commands: list[Command] = []
        tried = 0
        while tried < min(LINE_TRIED, len(self._line)):
            waiting = self._waiting[self._line[tried][1]]
            verdict = None if self._comes(waiting) else self._try(waiting)
            if verdict is None:
                tried += 1
                continue
            self._leave_line(waiting.event.request)
            commands.append(self._counted(self._place(*verdict, waiting.event)))
            if self._policy.busy(self._workers.values()):
                break
            tried = 0
        return commands

    def _try(self, waiting: Waiting) -> tuple[View, Admit] | None:
        view = self._view(waiting.event)
        if not view.decode:
            return None
        waited_s = self._now_s - waiting.arrived_s
        ranked = [
            replace(
                way,
                cost=replace(
                    way.cost, queue_s=way.cost.queue_s + waited_s, ttft_s=way.cost.ttft_s + waited_s
                ),
            )
            for way in self._policy.rank(view, waiting.event, self._chance)
        ]
        verdict = judge(view, waiting.event, ranked) if ranked else None
        return (view, verdict) if isinstance(verdict, Admit) else None

    def _leave_line(self, request: RequestId) -> Waiting | None:
        waiting = self._waiting.pop(request, None)
        if waiting is not None:
            del self._line[bisect_left(self._line, waiting.key)]
            if waiting.cached < len(waiting.event.chain):
                block = waiting.event.chain[waiting.cached]
                del self._wanting[block][request]
                if not self._wanting[block]:
                    del self._wanting[block]
        return waiting

    def _given_up(self) -> list[Command]:
        """Who has waited as long as the policy lets them."""
        commands: list[Command] = []
        while self._too_late and self._too_late[0][0] <= self._now_s:
            too_late_s, request = heappop(self._too_late)
            waiting = self._waiting.get(request)
            if waiting is None or waiting.too_late_s != too_late_s:
                continue
            self._leave_line(request)
            view = self._view(waiting.event)
            refusal = waited(view, waiting.event, self._now_s - waiting.arrived_s)
            commands.append(self._counted(refusal))
        return commands

    def _doubt(self, refused: Explanation) -> None:
        """Believe a correction less that alone made a request seem impossible: refusals bring no observations."""
        best, limit = refused.candidates[0], refused.limit
        assert limit is not None, "a candidate was refused without a limit"
        workers = [self._workers[name] for name in (best.prefill, best.decode) if name is not None]
        if limit.predicted / max(worker.fit.scale for worker in workers) <= limit.allowed:
            for worker in workers:
                worker.fit = worker.fit.relax()

    def _view(self, event: Arrive) -> View:
        workers = self._trusted()
        return View(
            now_s=self._now_s,
            directory_lost_s=self._directory_lost_s,
            config=self.config,
            prefill=tuple(
                w for w in workers if w.role is Role.PREFILL and w.capacity.kv_tokens_max >= event.tokens
            ),
            decode=tuple(
                w for w in workers if w.role is Role.DECODE and w.capacity.kv_tokens_max > event.tokens
            ),
            held=self.index.match(event.chain),
            inflight=len(self._flights) + len(self._waiting),
            placements=self._counts["placed"],
            output_tokens=self._output_tokens,
            context_tokens=event.tokens + round(min(self._output_tokens, event.max_new_tokens)),
        )

    def _place(self, view: View, verdict: Admit, event: Arrive) -> Place:
        chosen = verdict.chosen
        place = Place(
            request=event.request,
            attempt=event.attempt,
            prefill=chosen.prefill,
            decode=chosen.decode,
            cached_tokens_expected=chosen.cached_tokens,
            source=chosen.source,
            explanation=verdict.explanation,
            step_s_max=chosen.step_s_max,
        )
        cost = chosen.cost
        stream = Stream(
            context_tokens=view.context_tokens,
            ready_s=self._now_s + cost.fetch_s + cost.prefill_s + cost.handoff_s,
            tbt_s=event.slo.tbt_s,
        )
        self._workers[chosen.decode].stream(event.request, stream)
        computes = chosen.prefill or (chosen.decode if cost.prefill_s else None)
        if computes is not None:
            self._workers[computes].queue(event.request, round(cost.prefill_s * 1e6))
        self._flights[event.request] = Flight(
            place=place,
            slo=event.slo,
            placed_s=self._now_s,
            computes=computes,
            stage=Stage.HANDING_OFF if computes is None else Stage.QUEUED,
            new_blocks=event.chain[chosen.cached_tokens // self.config.block_tokens :],
        )
        for block in self._flights[event.request].new_blocks:
            self._computing[block] = self._computing.get(block, 0) + 1
        return place

    # -- following what was placed

    def _trusted(self) -> list[Worker]:
        """All workers but those that have just failed a request, unless that left a role without any."""
        trusted = [w for w in self._workers.values() if w.suspect_until_s <= self._now_s]
        roles = {w.role for w in trusted}
        return trusted + [w for w in self._workers.values() if w.role not in roles]

    def _progress(
        self,
        event: PrefillStarted
        | PrefillFinished
        | PrefillLost
        | DecodeStarted
        | FirstToken
        | Finished
        | Failed,
    ) -> list[Command]:
        flight = self._flights.get(event.request)
        if flight is None or flight.place.attempt != event.attempt:
            return []
        match event:
            case PrefillStarted():
                self._prefill_started(flight)
            case PrefillFinished():
                return self._prefill_finished(flight, event)
            case PrefillLost():
                self._suspect(flight, "prefill")
            case DecodeStarted():
                self._decode_started(flight)
            case FirstToken():
                self._decode_started(flight)
                chosen = flight.place.explanation.chosen
                assert chosen is not None
                self._ttft_fit = self._ttft_fit.observe(chosen.cost.ttft_s, event.ttft_s)
            case Finished():
                self._finished(flight, event)
            case Failed():
                self._counts["failed"] += 1
                self._suspect(flight, event.stage)
                self._end(event.request)
        return []

    def _suspect(self, flight: Flight, stage: str) -> None:
        """The worker that failed gets no work for a while: until its membership would have lapsed."""
        failed = flight.place.prefill if stage == "prefill" else flight.place.decode
        if failed in self._workers:
            self._workers[failed].suspect_until_s = self._now_s + self.config.suspect_s

    def _prefill_started(self, flight: Flight) -> None:
        if flight.stage is Stage.QUEUED and flight.computes is not None:
            flight.stage = Stage.PREFILLING
            self._workers[flight.computes].start(flight.place.request, self._now_s)

    def _prefill_finished(self, flight: Flight, event: PrefillFinished) -> list[Command]:
        if flight.stage not in (Stage.QUEUED, Stage.PREFILLING) or flight.computes is None:
            return []
        flight.stage = Stage.HANDING_OFF
        worker = self._workers[flight.computes]
        self._prompt_over(flight)
        predicted_s = prefill_s(worker.coefficients, event.cached_tokens, event.computed_tokens)
        worker.fit = worker.fit.observe(predicted_s, event.observed_s)
        return self._judge_again(flight)

    def _prompt_over(self, flight: Flight) -> None:
        """Computed or not, its worker has it no more."""
        for block in flight.new_blocks:
            self._computing[block] -= 1
            if not self._computing[block]:
                del self._computing[block]
        flight.new_blocks = ()
        if flight.computes in self._workers:
            self._workers[flight.computes].computed(flight.place.request)

    def _judge_again(self, flight: Flight) -> list[Command]:
        """Mooncake's modes of overload look at the decode worker once more before it gets the request."""
        limit_s, mode, place = flight.slo.tbt_s, self.config.overload, flight.place
        if limit_s is None or mode not in (Overload.NONE, Overload.EARLY, Overload.PREDICTIVE):
            return []
        worker = self._workers[place.decode]
        own = worker.streams[place.request]
        decoding = [stream for stream in worker.streams.values() if stream.since_s is not None]
        if worker.step_with_s(decoding, own.context_tokens) <= limit_s:
            return []
        self._counts["wasted"] += 1
        self._end(place.request)
        return [Abort(request=place.request, attempt=place.attempt, reason="tbt_s")]

    def _decode_started(self, flight: Flight) -> None:
        """Whatever was not heard of the prefill: it is over once the decode worker has the KV."""
        if flight.stage is Stage.DECODING:
            return
        flight.stage = Stage.DECODING
        worker = self._workers[flight.place.decode]
        worker.streams[flight.place.request].since_s = self._now_s
        flight.step_s = self._uncorrected_step_s(worker)
        self._prompt_over(flight)

    def _finished(self, flight: Flight, event: Finished) -> None:
        """Learn from the answer. Its batch changed while it ran: the mean of both ends stands for what it saw."""
        worker = self._workers[flight.place.decode]
        if flight.stage is Stage.DECODING and event.tbt_mean_s is not None:
            predicted_s = (flight.step_s + self._uncorrected_step_s(worker)) / 2
            worker.fit = worker.fit.observe(predicted_s, event.tbt_mean_s)
        self._output_tokens += FIT_WEIGHT * (event.output_tokens - self._output_tokens)
        self._counts["finished"] += 1
        self._end(event.request)

    def _uncorrected_step_s(self, worker: Worker) -> float:
        """A step of the worker's present batch, as its coefficients alone predict it."""
        return worker.step_s() / worker.fit.scale

    def _aborted(self, event: Aborted) -> list[Command]:
        if self._end(event.request):
            self._counts["aborted"] += 1
        return []

    def _end(self, request: RequestId) -> bool:
        """Take the request out of the line, or its flight out and its load off both workers."""
        if self._leave_line(request) is not None:
            return True
        flight = self._flights.pop(request, None)
        if flight is None:
            return False
        self._workers[flight.place.decode].release(request)
        self._prompt_over(flight)
        return True

    # -- members

    def _joined(self, event: WorkerJoined) -> list[Command]:
        """A worker that says again what is known changes nothing; one that says something else has restarted.

        A worker on a node that is not known yet leads to the question what that node holds.
        """
        worker = Worker(
            id=event.worker,
            role=event.role,
            node=event.node,
            address=event.address,
            capacity=event.capacity,
            coefficients=event.coefficients,
        )
        known = self._workers.get(event.worker)
        if known is not None and _identity(known) == _identity(worker):
            return []
        commands = self._left(event.worker, f"{event.worker} restarted")
        self._workers[event.worker] = worker
        self._workers = dict(sorted(self._workers.items()))  # views list workers by id
        if event.node not in self.index.nodes():
            commands += self._ask(event.node)
        return commands

    def _left(self, worker: WorkerId, reason: str) -> list[Command]:
        if worker not in self._workers:
            return []
        lost = [flight.place for flight in self._flights.values() if _needs(flight, worker)]
        for place in lost:
            self._end(place.request)
        del self._workers[worker]
        return [Abort(request=place.request, attempt=place.attempt, reason=reason) for place in lost]

    # -- the copy of the truth, and time

    def _stored(self, event: BlockStored) -> list[Command]:
        complete = self.index.stored(event.node, event.hashes, event.sequence, event.tier)
        if self._wanting:
            self._came(event.hashes)
        return self._seen(event.node, complete)

    def _seen(self, node: NodeId, complete: bool) -> list[Command]:
        if complete:
            return []
        return self._ask(node)

    def _ask(self, node: NodeId) -> list[Command]:
        if node in self._snapshots_asked_s:
            return []
        self._snapshots_asked_s[node] = self._now_s
        return [RequestSnapshot(node=node)]

    def _overdue(self) -> list[Command]:
        """Ask again for snapshots that did not come; end attempts that nobody ended."""
        while self._wakes_s and self._wakes_s[-1] <= self._now_s:
            self._wakes_s.pop()
        commands = self._given_up()
        for node, asked_s in list(self._snapshots_asked_s.items()):
            if asked_s + self.config.snapshot_retry_s <= self._now_s:
                del self._snapshots_asked_s[node]
                commands += self._ask(node)
        for flight in list(self._flights.values()):
            if flight.placed_s + self.config.request_s_max > self._now_s:
                break  # flights are in order of placement
            self._end(flight.place.request)
            commands.append(
                Abort(request=flight.place.request, attempt=flight.place.attempt, reason="request_s_max")
            )
        return commands

    def _next_wake(self) -> list[Command]:
        """A WakeAt for the next deadline, unless one that comes soon enough was asked for."""
        due_s = min(
            min(self._snapshots_asked_s.values(), default=float("inf")) + self.config.snapshot_retry_s,
            next((f.placed_s for f in self._flights.values()), float("inf")) + self.config.request_s_max,
            self._too_late[0][0] if self._too_late else float("inf"),
        )
        if due_s >= min(self._wakes_s[-1:], default=float("inf")):
            return []
        self._wakes_s.append(due_s)
        return [WakeAt(at_s=due_s)]

    # -- proving and showing

    def check(self) -> None:
        """Assert the invariants: every load is the sum of its flights, every flight is on workers that exist."""
        self.index.check()
        assert len(self._flights) + len(self._waiting) <= self.config.inflight_max, "too much in flight"
        queued: dict[WorkerId, list[RequestId]] = {worker: [] for worker in self._workers}
        streams: dict[WorkerId, list[RequestId]] = {worker: [] for worker in self._workers}
        for request, flight in self._flights.items():
            assert flight.place.request == request
            streams[flight.place.decode].append(request)
            if flight.computes is not None and flight.stage in (Stage.QUEUED, Stage.PREFILLING):
                queued[flight.computes].append(request)
        for worker in self._workers.values():
            worker.check()
            assert list(worker.queue_us) == queued[worker.id], f"{worker.id}: queue and flights disagree"
            assert list(worker.streams) == streams[worker.id], f"{worker.id}: streams and flights disagree"
        assert self._wakes_s == sorted(set(self._wakes_s), reverse=True), "a timer was asked for twice"
        assert self._line == sorted(waiting.key for waiting in self._waiting.values()), (
            "the line is not who waits"
        )
        computing: dict[BlockHash, int] = {}
        for flight in self._flights.values():
            for block in flight.new_blocks:
                computing[block] = computing.get(block, 0) + 1
        assert computing == self._computing, "what is being computed is not what was placed"
        wanting = {request for requests in self._wanting.values() for request in requests}
        wants = {one for one, w in self._waiting.items() if w.cached < len(w.event.chain)}
        assert wanting == wants, "who wants a block is not who waits"
        assert not self._waiting.keys() & self._flights.keys(), "a request waits that was placed"
        placed_s = [flight.placed_s for flight in self._flights.values()]
        assert placed_s == sorted(placed_s), "flights are not in order of placement"

    def snapshot(self) -> dict[str, Any]:
        """The whole state as plain data, for `moonpool status` and the web page."""
        stages = [flight.stage for flight in self._flights.values()]
        return {
            "now_s": self._now_s,
            "policy": self.config.policy,
            "counts": dict(self._counts),
            "waiting": len(self._waiting),
            "inflight": {stage.value: stages.count(stage) for stage in Stage},
            "output_tokens_expected": self._output_tokens,
            "ttft_fit": asdict(self._ttft_fit),
            "workers": [self._worker_row(worker) for worker in self._workers.values()],
            "nodes": [self._node_row(node) for node in sorted(self.index.nodes())],
            "blocks": len(self.index),
        }

    def _worker_row(self, worker: Worker) -> dict[str, Any]:
        return {
            "worker": worker.id,
            "role": worker.role.value,
            "node": worker.node,
            "address": worker.address,
            "requests": len(worker.queue_us.keys() | worker.streams.keys()),
            "queue_s": worker.queue_s(self._now_s),
            "context_tokens": worker.context_tokens,
            "fit": asdict(worker.fit),
        }

    def _node_row(self, node: NodeId) -> dict[str, Any]:
        return {
            "node": node,
            "blocks": self.index.blocks_on(node),
            "dram_blocks": self.index.dram_blocks_on(node),
            "sequence": self.index.sequence_of(node),
            "snapshot_asked": node in self._snapshots_asked_s,
        }


def _identity(worker: Worker) -> tuple[object, ...]:
    return (worker.role, worker.node, worker.address, worker.capacity, worker.coefficients)


def _needs(flight: Flight, worker: WorkerId) -> bool:
    """Whether the flight is lost without `worker`; a prefill that is over needs its worker no more."""
    before_handoff = flight.stage in (Stage.QUEUED, Stage.PREFILLING)
    return flight.place.decode == worker or (before_handoff and flight.computes == worker)
