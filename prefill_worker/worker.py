"""The prefill worker: turns token ids into KV in the node's arena. It never samples for the user.

vLLM must produce a token to run a prompt: it gets fresh parameters, greedy, one token, and the token is discarded.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import asdict
from typing import Any, TypeAlias

import grpc
from vllm import SamplingParams
from vllm.outputs import RequestOutput
from vllm.v1.engine.exceptions import EngineDeadError

from kvstore.core.blocks import BlockHash, RequestId
from kvstore.engine.engine import KVEngine
from kvstore.engine.plan import KVPlan, LoadReport, PlannedBlock
from kvstore.engine.reservation import end_reservation, forget
from kvstore.tiers.dram import Writing
from kvstore.transfer import kv_pb2 as kv
from prefill_worker import prefill_pb2 as pb
from prefill_worker.prefill_pb2_grpc import PrefillWorkerServicer

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_ROOM_WAIT_S = 0.02
_ROOM_WAIT_MAX_S = 0.5
_NODE_CALL_S = 5.0
_FETCH_S = 20.0  # for blocks that the node must bring from its SSD or from another node


class PrefillWorker(PrefillWorkerServicer):
    """The service over one engine. A call's life is the hand-off's life: when the gateway ends it, leases end."""

    def __init__(self, engine: KVEngine) -> None:
        self._engine = engine
        self._prefills = 0

    async def Prefill(self, request: pb.PrefillRequest, context: Context) -> AsyncIterator[pb.PrefillReply]:
        submitted: KVPlan | None = None
        committed = False
        try:
            slots = await self._reserve(request, context)
            yield pb.PrefillReply(plan=pb.Plan(slots=slots))
            submitted = self._plan(request, slots)
            output = await self._compute(request, submitted)
            writing = self._engine.arena.writing([block.slot for block in submitted.save])
            await self._engine.node.Commit(self._holding(request.request_id), timeout=_NODE_CALL_S)
            committed = True
            self._prefills += 1
            yield pb.PrefillReply(done=await self._done(request, submitted, output, writing))
            await asyncio.sleep(request.lease_s)  # the gateway ends the call when the decode side has the KV
        except grpc.aio.AioRpcError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"KV node: {error.details()}")
        except EngineDeadError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"the prefill engine died: {error}")
        except ValueError as error:  # what vLLM raises for a request that no engine of this model could serve
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            await asyncio.shield(self._end(request.request_id, submitted, committed))

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusReply:
        status = {
            **asdict(self._engine.counters()),
            "prefills": self._prefills,
            "dead": self._engine.dead,
        }
        return pb.StatusReply(status_json=json.dumps(status))

    async def _reserve(self, request: pb.PrefillRequest, context: Context) -> list[kv.Slot]:
        """Slots for the prompt; waits for room until the caller's deadline."""
        full, rest = divmod(len(request.token_ids), self._engine.layout.block_tokens)
        if (len(request.hashes), bool(request.tail_hash)) != (full, bool(rest)):
            raise ValueError(f"{len(request.hashes)} blocks are named for {len(request.token_ids)} tokens")
        wanted = kv.ReserveRequest(
            request_id=request.request_id,
            worker_id=self._engine.worker_id,
            hashes=request.hashes,
            tail_hash=request.tail_hash,
            lease_s=request.lease_s,
            sources=request.sources,
            fetch_s=_FETCH_S,
        )
        wait_s = _ROOM_WAIT_S
        while True:
            try:
                reply = await self._engine.node.Reserve(wanted, timeout=_FETCH_S + _NODE_CALL_S)
                return list(reply.slots)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    await context.abort(error.code(), f"KV node: {error.details()}")
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _ROOM_WAIT_MAX_S)

    async def _compute(self, request: pb.PrefillRequest, plan: KVPlan) -> RequestOutput:
        """Runs the prompt through the engine."""
        params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
        output: RequestOutput | None = None
        async with aclosing(
            self._engine.generate(request.token_ids, params, request.request_id, plan)
        ) as outputs:
            async for latest in outputs:
                output = latest
        assert output is not None, "an engine ended without an output"
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

    async def _done(
        self, request: pb.PrefillRequest, plan: KVPlan, output: RequestOutput, writing: Writing
    ) -> pb.Done:
        report = LoadReport.from_params(output.kv_transfer_params)
        assert report is not None, "a planned request ends with a report"
        await forget(self._engine, report.corrupt)
        times = output.metrics
        assert times is not None, "engines keep request times"
        return pb.Done(
            queue_s=times.scheduled_ts - times.queued_ts,
            prefill_s=times.first_token_ts - times.scheduled_ts,
            cached_tokens=len(request.token_ids) - report.computed_tokens,
            computed_tokens=report.computed_tokens,
            kv_bytes=len(plan.save) * self._engine.layout.block_bytes,
            failed_blocks=report.failed_blocks,
            last_layer_at=writing.last_sealed_at,
            early_kv_bytes=writing.early_bytes,
        )

    async def _end(self, request_id: str, submitted: KVPlan | None, committed: bool) -> None:
        """Gives back what the request still holds at the node, whatever had come of it."""
        if submitted is not None and not committed:
            await self._engine.fence(submitted)
        await end_reservation(self._engine, request_id, committed=committed, stopped=submitted is None)

    def _holding(self, request_id: str) -> kv.Holding:
        return kv.Holding(request_id=request_id, holder=self._engine.worker_id)
