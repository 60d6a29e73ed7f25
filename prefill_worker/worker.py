"""The prefill worker: turns token ids into KV in the node's arena. It never samples for the user.

vLLM must produce a token to run a prompt: it gets fresh parameters, greedy, one token, and the token is discarded.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any, TypeAlias

import grpc
from vllm import SamplingParams
from vllm.outputs import RequestOutput
from vllm.v1.engine.exceptions import EngineDeadError

from kvstore.core.blocks import BlockHash, RequestId
from kvstore.engine.engine import Engine
from kvstore.engine.plan import KVPlan, LoadReport, PlannedBlock
from kvstore.transfer import kv_pb2 as kv
from prefill_worker import prefill_pb2 as pb
from prefill_worker.prefill_pb2_grpc import PrefillWorkerServicer

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
logger = logging.getLogger(__name__)

_ROOM_WAIT_S = 0.02
_NODE_CALL_S = 5.0


class PrefillWorker(PrefillWorkerServicer):
    """The service over one engine. A call's life is the hand-off's life: when the gateway ends it, leases end."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._failed_loads = 0
        self._prefills = 0

    async def Prefill(self, request: pb.PrefillRequest, context: Context) -> AsyncIterator[pb.PrefillReply]:
        started = time.monotonic()
        slots = await self._reserve(request, context)
        try:
            yield pb.PrefillReply(plan=pb.Plan(slots=slots))
            output = await self._compute(request, slots, started)
            done = self._done(request, slots, output, started)
            yield pb.PrefillReply(done=done)
            await asyncio.sleep(request.lease_s)  # the gateway ends the call when the decode side has the KV
        except EngineDeadError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"the prefill engine died: {error}")
        finally:
            await asyncio.shield(self._release(request.request_id))

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusReply:
        status = {
            **asdict(self._engine.counters()),
            "failed_loads": self._failed_loads,
            "prefills": self._prefills,
            "dead": self._engine.dead,
        }
        return pb.StatusReply(status_json=json.dumps(status))

    async def _reserve(self, request: pb.PrefillRequest, context: Context) -> list[kv.Slot]:
        """Slots for the prompt; waits for room until the caller's deadline."""
        wanted = kv.ReserveRequest(
            request_id=request.request_id,
            worker_id=self._engine.worker_id,
            hashes=request.hashes,
            tail_hash=request.tail_hash,
            lease_s=request.lease_s,
            no_reuse=request.no_reuse,
        )
        while True:
            try:
                reply: kv.SlotList = await self._engine.node.Reserve(wanted, timeout=_NODE_CALL_S)
                return list(reply.slots)
            except grpc.aio.AioRpcError as error:
                left = context.time_remaining()
                if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED or (left is not None and left < 1):
                    await context.abort(error.code(), f"KV node: {error.details()}")
                await asyncio.sleep(_ROOM_WAIT_S)

    async def _compute(
        self, request: pb.PrefillRequest, slots: list[kv.Slot], started: float
    ) -> RequestOutput:
        """Runs the prompt and commits its blocks; gives them up if anything goes wrong."""
        params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
        submitted = False
        try:
            output: RequestOutput | None = None
            stream = self._engine.generate(
                request.token_ids, params, request.request_id, self._plan(request, slots)
            )
            submitted = True
            async for latest in stream:
                output = latest
            assert output is not None, "an engine ended without an output"
            await self._engine.node.Commit(self._holding(request.request_id), timeout=_NODE_CALL_S)
            self._prefills += 1
        except BaseException:
            await asyncio.shield(self._abandon(request.request_id, stopped=not submitted))
            raise
        return output

    def _plan(self, request: pb.PrefillRequest, slots: list[kv.Slot]) -> KVPlan:
        blocks = [PlannedBlock(slot.slot, slot.epoch, BlockHash(slot.hash)) for slot in slots]
        cached = sum(slot.filled for slot in slots)
        return KVPlan(
            request=RequestId(request.request_id),
            load=tuple(blocks[:cached]),
            load_tokens=cached * self._engine.layout.block_tokens,
            save=tuple(blocks[cached:]),
            prompt_tokens=len(request.token_ids),
            deadline_s=time.monotonic() + request.lease_s,
        )

    def _done(
        self, request: pb.PrefillRequest, slots: list[kv.Slot], output: RequestOutput, started: float
    ) -> pb.Done:
        report = LoadReport.from_params(output.kv_transfer_params)
        assert report is not None, "a planned request ends with a report"
        self._failed_loads += report.failed_blocks
        cached = len(request.token_ids) - report.computed_tokens
        filled = sum(not slot.filled for slot in slots)
        return pb.Done(
            prefill_s=time.monotonic() - started,
            cached_tokens=cached,
            computed_tokens=report.computed_tokens,
            kv_bytes=filled * self._engine.layout.block_bytes,
            failed_blocks=report.failed_blocks,
        )

    async def _abandon(self, request_id: str, stopped: bool) -> None:
        await self._tell_node(
            "Abandon",
            kv.AbandonRequest(request_id=request_id, worker_id=self._engine.worker_id, stopped=stopped),
        )

    async def _release(self, request_id: str) -> None:
        await self._tell_node("Release", self._holding(request_id))

    async def _tell_node(self, method: str, message: object) -> None:
        """A clean-up call: if the node is gone, so is what it held."""
        try:
            await getattr(self._engine.node, method)(message, timeout=_NODE_CALL_S)
        except grpc.aio.AioRpcError as error:
            logger.warning("%s at the KV node failed: %s", method, error.details())

    def _holding(self, request_id: str) -> kv.Holding:
        return kv.Holding(request_id=request_id, holder=self._engine.worker_id)
