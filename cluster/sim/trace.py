"""Request traces in Mooncake's format: reading, spreading, scaling, generating, and turning into prompts.

A trace is JSON Lines, plain or gzipped, one request a line, four integer keys (Mooncake, FAST'25, released traces):

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ..., 59]}

`timestamp` is the arrival in milliseconds since the start; lengths are tokens; `hash_ids` names the input's blocks of
512 tokens, the last possibly part-full. An id stands for its block *and everything before it*, so two requests share
exactly the prefix that their id lists share from the left. The trace holds no text: `prompt_token_ids` makes some.

Everything here is a function of its arguments and a seed: the simulator and a live replay see the same requests.
"""

import gzip
import heapq
import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import groupby
from math import ceil
from pathlib import Path
from random import Random
from typing import IO, Any, cast

from blake3 import blake3

TRACE_BLOCK_TOKENS = 512

# The conversation trace was recorded in 3-second bins: all its arrivals lie within 3 ms of a multiple of 3000 ms.
GRID_MS = 3000
GRID_TOLERANCE_MS = 5
GRID_FRACTION_MIN = 0.95  # arrivals at random times hit the grid with probability 11 / 3000


class TraceError(ValueError):
    """A trace file that cannot be used; the message names the file, the line and what is wrong there."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace; `len(hash_ids) == ceil(input_tokens / block_tokens)`."""

    timestamp_ms: int
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]
    block_tokens: int = TRACE_BLOCK_TOKENS


# --- reading -------------------------------------------------------------------------------------------------------


def read_trace(path: Path) -> Iterator[TraceRow]:
    """Yield a file's rows in order, holding one line at a time.

    Raises `TraceError` at the first bad line or where there is no row at all, `OSError` where the file cannot be read.
    """
    previous_ms = -1
    for number, line in _numbered_lines(path):
        if not line.strip():
            continue
        try:
            row = _parse_row(line)
            if row.timestamp_ms < previous_ms:
                raise TraceError(f"timestamp {row.timestamp_ms} lies before the previous row's {previous_ms}")
        except TraceError as error:
            raise TraceError(f"{path}:{number}: {error}") from error
        previous_ms = row.timestamp_ms
        yield row
    if previous_ms < 0:
        raise TraceError(f"{path}: the file is empty: no requests in it")


def _numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    with _open_maybe_gzipped(path) as lines:
        try:
            for number, line in enumerate(lines, start=1):
                yield number, line
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise TraceError(f"{path}:{number + 1}: damaged gzip data: {error}") from error


def _open_maybe_gzipped(path: Path) -> IO[bytes]:
    """Tell gzip by its magic number: downloads often lose or gain the suffix."""
    with path.open("rb") as probe:
        zipped = probe.read(2) == b"\x1f\x8b"
    return cast(IO[bytes], gzip.open(path, "rb")) if zipped else path.open("rb")


