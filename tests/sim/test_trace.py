"""Traces: what is read is what was written, errors say where, arrivals, lengths and prompts keep what they promise."""

import gzip
import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import islice, pairwise
from math import ceil
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.sim.trace import (
    GRID_MS,
    TraceError,
    TraceRow,
    generate_conversations,
    is_on_grid,
    prompt_token_ids,
    read_trace,
    scale,
    spread_arrivals,
)

REPOSITORY = Path(__file__).resolve().parents[2]
PUBLISHED = REPOSITORY.parent / "shared" / "traces"
CONVERSATION = PUBLISHED / "conversation_trace.jsonl.gz"
SYNTHETIC = PUBLISHED / "synthetic_trace.jsonl"
needs_published_traces = pytest.mark.skipif(
    not CONVERSATION.exists(), reason="the published Mooncake traces are not in ../shared/traces"
)

LINE = '{"timestamp": 5, "input_length": 600, "output_length": 7, "hash_ids": [1, 2]}\n'
ROW = TraceRow(timestamp_ms=5, input_tokens=600, output_tokens=7, hash_ids=(1, 2))


# --- reading -------------------------------------------------------------------------------------------------------


def test_plain_and_gzipped_files_read_alike_whatever_their_names(tmp_path: Path) -> None:
    (tmp_path / "plain.gz").write_text(LINE * 3)
    (tmp_path / "zipped.jsonl").write_bytes(gzip.compress(LINE.encode() * 3))
    assert list(read_trace(tmp_path / "plain.gz")) == [ROW] * 3
    assert list(read_trace(tmp_path / "zipped.jsonl")) == [ROW] * 3


def test_blank_lines_and_further_keys_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("\n" + LINE.replace("{", '{"session": "a", ') + "\n")
    assert list(read_trace(path)) == [ROW]


