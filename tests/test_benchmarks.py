"""The arithmetic of the benchmarks' rows: a figure that misses its bar must never read as one that meets it."""

import io
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.handoff import decode_rate
from benchmarks.report import NotMeasured, Report, Row, Setting, show

ROW = Row(
    name="ratio", value=0.9, unit="×", op=">=", bar=0.9, bound=1.0, why="because", samples=({"ratio": 0.9},)
)
SETTING = Setting(cpu="a cpu", cores=2, memory_gib=8.0, load=0.1, commit="abc", seed=0, configuration="small")


@pytest.mark.parametrize(
    ("op", "value", "passes"),
    [(">=", 0.9, True), (">=", 0.8999, False), ("<=", 0.9, True), ("<=", 0.9001, False)],
)
def test_a_row_passes_up_to_and_with_its_bar(op: str, value: float, passes: bool) -> None:
    assert replace(ROW, op=op, value=value).passes is passes  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_no_figure_is_made_of_what_is_no_number(bad: float) -> None:
    with pytest.raises(ValueError, match="value is"):
        replace(ROW, value=bad)
    with pytest.raises(ValueError, match="ratio is"):
        replace(ROW, samples=({"ratio": 1.0}, {"ratio": bad}))
    with pytest.raises(ValueError, match="bound is"):
        replace(ROW, bound=bad)


def test_no_figure_without_samples() -> None:
    with pytest.raises(ValueError, match="without samples"):
        replace(ROW, samples=())


def test_a_report_survives_its_file_and_its_verdict_is_reached_anew(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    report = Report("b", SETTING, (ROW, replace(ROW, name="other", value=0.5)))
    report.write(path)
    assert Report.read(path) == report
    assert not report.passes
    path.write_text(path.read_text().replace('"pass": false', '"pass": true'))
    assert not Report.read(path).passes


def test_one_missed_bar_fails_the_report() -> None:
    assert Report("b", SETTING, (ROW, ROW)).passes
    assert not Report("b", SETTING, (ROW, replace(ROW, value=0.1))).passes


def test_what_was_not_measured_neither_passes_nor_fails_and_says_why(tmp_path: Path) -> None:
    missing = NotMeasured("link / peer", "the peer is not installed")
    report = Report("b", SETTING, (ROW,), (missing,))
    report.write(tmp_path / "rows.json")
    assert Report.read(tmp_path / "rows.json") == report
    assert report.passes
    assert not Report("b", SETTING, (replace(ROW, value=0.1),), (missing,)).passes
    shown = io.StringIO()
    show([report], Console(file=shown, width=120))
    [line] = [line for line in shown.getvalue().splitlines() if "not measured" in line]
    assert "link / peer" in line
    assert "link / peer: the peer is not installed" in shown.getvalue()


def test_the_decode_window_opens_with_the_last_first_token_and_closes_with_the_first_end() -> None:
    early = [(0.0, 1), (1.0, 1), (2.0, 1), (3.0, 1)]
    late = [(1.5, 1), (2.5, 2), (3.5, 1)]
    assert decode_rate([early, late]) == pytest.approx(4 / 1.5)  # at 2, 2.5 (two) and 3, within 1.5 s
    with pytest.raises(ValueError, match="never ran together"):
        decode_rate([[(0.0, 1), (1.0, 1)], [(1.0, 1), (2.0, 1)]])
