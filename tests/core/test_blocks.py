"""Block names are a contract between machines and between years: golden vectors, and what a name depends on."""

import os
import struct
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.blocks import (
    BlockHash,
    ChainRoot,
    KVLayout,
    RequestId,
    block_hash,
    block_hashes,
    blocks_needed,
    hex_prefix,
    tail_hash,
)

ROOT = ChainRoot(model="a" * 32, dtype="float32", block_tokens=4)
TOKENS = [1, 2, 3, 4, 5, 6, 7, 2**32 - 1, 9]
LAYOUT = KVLayout(layers=2, block_tokens=32, page_tokens=16, page_bytes=1024, dtype="float32", packing="avx2")
token_ids = st.lists(st.integers(0, 2**32 - 1), max_size=12)

# Whoever changes these orphans every stored block: the version in the tags must change with them.
GOLDEN_ROOT = "c37a515f936dc75adfddb6da3311e02d1b9eced7f1c0349709e3721956d9cd44"
GOLDEN_LOSSY_ROOT = "c0bc8ed22b9d5b888f29588d8035f269b279bc9a9c8da352d1643baeb38d4573"
GOLDEN_BLOCKS = [
    "02f5a2d3768d968ee45bd49dc6badabc3a757d5a95c098b4e71926f82b500b2f",
    "cd4c3d6ba9a008284c8ee0a07b68800db1a75215035c6741008569d07982d191",
]
GOLDEN_TAIL = "833b7dec6f55fff184c5c2d7181258c6be356ff87e31032b5860671df776fa63"
GOLDEN_LAYOUT = "0b8bcfcbddc2ab66"


def test_golden_vectors() -> None:
    assert ROOT.digest().hex() == GOLDEN_ROOT
    assert replace(ROOT, precision="int8", tenant_salt=b"tenant-1").digest().hex() == GOLDEN_LOSSY_ROOT
    hashes = block_hashes(ROOT.digest(), TOKENS, 4)
    assert [name.hex() for name in hashes] == GOLDEN_BLOCKS
    assert tail_hash(hashes[-1], TOKENS[8:], RequestId("req-1")).hex() == GOLDEN_TAIL
    assert LAYOUT.fingerprint() == GOLDEN_LAYOUT


def test_the_encoding_is_the_one_in_the_docstring() -> None:
    def field(value: bytes) -> bytes:
        return struct.pack("<I", len(value)) + value

    root = field(b"a" * 32) + field(b"float32") + field(b"exact") + field(b"") + struct.pack("<I", 4)
    assert ROOT.digest() == blake3(b"moonpool-root-1" + root).digest()
    block = ROOT.digest() + struct.pack("<4I", 1, 2, 3, 4)
    assert block_hash(ROOT.digest(), [1, 2, 3, 4]) == blake3(b"moonpool-block-1" + block).digest()


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_names_do_not_depend_on_the_process(seed: str) -> None:
    script = (
        "from kvstore.core.blocks import *\n"
        "root = ChainRoot(model='a' * 32, dtype='float32', block_tokens=4).digest()\n"
        f"print(*[name.hex() for name in block_hashes(root, {TOKENS}, 4)])\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, env=environment, check=True)
    assert done.stdout.decode().split() == GOLDEN_BLOCKS


@pytest.mark.parametrize(
    "other",
    [
        replace(ROOT, model="b" * 32),
        replace(ROOT, dtype="bfloat16"),
        replace(ROOT, block_tokens=8),
        replace(ROOT, precision="int8"),
        replace(ROOT, tenant_salt=b"\0"),
        replace(ROOT, dtype="float32exact", precision=""),  # fields cannot run into each other
    ],
)
def test_every_field_of_the_root_names_another_chain(other: ChainRoot) -> None:
    assert other.digest() != ROOT.digest()
    assert block_hash(other.digest(), [1, 2, 3, 4]) != block_hash(ROOT.digest(), [1, 2, 3, 4])


@given(tokens=token_ids, more=token_ids, block_tokens=st.integers(1, 5))
def test_a_longer_prompt_keeps_the_names_of_its_prefix(
    tokens: list[int], more: list[int], block_tokens: int
) -> None:
    root = ROOT.digest()
    short = block_hashes(root, tokens, block_tokens)
    assert len(short) == len(tokens) // block_tokens
    assert block_hashes(root, tokens + more, block_tokens)[: len(short)] == short


@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), min_size=8, max_size=12),
    at=st.integers(0, 7),
    new=st.integers(0, 2**32 - 1),
)
def test_one_other_token_names_its_block_and_all_after_it_anew(tokens: list[int], at: int, new: int) -> None:
    changed = [*tokens[:at], new, *tokens[at + 1 :]]
    before, after = (block_hashes(ROOT.digest(), ids, 2) for ids in (tokens, changed))
    same = len(before) if new == tokens[at] else at // 2
    assert [a == b for a, b in zip(before, after, strict=True)] == [i < same for i in range(len(before))]