def test_rows_come_before_the_rest_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(LINE + "rubbish\n")
    assert next(read_trace(path)) == ROW


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{nope", "not JSON"),
        ("[1, 2]", "not a JSON object but list"),
        (LINE.replace('"output_length": 7, ', ""), "key 'output_length' is missing"),
        (LINE.replace(', "hash_ids": [1, 2]', ""), "key 'hash_ids' is missing"),
        (LINE.replace(": 5", ": -5"), "timestamp must be a whole number of at least 0, not -5"),
        (LINE.replace("600", "0"), "input_length must be a whole number of at least 1, not 0"),
        (LINE.replace("7", "7.5"), "output_length must be a whole number of at least 0, not 7.5"),
        (LINE.replace("7", "true"), "output_length must be a whole number of at least 0, not True"),
        (LINE.replace("[1, 2]", "[1, -2]"), "hash_ids must be a list of whole numbers"),
        (LINE.replace("[1, 2]", '"12"'), "hash_ids must be a list of whole numbers"),
        (LINE.replace("[1, 2]", "[1, 18446744073709551616]"), "hash_ids must be a list of whole numbers"),
        (LINE.replace("[1, 2]", "[1]"), "1 hash_ids, but 600 input tokens make 2 blocks of 512"),
        (LINE.replace(": 5", ": 4"), "timestamp 4 lies before the previous row's 5"),
    ],
)
def test_a_bad_line_is_named_with_what_is_wrong(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(LINE + "\n" + line)
    with pytest.raises(TraceError) as caught:
        list(read_trace(path))
    assert str(caught.value).startswith(f"{path}:3: {complaint}")


def test_empty_missing_and_damaged_files(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("\n")
    with pytest.raises(TraceError, match=r"t.jsonl: the file is empty"):
        list(read_trace(path))
    path.write_bytes(gzip.compress(LINE.encode() * 100)[:-9])
    with pytest.raises(TraceError, match=r"t.jsonl:101: damaged gzip data"):
        list(read_trace(path))
    with pytest.raises(FileNotFoundError):
        list(read_trace(tmp_path / "none"))


# --- arrivals ------------------------------------------------------------------------------------------------------


def at(*timestamps_ms: int) -> list[TraceRow]:
    """Rows arriving then, told apart by their output length."""
    return [TraceRow(ms, 1, number, (0,)) for number, ms in enumerate(timestamps_ms)]


GRIDDED = at(0, 0, 0, 3000, 3000, 5999, 6001, 9000)


def test_the_grid_is_recognised_and_nothing_else() -> None:
    assert is_on_grid(GRIDDED)
    assert not is_on_grid(at(0, 0, 40, 277, 471, 3000))
    assert not is_on_grid(at(0, 1000, 2000, 3000, 4000))
    assert not is_on_grid(at(0, 0))
    assert not is_on_grid([])


def test_spreading_keeps_each_group_in_its_three_seconds_and_in_order() -> None:
    spread = spread_arrivals(GRIDDED, seed=1)
    assert [row.output_tokens for row in spread] == [row.output_tokens for row in GRIDDED]
    times = [row.timestamp_ms for row in spread]
    assert times == sorted(times) and len(set(times)) > 5
    points = [0, 0, 0, 3000, 3000, 6000, 6000, 9000]
    assert all(point <= time < point + GRID_MS for point, time in zip(points, times, strict=True))


def test_spreading_is_seeded() -> None:
    assert spread_arrivals(GRIDDED, seed=1) == spread_arrivals(GRIDDED, seed=1)
    assert spread_arrivals(GRIDDED, seed=1) != spread_arrivals(GRIDDED, seed=2)


def test_times_off_the_grid_are_left_alone() -> None:
    poisson = at(0, 0, 40, 277, 3224, 4297)
    assert spread_arrivals(poisson, seed=1) == poisson


# --- lengths and prompts -------------------------------------------------------------------------------------------


def test_scaling_to_a_sixteenth() -> None:
    assert scale(TraceRow(9, 1025, 17, (1, 2, 3)), 1 / 16) == TraceRow(9, 65, 2, (1, 2, 3), block_tokens=32)
    assert scale(TraceRow(9, 1, 0, (1,)), 1 / 512) == TraceRow(9, 1, 1, (1,), block_tokens=1)


@given(st.integers(1, 200_000), st.integers(1, 1024))
def test_any_scale_keeps_one_id_a_block(input_tokens: int, scaled_block_tokens: int) -> None:
    row = TraceRow(0, input_tokens, 1, tuple(range(ceil(input_tokens / 512))))
    scaled = scale(row, scaled_block_tokens / 512)
    assert scaled.block_tokens == scaled_block_tokens
    assert len(scaled.hash_ids) == ceil(scaled.input_tokens / scaled.block_tokens)


@pytest.mark.parametrize("factor", [0.1, 1 / 1024, 0, -1 / 16])
def test_a_scale_that_breaks_blocks_is_refused(factor: float) -> None:
    with pytest.raises(ValueError, match="whole number of tokens"):
        scale(ROW, factor)


def prompt(hash_ids: Sequence[int], input_tokens: int, seed: int = 0) -> list[int]:
    return prompt_token_ids(
        TraceRow(0, input_tokens, 1, tuple(hash_ids), block_tokens=32), range(10, 1000), seed
    )


def test_equal_prefixes_of_ids_are_equal_prefixes_of_tokens() -> None:
    longer, shorter, other = prompt([1, 2, 3], 96), prompt([1, 2], 40), prompt([1, 9, 3], 96)
    assert [len(longer), len(shorter)] == [96, 40]
    assert longer[:40] == shorter
    assert longer[:32] == other[:32] and longer[32:64] != other[32:64]
    assert all(10 <= token < 1000 for token in longer)
    assert len(set(longer)) > 80  # not one token over and over


def test_another_seed_is_another_text() -> None:
    assert prompt([1, 2], 64, seed=0) != prompt([1, 2], 64, seed=1)
    assert prompt([1, 2], 64, seed=-1) == prompt([1, 2], 64, seed=-1)


def test_prompts_are_the_same_in_every_process_and_version() -> None:
    assert prompt([7], 8) == GOLDEN_PROMPT
    program = (
        "from cluster.sim.trace import *; "
        "print(prompt_token_ids(TraceRow(0, 8, 1, (7,), block_tokens=32), range(10, 1000)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == GOLDEN_PROMPT


GOLDEN_PROMPT = [574, 306, 972, 582, 256, 471, 46, 219]


def test_the_module_needs_no_engine() -> None:
    """The simulator imports with none of these installed."""
    program = (
        "import sys, cluster.sim.trace; print(sorted({'torch', 'ray', 'vllm', 'numpy'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


# --- generated conversations ---------------------------------------------------------------------------------------

GENERATED = list(islice(generate_conversations(seed=5), 300))


def test_generated_rows_are_sound_and_seeded() -> None:
    assert list(islice(generate_conversations(seed=5), 300)) == GENERATED
    assert list(islice(generate_conversations(seed=6), 300)) != GENERATED
    assert all(len(row.hash_ids) == ceil(row.input_tokens / 512) for row in GENERATED)
    assert all(a.timestamp_ms <= b.timestamp_ms for a, b in pairwise(GENERATED))
    assert all(512 < row.input_tokens <= 7168 and 1 <= row.output_tokens <= 1024 for row in GENERATED)
    assert not is_on_grid(GENERATED)


def test_generated_rows_survive_the_format(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    with path.open("w") as out:
        for row in GENERATED:
            values = (row.timestamp_ms, row.input_tokens, row.output_tokens, list(row.hash_ids))
            out.write(json.dumps(dict(zip(keys, values, strict=True))) + "\n")
    assert list(read_trace(path)) == GENERATED


def test_generated_turns_share_the_system_block_and_extend_earlier_turns() -> None:
    assert all(row.hash_ids[0] == 0 for row in GENERATED)
    seen: set[tuple[int, ...]] = set()
    extended = 0
    for row in GENERATED:
        full = row.hash_ids[: row.input_tokens // 512]
        extended += any(full[:length] in seen for length in range(2, len(full) + 1))
        seen.update(full[:length] for length in range(1, len(full) + 1))
    assert extended > 100, "hardly any turn continues an earlier one"
    # An id stands for its block and all before it: it occurs at one depth only, after one prefix only.
    before: dict[int, tuple[int, ...]] = {}
    for row in GENERATED:
        for depth, hash_id in enumerate(row.hash_ids):
            assert before.setdefault(hash_id, row.hash_ids[:depth]) == row.hash_ids[:depth]


# --- the published traces ------------------------------------------------------------------------------------------


@needs_published_traces
def test_the_published_conversation_trace() -> None:
    rows = list(read_trace(CONVERSATION))
    assert len(rows) == 12_031
    assert round(fmean(row.input_tokens for row in rows)) == 12_035
    assert round(fmean(row.output_tokens for row in rows)) == 343
    assert len({row.timestamp_ms for row in rows}) == 1_180
    assert is_on_grid(rows) and is_on_grid(rows[:50])
    times = [row.timestamp_ms for row in spread_arrivals(rows, seed=0)]
    assert times == sorted(times)
    assert max(times.count(time) for time in times[:500]) < 5  # 28 at once before
    assert all(abs(new - row.timestamp_ms) <= GRID_MS + 5 for new, row in zip(times, rows, strict=True))


@needs_published_traces
def test_the_published_synthetic_trace() -> None:
    rows = list(read_trace(SYNTHETIC))
    assert len(rows) == 3_993
    assert round(fmean(row.input_tokens for row in rows)) == 15_325
    assert round(fmean(row.output_tokens for row in rows)) == 149
    assert spread_arrivals(rows, seed=0) == rows
