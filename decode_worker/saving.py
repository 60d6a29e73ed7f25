"""Saves the KV of answers into the pool, where the conversation's next turn finds it.

When an answer has ended, its engine holds the pages. Now that all tokens are known, so are the names of the blocks that
they fill, and slots are reserved under these names like any prompt's: no room, no saving. The engine copies, the node
commits. All of it is done in tasks of their own, which nobody waits for: no failure reaches a client.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from typing import Any

import grpc
from vllm.v1.engine.exceptions import EngineDeadError

from kvstore.core.blocks import BlockHash, RequestId, block_hashes
from kvstore.engine.engine import KVEngine
from kvstore.engine.plan import KVPlan, PlannedBlock
from kvstore.engine.reservation import end_reservation
from kvstore.transfer import kv_pb2 as kv

logger = logging.getLogger(__name__)

_NODE_CALL_S = 5.0
_SAVE_S = 30.0  # the engine goes on with other answers meanwhile
_POLL_S = 0.01


class AnswerSaver:
    """Ends each hold that a plan with `hold` has asked for, by saving or by nothing."""

    def __init__(self, engine: KVEngine) -> None:
        self._engine = engine
        self._tasks: set[asyncio.Task[None]] = set()
        self.blocks = 0
        """Committed so far."""

    def save(self, plan: KVPlan, root: BlockHash, token_ids: Sequence[int]) -> None:
        """The answer is whole: `token_ids` are the prompt's and its own; `root` is the parent of their chain."""
        block_tokens = self._engine.layout.block_tokens
        names = block_hashes(root, token_ids[:-1], block_tokens)  # the last token was never fed: it has no KV
        if len(names) > plan.prompt_tokens // block_tokens:
            self._spawn(self._save(plan.request, names))
        else:
            self.let_go(plan)

    def let_go(self, plan: KVPlan) -> None:
        """Nothing of the answer is to be saved."""
        self._spawn(self._engine.save_held(_filling(plan.request, [], 0)))

    async def _save(self, request: RequestId, names: Sequence[BlockHash]) -> None:
        mine = f"{request}/answer"
        slots = await self._reserve(mine, names)
        plan = _filling(request, slots, self._engine.layout.block_tokens)
        await self._engine.save_held(plan)
        if not slots:
            return
        committed = await self._written(plan.save) and await self._commit(mine)
        self.blocks += len(plan.save) if committed else 0
        await end_reservation(self._engine, mine, committed=committed, stopped=False)

    async def _reserve(self, mine: str, names: Sequence[BlockHash]) -> list[kv.Slot]:
        """Slots for the whole sequence, of which the pool has the first already; none when there is no room."""
        wanted = kv.ReserveRequest(
            request_id=mine, worker_id=self._engine.worker_id, hashes=names, lease_s=_SAVE_S
        )
        try:
            return list((await self._engine.node.Reserve(wanted, timeout=_NODE_CALL_S)).slots)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:  # it may have been done all the same
                logger.warning("%s: no slots: %s", mine, error.details())
                self._spawn(end_reservation(self._engine, mine, committed=False, stopped=True))
            return []

    async def _written(self, blocks: Sequence[PlannedBlock]) -> bool:
        """Waits until the engine has said that it writes these no more. False: it has not."""
        arena, until_s = self._engine.arena, time.monotonic() + _SAVE_S
        while not all(arena.has_stopped(block.slot, block.epoch) for block in blocks):
            if self._engine.dead or time.monotonic() > until_s:
                return False
            await asyncio.sleep(_POLL_S)
        return True

    async def _commit(self, mine: str) -> bool:
        """The node refuses blocks that are not complete: the engine had not all of their pages."""
        holding = kv.Holding(request_id=mine, holder=self._engine.worker_id)
        try:
            await self._engine.node.Commit(holding, timeout=_NODE_CALL_S)
            return True
        except grpc.aio.AioRpcError as error:
            logger.warning("%s: not saved: %s", mine, error.details())
            return False

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(_quietly(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _filling(request: RequestId, slots: Sequence[kv.Slot], block_tokens: int) -> KVPlan:
    blocks = [PlannedBlock(slot.slot, slot.epoch, BlockHash(slot.hash)) for slot in slots]
    cached = sum(slot.filled for slot in slots)
    return KVPlan(
        request=request,
        load=tuple(blocks[:cached]),
        load_tokens=cached * block_tokens,
        save=tuple(blocks[cached:]),
        prompt_tokens=len(blocks) * block_tokens,
        deadline_s=0.0,
    )


async def _quietly(work: Coroutine[Any, Any, None]) -> None:
    """A dead engine holds nothing, and the node frees what it was filling."""
    try:
        await work
    except EngineDeadError as error:
        logger.warning("an answer was not saved: %s", error)
