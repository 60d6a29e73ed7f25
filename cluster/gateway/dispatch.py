"""The gateway's backend: carries one request through its placement, and is its owner until the end.

A request asks the conductor where to go, gets its KV made by a prefill worker and its tokens by a decode worker. Both
calls start as soon as slots are reserved, so that the decode side follows the prefill. If a worker fails before the
first token the request is placed again; after it, the client gets a clean error.
"""

import asyncio
import json
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import grpc

from cluster.control import conductor_pb2 as control
from cluster.control.conductor_pb2_grpc import ConductorStub
from cluster.core.commands import Abort, Place, Reject, RetryAfter
from cluster.core.events import (
    Aborted,
    Arrive,
    Event,
    Failed,
    Finished,
    FirstToken,
    PrefillFinished,
    PrefillLost,
    PrefillStarted,
)
from cluster.core.log import decode, encode
from cluster.core.state import Slo, TenantId
from cluster.gateway.request import GenerateRequest, Overloaded, Unavailable, UnservedRequest
from decode_worker import decode_pb2
from decode_worker.decode_pb2_grpc import DecodeWorkerStub
from kvstore.core.blocks import BlockHash, ChainRoot, RequestId, block_hashes, tail_hash
from kvstore.engine.wire import RequestOutput, RequestOutputKind, decode_output, encode_params
from kvstore.transfer import kv_pb2 as kv
from kvstore.transfer.server import OPTIONS
from prefill_worker import prefill_pb2
from prefill_worker.prefill_pb2_grpc import PrefillWorkerStub

logger = logging.getLogger(__name__)

_ATTEMPTS_MAX = 3
_RETRY_PAUSE_S = 1.0
_HISTORY_MAX = 1000
_POLL_S = 0.5
_CONDUCTOR_CALL_S = 10.0
_LOAD_TIMEOUT_S = 600.0  # from the plan to the KV: the prefill's queue is in it
_REQUEST_S_MAX = 3600.0


class WorkerLost(Exception):  # noqa: N818  # an event to react to
    """A worker did not do its part. `stage` is prefill or decode."""

    def __init__(self, stage: str, reason: str) -> None:
        super().__init__(reason)
        self.stage = stage


@dataclass(slots=True)
class Story:
    """What was decided and what happened for one request; `explain` gives it out."""

    request: str
    prompt_tokens: int
    arrived_s: float
    attempts: list[dict[str, Any]] = field(default_factory=list)
    first_token_s: float | None = None
    finished_s: float | None = None
    output_tokens: int = 0
    outcome: str = "running"
    delivered: bool = False  # something has reached the client's side of the gateway


@dataclass(slots=True)
class _Attempt:
    """One try at one request.

    `name` is the request's beyond this gateway. A client may send an id again while workers still clean up after its
    last use, and another gateway may serve the same id: what one holds must not be taken for what the other does.
    """

    request: GenerateRequest
    name: RequestId
    number: int
    place: Place
    decision: control.Decision
    story: dict[str, Any]
    placed_s: float = field(default_factory=time.time)
    answering: bool = False
    cached_tokens: int = 0
    loaded: asyncio.Event = field(default_factory=asyncio.Event)


