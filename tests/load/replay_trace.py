"""Replay a request trace against an OpenAI-compatible server and judge the answers by their limits.

    python tests/load/replay_trace.py --url http://127.0.0.1:8000/v1 --trace conversation_trace.jsonl.gz \\
        --requests 100 --speedup 4 --length-scale 1/16 --slo-ttft 5 --slo-tbt 0.2 --out report

Open loop: each request leaves at its own time, whatever became of those before it; there is no limit on connections.
How late the generator itself was is part of the report (`send_lag_s`): an overloaded client shows.

Prompts are token ids made from the trace's hash ids (`cluster.sim.trace`), so shared prefixes are shared prompts. The
arrival of a chunk is taken as the time of its token; how many tokens there were is the server's own count (`usage`).

Writes `report.json` (configuration, summary, every request), `report.png` and a table. Exit status: 0 when the replay
ran to its end, 1 when no request succeeded, 2 for wrong usage, 130 when interrupted (what was done is still written).
"""

import argparse
import asyncio
import json
import math
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from fractions import Fraction
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

if __name__ == "__main__":  # run as a file: `cluster` is then found in the repository this file lies in
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from cluster.sim.trace import (
    TraceRow,
    generate_conversations,
    prompt_token_ids,
    read_trace,
    scale,
    spread_arrivals,
)

GRID_SAMPLE_ROWS = 1000  # enough rows to tell a trace's recording grid even when only a few are replayed
SLOWEST_FRACTION = 0.1  # a request's TBT is the mean of its slowest tenth of gaps (Mooncake, FAST'25)
OVERALL_SLACK_S = 30.0
DETAIL_CHARS_MAX = 300
SILENCE_S_MAX = 4.0  # without a terminal, a line of progress at least this often


class UsageError(Exception):
    """The replay cannot start as asked; the message says what to change."""


class NoServerError(Exception):
    """No OpenAI-compatible server answers at the URL; the message says what does."""


# --- what is asked for, and what came of it ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReplayConfig:
    """Everything a replay depends on, beside the server. `trace=None` generates conversations from the seed."""

    url: str
    trace: Path | None = None
    requests: int = 20
    speedup: float = 1.0
    length_scale: Fraction = Fraction(1)
    seed: int = 0
    slo_ttft_s: float = 30.0
    slo_tbt_s: float = 0.2
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    max_output: int | None = None
    timeout_s: float = 600.0
    overall_timeout_s: float | None = None  # None: the arrivals' span, one request's timeout and some slack
    vocab: int = 32_000  # token ids stay below it; the smallest vocabulary in wide use

    @property
    def vocab_range(self) -> range:
        """Token ids for prompts, without the low ones where most tokenisers keep their special tokens."""
        return range(min(256, self.vocab // 2), self.vocab)

    def as_json(self) -> dict[str, Any]:
        """All but the key."""
        plain = asdict(self) | {
            "trace": self.trace and str(self.trace),
            "length_scale": float(self.length_scale),
        }
        del plain["api_key"]
        return plain


@dataclass(frozen=True, slots=True)
class Server:
    """What `/v1/models` told: the model to ask for and its context length where it says."""

    model: str
    context_tokens: int | None


@dataclass(frozen=True, slots=True)
class Record:
    """One request that was sent. Times are seconds since the replay's start; `error` is None where it succeeded."""

    row: int  # in the trace
    arrival_s: float  # when it was due
    sent_s: float
    token_times_s: tuple[float, ...]  # one a chunk that carried text
    finish_s: float
    prompt_tokens_sent: int
    output_tokens_asked: int
    prompt_tokens: int | None  # the three counts are the server's own
    completion_tokens: int | None
    cached_tokens: int | None
    error: str | None
    detail: str | None
    retry_after_s: float | None

    @property
    def first_token_s(self) -> float | None:
        return self.token_times_s[0] if self.token_times_s else None

    @property
    def ttft_s(self) -> float | None:
        return self.token_times_s[0] - self.sent_s if self.token_times_s else None

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.token_times_s)]

    @property
    def tbt_s(self) -> float | None:
        """Mean of the slowest tenth of the gaps, at least one; None where there is no gap."""
        slowest_first = sorted(self.gaps_s, reverse=True)
        taken = slowest_first[: math.ceil(SLOWEST_FRACTION * len(slowest_first))]
        return sum(taken) / len(taken) if taken else None

    @property
    def several_tokens_in_a_chunk(self) -> bool:
        return (self.completion_tokens or 0) > len(self.token_times_s)

    def within(self, slo_ttft_s: float, slo_tbt_s: float) -> bool:
        """Whether it succeeded within both limits. An answer of one token has no gaps to be late in."""
        if self.error is not None or self.ttft_s is None:
            return False
        return self.ttft_s <= slo_ttft_s and (self.tbt_s is None or self.tbt_s <= slo_tbt_s)

    def as_json(self) -> dict[str, Any]:
        plain = asdict(self)
        del plain["token_times_s"]
        return plain | {
            "first_token_s": self.first_token_s,
            "gaps_s": self.gaps_s,
            "ttft_s": self.ttft_s,
            "tbt_s": self.tbt_s,
            "e2e_s": self.finish_s - self.sent_s,
        }


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution in seconds; percentiles interpolate linearly."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Summary:
    """The replay in numbers. None stands for what no request could tell."""

    sent: int
    succeeded: int
    refused: int  # 429
    failed: int  # everything else that did not succeed
    dropped: int  # did not fit the model's context: never sent
    unsent: int  # the replay ended before their time
    duration_s: float  # first send to last finish
    ttft_s: Spread | None
    tbt_all_gaps_s: Spread | None
    tbt_slowest_tenth_s: Spread | None  # of each request the mean of its slowest tenth of gaps
    e2e_s: Spread | None
    slo_attainment: float | None  # within both limits, of all sent: a refusal is a miss
    slo_attainment_accepted: float | None  # the same, of those not refused
    goodput_rps: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    cached_token_ratio: float | None
    errors: dict[str, int]
    retry_after_s: Spread | None
    send_lag_s: Spread | None


