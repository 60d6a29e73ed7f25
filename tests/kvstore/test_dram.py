"""The arena: one file that processes share, and bytes that verify only where and when they were sealed."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.core.blocks import BlockHash, KVLayout
from kvstore.tiers.dram import Arena, ArenaShape, Writing, segment_sum

LAYOUT = KVLayout(layers=3, block_tokens=4, page_tokens=2, page_bytes=24, dtype="float32", packing="test")
SHAPE = ArenaShape(LAYOUT, slots=4)
NAME, OTHER = BlockHash(bytes(range(32))), BlockHash(bytes(range(1, 33)))


@pytest.fixture
def arena(tmp_path: Path) -> Arena:
    return Arena.create(tmp_path / "arena", SHAPE)


def sealed(arena: Arena, slot: int = 1, epoch: int = 7, name: BlockHash = NAME, seed: int = 0) -> None:
    """One whole block of random bytes."""
    arena.begin(slot, epoch, name)
    arena.payload[slot] = np.random.default_rng(seed).integers(0, 256, arena.payload[slot].shape, np.uint8)
    for layer in range(LAYOUT.layers):
        arena.seal(slot, layer, epoch, name)


# -- the file -------------------------------------------------------------------------------------------------------


def test_only_its_user_may_read_an_arena(arena: Arena) -> None:
    assert arena.path.stat().st_mode & 0o777 == 0o600
    assert arena.path.stat().st_size == SHAPE.file_bytes


def test_payloads_start_on_a_page_and_headers_fit_before_them() -> None:
    for slots in (1, 42, 1000):
        shape = ArenaShape(LAYOUT, slots)
        assert shape.payload_offset % 4096 == 0
        assert shape.payload_offset >= slots * shape.header_dtype.itemsize
        assert shape.file_bytes == shape.payload_offset + slots * LAYOUT.block_bytes


@given(dram_bytes=st.integers(0, 100_000))
def test_as_many_slots_as_fit(dram_bytes: int) -> None:
    slot_bytes = LAYOUT.block_bytes + ArenaShape(LAYOUT, 1).header_dtype.itemsize
    if dram_bytes < slot_bytes:
        with pytest.raises(ValueError, match="holds no block"):
            ArenaShape.fitting(LAYOUT, dram_bytes)
    else:
        slots = ArenaShape.fitting(LAYOUT, dram_bytes).slots
        assert slots * slot_bytes <= dram_bytes < (slots + 1) * slot_bytes


def test_an_arena_of_another_shape_is_refused(arena: Arena) -> None:
    with pytest.raises(ValueError, match="its shape says"):
        Arena.attach(arena.path, ArenaShape(LAYOUT, slots=5))


def test_an_arena_is_never_made_over_another(arena: Arena) -> None:
    with pytest.raises(FileExistsError):
        Arena.create(arena.path, SHAPE)
    assert arena.path.exists()


def test_too_little_memory_is_told_with_the_size_and_leaves_no_file() -> None:
    path = Path("/dev/shm") / f"moonpool-test-{os.getpid()}"
    too_large = ArenaShape(LAYOUT, slots=2**50 // LAYOUT.block_bytes)
    with pytest.raises(OSError, match=r"cannot reserve \d+ MiB for the KV arena in /dev/shm"):
        Arena.create(path, too_large)
    assert not path.exists()


def test_mappings_outlive_the_name(arena: Arena) -> None:
    attached = Arena.attach(arena.path, SHAPE)
    arena.unlink()
    arena.unlink()
    assert not arena.path.exists()
    sealed(attached)
    assert arena.verify(1, 0, 7, NAME, arena.payload[1, 0])


OTHER_PROCESS = """
import sys
import time
from pathlib import Path
from kvstore.core.blocks import BlockHash, KVLayout
from kvstore.tiers.dram import Arena, ArenaShape
layout = KVLayout(layers=3, block_tokens=4, page_tokens=2, page_bytes=24, dtype="float32", packing="test")
arena = getattr(Arena, sys.argv[1])(Path(sys.argv[2]), ArenaShape(layout, slots=4))
print("mapped", flush=True)
for line in sys.stdin:
    slot, epoch = map(int, line.split())
    name = BlockHash(arena.hash[slot].tobytes())
    arena.payload[slot] = epoch
    for layer in range(layout.layers):
        arena.seal(slot, layer, epoch, name)
    arena.stop(slot, epoch)
    print("sealed", flush=True)