class ClusterBackend:
    """Implements `cluster.gateway.request.Backend` over the conductor at `conductor_address`.

    Create it inside the event loop; `run` does the background work.
    """

    def __init__(self, conductor_address: str, handoff_lease_s: float) -> None:
        self._lease_s = handoff_lease_s
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._conductor_address = conductor_address
        self._described: control.Description | None = None
        self._status: dict[str, Any] = {}
        self._unready = "the conductor has not answered yet"
        self._stories: OrderedDict[str, Story] = OrderedDict()
        self._running: dict[tuple[str, int], asyncio.Event] = {}  # set: this attempt is to end
        self._reports: set[asyncio.Task[None]] = set()

    # -- Backend ----------------------------------------------------------------------------------------------

    def ready(self) -> str | None:
        return self._unready or None

    def status(self) -> dict[str, object]:
        return dict(self._status)

    def explain(self, request_id: str) -> dict[str, object] | None:
        story = self._stories.get(request_id)
        if story is None:
            return None
        return {
            "request": story.request,
            "outcome": story.outcome,
            "prompt_tokens": story.prompt_tokens,
            "output_tokens": story.output_tokens,
            "first_token_s": story.first_token_s,
            "finished_s": story.finished_s,
            "attempts": story.attempts,
        }

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        root, chain = _chain(request, self._description())
        story = self._begin(request)
        name = RequestId(f"{request.request_id}-{uuid.uuid4().hex[:8]}")
        try:
            for number in range(1, _ATTEMPTS_MAX + 1):
                await asyncio.sleep(_RETRY_PAUSE_S * (number - 1))
                attempt = await self._place(request, name, number, chain, story)
                try:
                    async with aclosing(self._run(attempt, root, chain, story)) as outputs:
                        async for output in outputs:
                            yield output
                except WorkerLost as lost:
                    self._lost(attempt, story, lost)
                else:
                    return
            raise Unavailable(f"no worker could serve the request in {_ATTEMPTS_MAX} attempts")
        except (asyncio.CancelledError, GeneratorExit):
            if story.outcome == "running":
                story.outcome = "aborted"
                self._report(Aborted(request=name))
            raise
        except Exception as refused:
            story.outcome = f"{type(refused).__name__}: {refused}"
            self._report(Aborted(request=name))  # whatever was placed is over
            raise
        finally:
            story.finished_s = time.time() - story.arrived_s

    def _lost(self, attempt: _Attempt, story: Story, lost: WorkerLost) -> None:
        """Tells the conductor. Raises Unavailable when the client has tokens already: then there is no second try."""
        self._report(Failed(request=attempt.name, attempt=attempt.number, stage=lost.stage, reason=str(lost)))
        attempt.story["failed"] = f"{lost.stage}: {lost}"
        logger.warning("request %s attempt %d: %s", attempt.name, attempt.number, lost)
        if story.delivered:
            raise Unavailable(
                f"the {lost.stage} worker was lost in the middle of the answer: {lost}"
            ) from lost
        story.first_token_s = None  # nobody saw it

    # -- one attempt --------------------------------------------------------------------------------------------

    async def _place(
        self,
        request: GenerateRequest,
        name: RequestId,
        number: int,
        chain: tuple[BlockHash, ...],
        story: Story,
    ) -> _Attempt:
        arrival = Arrive(
            request=name,
            attempt=number,
            tenant=TenantId(request.tenant),
            tokens=len(request.token_ids),
            chain=chain,
            max_new_tokens=request.sampling_params.max_tokens or 1,
            slo=Slo(ttft_s=request.ttft_slo_s, tbt_s=request.tbt_slo_s),
        )
        try:
            async with asyncio.timeout(_CONDUCTOR_CALL_S):
                await self._channel(self._conductor_address).channel_ready()
            decision = await self._conductor().Decide(
                _message(arrival), timeout=_REQUEST_S_MAX, wait_for_ready=True
            )  # a policy that binds late answers when a way is free
        except TimeoutError as error:
            raise Unavailable("the conductor does not answer") from error
        except grpc.aio.AioRpcError as error:
            raise Unavailable(f"the conductor does not answer: {error.details()}") from error
        data = json.loads(decision.command_json)
        command = decode(data)
        record: dict[str, Any] = {"attempt": number, "decision": data}
        story.attempts.append(record)
        if isinstance(command, RetryAfter):
            raise Overloaded(command.reason, command.seconds)
        if isinstance(command, Reject):
            raise UnservedRequest(command.reason)
        assert isinstance(command, Place), command
        return _Attempt(request, name, number, command, decision, record)

    async def _run(
        self, attempt: _Attempt, root: BlockHash, chain: tuple[BlockHash, ...], story: Story
    ) -> AsyncGenerator[RequestOutput, None]:
        """Prefill and decode side by side; the prefill's call lives until the decode side has the KV."""
        key = (attempt.name, attempt.number)
        ended = self._running[key] = asyncio.Event()
        stop = asyncio.create_task(ended.wait())
        prefill: asyncio.Task[None] | None = None
        plan: asyncio.Future[list[kv.Slot]] = asyncio.get_running_loop().create_future()
        try:
            if attempt.place.prefill is not None:
                prefill = asyncio.create_task(self._prefill(attempt, root, chain, plan))
                slots = await _first(plan, prefill, stop)
            else:
                slots = []
                attempt.cached_tokens = attempt.place.cached_tokens_expected
            async with aclosing(self._decode(attempt, slots, root, chain, prefill, stop, story)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            stop.cancel()
            self._running.pop(key, None)
            attempt.loaded.set()
            if prefill is not None:
                prefill.cancel()
                await asyncio.gather(prefill, return_exceptions=True)

    async def _prefill(
        self,
        attempt: _Attempt,
        root: BlockHash,
        chain: tuple[BlockHash, ...],
        plan: "asyncio.Future[list[kv.Slot]]",
    ) -> None:
        """Runs the prompt; then keeps the hand-off's lease until the decode side has loaded."""
        tokens = attempt.request.token_ids
        tail = tokens[len(chain) * self._description().block_tokens :]
        tail_name = tail_hash(chain[-1] if chain else root, tail, attempt.name) if tail else b""
        names = [*chain, tail_name] if tail else list(chain)
        call = PrefillWorkerStub(self._channel(attempt.decision.prefill_address)).Prefill(
            prefill_pb2.PrefillRequest(
                request_id=f"{attempt.name}/{attempt.number}",
                token_ids=tokens,
                hashes=chain,
                tail_hash=tail_name,
                lease_s=self._lease_s,
                sources=_elsewhere(attempt.decision.sources, attempt.decision.prefill_node),
            ),
            timeout=_REQUEST_S_MAX,
        )
        try:
            self._report(PrefillStarted(request=attempt.name, attempt=attempt.number))
            async for reply in call:
                if reply.HasField("plan"):
                    slots = list(reply.plan.slots)
                    if [slot.hash for slot in slots] != names:
                        raise WorkerLost("prefill", "it planned other blocks than the prompt's")
                    attempt.cached_tokens = self._description().block_tokens * sum(
                        slot.filled for slot in slots
                    )
                    plan.set_result(slots)
                else:
                    self._prefilled(attempt, reply.done)
                    await attempt.loaded.wait()
                    return
            raise WorkerLost("prefill", "the call ended before the prompt was done")
        except grpc.aio.AioRpcError as error:
            refused = _lost_or_refused("prefill", error)
            if isinstance(
                refused, WorkerLost
            ):  # the answer may come all the same: decode computes what is missing
                lost = PrefillLost(request=attempt.name, attempt=attempt.number, reason=str(refused))
                self._report(lost)
            raise refused from error
        finally:
            call.cancel()

    def _prefilled(self, attempt: _Attempt, done: prefill_pb2.Done) -> None:
        attempt.story["prefill"] = {
            "worker": attempt.place.prefill,
            "seconds": done.prefill_s,
            "queue_s": done.queue_s,
            "cached_tokens": done.cached_tokens,
            "computed_tokens": done.computed_tokens,
            "kv_bytes": done.kv_bytes,
            "failed_blocks": done.failed_blocks,
            "last_layer_at": done.last_layer_at,
            "early_kv_bytes": done.early_kv_bytes,
        }
        self._report(
            PrefillFinished(
                request=attempt.name,
                attempt=attempt.number,
                observed_s=done.prefill_s,
                computed_tokens=done.computed_tokens,
                cached_tokens=done.cached_tokens,
            )
        )

    async def _decode(
        self,
        attempt: _Attempt,
        slots: list[kv.Slot],
        root: BlockHash,
        chain: tuple[BlockHash, ...],
        prefill: asyncio.Task[None] | None,
        stop: asyncio.Task[Any],
        story: Story,
    ) -> AsyncGenerator[RequestOutput, None]:
        request = attempt.request
        streamed = request.sampling_params.clone()
        streamed.output_kind = (
            RequestOutputKind.DELTA
        )  # times and leases need each token, whoever wants the whole
        call = DecodeWorkerStub(self._channel(attempt.decision.decode_address)).Decode(
            decode_pb2.DecodeRequest(
                request_id=f"{attempt.name}/{attempt.number}",
                token_ids=request.token_ids,
                sampling_params=encode_params(streamed),
                slots=slots,
                hashes=() if slots else chain,
                sources=_elsewhere(
                    [attempt.decision.prefill_node] if slots else attempt.decision.sources,
                    attempt.decision.decode_node,
                ),
                has_tail=len(slots) > len(chain),
                root=root,
                load_timeout_s=_LOAD_TIMEOUT_S,
                reasoning_ended=request.reasoning_ended,
                reasoning_parser_kwargs_json=json.dumps(dict(request.reasoning_parser_kwargs or {})),
            ),
            timeout=_REQUEST_S_MAX,
        )
        clock, answer = _TokenClock(), Answer(request.sampling_params.output_kind)
        prompt = list(request.token_ids)
        try:
            while True:
                reply = await _first(call.read(), None if attempt.loaded.is_set() else prefill, stop)
                if reply is grpc.aio.EOF:
                    raise WorkerLost("decode", "the call ended before the answer")
                output = decode_output(reply.output, request.request_id, None, prompt)
                output.num_cached_tokens = attempt.cached_tokens  # reuse, not the hand-off
                self._note_first_token(attempt, story)
                attempt.loaded.set()
                story.output_tokens = clock.count({one.index: len(one.token_ids) for one in output.outputs})
                finished = output.finished
                if finished:
                    story.outcome = "finished"
                    self._answered(attempt, reply, clock)
                if (whole := answer.add(output)) is not None:
                    story.delivered = True
                    yield whole
                if finished:
                    return
        except grpc.aio.AioRpcError as error:
            raise _lost_or_refused("decode", error) from error
        finally:
            call.cancel()

    def _note_first_token(self, attempt: _Attempt, story: Story) -> None:
        """Each attempt has its own first token: the client waits since it came, the conductor predicted from here on."""
        if attempt.answering:
            return
        attempt.answering = True
        now_s = time.time()
        if story.first_token_s is None:
            story.first_token_s = now_s - story.arrived_s
        since_s = story.arrived_s if attempt.number == 1 else attempt.placed_s
        self._report(FirstToken(request=attempt.name, attempt=attempt.number, ttft_s=now_s - since_s))

    def _answered(self, attempt: _Attempt, reply: decode_pb2.DecodeReply, clock: "_TokenClock") -> None:
        loaded = reply.loaded
        attempt.story["decode"] = {
            "worker": attempt.place.decode,
            "output_tokens": clock.tokens,
            "tbt_mean_s": clock.mean_gap_s(),
            "external_tokens": loaded.external_tokens,
            "computed_prompt_tokens": loaded.computed_tokens,
            "kv_bytes": loaded.kv_bytes,
            "load_s": loaded.load_s,
            "resident_at": loaded.resident_at,
            "failed_blocks": loaded.failed_blocks,
            "failure": loaded.failure,
        }
        self._report(
            Finished(
                request=attempt.name,
                attempt=attempt.number,
                output_tokens=clock.tokens,
                tbt_mean_s=clock.mean_gap_s(),
                tbt_p99_s=clock.p99_gap_s(),
            )
        )

    # -- conductor ----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Follows the conductor's state and its abort commands until cancelled; then tells the rest and hangs up."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow_state())
                tasks.create_task(self._follow_commands())
        finally:
            await asyncio.gather(*self._reports)
            for channel in self._channels.values():
                await channel.close()

    async def _follow_state(self) -> None:
        while True:
            try:
                self._described = await self._conductor().Describe(
                    control.DescribeRequest(), timeout=_POLL_S * 4
                )
                reply = await self._conductor().Status(control.StatusRequest(), timeout=_POLL_S * 4)
                self._status = json.loads(reply.json)
                self._unready = _missing(self._status)
            except grpc.aio.AioRpcError as error:
                self._unready = f"the conductor does not answer: {error.details()}"
            await asyncio.sleep(_POLL_S)

    async def _follow_commands(self) -> None:
        while True:
            try:
                async for message in self._conductor().Commands(
                    control.CommandsRequest(), wait_for_ready=True
                ):
                    command = decode(json.loads(message.json))
                    if isinstance(command, Abort):
                        event = self._running.get((command.request, command.attempt))
                        if event is not None:
                            event.set()
            except grpc.aio.AioRpcError as error:
                logger.warning("the conductor's command stream broke: %s", error.details())
            await asyncio.sleep(_POLL_S)

    def _conductor(self) -> Any:
        return ConductorStub(self._channel(self._conductor_address))

    def _description(self) -> control.Description:
        if self._described is None:
            raise Unavailable(self._unready or "no worker has joined yet")
        return self._described

    def _report(self, event: Event) -> None:
        """Tells the conductor without waiting; a conductor that is away learns from the next placement."""

        async def tell() -> None:
            try:
                await self._conductor().Report(_message(event), timeout=_CONDUCTOR_CALL_S)
            except grpc.aio.AioRpcError as error:
                logger.warning("report %s failed: %s", type(event).__name__, error.details())

        task = asyncio.create_task(tell())
        self._reports.add(task)
        task.add_done_callback(self._reports.discard)

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = grpc.aio.insecure_channel(address, options=OPTIONS)
        return self._channels[address]

    def _begin(self, request: GenerateRequest) -> Story:
        story = Story(request.request_id, len(request.token_ids), request.arrival_s)
        self._stories[request.request_id] = story
        while len(self._stories) > _HISTORY_MAX:
            self._stories.popitem(last=False)
        return story


async def _first(
    awaited: "Awaitable[Any]", prefill: asyncio.Task[None] | None, stop: asyncio.Task[Any]
) -> Any:
    """The result of `awaited`, unless the prefill fails or the conductor ends the attempt before it is there."""
    task = asyncio.ensure_future(awaited)
    waiting: set[asyncio.Future[Any]] = {task, stop}
    if prefill is not None and not prefill.done():
        waiting.add(prefill)
    try:
        while True:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if task in done:
                return task.result()
            if stop in done:
                raise WorkerLost("placement", "the conductor ended the attempt")
            assert prefill is not None
            await prefill  # raises why it failed
            waiting.discard(prefill)
    finally:
        if not task.done():
            task.cancel()


def _lost_or_refused(stage: str, error: grpc.aio.AioRpcError) -> Exception:
    """A worker's refusal of the request itself is the client's answer; everything else is a lost worker."""
    if error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE):
        return UnservedRequest(error.details() or "the request cannot be served")
    return WorkerLost(stage, f"{error.code().name}: {error.details()}")


