"""`moonpool sim`: a run, a sweep, a report that stands alone, one decision explained, and what is wrong said in words."""

import json
from itertools import islice
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli import app
from cluster.sim.cache import hit_ratio
from cluster.sim.trace import TraceRow, generate_conversations


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "talk.jsonl"
    with path.open("w") as file:
        for row in islice(generate_conversations(seed=3), 60):
            line = {
                "timestamp": row.timestamp_ms,
                "input_length": row.input_tokens,
                "output_length": row.output_tokens,
                "hash_ids": row.hash_ids,
            }
            file.write(json.dumps(line) + "\n")
    return path


def sim(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["sim", *arguments])
    return result.exit_code, result.output


def test_a_sweep_writes_json_and_a_report_that_fetches_nothing(trace: Path, tmp_path: Path) -> None:
    figures, page = tmp_path / "runs.json", tmp_path / "runs.html"
    code, _ = sim(
        *("--trace", str(trace), "--policy", "kvcache_centric", "--policy", "random", "--shape", "2+1"),
        *("--rate", "1", "--rate", "60", "--processes", "1", "--json", str(figures), "--html", str(page)),
    )
    assert code == 0
    runs = json.loads(figures.read_text())
    assert [(run["policy"], run["rate"]) for run in runs] == [
        ("kvcache_centric", 1),
        ("kvcache_centric", 60),
        ("random", 1),
        ("random", 60),
    ]
    assert runs[0]["attainment"] == 1.0
    assert runs[0]["hit_ratio"] > runs[2]["hit_ratio"]
    html = page.read_text()
    assert html.count("<svg") == 6
    assert "kvcache_centric 2+1 talk ×60" in html
    assert "src=" not in html


def test_two_processes_find_what_one_finds(trace: Path, tmp_path: Path) -> None:
    found = []
    for processes in ("1", "2"):
        path = tmp_path / f"{processes}.json"
        code, _ = sim(
            *("--trace", str(trace), "--shape", "1+1", "--shape", "2+1", "--rate", "30"),
            "--processes",
            processes,
            "--json",
            str(path),
        )
        assert code == 0
        found.append(json.loads(path.read_text()))
    assert found[0] == found[1]


def test_one_decision_is_explained(trace: Path) -> None:
    code, output = sim("--trace", str(trace), "--policy", "cache_aware", "--shape", "2+1", "--explain", "7")
    assert code == 0
    told = json.loads(output)
    assert told["request"] == "r000007"
    assert told["explanation"]["chosen"]["prefill"] == told["prefill"]
    assert told["ttft_s"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policy", "astrology"], "'astrology' is none of"),
        (["--policy", "random", "--option", "threshold=2"], "'random' has no option 'threshold'"),
        (["--option", "threshold"], "NAME=NUMBER, not 'threshold'"),
        (["--shape", "8x8"], "PREFILL+DECODE, as 8+8, not '8x8'"),
        (["--shape", "0+4"], "cannot work with 0 prefill"),
        (["--rate", "0"], "rate 0 is not above 0"),
        (["--profile", "abacus"], "'abacus' is neither"),
        (["--overload", "panic"], "'panic'"),
        (["--explain", "60"], "the trace has 0 to 59"),
    ],
)
def test_what_is_wrong_is_said(trace: Path, arguments: list[str], words: str) -> None:
    code, output = sim("--trace", str(trace), *arguments)
    assert code == 2
    assert words in " ".join(output.split())


def test_hits_of_one_pool_by_hand() -> None:
    """Blocks 0 and 1, then 0 and 2, then 0 and 1 again: with room for two, 1 was pushed out by 2."""
    rows = [TraceRow(0, 1024, 1, ids) for ids in ((0, 1), (0, 2), (0, 1))]
    assert hit_ratio(rows, 10) == pytest.approx(3 / 6)
    assert hit_ratio(rows, 2) == pytest.approx(2 / 6)
    assert hit_ratio([], 2) == 0.0