"""


def another_process(how: str, path: Path) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER_PROCESS, how, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "mapped\n"
    return process


def test_another_process_fills_a_slot(arena: Arena) -> None:
    arena.begin(2, 9, NAME)
    with another_process("attach", arena.path) as writer:
        assert writer.stdin is not None and writer.stdout is not None
        assert not arena.complete(2, 9)
        writer.stdin.write("2 9\n")
        writer.stdin.flush()
        assert writer.stdout.readline() == "sealed\n"
        assert arena.complete(2, 9)
        assert arena.has_stopped(2, 9)
        assert (arena.payload[2] == 9).all()
        assert arena.verify(2, 1, 9, NAME, arena.payload[2, 1])
        writer.stdin.close()
    assert writer.returncode == 0


def test_the_arena_of_a_killed_node_is_removed_and_that_of_a_living_one_is_not(tmp_path: Path) -> None:
    dead, alive, stranger = (tmp_path / name for name in ("moonpool-n-1", "moonpool-n-2", "other"))
    stranger.touch()
    with another_process("create", dead) as killed, another_process("create", alive) as living:
        killed.kill()
        killed.wait()
        assert dead.exists()
        Arena.remove_dead(tmp_path, "moonpool-n-")
        assert (dead.exists(), alive.exists(), stranger.exists()) == (False, True, True)
        assert living.stdin is not None
        living.stdin.close()


# -- writing and reading --------------------------------------------------------------------------------------------


def test_a_block_is_complete_with_its_last_layer(arena: Arena) -> None:
    arena.begin(0, 3, NAME)
    for layer in range(LAYOUT.layers):
        assert not arena.complete(0, 3)
        assert arena.segments_complete([0, 1], [3, 3]) == layer
        arena.seal(0, layer, 3, NAME)
    assert arena.complete(0, 3)
    assert not arena.complete(0, 2)


def test_a_new_use_has_nothing_of_the_old(arena: Arena) -> None:
    sealed(arena, slot=1, epoch=7)
    assert arena.all_held([1], [7])
    arena.end(1)
    assert not arena.all_held([1], [7])
    assert not arena.complete(1, 7)
    arena.begin(1, 8, OTHER)
    assert arena.all_held([1], [8])
    assert arena.segments_complete([1], [8]) == 0
    assert not arena.verify(1, 0, 8, OTHER, arena.payload[1, 0])


def test_a_late_reader_is_told_so(arena: Arena) -> None:
    sealed(arena, slot=1, epoch=7)
    copy = arena.payload[1, 0].copy()
    assert arena.verify(1, 0, 7, NAME, copy)
    sealed(arena, slot=1, epoch=8)  # the same bytes under the same name, in a later use
    assert arena.verify(1, 0, 8, NAME, copy)
    assert not arena.verify(1, 0, 7, NAME, copy)
    arena.end(1)
    assert not arena.verify(1, 0, 8, NAME, copy)


def test_a_late_word_of_an_old_writer_does_not_hide_a_newer_ones(arena: Arena) -> None:
    arena.stop(1, 8)
    arena.stop(1, 7)
    assert arena.has_stopped(1, 8)
    arena.stop(1, 9)
    assert arena.has_stopped(1, 9)


def test_every_flipped_byte_fails(arena: Arena) -> None:
    sealed(arena)
    for layer in range(LAYOUT.layers):
        for at in range(LAYOUT.segment_bytes):
            for bit in (1, 0x80):
                arena.payload[1, layer, at] ^= bit
                assert not arena.verify(1, layer, 7, NAME, arena.payload[1, layer]), (layer, at, bit)
                arena.payload[1, layer, at] ^= bit
        assert arena.verify(1, layer, 7, NAME, arena.payload[1, layer])


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.binary(min_size=32, max_size=32), layer=st.integers(0, LAYOUT.layers - 1))
def test_right_bytes_in_a_wrong_place_fail(arena: Arena, name: bytes, layer: int) -> None:
    sealed(arena)
    copy = arena.payload[1, layer].copy()
    assert arena.verify(1, layer, 7, NAME, copy)
    if name != NAME:
        assert not arena.verify(1, layer, 7, BlockHash(name), copy), "under another block's name"
    for other in set(range(LAYOUT.layers)) - {layer}:
        assert not arena.verify(1, other, 7, NAME, copy), "as another layer"


def test_a_sum_depends_on_bytes_name_and_layer_and_not_on_where_it_is_taken(arena: Arena) -> None:
    sealed(arena)
    inside = arena.payload[1, 2]
    assert segment_sum(inside, NAME, 2) == segment_sum(inside.copy(), NAME, 2)
    assert len({segment_sum(inside, name, layer) for name in (NAME, OTHER) for layer in (0, 1, 2)}) == 6


def test_the_arena_tells_how_a_prompt_was_written(arena: Arena) -> None:
    """Two chunks of one block each: when the last one's last layer begins, all segments but one are there."""
    before = time.monotonic()
    sealed(arena, slot=1)
    sealed(arena, slot=2, name=OTHER)
    writing = arena.writing([1, 2])
    assert before < writing.last_sealed_at <= time.monotonic()
    assert writing.last_sealed_at == arena.segment_at[2, LAYOUT.layers - 1]
    assert writing.early_bytes == (2 * LAYOUT.layers - 1) * LAYOUT.segment_bytes
    assert arena.writing([]) == Writing(last_sealed_at=0.0, early_bytes=0)


def huge_pages() -> Path:
    """A mounted hugetlbfs that this user may write to, where the machine has free huge pages."""
    memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    for mount in psutil.disk_partitions(all=True):
        if mount.fstype == "hugetlbfs" and os.access(mount.mountpoint, os.W_OK):
            if int(memory.get("HugePages_Free", "0")) >= 2:
                return Path(mount.mountpoint)
            pytest.skip("this machine has no two free huge pages")
    pytest.skip("no hugetlbfs is mounted here")


def test_an_arena_lies_in_huge_pages_where_its_folder_is_a_hugetlbfs() -> None:
    path, shape = huge_pages() / f"moonpool-test-{os.getpid()}", ArenaShape(LAYOUT, 3)
    arena = Arena.create(path, shape)
    assert arena.page_bytes >= 2**21
    assert path.stat().st_size == arena.page_bytes
    other = Arena.attach(arena.path, shape)
    arena.begin(1, 7, NAME)
    arena.payload[1] = 5
    arena.seal(1, 0, 7, NAME)
    assert other.verify(1, 0, 7, NAME, other.payload[1, 0])
    arena.unlink()
    with pytest.raises(OSError, match="for the KV arena"):
        Arena.create(path, ArenaShape(LAYOUT, 2**40 // LAYOUT.block_bytes))
    assert not path.exists()