def _parse_row(line: bytes) -> TraceRow:
    """Parse one line; `TraceError` says in plain words what is wrong. Keys beyond the four are ignored."""
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise TraceError(f"not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise TraceError(f"not a JSON object but {type(fields).__name__}")
    row = TraceRow(
        timestamp_ms=_whole_number(fields, "timestamp", at_least=0),
        input_tokens=_whole_number(fields, "input_length", at_least=1),
        output_tokens=_whole_number(fields, "output_length", at_least=0),
        hash_ids=_hash_ids(fields),
    )
    blocks = ceil(row.input_tokens / row.block_tokens)
    if len(row.hash_ids) != blocks:
        raise TraceError(
            f"{len(row.hash_ids)} hash_ids, but {row.input_tokens} input tokens make {blocks} blocks of {row.block_tokens}"
        )
    return row


def _whole_number(fields: dict[str, Any], key: str, at_least: int) -> int:
    if key not in fields:
        raise TraceError(f"key {key!r} is missing")
    value = fields[key]
    if type(value) is not int or value < at_least:  # bool is an int to isinstance
        raise TraceError(f"{key} must be a whole number of at least {at_least}, not {value!r}")
    return value


def _hash_ids(fields: dict[str, Any]) -> tuple[int, ...]:
    if "hash_ids" not in fields:
        raise TraceError("key 'hash_ids' is missing")
    ids = fields["hash_ids"]
    if not isinstance(ids, list) or any(type(i) is not int or not 0 <= i < 2**64 for i in ids):
        raise TraceError("hash_ids must be a list of whole numbers from 0 to 2**64 - 1")
    return tuple(ids)


# --- arrivals ------------------------------------------------------------------------------------------------------


def is_on_grid(rows: Sequence[TraceRow]) -> bool:
    """Whether the arrivals sit on the 3-second recording grid. Needs two instants: a lone burst at 0 proves nothing."""
    on_grid = [row for row in rows if abs(row.timestamp_ms - _grid_point_ms(row)) <= GRID_TOLERANCE_MS]
    instants = {_grid_point_ms(row) for row in on_grid}
    return len(instants) >= 2 and len(on_grid) >= GRID_FRACTION_MIN * len(rows)


def spread_arrivals(rows: Sequence[TraceRow], seed: int) -> list[TraceRow]:
    """Undo the recording grid: each instant's requests get uniform random times within their 3 s, in their order.

    Rows whose arrivals sit on no grid come back as they are. Pass enough of the trace to tell (1000 rows are plenty).
    """
    if not is_on_grid(rows):
        return list(rows)
    rng = Random(seed)
    spread: list[TraceRow] = []
    for point_ms, group in groupby(rows, key=_grid_point_ms):
        members = list(group)
        offsets_ms = sorted(int(rng.random() * GRID_MS) for _ in members)
        spread += [
            replace(row, timestamp_ms=point_ms + offset_ms)
            for row, offset_ms in zip(members, offsets_ms, strict=True)
        ]
    return spread


def _grid_point_ms(row: TraceRow) -> int:
    return round(row.timestamp_ms / GRID_MS) * GRID_MS


# --- lengths and prompts -------------------------------------------------------------------------------------------


def scale(row: TraceRow, length_scale: float | Fraction) -> TraceRow:
    """Shrink (or stretch) a request's lengths and its blocks by one factor: 1/16 turns 512-token blocks into 32.

    Lengths round up, which keeps one hash id per block whatever the lengths, and no length reaches 0. Raises
    `ValueError` where the factor leaves no whole number of tokens in a block: shared prefixes would no longer end on
    block boundaries.
    """
    factor = Fraction(length_scale)
    block_tokens = row.block_tokens * factor
    if block_tokens < 1 or block_tokens.denominator != 1:
        raise ValueError(
            f"length scale {length_scale} turns a block of {row.block_tokens} tokens into {float(block_tokens):g}: "
            "the scaled block must be a whole number of tokens (1/16 gives 32)"
        )
    return replace(
        row,
        input_tokens=ceil(row.input_tokens * factor),
        output_tokens=max(1, ceil(row.output_tokens * factor)),
        block_tokens=int(block_tokens),
    )


def prompt_token_ids(row: TraceRow, vocab: range, seed: int = 0) -> list[int]:
    """Make a request's prompt: each hash id becomes one fixed run of tokens from `vocab`, the last cut to length.

    Equal prefixes of hash ids give equal prefixes of tokens. Another seed gives other text for the whole trace, so that a
    second replay need not find the first one's cache. Stable across processes, machines and versions (BLAKE3).
    """
    tokens: list[int] = []
    for hash_id in row.hash_ids:
        tokens += _block_token_ids(hash_id, row.block_tokens, vocab, seed)
    return tokens[: row.input_tokens]


def _block_token_ids(hash_id: int, block_tokens: int, vocab: range, seed: int) -> Iterator[int]:
    key = struct.pack("<qQ", seed, hash_id)
    words = struct.unpack(f"<{block_tokens}I", blake3(b"trace block" + key).digest(length=4 * block_tokens))
    return (vocab[word % len(vocab)] for word in words)


# --- a trace of our own ----------------------------------------------------------------------------------------------

# Shape of the generated conversations, in unscaled tokens and seconds: a miniature of the published conversation trace
# (several turns, long growing prefixes, answers of a few hundred tokens), short enough for an 8k context.
SYSTEM_TOKENS = 512
USER_TOKENS_MEDIAN = 300
ANSWER_TOKENS_MEDIAN = 200
LENGTH_SIGMA = 0.7  # of the log-normal lengths
SESSION_GAP_S = 4.0
THINK_S = 15.0
GO_ON_PROBABILITY = 0.7
INPUT_TOKENS_MAX = 7168
ANSWER_TOKENS_MAX = 1024


@dataclass(slots=True)
class _Session:
    """A conversation between turns: how long it is by now and the ids of its full blocks."""

    tokens: int
    full_blocks: list[int]


def generate_conversations(seed: int) -> Iterator[TraceRow]:
    """Yield an endless trace of conversations in order of arrival; take as many rows as wanted.

    Sessions start at random (Poisson), all with the same system block; each turn's input is everything said before plus
    a new message, so prefixes grow; the next turn follows after a think time.
    """
    rng = Random(seed)
    next_id = 1  # 0 is the system block
    started = 0
    turns: list[tuple[float, int, _Session]] = []  # (arrival_s, session number, session): a heap
    next_session_s = 0.0
    while True:
        if not turns or next_session_s <= turns[0][0]:
            heapq.heappush(turns, (next_session_s, started, _Session(SYSTEM_TOKENS, [0])))
            started += 1
            next_session_s += rng.expovariate(1 / SESSION_GAP_S)
        arrival_s, number, session = heapq.heappop(turns)
        session.tokens += _length(rng, USER_TOKENS_MEDIAN)
        if session.tokens > INPUT_TOKENS_MAX:
            continue
        while len(session.full_blocks) < session.tokens // TRACE_BLOCK_TOKENS:
            session.full_blocks.append(next_id)
            next_id += 1
        hash_ids = list(session.full_blocks)
        if session.tokens % TRACE_BLOCK_TOKENS:  # a part-full block is another block once it has grown
            hash_ids.append(next_id)
            next_id += 1
        answer_tokens = min(_length(rng, ANSWER_TOKENS_MEDIAN), ANSWER_TOKENS_MAX)
        yield TraceRow(round(arrival_s * 1000), session.tokens, answer_tokens, tuple(hash_ids))
        session.tokens += answer_tokens
        if rng.random() < GO_ON_PROBABILITY:
            heapq.heappush(turns, (arrival_s + rng.expovariate(1 / THINK_S), number, session))


def _length(rng: Random, median: int) -> int:
    return max(1, round(median * rng.lognormvariate(0.0, LENGTH_SIGMA)))