def _chain(
    request: GenerateRequest, description: control.Description
) -> tuple[BlockHash, tuple[BlockHash, ...]]:
    """The root and the names of the prompt's full blocks, salted by tenant and by the client's own salt."""
    salt = json.dumps([request.tenant, request.cache_salt])
    root = ChainRoot(
        model=description.model_fingerprint,
        dtype=description.dtype,
        block_tokens=description.block_tokens,
        precision=description.precision,
        tenant_salt=salt.encode(),
    ).digest()
    return root, tuple(block_hashes(root, request.token_ids, description.block_tokens))


def _elsewhere(sources: Sequence[kv.Node], here: kv.Node) -> list[kv.Node]:
    """The nodes that KV may be brought from, the best first; none when that is `here` itself, or nobody has it."""
    if sources and sources[0].node_id == here.node_id:
        return []
    return [source for source in sources if source.node_id and source.node_id != here.node_id]


def _message(event: Event) -> control.Event:
    return control.Event(json=json.dumps(encode(event)))


def _missing(status: dict[str, Any]) -> str:
    """Why requests cannot be served with these members; empty when they can."""
    roles = {member["role"] for member in status["members"]}
    missing = [
        f"no {role} worker" if role != "node" else "no KV node"
        for role in ("node", "prefill", "decode")
        if role not in roles
    ]
    return ", ".join(missing)


