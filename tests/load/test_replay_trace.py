"""The replay tool against a small real HTTP server that plays an OpenAI-compatible one, well-behaved or not."""

import asyncio
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import web

from tests.load.replay_trace import (
    NoServerError,
    Record,
    ReplayConfig,
    Report,
    Server,
    UsageError,
    draw,
    main,
    replay,
    spread_of,
    write_json,
)

REPOSITORY = Path(__file__).resolve().parents[2]
TOOL = REPOSITORY / "tests" / "load" / "replay_trace.py"


# --- the server ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How the server answers one request."""

    status: int = 200
    retry_after: str | None = None
    first_token_s: float = 0.0
    gap_s: float = 0.0
    tokens_in_chunk: int = 1
    text: str = "x"
    cached_tokens: int | None = None
    usage: bool = True
    stop_after: int | None = None  # tokens, then:
    stop_by: str = ""  # "drop" the connection, "end" the stream early, send an "error", send "rubbish"
    refuses_ignore_eos: bool = False
    waits_for_requests: int = 0  # answers nobody before so many have asked


@dataclass(slots=True)
class FakeOpenAI:
    """Serves on a thread of its own; remembers what it was asked and when."""

    behave: Callable[[int], Behaviour]
    context_tokens: int | None = 8192
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    asked_at_s: list[float] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    enough_asked: asyncio.Event = field(default_factory=asyncio.Event)

    async def models(self, request: web.Request) -> web.Response:
        model = {"id": "fake", "object": "model", "max_model_len": self.context_tokens}
        return web.json_response({"object": "list", "data": [model]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        behaviour = self.behave(len(self.asked))
        self.asked_at_s.append(time.perf_counter())
        self.asked.append(body)
        self.headers.append(dict(request.headers))
        if behaviour.refuses_ignore_eos and "ignore_eos" in body:
            return web.json_response({"error": {"message": "unknown argument: ignore_eos"}}, status=400)
        if behaviour.status != 200:
            headers = {"Retry-After": behaviour.retry_after} if behaviour.retry_after else {}
            return web.json_response({"error": {"message": "no"}}, status=behaviour.status, headers=headers)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        with suppress(ConnectionError):  # the client went away
            await self._stream(request, response, body, behaviour)
        return response

    async def _stream(
        self, request: web.Request, response: web.StreamResponse, body: dict[str, Any], behaviour: Behaviour
    ) -> None:
        async def send(event: dict[str, Any]) -> None:
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")

        sent = 0
        await asyncio.sleep(behaviour.first_token_s)
        if len(self.asked) >= behaviour.waits_for_requests:
            self.enough_asked.set()
        await self.enough_asked.wait()
        while sent < body["max_tokens"]:
            if sent == behaviour.stop_after:
                if behaviour.stop_by == "drop":
                    assert request.transport is not None
                    request.transport.abort()
                if behaviour.stop_by == "error":
                    await send({"error": {"message": "the engine died", "code": 500}})
                if behaviour.stop_by == "rubbish":
                    await response.write(b"data: {not json\n\n")
                return
            if sent:
                await asyncio.sleep(behaviour.gap_s)
            sent += min(behaviour.tokens_in_chunk, body["max_tokens"] - sent)
            last = sent == body["max_tokens"]
            choice = {"index": 0, "text": behaviour.text, "finish_reason": "length" if last else None}
            await send({"id": "1", "object": "text_completion", "choices": [choice]})
        if behaviour.usage:
            usage: dict[str, Any] = {"prompt_tokens": len(body["prompt"]), "completion_tokens": sent}
            if behaviour.cached_tokens is not None:
                usage["prompt_tokens_details"] = {"cached_tokens": behaviour.cached_tokens}
            await send({"id": "1", "choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")


@contextmanager
def serving(
    behave: Callable[[int], Behaviour] | Behaviour, context_tokens: int | None = 8192
) -> Iterator[FakeOpenAI]:
    """Run the server on a free port of the loopback until the block ends."""
    fake = FakeOpenAI(behave if callable(behave) else lambda _: behave, context_tokens)
    started: Future[Callable[[], object]] = Future()

    async def serve() -> None:
        over = asyncio.Event()
        app = web.Application()
        app.router.add_get("/v1/models", fake.models)
        app.router.add_post("/v1/completions", fake.completions)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        started.set_result(partial(asyncio.get_running_loop().call_soon_threadsafe, over.set))
        await over.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    stop = started.result(timeout=10)
    try:
        yield fake
    finally:
        stop()
        thread.join(10)


# --- traces and configurations -------------------------------------------------------------------------------------


def write_trace(
    path: Path, arrivals_ms: Sequence[int], input_tokens: int = 64, output_tokens: int = 4
) -> Path:
    """A trace of equal requests that share their first block where they have several."""
    blocks = math.ceil(input_tokens / 512)
    rows = [
        {
            "timestamp": at_ms,
            "input_length": input_tokens,
            "output_length": output_tokens,
            "hash_ids": [0, *range(100 * i + 1, 100 * i + blocks)],
        }
        for i, at_ms in enumerate(arrivals_ms)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "trace.jsonl", [0, 40, 80, 120, 160])


def config(fake: FakeOpenAI, trace: Path | None, **changes: Any) -> ReplayConfig:
    return ReplayConfig(url=fake.url, trace=trace, **{"timeout_s": 30.0, **changes})


def written(report: Report, folder: Path) -> dict[str, Any]:
    """The report as a reader of the file gets it; NaN and infinity are not JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} in the JSON")

    write_json(report, folder / "report.json")
    content: dict[str, Any] = json.loads((folder / "report.json").read_text(), parse_constant=refuse)
    return content


def is_drawn(report: Report, folder: Path) -> bool:
    draw(report, folder / "report.png")
    return (folder / "report.png").read_bytes().startswith(b"\x89PNG")


# --- well-behaved answers ------------------------------------------------------------------------------------------


def test_a_replay_measures_what_the_server_does(trace: Path, tmp_path: Path) -> None:
    with serving(Behaviour(first_token_s=0.1, gap_s=0.05, cached_tokens=16)) as fake:
        report = replay(config(fake, trace, requests=4))
    summary = report.summary
    assert (summary.sent, summary.succeeded, summary.errors, summary.unsent) == (4, 4, {}, 0)
    assert summary.ttft_s and 0.1 <= summary.ttft_s.p50 < 1
    assert summary.tbt_all_gaps_s and summary.tbt_all_gaps_s.count == 4 * 3
    assert 0.045 < summary.tbt_all_gaps_s.p50 < 0.5
    assert summary.e2e_s and 0.25 <= summary.e2e_s.p50 < 2.5
    assert summary.cached_token_ratio == 16 / 64
    assert all(record.completion_tokens == 4 for record in report.records)
    assert len(written(report, tmp_path)["requests"]) == 4


def test_requests_say_what_the_trace_says(trace: Path) -> None:
    with serving(Behaviour()) as fake:
        replay(config(fake, trace, requests=2, api_key="secret", vocab=1000))
    body = fake.asked[0]
    assert (body["max_tokens"], body["temperature"], body["stream"]) == (4, 0, True)
    assert body["ignore_eos"] is True and body["stream_options"] == {"include_usage": True}
    assert body["model"] == "fake"
    assert len(body["prompt"]) == 64 and all(256 <= token < 1000 for token in body["prompt"])
    assert fake.headers[0]["Authorization"] == "Bearer secret"


def test_shared_prefixes_are_sent_as_shared_prefixes_after_scaling(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl", [0, 10, 20], input_tokens=1500)
    with serving(Behaviour()) as fake:
        replay(config(fake, trace, length_scale=Fraction(1, 16)))
    first, second, third = (body["prompt"] for body in fake.asked)
    assert len(first) == 94  # 1500 / 16, rounded up
    assert first[:32] == second[:32] == third[:32]
    assert first[32:36] != second[32:36]


def test_the_key_is_not_written(trace: Path, tmp_path: Path) -> None:
    with serving(Behaviour()) as fake:
        report = replay(config(fake, trace, api_key="secret-key"))
    written(report, tmp_path)
    assert "secret-key" not in (tmp_path / "report.json").read_text()
    assert "secret-key" not in repr(report)


def test_arrivals_keep_the_traces_times_divided_by_the_speedup(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl", [500, 900, 1700])
    with serving(Behaviour()) as fake:
        report = replay(config(fake, trace, speedup=4))
    assert [record.arrival_s for record in report.records] == pytest.approx([0.0, 0.1, 0.3])
    assert all(record.sent_s >= record.arrival_s for record in report.records)
    assert fake.asked_at_s[2] - fake.asked_at_s[0] > 0.2


def test_late_answers_do_not_delay_later_requests(tmp_path: Path) -> None:
    """Open loop: a server that answers nobody until 150 have asked gets its 150, more than default pools let out."""
    trace = write_trace(tmp_path / "t.jsonl", [5 * i for i in range(150)], output_tokens=1)
    with serving(Behaviour(waits_for_requests=150)) as fake:
        summary = replay(config(fake, trace, requests=150, timeout_s=30.0)).summary
    assert (summary.succeeded, summary.errors) == (150, {})


def test_a_generated_trace_is_replayed_where_none_is_given() -> None:
    with serving(Behaviour()) as fake:
        report = replay(config(fake, None, requests=6, speedup=100, length_scale=Fraction(1, 16), seed=3))
    assert report.summary.succeeded == 6
    assert all(body["prompt"][:32] == fake.asked[0]["prompt"][:32] for body in fake.asked)


def test_prompts_beyond_the_context_are_dropped_and_counted(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl", [0, 10], input_tokens=100, output_tokens=10)
    trace.write_text(
        trace.read_text()
        + json.dumps({"timestamp": 20, "input_length": 101, "output_length": 10, "hash_ids": [7]})
        + "\n"
    )
    with serving(Behaviour(), context_tokens=110) as fake:
        summary = replay(config(fake, trace)).summary
    assert (summary.sent, summary.dropped) == (2, 1)


def test_max_output_cuts_answers_before_the_context_is_checked(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl", [0], input_tokens=100, output_tokens=50)
    with serving(Behaviour(), context_tokens=110) as fake:
        assert replay(config(fake, trace, max_output=10)).summary.sent == 1
    assert fake.asked[0]["max_tokens"] == 10


def test_chunks_of_several_tokens_are_said_to_be(trace: Path) -> None:
    with serving(Behaviour(tokens_in_chunk=2)) as fake:
        several = replay(config(fake, trace))
    with serving(Behaviour()) as fake:
        single = replay(config(fake, trace))
    assert any("several tokens" in note for note in several.notes)
    assert single.notes == ()
    assert several.records[0].completion_tokens == 4 and len(several.records[0].gaps_s) == 1


def test_tokens_without_text_count_as_tokens(trace: Path) -> None:
    """A token that ends inside a character has no text yet, the last one included; its chunk is a token all the same."""
    with serving(Behaviour(text="", gap_s=0.01)) as fake:
        report = replay(config(fake, trace, requests=1))
    assert len(report.records[0].token_times_s) == 4
    assert report.notes == ()


def test_a_server_that_refuses_ignore_eos_is_asked_once_without(trace: Path) -> None:
    with serving(Behaviour(refuses_ignore_eos=True)) as fake:
        report = replay(config(fake, trace))
    assert report.summary.succeeded == 5
    assert "ignore_eos" in fake.asked[0] and "ignore_eos" not in fake.asked[-1]
    assert any("ignore_eos" in note for note in report.notes)


def test_without_cached_counts_the_ratio_is_unknown(trace: Path, tmp_path: Path) -> None:
    with serving(Behaviour()) as fake:
        assert replay(config(fake, trace)).summary.cached_token_ratio is None
    with serving(lambda i: Behaviour(cached_tokens=32 if i == 0 else None)) as fake:
        assert replay(config(fake, trace, requests=4)).summary.cached_token_ratio == 32 / (4 * 64)


def test_without_usage_the_times_remain(trace: Path) -> None:
    with serving(Behaviour(usage=False)) as fake:
        report = replay(config(fake, trace))
    assert report.summary.succeeded == 5
    assert report.summary.ttft_s and report.summary.output_tokens_per_s == 0.0


# --- answers that go wrong -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("behaviour", "kind"),
    [
        (Behaviour(status=503), "http_503"),
        (Behaviour(status=400), "http_400"),
        (Behaviour(stop_after=2, stop_by="drop"), "disconnected"),
        (Behaviour(stop_after=2, stop_by="end"), "disconnected"),
        (Behaviour(stop_after=2, stop_by="error"), "error_event"),
        (Behaviour(stop_after=2, stop_by="rubbish"), "malformed_event"),
        (Behaviour(first_token_s=20), "timeout"),
        (Behaviour(gap_s=20), "timeout"),
    ],
)
def test_each_failure_is_counted_by_its_kind(
    behaviour: Behaviour, kind: str, trace: Path, tmp_path: Path
) -> None:
    with serving(behaviour) as fake:
        report = replay(config(fake, trace, timeout_s=1.0 if kind == "timeout" else 30.0))
    summary = report.summary
    assert summary.errors == {kind: 5}
    assert (summary.failed, summary.succeeded, summary.slo_attainment, summary.goodput_rps) == (
        5,
        0,
        0.0,
        0.0,
    )
    assert written(report, tmp_path)["summary"]["ttft_s"] is None
    assert all(record.detail for record in report.records)


def test_refusals_are_told_from_failures_and_keep_their_retry_after(trace: Path) -> None:
    refusals = [Behaviour(status=429, retry_after="2"), Behaviour(status=429, retry_after="4")]
    with serving(lambda i: refusals[i] if i < 2 else Behaviour()) as fake:
        summary = replay(config(fake, trace)).summary
    assert (summary.refused, summary.failed, summary.succeeded) == (2, 0, 3)
    assert summary.errors == {"refused_429": 2}
    assert summary.retry_after_s and (summary.retry_after_s.mean, summary.retry_after_s.max) == (3.0, 4.0)
    assert (summary.slo_attainment, summary.slo_attainment_accepted) == (3 / 5, 1.0)


def test_one_failure_leaves_the_others_alone(trace: Path, tmp_path: Path) -> None:
    with serving(lambda i: Behaviour(stop_after=1, stop_by="drop") if i == 2 else Behaviour()) as fake:
        report = replay(config(fake, trace))
    assert [record.error for record in report.records] == [None, None, "disconnected", None, None]
    assert is_drawn(report, tmp_path)


def test_the_overall_timeout_ends_a_replay(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl", [0, 10, 60_000])
    with serving(Behaviour(first_token_s=60)) as fake:
        report = replay(config(fake, trace, timeout_s=60.0, overall_timeout_s=2.0))
    assert report.summary.errors == {"unfinished": 2}
    assert report.summary.unsent == 1
    assert report.summary.duration_s < 30


def test_nothing_to_send_is_a_report_too(trace: Path, tmp_path: Path) -> None:
    with serving(Behaviour(), context_tokens=8) as fake:
        report = replay(config(fake, trace))
    content = written(report, tmp_path)
    assert is_drawn(report, tmp_path)
    assert content["requests"] == []
    assert (content["summary"]["dropped"], content["summary"]["slo_attainment"]) == (5, None)


def test_no_server_and_no_such_model_are_said(trace: Path) -> None:
    with pytest.raises(NoServerError, match="no server answers"):
        replay(ReplayConfig(url="http://127.0.0.1:9/v1", trace=trace))
    with serving(Behaviour()) as fake, pytest.raises(UsageError, match=r"no model 'other'; it has: fake"):
        replay(config(fake, trace, model="other"))
    with serving(Behaviour()) as fake, pytest.raises(NoServerError, match="answers 404"):
        replay(ReplayConfig(url=fake.url + "/wrong", trace=trace))


# --- the numbers ---------------------------------------------------------------------------------------------------


def record(sent_s: float, token_times_s: Sequence[float], **changes: Any) -> Record:
    plain: dict[str, Any] = {
        "row": 0,
        "arrival_s": sent_s - 0.25,
        "sent_s": sent_s,
        "token_times_s": tuple(token_times_s),
        "finish_s": max(token_times_s, default=sent_s),
        "prompt_tokens_sent": 10,
        "output_tokens_asked": len(token_times_s),
        "prompt_tokens": 10,
        "completion_tokens": len(token_times_s),
        "cached_tokens": None,
        "error": None,
        "detail": None,
        "retry_after_s": None,
    }
    return Record(**(plain | changes))


def report_of(records: Sequence[Record], slo_ttft_s: float, slo_tbt_s: float) -> Report:
    asked = ReplayConfig(url="http://nowhere", slo_ttft_s=slo_ttft_s, slo_tbt_s=slo_tbt_s)
    return Report(asked, Server("m", None), "then", tuple(records), 0, 0, False, ())


def test_percentiles_agree_with_the_standard_library() -> None:
    values = [((7 * i * i) % 101) / 10 for i in range(37)]
    spread = spread_of([*values, None])
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    assert spread is not None
    assert (spread.p50, spread.p90, spread.p99) == pytest.approx((cuts[49], cuts[89], cuts[98]))
    assert (spread.count, spread.max) == (37, max(values))
    assert spread.mean == pytest.approx(statistics.fmean(values))
    assert spread_of([None]) is None


def test_a_requests_tbt_is_the_mean_of_its_slowest_tenth() -> None:
    gaps = [0.1] * 18 + [0.5, 0.9]  # 20 gaps: the slowest two count
    times = [1.0]
    for gap in gaps:
        times.append(times[-1] + gap)
    assert record(0.0, times).tbt_s == pytest.approx(0.7)
    assert record(0.0, [1.0, 1.2, 1.3]).tbt_s == pytest.approx(0.2)  # of two gaps, the slowest one
    assert record(0.0, [1.0]).tbt_s is None


def test_attainment_and_goodput_need_both_limits() -> None:
    records = [
        record(0.0, [1.0, 1.1]),  # within both
        record(0.0, [3.0, 3.1]),  # late first token
        record(0.0, [1.0, 2.0]),  # slow gap
        record(0.0, [2.0]),  # one token, exactly at the limit: within
        record(5.0, [], error="http_500"),
        record(5.0, [], error="refused_429", retry_after_s=1.0, finish_s=10.0),
    ]
    summary = report_of(records, slo_ttft_s=2.0, slo_tbt_s=0.5).summary
    assert summary.slo_attainment == 2 / 6
    assert summary.slo_attainment_accepted == 2 / 5
    assert summary.duration_s == 10.0
    assert summary.goodput_rps == pytest.approx(0.2)
    assert summary.output_tokens_per_s == pytest.approx(0.7)
    assert summary.send_lag_s and summary.send_lag_s.p99 == pytest.approx(0.25)
    assert (summary.succeeded, summary.refused, summary.failed) == (4, 1, 1)


# --- the command ---------------------------------------------------------------------------------------------------


def run_tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the file as a user does, from elsewhere, without the repository on the path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(TOOL), *arguments]
    return subprocess.run(
        command, env=environment, cwd="/", capture_output=True, text=True, timeout=60, check=False
    )


def test_the_command_writes_its_report_and_says_so(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    with serving(Behaviour(cached_tokens=32)) as fake:
        done = run_tool(
            "--url", fake.url, "--trace", str(trace), "--out", str(out), "--length-scale", "0.0625"
        )
    assert done.returncode == 0, done.stderr
    assert "within both limits" in done.stdout and "goodput" in done.stdout
    content = json.loads((out / "report.json").read_text())
    assert content["summary"]["succeeded"] == 5
    assert content["config"]["length_scale"] == 0.0625
    assert (out / "report.png").stat().st_size > 10_000


def exit_status(*arguments: str) -> int:
    try:
        return main(arguments)
    except SystemExit as leaving:  # argparse's way
        return cast(int, leaving.code)


def test_when_all_fail_the_exit_status_is_1_and_the_report_is_written(trace: Path, tmp_path: Path) -> None:
    with serving(Behaviour(status=500)) as fake:
        assert exit_status("--url", fake.url, "--trace", str(trace), "--out", str(tmp_path)) == 1
    assert json.loads((tmp_path / "report.json").read_text())["summary"]["errors"] == {"http_500": 5}
    assert exit_status("--url", "http://127.0.0.1:9/v1", "--out", str(tmp_path)) == 1


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--trace", "/none.jsonl"], "No such file"),
        (["--length-scale", "0.1"], "whole number of tokens"),
        (["--length-scale", "1/0"], "--length-scale"),
        (["--requests", "0"], "at least 1"),
        (["--speedup", "-1"], "not above 0"),
        (["--slo-tbt", "nan"], "--slo-tbt"),
        (["--model", "other"], "no model 'other'"),
    ],
)
def test_wrong_usage_is_said_with_exit_status_2(
    arguments: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(Behaviour()) as fake:
        assert exit_status("--url", fake.url, "--out", str(tmp_path), *arguments) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_replay_reports_what_was_done(tmp_path: Path, stop: signal.Signals) -> None:
    trace = write_trace(tmp_path / "t.jsonl", [0, 10, 50_000])
    with serving(lambda i: Behaviour(first_token_s=60 if i == 1 else 0)) as fake:
        command = [
            sys.executable,
            str(TOOL),
            "--url",
            fake.url,
            "--trace",
            str(trace),
            "--out",
            str(tmp_path),
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as tool:
            give_up_s = time.monotonic() + 30
            while len(fake.asked) < 2 and time.monotonic() < give_up_s:
                time.sleep(0.05)
            time.sleep(0.3)
            tool.send_signal(stop)
            output, _ = tool.communicate(timeout=30)
    assert tool.returncode == 130, output
    content = json.loads((tmp_path / "report.json").read_text())
    assert content["interrupted"] is True
    assert [request["error"] for request in content["requests"]] == [None, "unfinished"]
    assert content["summary"]["unsent"] == 1
