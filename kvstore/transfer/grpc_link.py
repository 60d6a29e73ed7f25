"""Blocks from another node with their bytes in gRPC messages: the link that works wherever the control call does.

The source sends each segment as soon as its writer has sealed it, with the writer's checksum. The reader copies it
into a slot of its own arena, verifies the copy under the name it asked for, and only then seals it: what was flipped,
cut short, sent twice or for another block is never seen by an engine.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING

import grpc
import numpy as np

from kvstore.core.blocks import BlockHash, NodeId, RequestId
from kvstore.core.slots import SlotRef
from kvstore.tiers.dram import Arena, segment_sum
from kvstore.transfer import kv_pb2 as pb

if TYPE_CHECKING:
    from kvstore.transfer.kv_pb2_grpc import KVNodeAsyncStub

logger = logging.getLogger(__name__)

_FOLLOW_POLL_S = 0.002


async def sealed_segments(
    arena: Arena, refs: Sequence[SlotRef], deadline_s: float
) -> AsyncIterator[pb.Segment]:
    """All segments of these uses of slots, each once it is sealed; ends early when what is missing will not come."""
    numbers, epochs = [ref.slot for ref in refs], np.asarray([ref.epoch for ref in refs], np.uint64)
    missing = np.ones((len(refs), arena.shape.layout.layers), bool)
    while missing.any():
        ready = missing & (arena.segment_epoch[numbers] == epochs[:, None])
        for block, layer in np.argwhere(ready):
            slot = numbers[block]
            segment = pb.Segment(
                block=int(block),
                layer=int(layer),
                checksum=int(arena.segment_sum[slot, layer]),
                payload=arena.payload[slot, layer].tobytes(),
            )
            yield segment
        missing &= ~ready
        if not ready.any():
            gone = bool((arena.epoch[numbers] != epochs)[missing.any(axis=1)].any())
            if gone or time.monotonic() > deadline_s:
                return
            await asyncio.sleep(_FOLLOW_POLL_S)


class PeerSource:
    """Another node as a source of blocks for the arena of this one. `uses` has the other's slots where they are known
    (blocks and a tail that are still being filled there); other blocks are asked for by name.
    """

    kind = "peer"

    def __init__(
        self, node: "KVNodeAsyncStub", reader: NodeId, arena: Arena, uses: Mapping[BlockHash, pb.Slot]
    ) -> None:
        self._node = node
        self._reader = reader
        self._arena = arena
        self._uses = uses

    def has(self, name: BlockHash) -> bool:
        return not self._uses or name in self._uses

    async def read(self, request: RequestId, blocks: Sequence[SlotRef], deadline_s: float) -> set[BlockHash]:
        """Returns the blocks that came whole and verified. Whatever goes wrong at the source ends the read."""
        names = [ref.hash for ref in blocks]
        wanted = pb.ReadRequest(
            request_id=request,
            reader=self._reader,
            layout=self._arena.shape.layout.fingerprint(),
            slots=[self._uses[name] for name in names] if self._uses else (),
            hashes=() if self._uses else names,
            timeout_s=max(0.0, deadline_s - time.monotonic()),
        )
        layers = self._arena.shape.layout.layers
        came = np.zeros((len(blocks), layers), bool)
        try:
            async for segment in self._node.Read(wanted, timeout=wanted.timeout_s):
                if segment.block >= len(blocks) or segment.layer >= layers:
                    raise ValueError(f"segment {segment.block}/{segment.layer} was not asked for")
                if _take(self._arena, blocks[segment.block], segment):
                    came[segment.block, segment.layer] = True
        except grpc.aio.AioRpcError as error:
            logger.warning("a read from another node ended: %s: %s", error.code().name, error.details())
        except ValueError as error:
            logger.warning("a read from another node ended: %s", error)
        return {ref.hash for ref, segments in zip(blocks, came, strict=True) if segments.all()}


def _take(arena: Arena, ref: SlotRef, segment: pb.Segment) -> bool:
    """Copies one segment into its slot. False, and nothing sealed, when it is not what its writer sealed."""
    payload = np.frombuffer(segment.payload, np.uint8)
    if payload.size != arena.shape.layout.segment_bytes:
        raise ValueError(f"a segment of {payload.size} bytes, not {arena.shape.layout.segment_bytes}")
    if segment_sum(payload, ref.hash, segment.layer) != segment.checksum:
        logger.error("block %s layer %d came with other bytes", ref.hash.hex()[:8], segment.layer)
        return False
    arena.payload[ref.slot, segment.layer] = payload
    arena.seal(ref.slot, segment.layer, ref.epoch, ref.hash, segment.checksum)
    return True
