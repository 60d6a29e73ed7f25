"""Blocks that lie encoded on the SSD: what comes back, what a spoilt file becomes, and who may share a node."""

import asyncio
import logging
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.codecs.at_rest import AtRest
from kvstore.codecs.choice import CODECS
from kvstore.codecs.codec import BlockForm
from kvstore.codecs.int8 import error_bound
from kvstore.codecs.pages import Bytes, PageShape, Permutation
from kvstore.core.blocks import BlockHash, KVLayout
from kvstore.tiers.block_file import FileForm
from kvstore.tiers.dram import Arena, ArenaShape, segment_sum
from kvstore.tiers.ssd import Loaded, Missed, NotWritten, SsdTier, Written
from kvstore.transfer import kv_pb2 as pb
from kvstore.transfer.messages import layout_message, packing_message
from tests.kvstore.test_codecs import Floats, block_of, kv_shape, values_of
from tests.kvstore.test_node import (
    INVALID,
    LEASE_S,
    PRECONDITION,
    READER,
    WORKER,
    Running,
    chain,
    refused,
    running,
)

INT8 = CODECS["int8-token-head-1"]
NAME = BlockHash(b"n" * 32)
SHAPE = PageShape(4, 2, 64, "float32")
LAYOUT = KVLayout(3, 8, 4, SHAPE.page_bytes, SHAPE.dtype, "test")
Open = Callable[..., Awaitable[SsdTier]]


def packed(seed: int) -> Permutation:
    order = np.random.default_rng(seed).permutation(SHAPE.elements)
    return Permutation(SHAPE, order.reshape(SHAPE.logical))


CODING = AtRest(BlockForm(LAYOUT, packed(1)), INT8)
RAW = FileForm.raw(LAYOUT)
ENCODED = replace(RAW, encoding=INT8.name, segment_bytes=CODING.encoded_segment_bytes)


def block(seed: int = 0) -> tuple[Bytes, Floats]:
    """As engine bytes, and as K and V."""
    values = np.random.default_rng(seed).standard_normal(kv_shape(CODING.form)).astype(np.float32)
    return block_of(CODING.form, values)


def sums(content: Bytes, name: BlockHash = NAME) -> Any:
    return np.array([segment_sum(row, name, layer) for layer, row in enumerate(content)], np.uint64)


def assert_within_bound(found: Bytes, before: Floats) -> None:
    after = values_of(CODING.form, found)
    bound = error_bound(np.abs(before).max(axis=-1), LAYOUT.dtype)[..., None]
    assert (np.abs(after.astype(np.float64) - before) <= bound).all()
    assert not np.array_equal(after, before), "nothing was encoded"


@pytest.fixture
async def opened(tmp_path: Path) -> AsyncIterator[Open]:
    tiers: list[SsdTier] = []

    async def open_tier(form: FileForm = ENCODED, coding: AtRest | None = CODING) -> SsdTier:
        """In place of the one before."""
        for tier in tiers:
            await tier.close()
        tiers[:] = [SsdTier.open(tmp_path, form, coding=coding)]
        return tiers[0]

    yield open_tier
    for tier in tiers:
        await tier.close()


async def stored(tier: SsdTier) -> Path:
    content, _ = block()
    assert await tier.write(NAME, content, sums(content)) == Written(tier.file_bytes)
    [path] = tier.folder.rglob(NAME.hex())
    return path