@dataclass(frozen=True, slots=True)
class Report:
    """What a replay leaves behind."""

    config: ReplayConfig
    server: Server
    started_at: str
    records: tuple[Record, ...]  # in order of arrival
    dropped: int
    unsent: int
    interrupted: bool
    notes: tuple[str, ...]

    @property
    def summary(self) -> Summary:
        return summarise(self)


# --- summary -----------------------------------------------------------------------------------------------------------


def spread_of(values: Iterable[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    p50, p90, p99 = np.percentile(known, [50, 90, 99])
    return Spread(len(known), sum(known) / len(known), float(p50), float(p90), float(p99), max(known))


def summarise(report: Report) -> Summary:
    """Compute the summary. Times count successful requests only; attainment and errors count all sent."""
    records, config = report.records, report.config
    good = [r for r in records if r.error is None]
    refused = [r for r in records if r.error == "refused_429"]
    within = sum(r.within(config.slo_ttft_s, config.slo_tbt_s) for r in records)
    duration_s = max((r.finish_s for r in records), default=0.0) - min(
        (r.sent_s for r in records), default=0.0
    )
    return Summary(
        sent=len(records),
        succeeded=len(good),
        refused=len(refused),
        failed=len(records) - len(good) - len(refused),
        dropped=report.dropped,
        unsent=report.unsent,
        duration_s=duration_s,
        ttft_s=spread_of(r.ttft_s for r in good),
        tbt_all_gaps_s=spread_of(gap for r in good for gap in r.gaps_s),
        tbt_slowest_tenth_s=spread_of(r.tbt_s for r in good),
        e2e_s=spread_of(r.finish_s - r.sent_s for r in good),
        slo_attainment=_ratio(within, len(records)),
        slo_attainment_accepted=_ratio(within, len(records) - len(refused)),
        goodput_rps=_ratio(within, duration_s) or 0.0,
        prompt_tokens_per_s=_ratio(sum(r.prompt_tokens or 0 for r in good), duration_s) or 0.0,
        output_tokens_per_s=_ratio(sum(r.completion_tokens or 0 for r in good), duration_s) or 0.0,
        cached_token_ratio=_cached_token_ratio(good),
        errors=dict(Counter(r.error for r in records if r.error is not None).most_common()),
        retry_after_s=spread_of(r.retry_after_s for r in refused),
        send_lag_s=spread_of(r.sent_s - r.arrival_s for r in records),
    )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _cached_token_ratio(good: Sequence[Record]) -> float | None:
    """None where no answer spoke of cached tokens; once one did, silence means 0 (servers leave out a zero)."""
    if all(r.cached_tokens is None for r in good):
        return None
    return _ratio(sum(r.cached_tokens or 0 for r in good), sum(r.prompt_tokens or 0 for r in good))


# --- one request -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Planned:
    """A request due `arrival_s` after the start."""

    row: int
    arrival_s: float
    request: TraceRow  # scaled


class RequestError(Exception):
    """Why a request did not succeed: a kind to count by, a detail to read."""

    def __init__(self, kind: str, detail: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(kind, detail)
        self.kind = kind
        self.detail = detail[:DETAIL_CHARS_MAX]
        self.retry_after_s = retry_after_s


@dataclass(slots=True)
class Answer:
    """A streamed answer as it comes in."""

    token_times_s: list[float] = field(default_factory=list)
    textless_finish_s: float | None = None
    finished: bool = False
    usage: dict[str, Any] = field(default_factory=dict)

    def take(self, payload: bytes, now_s: float) -> None:
        """Take one `data:` payload that arrived at `now_s`."""
        if payload == b"[DONE]":
            self.finished = True
            return
        try:
            event = json.loads(payload)
            self.usage = event.get("usage") or self.usage
            for choice in event.get("choices") or ():
                self._take_choice(choice, now_s)
        except (ValueError, TypeError, AttributeError) as error:
            raise RequestError("malformed_event", f"{error}: {payload!r}") from error
        if "error" in event:
            raise RequestError("error_event", json.dumps(event["error"]))

    def _take_choice(self, choice: dict[str, Any], now_s: float) -> None:
        ends = choice.get("finish_reason") is not None
        self.finished = self.finished or ends
        # Without text, a chunk is a token whose character is not complete yet; with a finish reason it may be none.
        if ends and not choice.get("text"):
            self.textless_finish_s = now_s
        else:
            self.token_times_s.append(now_s)

    def settle(self) -> None:
        """After the stream's end: whether it was whole, and whether its closing chunk was a token."""
        if not self.finished:
            raise RequestError("disconnected", "the stream ended without a finish reason")
        uncounted = (self.usage.get("completion_tokens") or 0) > len(self.token_times_s)
        if self.textless_finish_s is not None and uncounted:
            self.token_times_s.append(self.textless_finish_s)
        if not self.token_times_s:
            raise RequestError("no_token", "the answer held no token")

    @property
    def cached_tokens(self) -> int | None:
        details = self.usage.get("prompt_tokens_details") or {}
        return details.get("cached_tokens")


class Replayer:
    """Sends planned requests at their times and records what came back. Owns the records; one use."""

    def __init__(self, config: ReplayConfig, server: Server, http: aiohttp.ClientSession) -> None:
        self.config = config
        self.server = server
        self.http = http
        self.records: list[Record] = []
        self.sent = 0
        self.ignore_eos = True  # vLLM's extension; a server that refuses it is asked without from then on
        self._start_s = time.perf_counter()

    def now_s(self) -> float:
        return time.perf_counter() - self._start_s

    async def run(self, planned: Sequence[Planned]) -> None:
        """Send all at their times and wait for all answers."""
        self._start_s = time.perf_counter()
        async with asyncio.TaskGroup() as in_flight:
            for request in planned:
                body = self._body(request)  # encoded ahead, while there is time
                await asyncio.sleep(request.arrival_s - self.now_s())
                in_flight.create_task(self._send(request, body))

    def _body(self, planned: Planned) -> bytes:
        fields = {
            "model": self.server.model,
            "prompt": prompt_token_ids(planned.request, self.config.vocab_range, self.config.seed),
            "max_tokens": planned.request.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            fields["ignore_eos"] = True
        return json.dumps(fields).encode()

    async def _send(self, planned: Planned, body: bytes) -> None:
        """Send one request and record it, whatever happens to it."""
        answer = Answer()
        failure: RequestError | None = None
        self.sent += 1
        sent_s = self.now_s()
        try:
            await self._ask(planned, body, answer)
            answer.settle()
        except RequestError as error:
            failure = error
        except TimeoutError:
            failure = RequestError("timeout", f"no end within {self.config.timeout_s:g} s")
        except aiohttp.ClientConnectorError as error:
            failure = RequestError("not_connected", str(error))
        except (aiohttp.ClientError, OSError) as error:
            failure = RequestError("disconnected", str(error) or type(error).__name__)
        except asyncio.CancelledError:
            failure = RequestError("unfinished", "the replay ended first")
            raise
        finally:
            self.records.append(self._record(planned, sent_s, answer, failure))

    async def _ask(self, planned: Planned, body: bytes, answer: Answer, again: bool = False) -> None:
        """Post the request and read its stream; ask once more where the server refuses `ignore_eos`."""
        json_type = {"Content-Type": "application/json"}
        url = _endpoint(self.config, "completions")
        async with self.http.post(url, data=body, headers=json_type) as response:
            if response.status == 200:
                await self._read_stream(response, answer)
                return
            text = await response.text(errors="replace")
        if response.status in (400, 422) and "ignore_eos" in text and not again:
            self.ignore_eos = False
            await self._ask(planned, self._body(planned), answer, again=True)
        elif response.status == 429:
            raise RequestError("refused_429", text, _seconds(response.headers.get("Retry-After")))
        else:
            raise RequestError(f"http_{response.status}", text)

    async def _read_stream(self, response: aiohttp.ClientResponse, answer: Answer) -> None:
        rest = b""
        async for data in response.content.iter_any():
            now_s = self.now_s()
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    answer.take(line[len(b"data:") :].strip(), now_s)

    def _record(
        self, planned: Planned, sent_s: float, answer: Answer, failure: RequestError | None
    ) -> Record:
        return Record(
            row=planned.row,
            arrival_s=planned.arrival_s,
            sent_s=sent_s,
            token_times_s=tuple(answer.token_times_s),
            finish_s=self.now_s(),
            prompt_tokens_sent=planned.request.input_tokens,
            output_tokens_asked=planned.request.output_tokens,
            prompt_tokens=answer.usage.get("prompt_tokens"),
            completion_tokens=answer.usage.get("completion_tokens"),
            cached_tokens=answer.cached_tokens,
            error=failure.kind if failure else None,
            detail=failure.detail if failure else None,
            retry_after_s=failure.retry_after_s if failure else None,
        )


def _endpoint(config: ReplayConfig, path: str) -> str:
    return f"{config.url.rstrip('/')}/{path}"


def _seconds(header: str | None) -> float | None:
    """Parse `Retry-After` in seconds; a date, the other legal form, counts as untold."""
    try:
        seconds = float(header or "")
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) else None


# --- the replay --------------------------------------------------------------------------------------------------------


def load_rows(config: ReplayConfig) -> list[TraceRow]:
    """The first `requests` rows, spread off the recording grid, scaled. Raises `UsageError`."""
    try:
        source: Iterator[TraceRow] = (
            generate_conversations(config.seed) if config.trace is None else read_trace(config.trace)
        )
        rows = list(islice(source, max(config.requests, GRID_SAMPLE_ROWS)))
        rows = spread_arrivals(rows, config.seed)[: config.requests]
        return [_limit_output(scale(row, config.length_scale), config.max_output) for row in rows]
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from error


def _limit_output(row: TraceRow, max_output: int | None) -> TraceRow:
    return row if max_output is None else replace(row, output_tokens=min(row.output_tokens, max_output))


def plan(rows: Sequence[TraceRow], context_tokens: int | None, speedup: float) -> list[Planned]:
    """When to send which row; rows that do not fit the context are left out, which leaves the others' times alone."""
    if not rows:
        return []
    start_ms = rows[0].timestamp_ms
    return [
        Planned(index, (row.timestamp_ms - start_ms) / 1000 / speedup, row)
        for index, row in enumerate(rows)
        if context_tokens is None or row.input_tokens + row.output_tokens <= context_tokens
    ]


async def ask_server(http: aiohttp.ClientSession, config: ReplayConfig) -> Server:
    """Learn the model's name and context length. Raises `NoServerError`, or `UsageError` for an unknown model."""
    url = _endpoint(config, "models")
    try:
        async with http.get(url) as response:
            text = await response.text(errors="replace")
        if response.status != 200:
            raise NoServerError(f"{url} answers {response.status}: {text[:DETAIL_CHARS_MAX]}")
        models = {model["id"]: model.get("max_model_len") for model in json.loads(text)["data"]}
    except (aiohttp.ClientError, TimeoutError) as error:
        raise NoServerError(f"no server answers at {url}: {error}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise NoServerError(f"{url} does not answer like an OpenAI server: {error!r}") from error
    name = config.model or next(iter(models), "")
    if name not in models:
        raise UsageError(f"the server has no model {name!r}; it has: {', '.join(models) or 'none'}")
    return Server(name, models[name])


def replay(config: ReplayConfig, console: Console | None = None) -> Report:
    """Run a replay to its end, its timeout or Ctrl-C, and report.

    Raises `UsageError` or `NoServerError` where it cannot start. Ctrl-C is heard only in a process's main thread.
    """
    rows = load_rows(config)
    return asyncio.run(_replay(config, rows, console or Console(quiet=True)))


async def _replay(config: ReplayConfig, rows: Sequence[TraceRow], console: Console) -> Report:
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
    async with aiohttp.ClientSession(
        # No limit on connections; idle ones are left before servers close them (commonly after 5 s), which would race.
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2),
        timeout=aiohttp.ClientTimeout(total=config.timeout_s),
        headers=headers,
    ) as http:
        server = await ask_server(http, config)
        planned = plan(rows, server.context_tokens, config.speedup)
        replayer = Replayer(config, server, http)
        last_arrival_s = planned[-1].arrival_s if planned else 0.0
        overall_s = config.overall_timeout_s or last_arrival_s + config.timeout_s + OVERALL_SLACK_S
        interrupted = False
        notes: list[str] = []
        try:
            async with _shown(replayer, len(planned), console), asyncio.timeout(overall_s):
                await replayer.run(planned)
        except TimeoutError:
            notes.append(f"the replay was ended after {overall_s:g} s")
        except asyncio.CancelledError:  # Ctrl-C: asyncio.run cancels this task
            interrupted = True
    records = tuple(sorted(replayer.records, key=lambda record: record.row))
    if not replayer.ignore_eos:
        notes.append("the server refused ignore_eos: answers may be shorter than the trace's")
    if any(record.several_tokens_in_a_chunk for record in records if record.error is None):
        notes.append("chunks carried several tokens: gaps are between chunks, not between tokens")
    return Report(
        config=config,
        server=server,
        started_at=started_at,
        records=records,
        dropped=len(rows) - len(planned),
        unsent=len(planned) - len(records),
        interrupted=interrupted,
        notes=tuple(notes),
    )


@asynccontextmanager
async def _shown(replayer: Replayer, total: int, console: Console) -> AsyncIterator[None]:
    """Show progress meanwhile: a bar on a terminal, else a line now and then."""
    columns = (TextColumn("replay"), BarColumn(), TextColumn("{task.fields[state]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("replay", total=total, state="")

        async def tick() -> None:
            while True:
                done = len(replayer.records)
                failed = sum(record.error is not None for record in replayer.records)
                state = f"{replayer.sent}/{total} sent · {done} done · {failed} refused or failed"
                progress.update(task, completed=done, state=state)
                if not console.is_terminal:
                    console.print(f"{replayer.now_s():6.1f} s  {state}", highlight=False)
                await asyncio.sleep(0.2 if console.is_terminal else SILENCE_S_MAX)

        ticking = asyncio.create_task(tick())
        try:
            yield
        finally:
            ticking.cancel()


# --- what is written ---------------------------------------------------------------------------------------------------


def write_json(report: Report, path: Path) -> None:
    """Write everything; strict JSON, without NaN."""
    content = {
        "format": 1,
        "started_at": report.started_at,
        "config": report.config.as_json(),
        "server": asdict(report.server),
        "interrupted": report.interrupted,
        "notes": report.notes,
        "summary": asdict(report.summary),
        "requests": [record.as_json() for record in report.records],
    }
    path.write_text(json.dumps(content, allow_nan=False) + "\n", encoding="utf-8")


def print_table(report: Report, console: Console) -> None:
    """Print the summary for a reader."""
    summary, config = report.summary, report.config
    times = Table(title=f"{summary.sent} requests to {report.server.model}", title_justify="left")
    for heading in ("", "p50", "p90", "p99", "max"):
        times.add_column(heading, justify="right" if heading else "left")
    for name, spread in {
        f"TTFT (limit {config.slo_ttft_s:g} s)": summary.ttft_s,
        "TBT, all gaps": summary.tbt_all_gaps_s,
        f"TBT, slowest tenth (limit {config.slo_tbt_s:g} s)": summary.tbt_slowest_tenth_s,
        "end to end": summary.e2e_s,
        "sent late by": summary.send_lag_s,
    }.items():
        figures = (spread.p50, spread.p90, spread.p99, spread.max) if spread else ()
        times.add_row(name, *(f"{figure:.3f} s" for figure in figures))
    console.print(times)
    counts = Table(show_header=False)
    counts.add_column()
    counts.add_column(justify="right")
    for name, value in _figures(summary).items():
        counts.add_row(name, value)
    console.print(counts)
    for note in report.notes:
        console.print(f"note: {note}", highlight=False)


def _figures(summary: Summary) -> dict[str, str]:
    def percent(part: float | None) -> str:
        return "–" if part is None else f"{100 * part:.1f} %"

    figures = {
        "succeeded / refused / failed": f"{summary.succeeded} / {summary.refused} / {summary.failed}",
        "dropped: too long for the model": str(summary.dropped),
        "within both limits": percent(summary.slo_attainment),
        "within both limits, of accepted": percent(summary.slo_attainment_accepted),
        "goodput": f"{summary.goodput_rps:.2f} requests/s",
        "prompt tokens from cache": percent(summary.cached_token_ratio),
        "prompt / output tokens": f"{summary.prompt_tokens_per_s:.0f} / {summary.output_tokens_per_s:.1f} per s",
        "duration": f"{summary.duration_s:.1f} s",
    }
    if summary.unsent:
        figures["not sent any more"] = str(summary.unsent)
    return figures | {f"error: {kind}": str(count) for kind, count in summary.errors.items()}


INK, BLUE, ORANGE, GREY = "#22303c", "#2563eb", "#ea7a1f", "#8a97a3"


def draw(report: Report, path: Path) -> None:
    """Draw the distributions of TTFT and TBT, and arrivals and requests in flight over time."""
    summary, config = report.summary, report.config
    good = [record for record in report.records if record.error is None]
    figure = Figure(figsize=(9, 5.4), dpi=150, layout="constrained")
    axes: dict[str, Axes] = figure.subplot_mosaic([["ttft", "tbt"], ["time", "time"]])
    _draw_cdf(
        axes["ttft"], "time to first token, s", config.slo_ttft_s, {"requests": [r.ttft_s for r in good]}
    )
    _draw_cdf(
        axes["tbt"],
        "time between tokens, s",
        config.slo_tbt_s,
        {
            "slowest tenth of each request": [r.tbt_s for r in good],
            "all gaps": [g for r in good for g in r.gaps_s],
        },
    )
    _draw_load(axes["time"], report.records)
    attained = "–" if summary.slo_attainment is None else f"{100 * summary.slo_attainment:.1f} %"
    figure.suptitle(
        f"{summary.sent} requests to {report.server.model}: {attained} within both limits, "
        f"goodput {summary.goodput_rps:.2f} requests/s",
        color=INK,
        fontsize=11,
        x=0.01,
        ha="left",
    )
    figure.savefig(path)


def _style(axes: Axes, xlabel: str, ylabel: str) -> None:
    axes.set_xlabel(xlabel, color=INK, fontsize=9)
    axes.set_ylabel(ylabel, color=INK, fontsize=9)
    axes.tick_params(colors=GREY, labelsize=8)
    axes.grid(color="#e5e9ed", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)


def _draw_cdf(axes: Axes, xlabel: str, limit_s: float, series: dict[str, Sequence[float | None]]) -> None:
    for (name, values), colour in zip(series.items(), (BLUE, ORANGE), strict=False):
        known = sorted(value for value in values if value is not None)
        if known:
            axes.ecdf(known, label=name, color=colour, linewidth=1.6)
    axes.axvline(limit_s, color=INK, linestyle=":", linewidth=1.2, label=f"limit {limit_s:g} s")
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1.02)
    axes.legend(fontsize=7, frameon=False, loc="lower right")
    _style(axes, xlabel, "share")


def _draw_load(axes: Axes, records: Sequence[Record]) -> None:
    changes = sorted([(r.sent_s, 1) for r in records] + [(r.finish_s, -1) for r in records])
    times = [0.0, *(at_s for at_s, _ in changes)]
    in_flight = np.cumsum([0, *(change for _, change in changes)])
    axes.fill_between(times, in_flight, step="post", color=BLUE, alpha=0.18, linewidth=0)
    axes.step(times, in_flight, where="post", color=BLUE, linewidth=1.4, label="in flight")
    arrivals = [r.arrival_s for r in records]
    axes.plot(arrivals, [0] * len(arrivals), "|", color=INK, markersize=8, label="arrivals", clip_on=False)
    failed = [r.finish_s for r in records if r.error is not None]
    if failed:
        axes.plot(
            failed,
            [0] * len(failed),
            "x",
            color=ORANGE,
            markersize=5,
            label="refused or failed",
            clip_on=False,
        )
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7, frameon=False, loc="upper right", ncols=3)
    _style(axes, "seconds since the start", "requests in flight")


# --- command line ------------------------------------------------------------------------------------------------------


def _fraction(text: str) -> Fraction:
    """Exact, so that 1/16 and 0.0625 are one number."""
    try:
        number = Fraction(text)
    except (ValueError, ZeroDivisionError) as error:
        raise argparse.ArgumentTypeError(f"{text} is not a number") from error
    if number <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def _positive(text: str) -> float:
    return float(_fraction(text))


def _positive_whole(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return number


def _parser() -> argparse.ArgumentParser:
    summary, _, epilog = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--url", required=True, help="the server's base, as OpenAI clients want it: http://host:8000/v1")
    add("--out", type=Path, default=Path("replay-report"), help="folder for report.json and report.png")
    add(
        "--trace",
        type=Path,
        help="a trace in Mooncake's format, plain or gzipped; without it, made from the seed",
    )
    add("--requests", type=_positive_whole, default=20, help="replay the trace's first N rows (20)")
    add("--speedup", type=_positive, default=1.0, help="divide all times between arrivals by this (1)")
    add(
        "--length-scale",
        type=_fraction,
        default=Fraction(1),
        help="multiply all lengths by this (1); 1/16, 0.0625",
    )
    add(
        "--seed",
        type=int,
        default=0,
        help="of arrivals and texts; another seed does not find this one's cache (0)",
    )
    add("--slo-ttft", type=_positive, default=30.0, metavar="SEC", dest="slo_ttft_s")
    add("--slo-tbt", type=_positive, default=0.2, metavar="SEC", dest="slo_tbt_s")
    add("--model", help="the server's first by default")
    add("--api-key")
    add("--max-output", type=_positive_whole, metavar="TOKENS", help="cut longer answers to this")
    add(
        "--timeout",
        type=_positive,
        default=600.0,
        metavar="SEC",
        dest="timeout_s",
        help="for one request (600)",
    )
    add(
        "--overall-timeout",
        type=_positive,
        metavar="SEC",
        dest="overall_timeout_s",
        help="for the whole replay",
    )
    add("--vocab", type=_positive_whole, default=32_000, help="keep token ids below this (32000)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = vars(parser.parse_args(arguments))
    out: Path = options.pop("out")
    config = ReplayConfig(**options)
    console = Console()
    try:
        out.mkdir(parents=True, exist_ok=True)
        report = replay(config, console)
    except (UsageError, OSError) as error:
        parser.error(str(error))
    except NoServerError as error:
        console.print(f"error: {error}", highlight=False)
        return 1
    except KeyboardInterrupt:  # before anything was sent
        return 130
    write_json(report, out / "report.json")
    draw(report, out / "report.png")
    print_table(report, console)
    console.print(f"report: {out / 'report.json'}, {out / 'report.png'}", highlight=False)
    if report.interrupted:
        return 130
    return 0 if report.summary.succeeded else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    sys.exit(main())
