"""The decode worker: loads a prompt's KV, recomputes the last prompt token, samples every token of the answer.

The whole sampler state (penalties, guided output, stop, logprobs, n > 1) lives in this one engine.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import asdict
from typing import Any, TypeAlias

import grpc
from vllm.outputs import RequestOutput
from vllm.v1.engine.exceptions import EngineDeadError

from decode_worker import decode_pb2 as pb
from decode_worker.decode_pb2_grpc import DecodeWorkerServicer
from decode_worker.saving import AnswerSaver
from kvstore.core.blocks import BlockHash, RequestId
from kvstore.engine.engine import KVEngine
from kvstore.engine.plan import KVPlan, LoadReport, PlannedBlock
from kvstore.engine.reservation import forget
from kvstore.engine.wire import decode_params, encode_output
from kvstore.transfer import kv_pb2 as kv

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
logger = logging.getLogger(__name__)

_NODE_CALL_S = 5.0
_FETCH_S = 20.0  # for blocks that the node must bring from its SSD or from another node
_STALL_S = 30.0  # the rest of a nearly complete prompt must come within this
_WAIT_POLL_S = 0.03  # while the prompt waits for its prefill engine
_FOLLOW_POLL_S = 0.002  # once its KV is arriving
# The engine gets the request when this share of the segments is there: early enough that the last layers' copy
# overlaps the prefill's end, late enough that its pages are not held for a whole prefill.
_SUBMIT_AT = 0.9


class DecodeWorker(DecodeWorkerServicer):
    """The service over one engine."""

    def __init__(self, engine: KVEngine, save_generated: bool = True) -> None:
        self._engine = engine
        self._save_generated = save_generated
        self._saver = AnswerSaver(engine)
        self._requests = 0
        self._unplanned_prompt_tokens = 0

    async def Decode(self, request: pb.DecodeRequest, context: Context) -> AsyncIterator[pb.DecodeReply]:
        try:
            params = decode_params(request.sampling_params)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        deadline_s = time.monotonic() + request.load_timeout_s
        leased = True  # until a release has been answered: what failed may have taken a lease
        plan: KVPlan | None = None
        holding = False  # the engine holds, or may come to hold, the pages of the answer
        try:
            slots = await self._lease(request)
            await self._follow(slots, deadline_s)
            hold = self._save_generated and bool(request.root) and params.n == 1
            plan = self._plan(request, slots, hold)
            holding = plan is not None and plan.hold
            sequence = list(request.token_ids)
            self._requests += 1
            self._unplanned_prompt_tokens += 0 if plan is not None else len(request.token_ids)
            loaded: set[int] = set()  # of the n answers, those that have a token
            async with aclosing(
                self._engine.generate(
                    request.token_ids, params, request.request_id, plan, **_reasoning(request)
                )
            ) as outputs:
                async for output in outputs:
                    loaded.update(one.index for one in output.outputs)
                    if holding:
                        sequence += output.outputs[0].token_ids
                    if leased and (len(loaded) == params.n or output.finished):
                        await self._release(request.request_id)
                        leased = False
                    report = LoadReport.from_params(output.kv_transfer_params)
                    reply = await self._reply(request, output, report)
                    if plan is not None and holding and output.finished:
                        holding = False
                        if report is None or report.held:  # no report: a stop string ended it
                            self._saver.save(plan, BlockHash(request.root), sequence)
                    yield reply
        except EngineDeadError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"the decode engine died: {error}")
        except ValueError as error:  # what vLLM raises for a request that no engine of this model could serve
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            if plan is not None and holding:
                self._saver.let_go(plan)
            if leased:
                await asyncio.shield(self._release(request.request_id))

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusReply:
        status = {
            **asdict(self._engine.counters()),
            "requests": self._requests,
            "unplanned_prompt_tokens": self._unplanned_prompt_tokens,
            "saved_blocks": self._saver.blocks,
            "dead": self._engine.dead,
        }
        return pb.StatusReply(status_json=json.dumps(status))

    async def _lease(self, request: pb.DecodeRequest) -> list[kv.Slot]:
        """The slots that hold, or will hold, the prompt's KV; none when they are gone: then it is computed here."""
        if not request.slots and not request.hashes:
            return []
        wanted = kv.LeaseRequest(
            request_id=request.request_id,
            holder=self._engine.worker_id,
            slots=request.slots,
            hashes=request.hashes,
            lease_s=request.load_timeout_s + 1.0,
            sources=request.sources,
            has_tail=request.has_tail,
            fetch_s=_FETCH_S,
        )
        try:
            reply = await self._engine.node.Lease(wanted, timeout=_FETCH_S + _NODE_CALL_S)
            slots = list(reply.slots)
            if request.slots and [slot.hash for slot in slots] != [slot.hash for slot in request.slots]:
                logger.error("request %s: the node leased other blocks than were planned", request.request_id)
                return []
            return slots
        except grpc.aio.AioRpcError as error:
            logger.warning("request %s: no lease on its KV: %s", request.request_id, error.details())
            return []

    async def _follow(self, slots: Sequence[kv.Slot], deadline_s: float) -> None:
        """Waits until most segments are written, the writer gave up, or time is over."""
        waiting = [slot for slot in slots if not slot.filled]
        if not waiting:
            return
        numbers, epochs = [slot.slot for slot in waiting], [slot.epoch for slot in waiting]
        arena, segments = self._engine.arena, self._engine.layout.segments
        enough = int(len(waiting) * segments * _SUBMIT_AT)
        poll_s = _WAIT_POLL_S
        while time.monotonic() < deadline_s:
            complete = arena.segments_complete(numbers, epochs)
            if complete:
                poll_s = _FOLLOW_POLL_S
            if complete >= enough or not arena.all_held(numbers, epochs):
                return
            await asyncio.sleep(poll_s)

    def _plan(self, request: pb.DecodeRequest, slots: Sequence[kv.Slot], hold: bool) -> KVPlan | None:
        if not slots:
            return None
        prompt_tokens = len(request.token_ids)
        return KVPlan(
            request=RequestId(request.request_id),
            load=tuple(PlannedBlock(slot.slot, slot.epoch, BlockHash(slot.hash)) for slot in slots),
            load_tokens=min(prompt_tokens, len(slots) * self._engine.layout.block_tokens),
            save=(),
            prompt_tokens=prompt_tokens,
            deadline_s=time.monotonic() + _STALL_S,
            hold=hold,
        )

    async def _reply(
        self, request: pb.DecodeRequest, output: RequestOutput, report: LoadReport | None
    ) -> pb.DecodeReply:
        reply = pb.DecodeReply(output=encode_output(output))
        if report is not None:
            await forget(self._engine, report.corrupt)
            loaded_blocks = report.blocks - report.failed_blocks
            external = min(len(request.token_ids), loaded_blocks * self._engine.layout.block_tokens)
            reply.loaded.MergeFrom(
                pb.Loaded(
                    external_tokens=external,
                    computed_tokens=report.computed_tokens,
                    kv_bytes=report.kv_bytes,
                    load_s=report.load_s,
                    resident_at=report.resident_at,
                    failed_blocks=report.failed_blocks,
                    failure=report.failure,
                )
            )
        return reply

    async def _release(self, request_id: str) -> None:
        """If the node is gone, so is the lease."""
        try:
            await self._engine.node.Release(
                kv.Holding(request_id=request_id, holder=self._engine.worker_id), timeout=_NODE_CALL_S
            )
        except grpc.aio.AioRpcError as error:
            logger.warning("release at the KV node failed: %s", error.details())


def _reasoning(request: pb.DecodeRequest) -> dict[str, Any]:
    """Arguments of `AsyncLLM.generate` that matter to guided output of reasoning models."""
    return {
        "reasoning_ended": request.reasoning_ended if request.HasField("reasoning_ended") else None,
        "reasoning_parser_kwargs": json.loads(request.reasoning_parser_kwargs_json or "{}") or None,
    }