# -- the tier -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
async def test_a_block_comes_back_within_the_codecs_bound(opened: Open, direct: bool) -> None:
    tier = await opened()
    tier.direct = tier.direct and direct
    path = await stored(tier)
    content, values = block()
    assert path.stat().st_size == ENCODED.file_bytes == 4096 + 4096 * -(-content.nbytes * 17 // 64 // 4096)
    found = np.zeros_like(content)
    result = await tier.read(NAME, found)
    assert isinstance(result, Loaded)
    assert_within_bound(found, values)
    np.testing.assert_array_equal(result.sums, sums(found), "those of what is in the slot now")


async def test_every_flipped_bit_is_a_counted_miss(opened: Open) -> None:
    tier = await opened()
    chance = np.random.default_rng(3)
    size = ENCODED.file_bytes
    for at in [0, 8, 4095, 4096, size - 1, *chance.integers(0, size, 60).tolist()]:
        path = await stored(tier)
        spoilt = bytearray(path.read_bytes())
        spoilt[at] ^= 1 << int(chance.integers(8))
        path.write_bytes(spoilt)
        before = tier.counters.corrupt
        result = await tier.read(NAME, block()[0])
        assert isinstance(result, Missed) and result.corrupt, (at, result)
        assert tier.counters.corrupt == before + 1
        assert not path.exists()


async def test_what_no_encoder_wrote_is_a_counted_miss(opened: Open) -> None:
    """A whole file with right checksums, and a scale that is no number."""
    plain = await opened(coding=None)
    content = np.full((LAYOUT.layers, ENCODED.segment_bytes), 0xFF, np.uint8)
    assert isinstance(await plain.write(NAME, content, sums(content)), Written)
    tier = await opened()
    result = await tier.read(NAME, block()[0])
    assert isinstance(result, Missed) and result.corrupt and "a scale is negative" in result.reason
    assert tier.counters.corrupt == 1


async def test_what_the_codec_refuses_is_not_written_and_counted(opened: Open) -> None:
    tier = await opened()
    content, _ = block()
    content[1].view(np.float32)[7] = np.nan
    result = await tier.write(NAME, content, sums(content))
    assert isinstance(result, NotWritten) and result.refused and not result.full
    assert "int8-token-head-1 refuses it: segment 1: an absmax of nan" in result.reason
    counted = tier.counters
    assert (counted.refused, counted.failed, counted.full, counted.writes) == (1, 0, 0, 0)
    assert tier.used_bytes == 0
    assert not [*tier.folder.rglob(f"{NAME.hex()}*")]


async def test_a_block_that_is_not_what_was_sealed_is_not_written(opened: Open) -> None:
    """Encoded, it would get checksums that fit."""
    tier = await opened()
    content, _ = block()
    sealed = sums(content)
    content[2, 5] ^= 1
    assert await tier.write(NAME, content, sealed) == NotWritten("layer 2 does not verify in DRAM")
    assert tier.counters.failed == 1


async def test_blocks_of_another_encoding_are_not_found(opened: Open) -> None:
    await stored(await opened())
    tier = await opened(RAW, None)
    assert [names async for names in tier.scan()] == []
    assert await tier.read(NAME, block()[0]) == Missed("no file", corrupt=False)
    content, _ = block()
    await stored_raw(tier, content)
    found = np.zeros_like(content)
    assert isinstance(await tier.read(NAME, found), Loaded)
    np.testing.assert_array_equal(found, content, "identity is exact")
    tier = await opened()
    assert [names async for names in tier.scan()] == [[NAME]]


async def stored_raw(tier: SsdTier, content: Bytes) -> None:
    assert await tier.write(NAME, content, sums(content)) == Written(RAW.file_bytes)


# -- the node -------------------------------------------------------------------------------------------------------

SLOTS = 4
NODE: dict[str, Any] = {
    "dram_bytes": SLOTS * (LAYOUT.block_bytes + ArenaShape(LAYOUT, 1).header_dtype.itemsize),
    "codec": INT8.name,
    "ssd_bytes": 2**24,
}


async def attach(
    node: Running, worker: str = WORKER, codec: str = INT8.name, packing: pb.Packing | None = None
) -> Arena:
    reply: pb.AttachReply = await node.stub.Attach(
        pb.AttachRequest(
            worker_id=worker,
            layout=layout_message(LAYOUT),
            pids=[os.getpid()],
            codec=codec,
            packing=packing if packing is not None else packing_message(packed(1)),
        )
    )
    return Arena.attach(Path(reply.arena_path), ArenaShape(LAYOUT, reply.slots))


async def test_a_nodes_blocks_come_from_its_ssd_encoded(tmp_path: Path) -> None:
    async with running(tmp_path, ssd_dir=tmp_path / "ssd", **NODE) as node:
        arena = await attach(node)
        slots = await node.reserve("w", chain(2))
        for number, slot in enumerate(slots):
            arena.payload[slot.slot], _ = block(number)
            for layer in range(LAYOUT.layers):
                arena.seal(slot.slot, layer, slot.epoch, BlockHash(slot.hash))
        await node.commit("w")
        await node.release("w")
        await node.until(ssd_blocks=2)
        await node.stub.Drop(pb.DropRequest(all=True, tier="dram"))
        await node.until(committed=0)
        status = await node.status()
        assert (status.ssd_codec, status.ssd_block_bytes) == (INT8.name, ENCODED.file_bytes)
        found = await node.lease("r", hashes=chain(2), fetch_s=LEASE_S)
        assert [slot.hash for slot in found] == chain(2)
        for number, slot in enumerate(found):
            assert_within_bound(arena.payload[slot.slot], block(number)[1])
            assert arena.verify_block(slot.slot, slot.epoch, BlockHash(slot.hash))
        await node.until(fetched_ssd_blocks=2, ssd_corrupt=0, ssd_refused=0)
        await node.release("r", READER)
        verified: pb.VerifyReply = await node.stub.Verify(pb.Empty())
        assert (verified.ssd_blocks, verified.ssd_corrupt) == (2, 0)


async def test_a_node_says_how_fast_its_codec_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvstore")
    async with running(tmp_path, ssd_dir=tmp_path / "ssd", **NODE) as node:
        await attach(node)
        for _ in range(500):
            if "codec int8" in caplog.text:
                break
            await asyncio.sleep(0.01)
    said = re.search(
        r"codec int8-token-head-1: encodes ([\d.]+) .* decodes ([\d.]+), .* (3\.76) times smaller",
        caplog.text,
    )
    assert said is not None
    assert min(map(float, said.groups())) > 0


async def test_a_refused_block_stays_in_dram(tmp_path: Path) -> None:
    async with running(tmp_path, ssd_dir=tmp_path / "ssd", **NODE) as node:
        arena = await attach(node)
        [slot] = await node.reserve("w", chain(1))
        arena.payload[slot.slot] = 0xFF  # all of it NaN
        for layer in range(LAYOUT.layers):
            arena.seal(slot.slot, layer, slot.epoch, BlockHash(slot.hash))
        await node.commit("w")
        await node.release("w")
        await node.until(ssd_refused=1, ssd_blocks=0, committed=1)


async def test_a_worker_of_another_codec_is_refused_by_name(tmp_path: Path) -> None:
    async with running(tmp_path, **NODE) as node:
        with refused(PRECONDITION, "has pool.codec identity, this node int8-token-head-1"):
            await attach(node, codec="")
        await attach(node)
        with refused(PRECONDITION, "worker decode-0 has pool.codec identity, this node int8-token-head-1"):
            await attach(node, READER, "identity")
    async with running(tmp_path, **{**NODE, "codec": "identity"}) as node:
        with refused(PRECONDITION, "has pool.codec int8-token-head-1, this node identity"):
            await attach(node)


async def test_workers_that_pack_otherwise_do_not_share_a_node(tmp_path: Path) -> None:
    async with running(tmp_path, **NODE) as node:
        await attach(node)
        with refused(
            PRECONDITION, f"worker decode-0 packs the elements of a page as {packed(2).fingerprint()}"
        ):
            await attach(node, READER, packing=packing_message(packed(2)))
        await attach(node, READER)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"heads": 0}, "at least 1"),
        ({"head_dim": 2**31}, "has pages of"),
        ({"positions": []}, "cannot reshape"),
        ({"positions": [0] * SHAPE.elements}, "no bijection"),
        ({"positions": [SHAPE.elements, *range(1, SHAPE.elements)]}, "in a page of"),
    ],
    ids=["no head", "huge", "none", "not one to one", "beyond the page"],
)
async def test_positions_that_cannot_be_are_refused(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    good = packing_message(packed(1))
    wrong = {"heads": good.heads, "head_dim": good.head_dim, "positions": good.positions, **change}
    async with running(tmp_path, **NODE) as node:
        with refused(INVALID, words):
            await attach(node, packing=pb.Packing(**wrong))
        assert list((await node.status()).workers) == []
