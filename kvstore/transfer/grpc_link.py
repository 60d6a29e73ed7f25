"""Another node as a source of blocks, by its RPC `Read`: bytes in the replies, on a bulk socket, or by NIXL.

The replies come from the source's `serve_reads`; what is done with them is `link.Landing`'s.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, TypeAlias

import grpc
import numpy as np

from kvstore.core.blocks import BlockHash, NodeId, RequestId
from kvstore.core.slots import SlotRef
from kvstore.tiers.dram import Arena
from kvstore.transfer import kv_pb2 as pb
from kvstore.transfer.bulk_link import receive
from kvstore.transfer.frames import Reason
from kvstore.transfer.landing import Landing
from kvstore.transfer.link import Complete, Failed, Link, Lost, Progress, read_from
from kvstore.transfer.nixl_link import NixlMemory, pull
from kvstore.transfer.tls import TlsConfig

if TYPE_CHECKING:
    from kvstore.transfer.kv_pb2_grpc import KVNodeAsyncStub

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Peer:
    """Another node: its service, where that listens, and how a bulk socket beside it is secured."""

    stub: "KVNodeAsyncStub"
    address: str
    tls: TlsConfig | None = None


Kind: TypeAlias = Literal["inline", "bulk", "nixl"]
KINDS: tuple[Kind, ...] = ("inline", "bulk", "nixl")
_WAYS = {"inline": pb.INLINE, "bulk": pb.BULK, "nixl": pb.NIXL}


class GrpcLink:
    """Bytes in gRPC messages ("inline"), on a bulk socket that the call announces ("bulk"), or taken from the source's
    memory ("nixl"). A source that has not what was asked for answers inline.

    `uses` has the other's slots where they are known (what is still being filled there); other blocks are asked for
    by name.
    """

    def __init__(
        self,
        peer: Peer,
        reader: NodeId,
        arena: Arena,
        uses: Mapping[BlockHash, pb.Slot] = MappingProxyType({}),
        kind: Kind = "bulk",
        memory: NixlMemory | None = None,
    ) -> None:
        self.kind = kind
        self._way = _WAYS[kind]
        self._memory = memory
        self._peer = peer
        self._reader = reader
        self._arena = arena
        self._uses = uses
        self.answered: Kind = "inline"
        """How the source answered the last read."""
        self.rejected_segments = 0

    async def read(
        self, request: RequestId, blocks: Sequence[SlotRef], follow: bool, deadline_s: float
    ) -> AsyncGenerator[Progress, None]:
        landing = Landing(self._arena, blocks)
        wanted = read_request(
            request, self._reader, self._arena, blocks, self._uses, follow, deadline_s, self._way
        )
        call = self._peer.stub.Read(wanted, timeout=wanted.timeout_s)
        try:
            async with aclosing(self._land(call, landing)) as steps:
                async for step in steps:
                    yield step
            for step in landing.rest("the source did not send all of it"):
                yield step
        except grpc.aio.AioRpcError as error:
            yield Lost(f"{error.code().name}: {error.details()}")
        except (OSError, ValueError) as error:
            yield Lost(str(error) or type(error).__name__)
        finally:
            call.cancel()
            self.rejected_segments += landing.rejected_segments

    async def _land(
        self, call: AsyncIterable[pb.ReadReply], landing: Landing
    ) -> AsyncGenerator[Progress, None]:
        replies = aiter(call)
        async for reply in replies:
            match reply.WhichOneof("reply"):
                case "segment":
                    for step in self._take(landing, reply.segment):
                        yield step
                case "void":
                    for step in landing.void(reply.void.block, Reason(reply.void.reason).words):
                        yield step
                case "bulk":
                    self.answered = "bulk"
                    async with aclosing(self._on_a_socket(reply.bulk, replies, landing)) as steps:
                        async for step in steps:
                            yield step
                    return
                case "memory" if self._memory is not None:
                    self.answered = "nixl"
                    async with aclosing(pull(self._memory, reply.memory, replies, landing)) as steps:
                        async for step in steps:
                            yield step
                    return
                case other:
                    raise ValueError(f"a reply of kind {other} was not asked for")

    async def _on_a_socket(
        self, bulk: pb.Bulk, replies: AsyncIterator[pb.ReadReply], landing: Landing
    ) -> AsyncGenerator[Progress, None]:
        """The call stays open while bytes come on the socket; if it ends before them, so does the read."""
        call_ended = asyncio.ensure_future(_drained(replies))
        segment_bytes = self._arena.shape.layout.segment_bytes
        received = receive(
            self._peer.address, bulk.port, bulk.token, landing, segment_bytes, self._peer.tls, call_ended
        )
        try:
            async with aclosing(received) as steps:
                async for step in steps:
                    yield step
        except OSError:
            if call_ended.done():
                call_ended.result()  # the call's own error says more
            raise
        finally:
            call_ended.cancel()
            await asyncio.gather(call_ended, return_exceptions=True)

    def _take(self, landing: Landing, segment: pb.Segment) -> list[Progress]:
        if len(segment.payload) != self._arena.shape.layout.segment_bytes:
            raise ValueError(
                f"a segment of {len(segment.payload)} bytes, not {self._arena.shape.layout.segment_bytes}"
            )
        [buffer], fresh = landing.place(segment.block, segment.layer, 1)
        buffer[:] = segment.payload
        return landing.take(segment.block, fresh, np.array([segment.checksum] * len(fresh), np.uint64))


def read_request(
    request: RequestId,
    reader: NodeId,
    arena: Arena,
    blocks: Sequence[SlotRef],
    uses: Mapping[BlockHash, pb.Slot],
    follow: bool,
    deadline_s: float,
    way: pb.Way.ValueType,
) -> pb.ReadRequest:
    """The message of one read, by slots where `uses` has them."""
    names = [ref.hash for ref in blocks]
    return pb.ReadRequest(
        request_id=request,
        reader=reader,
        layout=arena.shape.layout.fingerprint(),
        slots=[uses[name] for name in names] if uses else (),
        hashes=() if uses else names,
        timeout_s=max(0.0, deadline_s - time.monotonic()),
        follow=follow,
        way=way,
    )


async def _drained(replies: AsyncIterator[pb.ReadReply]) -> None:
    async for _ in replies:
        raise ValueError("a reply after the socket was announced")


class PeerSource:
    """Links to nodes that have the same blocks, the best first, as one of the fetcher's sources."""

    kind = "peer"

    def __init__(
        self, links: Sequence[Link], uses: Mapping[BlockHash, pb.Slot] = MappingProxyType({})
    ) -> None:
        self._links = links
        self._uses = uses

    def has(self, name: BlockHash) -> bool:
        """May the block be there? Without `uses` nobody knows before asking."""
        return not self._uses or name in self._uses

    async def read(self, request: RequestId, blocks: Sequence[SlotRef], deadline_s: float) -> set[BlockHash]:
        """Returns the blocks that came whole and verified. What is being filled at the source is followed."""
        came: set[BlockHash] = set()
        async with aclosing(
            read_from(self._links, request, blocks, bool(self._uses), deadline_s)
        ) as progress:
            async for step in progress:
                if isinstance(step, Complete):
                    came.add(blocks[step.block].hash)
                elif isinstance(step, Failed):
                    logger.warning("request %s: %s", request, step)
        return came
