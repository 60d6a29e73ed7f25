"""The decode worker: loads a prompt's KV, recomputes the last prompt token, samples every token of the answer.

The whole sampler state (penalties, guided output, stop, logprobs, n > 1) lives in this one engine.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

import grpc
from vllm.outputs import RequestOutput
from vllm.v1.engine.exceptions import EngineDeadError

from decode_worker import decode_pb2 as pb
from decode_worker.decode_pb2_grpc import DecodeWorkerServicer
from kvstore.core.blocks import BlockHash, RequestId
from kvstore.engine.engine import Engine
from kvstore.engine.plan import KVPlan, LoadReport, PlannedBlock
from kvstore.engine.wire import decode_params, encode_output
from kvstore.transfer import kv_pb2 as kv

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
logger = logging.getLogger(__name__)

_NODE_CALL_S = 5.0
_FOLLOW_POLL_S = 0.002
# The engine gets the request when this share of the segments is there: early enough that the last layers' copy
# overlaps the prefill's end, late enough that its pages are not held for a whole prefill.
_SUBMIT_AT = 0.9


class DecodeWorker(DecodeWorkerServicer):
    """The service over one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._requests = 0
        self._failed_loads = 0
        self._computed_prompt_tokens = 0

    async def Decode(self, request: pb.DecodeRequest, context: Context) -> AsyncIterator[pb.DecodeReply]:
        try:
            params = decode_params(request.sampling_params)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        deadline_s = time.monotonic() + request.load_timeout_s
        slots = await self._lease(request)
        leased = bool(slots)
        try:
            await self._follow(slots, deadline_s)
            plan = self._plan(request, slots, deadline_s)
            self._requests += 1
            if plan is None:
                self._computed_prompt_tokens += len(request.token_ids)
            seen: set[int] = set()
            async for output in self._engine.generate(request.token_ids, params, request.request_id, plan):
                seen.update(one.index for one in output.outputs)
                if leased and (len(seen) == params.n or output.finished):
                    leased = False
                    await self._release(request.request_id)
                yield self._reply(request, output)
        except EngineDeadError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"the decode engine died: {error}")
        finally:
            if leased:
                await asyncio.shield(self._release(request.request_id))

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusReply:
        status = {
            **asdict(self._engine.counters()),
            "requests": self._requests,
            "failed_loads": self._failed_loads,
            "computed_prompt_tokens": self._computed_prompt_tokens,
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
        )
        try:
            reply: kv.SlotList = await self._engine.node.Lease(wanted, timeout=_NODE_CALL_S)
            return list(reply.slots)
        except grpc.aio.AioRpcError as error:
            logger.warning("request %s: no lease on its KV: %s", request.request_id, error.details())
            return []

    async def _follow(self, slots: Sequence[kv.Slot], deadline_s: float) -> None:
        """Waits until most segments are written, the writer gave up, or time is over."""
        waiting = [slot for slot in slots if not slot.filled]
        if not waiting:
            return
        numbers, epochs = [slot.slot for slot in waiting], [slot.epoch for slot in waiting]
        arena, layers = self._engine.arena, self._engine.layout.layers
        enough = int(len(waiting) * layers * _SUBMIT_AT)
        while time.monotonic() < deadline_s:
            if arena.segments_complete(numbers, epochs) >= enough or not arena.all_held(numbers, epochs):
                return
            await asyncio.sleep(_FOLLOW_POLL_S)

    def _plan(self, request: pb.DecodeRequest, slots: Sequence[kv.Slot], deadline_s: float) -> KVPlan | None:
        if not slots:
            return None
        prompt_tokens = len(request.token_ids)
        return KVPlan(
            request=RequestId(request.request_id),
            load=tuple(PlannedBlock(slot.slot, slot.epoch, BlockHash(slot.hash)) for slot in slots),
            load_tokens=min(prompt_tokens, len(slots) * self._engine.layout.block_tokens),
            save=(),
            prompt_tokens=prompt_tokens,
            deadline_s=deadline_s,
        )

    def _reply(self, request: pb.DecodeRequest, output: RequestOutput) -> pb.DecodeReply:
        reply = pb.DecodeReply(output=encode_output(output))
        report = LoadReport.from_params(output.kv_transfer_params)
        if report is not None:
            self._failed_loads += report.failed_blocks
            self._computed_prompt_tokens += report.computed_tokens
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
