"""Every byte of a stored block flipped, in DRAM, on the SSD and on the wire: a miss that is counted, never a wrong read.

`make test` flips a sample; `MOONPOOL_FAULTS=full` (`make test-faults`) flips all bytes for thousands of seeds.
"""

import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.core.blocks import BlockHash, KVLayout, NodeId, RequestId
from kvstore.core.slots import SlotRef
from kvstore.tiers.block_file import FileForm
from kvstore.tiers.dram import Arena, ArenaShape, segment_sum
from kvstore.tiers.ssd import Loaded, Missed, SsdTier
from kvstore.transfer import kv_pb2 as pb
from kvstore.transfer.grpc_link import GrpcLink, Peer, PeerSource
from kvstore.transfer.serve_reads import Watched, inline_replies

LAYOUT = KVLayout(layers=2, block_tokens=2, page_tokens=2, page_bytes=48, dtype="float32", packing="test")
FULL = os.environ.get("MOONPOOL_FAULTS") == "full"
SEEDS = 2000 if FULL else 40
SAMPLE = None if FULL else 24  # bytes flipped a seed, chosen by the seed; None: in turn, so that all are
SHAPE = ArenaShape(LAYOUT, 2)


def name_of(seed: int) -> BlockHash:
    return BlockHash(seed.to_bytes(4, "little") * 8)


def bytes_of(seed: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """What block `seed` holds: any reader can make it again."""
    return np.random.default_rng(seed).integers(0, 256, (LAYOUT.layers, LAYOUT.segment_bytes), np.uint8)


def flips(seed: int, size: int) -> list[tuple[int, int]]:
    """(byte, mask): a sample of bytes, or one run of consecutive bytes a seed so that all seeds cover all bytes."""
    random = np.random.default_rng(10_000 + seed)
    if SAMPLE is None:
        places = [(seed * 8 + i) % size for i in range(8)]
    else:
        places = random.integers(0, size, SAMPLE).tolist()
    return [(place, 1 << int(random.integers(0, 8))) for place in places]


@pytest.fixture
def arena(tmp_path: Path) -> Arena:
    return Arena.create(tmp_path / "arena", SHAPE)


def store(arena: Arena, slot: int, epoch: int, seed: int) -> SlotRef:
    name = name_of(seed)
    arena.begin(slot, epoch, name)
    arena.payload[slot] = bytes_of(seed)
    for layer in range(LAYOUT.layers):
        arena.seal(slot, layer, epoch, name)
    return SlotRef(slot, epoch, name, filled=True)


def test_in_dram(arena: Arena) -> None:
    """Payload and every word of the header that a reader relies on."""
    noticed = 0
    for seed in range(SEEDS):
        ref = store(arena, 0, seed + 1, seed)
        payload = arena.payload[0].reshape(-1)
        for place, mask in flips(seed, payload.size):
            payload[place] ^= mask
            layer = place // LAYOUT.segment_bytes
            assert not arena.verify(0, layer, ref.epoch, ref.hash, arena.payload[0, layer])
            other = 1 - layer
            assert arena.verify(0, other, ref.epoch, ref.hash, arena.payload[0, other])
            payload[place] ^= mask
            noticed += 1
        for word in (arena.segment_sum, arena.segment_epoch):
            word[0, 0] ^= np.uint64(1 << (seed % 64))
            assert not arena.verify(0, 0, ref.epoch, ref.hash, arena.payload[0, 0])
            word[0, 0] ^= np.uint64(1 << (seed % 64))
            noticed += 1
        arena.epoch[0] ^= np.uint64(1 << (seed % 64))
        assert not arena.verify(0, 0, ref.epoch, ref.hash, arena.payload[0, 0])
        arena.epoch[0] ^= np.uint64(1 << (seed % 64))
    assert noticed >= SEEDS * 10


async def test_on_the_ssd(tmp_path: Path) -> None:
    """Header, padding and payload. The padding is under the header's checksum too."""
    tier = SsdTier.open(tmp_path, FileForm.raw(LAYOUT))
    buffer = np.empty((LAYOUT.layers, LAYOUT.segment_bytes), np.uint8)
    flipped = 0
    try:
        for seed in range(SEEDS):
            name = name_of(seed)
            content = bytes_of(seed)
            sums = np.array([segment_sum(row, name, layer) for layer, row in enumerate(content)], np.uint64)
            await tier.write(name, content, sums)
            [path] = tmp_path.rglob(name.hex())
            whole = path.read_bytes()
            for place, mask in flips(seed, len(whole)):
                broken = bytearray(whole)
                broken[place] ^= mask
                path.write_bytes(broken)
                result = await tier.read(name, buffer)
                assert isinstance(result, Missed), f"seed {seed}, byte {place}, mask {mask}"
                assert result.corrupt
                flipped += 1
            path.write_bytes(whole)
            assert isinstance(await tier.read(name, buffer), Loaded)
            np.testing.assert_array_equal(buffer, bytes_of(seed))
            path.unlink()
        assert tier.counters.corrupt == flipped
    finally:
        await tier.close()


class FlippedWire:
    """A peer whose messages come with one byte changed, as they lie on the wire; real otherwise."""

    def __init__(self, source: Arena, refs: list[SlotRef]) -> None:
        self._source = source
        self._refs = refs
        self.flip: tuple[int, int] | None = None

    def Read(self, request: pb.ReadRequest, timeout: float) -> "FlippedCall":
        return FlippedCall(Watched(self._source, self._refs, False, time.monotonic() + timeout), self.flip)


class FlippedCall:
    """One call to it."""

    def __init__(self, watched: Watched, flip: tuple[int, int] | None) -> None:
        self._watched = watched
        self._flip = flip

    async def __aiter__(self) -> AsyncIterator[pb.ReadReply]:
        first = True
        async for reply in inline_replies(self._watched):
            message = bytearray(reply.SerializeToString())
            if first and self._flip is not None:
                place, mask = self._flip
                message[place % len(message)] ^= mask
            first = False
            yield _parsed(bytes(message))

    def cancel(self) -> None:
        """The reader needs no more."""


def _parsed(message: bytes) -> pb.ReadReply:
    """As gRPC does it: what cannot be parsed ends the call."""
    try:
        return pb.ReadReply.FromString(message)
    except Exception as error:
        raise ValueError("the message cannot be parsed") from error


async def test_on_the_wire(arena: Arena, tmp_path: Path) -> None:
    there = Arena.create(tmp_path / "there", SHAPE)
    misses = 0
    for seed in range(SEEDS):
        source = store(there, 0, seed + 1, seed)
        wire = FlippedWire(there, [source])
        peer = PeerSource([GrpcLink(Peer(wire, ""), NodeId("reader"), arena, kind="inline")])  # type: ignore[arg-type]
        for number, flip in enumerate([None, *flips(seed, 120)]):
            wire.flip = flip
            epoch = seed * 1000 + number + 1
            target = SlotRef(1, epoch, source.hash, filled=False)
            arena.begin(1, epoch, source.hash)
            arena.payload[1] = 0
            came = await peer.read(RequestId("r"), [target], time.monotonic() + 1.0)
            sealed = arena.segment_epoch[1] == epoch
            for layer in np.flatnonzero(sealed):
                np.testing.assert_array_equal(arena.payload[1, layer], bytes_of(seed)[layer])
            assert (came == {source.hash}) == bool(sealed.all())
            if flip is None:
                assert came
            misses += not came
    assert misses >= SEEDS