def test_equal_tokens_at_another_place_are_another_block() -> None:
    first, second = block_hashes(ROOT.digest(), [7, 7, 7, 7, 7, 7, 7, 7], 4)
    assert first != second


@pytest.mark.parametrize("bad", [-1, 2**32, 2**64, 1.5, "7", None])
def test_a_bad_token_id_is_named(bad: object) -> None:
    tokens: list[int] = [1, bad, 3, 4]  # type: ignore[list-item]  # what a client may send
    with pytest.raises(ValueError, match=rf"token id {bad!r} is not an integer"):
        block_hash(ROOT.digest(), tokens)


def test_a_tail_is_bound_to_its_request_and_is_no_block() -> None:
    parent = ROOT.digest()
    mine = tail_hash(parent, [1, 2], RequestId("a"))
    assert (
        len({mine, tail_hash(parent, [1, 2], RequestId("b")), tail_hash(parent, [1, 3], RequestId("a"))}) == 3
    )
    assert mine != block_hash(parent, [1, 2])


def test_names_for_people_are_short() -> None:
    assert hex_prefix([BlockHash(bytes(range(32)))]) == ["00010203"]


# -- sizes ----------------------------------------------------------------------------------------------------------


def test_sizes_follow_from_the_page() -> None:
    assert (LAYOUT.pieces, LAYOUT.segment_bytes, LAYOUT.block_bytes) == (2, 2048, 4096)
    halves = replace(LAYOUT, page_bytes=LAYOUT.page_bytes // 2, shards=2)
    assert (halves.segments, halves.segment_bytes, halves.block_bytes) == (4, 1024, 4096)


@pytest.mark.parametrize(
    ("tokens", "needed"), [(0, (0, 0)), (1, (0, 1)), (31, (0, 31)), (32, (1, 0)), (33, (1, 1)), (96, (3, 0))]
)
def test_blocks_and_tail_of_a_prompt(tokens: int, needed: tuple[int, int]) -> None:
    assert blocks_needed(tokens, 32) == needed


@pytest.mark.parametrize("field", ["layers", "block_tokens", "page_tokens", "page_bytes", "shards"])
@pytest.mark.parametrize("size", [0, -1])
def test_a_layout_without_size_is_refused(field: str, size: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        KVLayout(**{**asdict(LAYOUT), field: size})


def test_a_block_is_a_whole_number_of_pages() -> None:
    with pytest.raises(ValueError, match="not a multiple"):
        replace(LAYOUT, page_tokens=24)


def test_every_field_of_a_layout_is_in_its_fingerprint() -> None:
    others = [
        replace(LAYOUT, layers=3),
        replace(LAYOUT, block_tokens=64),
        replace(LAYOUT, page_tokens=8),
        replace(LAYOUT, page_bytes=2048),
        replace(LAYOUT, dtype="bfloat16"),
        replace(LAYOUT, packing="avx512"),
        replace(LAYOUT, shards=2),
    ]
    assert len({LAYOUT.fingerprint(), *(other.fingerprint() for other in others)}) == 1 + len(others)
