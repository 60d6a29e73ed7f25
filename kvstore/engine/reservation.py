"""What a worker still has to tell its KV node when a request has ended: nothing stays held, nothing wrong stays."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import grpc

from kvstore.engine.engine import KVEngine
from kvstore.transfer import kv_pb2 as kv

logger = logging.getLogger(__name__)

_NODE_CALL_S = 5.0
_AGAIN_S = 0.5


async def end_reservation(engine: KVEngine, request_id: str, *, committed: bool, stopped: bool) -> None:
    """Gives back what the request still holds at the node.

    `stopped`: should it not be `committed`, it is certain that the engine writes nothing for it any more.
    """
    if not committed:
        abandoned = kv.AbandonRequest(request_id=request_id, worker_id=engine.worker_id, stopped=stopped)
        await _insist(engine, lambda: engine.node.Abandon(abandoned, timeout=_NODE_CALL_S))
    holding = kv.Holding(request_id=request_id, holder=engine.worker_id)
    await _insist(engine, lambda: engine.node.Release(holding, timeout=_NODE_CALL_S))


async def forget(engine: KVEngine, corrupt: Sequence[str]) -> None:
    """Has the node forget blocks (hashes in hex) whose bytes did not verify.

    Should it not hear of it, the next reader finds them wrong again.
    """
    if not corrupt:
        return
    names = [bytes.fromhex(name) for name in corrupt]
    try:
        await engine.node.Drop(kv.DropRequest(hashes=names, corrupt=True), timeout=_NODE_CALL_S)
    except grpc.aio.AioRpcError as error:
        logger.warning(
            "%d blocks did not verify, and the KV node does not forget them: %s", len(names), error.details()
        )


async def _insist(engine: KVEngine, call: Callable[[], Awaitable[object]]) -> None:
    """Repeats a clean-up call until the node has answered; if the node is gone for good, so is what it held."""
    while not engine.dead:
        try:
            await call()
            return
        except grpc.aio.AioRpcError as error:
            if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                logger.warning("clean-up at the KV node failed: %s", error.details())
                return
        await asyncio.sleep(_AGAIN_S)