class Answer:
    """Turns the worker's deltas into what the edge asked for: deltas, or the whole at the end."""

    def __init__(self, kind: RequestOutputKind) -> None:
        self._kind = kind
        self._whole: RequestOutput | None = None

    def add(self, delta: RequestOutput) -> RequestOutput | None:
        """What the edge gets now, if anything."""
        if self._kind is RequestOutputKind.DELTA:
            return delta
        if self._whole is None:
            self._whole = delta
        else:
            self._whole.add(delta, aggregate=True)
        self._whole.outputs.sort(key=lambda one: one.index)
        if self._kind is RequestOutputKind.FINAL_ONLY and not self._whole.finished:
            return None
        return self._whole


class _TokenClock:
    """Counts a request's tokens and the gaps between those of each of its n answers."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.tokens = 0
        self._now = now
        self._gaps_s: list[float] = []
        self._last_s: dict[int, float] = {}  # by answer: the n answers' steps are one step of the engine

    def count(self, new: Mapping[int, int]) -> int:
        """Tokens so far; `new` are those of each answer by its index. Several in one output share its gap."""
        now_s = self._now()
        for index, tokens in new.items():
            if tokens and index in self._last_s:
                self._gaps_s.extend([(now_s - self._last_s[index]) / tokens] * tokens)
            if tokens:
                self._last_s[index] = now_s
            self.tokens += tokens
        return self.tokens

    def mean_gap_s(self) -> float | None:
        return sum(self._gaps_s) / len(self._gaps_s) if self._gaps_s else None

    def p99_gap_s(self) -> float | None:
        return sorted(self._gaps_s)[int(0.99 * (len(self._gaps_s) - 1))] if self._gaps_s else None
