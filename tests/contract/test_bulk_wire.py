"""What a bulk socket may bring instead of what was sent: 0 wrong reads, each a counted miss, and never a hang."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from kvstore.core.blocks import NodeId, RequestId
from kvstore.core.slots import SlotRef
from kvstore.tiers.dram import Arena, ArenaShape, segment_sum
from kvstore.transfer import kv_pb2 as pb
from kvstore.transfer.frames import HEADER_BYTES, Frame, Kind
from kvstore.transfer.grpc_link import GrpcLink, Peer
from kvstore.transfer.kv_pb2_grpc import KVNodeServicer, KVNodeStub, add_KVNodeServicer_to_server
from kvstore.transfer.link import Complete, Failed, Lost, Progress
from kvstore.transfer.server import channel_to, serving
from tests.contract.source_node import bytes_of, layout_of, name_of

LAYOUT = layout_of(layers=2, page_bytes=48)
TOKEN = bytes(range(16))


def segments(block: int, layer: int, layers: int, number: int) -> bytes:
    """One frame as an honest source sends it."""
    content = bytes_of(LAYOUT, number)[layer : layer + layers]
    sums = [segment_sum(row, name_of(number), layer + i) for i, row in enumerate(content)]
    frame = Frame(Kind.SEGMENTS, block, layer, layers, content.nbytes)
    return frame.pack(TOKEN) + np.asarray(sums, "<u8").tobytes() + content.tobytes()


END = Frame(Kind.END).pack(TOKEN)


class Wire(KVNodeServicer):
    """A source that announces a socket on which `stream` is sent, whatever that is."""

    def __init__(self) -> None:
        self.stream = b""
        self.port = 0

    async def Read(
        self, request: pb.ReadRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[pb.ReadReply]:
        yield pb.ReadReply(bulk=pb.Bulk(port=self.port, token=TOKEN))
        await asyncio.sleep(30.0)

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.readexactly(len(TOKEN)) == TOKEN
        writer.write(self.stream)
        writer.close()
        await writer.wait_closed()


class Reader:
    def __init__(self, wire: Wire, link: GrpcLink, arena: Arena) -> None:
        self._wire = wire
        self._link = link
        self._arena = arena
        self._epoch = 0

    async def read(self, stream: bytes, numbers: list[int]) -> list[Progress]:
        """Reads what the stream brings; whatever is sealed then is right."""
        self._wire.stream = stream
        refs = []
        for slot, number in enumerate(numbers):
            self._epoch += 1
            refs.append(SlotRef(slot, self._epoch, name_of(number), filled=False))
            self._arena.begin(slot, self._epoch, name_of(number))
            self._arena.payload[slot] = 0
        read = self._link.read(RequestId("r"), refs, False, time.monotonic() + 5.0)
        async with asyncio.timeout(10.0), aclosing(read) as progress:
            steps = [step async for step in progress]
        for ref, number in zip(refs, numbers, strict=True):
            sealed = np.flatnonzero(self._arena.segment_epoch[ref.slot] == ref.epoch)
            np.testing.assert_array_equal(
                self._arena.payload[ref.slot, sealed], bytes_of(LAYOUT, number)[sealed]
            )
            whole = Complete(refs.index(ref)) in steps
            assert whole == (len(sealed) == LAYOUT.layers)
        return steps


@asynccontextmanager
async def reading(folder: Path) -> AsyncIterator[Reader]:
    wire = Wire()  # type: ignore[abstract]  # its other methods answer UNIMPLEMENTED
    arena = Arena.create(folder / "arena", ArenaShape(LAYOUT, 4))
    server = await asyncio.start_server(wire.connected, "127.0.0.1", 0)
    wire.port = server.sockets[0].getsockname()[1]
    grpc_address = f"unix:{folder}/s"
    async with (
        server,
        serving(grpc_address, lambda one: add_KVNodeServicer_to_server(wire, one)),
        channel_to(grpc_address) as channel,
    ):
        await channel.channel_ready()
        peer = Peer(KVNodeStub(channel), "127.0.0.1:0")
        yield Reader(wire, GrpcLink(peer, NodeId("reader"), arena), arena)


@pytest.fixture
async def reader(tmp_path: Path) -> AsyncIterator[Reader]:
    async with reading(tmp_path) as made:
        yield made


def missed(steps: list[Progress]) -> bool:
    return any(isinstance(step, Failed | Lost) for step in steps)


async def test_an_honest_stream_is_read(reader: Reader) -> None:
    assert Complete(0) in await reader.read(segments(0, 0, 2, 5) + END, [5])


async def test_every_byte_of_frames_and_payload_flipped(reader: Reader) -> None:
    stream = segments(0, 0, 2, 5) + END
    chance = random.Random(5)
    for place in range(len(stream)):
        flipped = bytearray(stream)
        flipped[place] ^= 1 << chance.randrange(8)
        steps = await reader.read(bytes(flipped), [5])
        assert missed(steps), f"byte {place}"
        assert (Complete(0) in steps) == (place >= len(stream) - HEADER_BYTES), f"byte {place}"


async def test_a_stream_cut_anywhere_is_lost(reader: Reader) -> None:
    stream = segments(0, 0, 1, 5) + segments(0, 1, 1, 5) + END
    for length in range(0, len(stream), 7):
        steps = await reader.read(stream[:length], [5])
        assert isinstance(steps[-1], Lost)
        assert (Complete(0) in steps) == (length >= len(stream) - HEADER_BYTES)


async def test_order_does_not_matter(reader: Reader) -> None:
    stream = segments(1, 1, 1, 6) + segments(0, 0, 2, 5) + segments(1, 0, 1, 6) + END
    steps = await reader.read(stream, [5, 6])
    assert {Complete(0), Complete(1)} <= set(steps)
    assert not missed(steps)


async def test_a_second_copy_goes_nowhere(reader: Reader) -> None:
    """Neither a faithful one nor one with other bytes; nor one that holds a new segment beside a known one."""
    other = bytearray(segments(0, 0, 1, 5))
    other[-1] ^= 1
    first = segments(0, 0, 1, 5)
    steps = await reader.read(first + first + bytes(other) + segments(0, 0, 2, 5) + END, [5])
    assert Complete(0) in steps
    assert not missed(steps)


async def test_a_frame_of_another_block_does_not_verify(reader: Reader) -> None:
    steps = await reader.read(segments(0, 0, 2, 6) + segments(1, 0, 2, 6) + END, [5, 6])
    assert Complete(1) in steps
    assert [step.block for step in steps if isinstance(step, Failed)] == [0]


@pytest.mark.parametrize(
    "frame",
    [
        Frame(Kind.SEGMENTS, 0, 0, 2, 2**40),
        Frame(Kind.SEGMENTS, 0, 0, 2, LAYOUT.block_bytes + 1),
        Frame(Kind.SEGMENTS, 0, 0, 3, 3 * LAYOUT.segment_bytes),
        Frame(Kind.SEGMENTS, 0, 65535, 2, LAYOUT.block_bytes),
        Frame(Kind.SEGMENTS, 1, 0, 2, LAYOUT.block_bytes),
        Frame(Kind.SEGMENTS, 2**32 - 1, 0, 2, LAYOUT.block_bytes),
        Frame(Kind.SEGMENTS, 0, 0, 0, 0),
        Frame(Kind.VOID, 1),
    ],
)
async def test_what_was_not_asked_for_is_refused_before_it_touches_memory(
    reader: Reader, frame: Frame
) -> None:
    steps = await reader.read(frame.pack(TOKEN) + bytes(4096) + END, [5])
    assert isinstance(steps[-1], Lost)
    assert "cut short" not in steps[-1].reason
    assert not reader._arena.payload.any()
