"""Rows of figures with their bars, the setting they were measured in, and the table that shows both."""

import json
import math
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

_REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: `value` must be `op` `bar`.

    `bound` is the best that this design could reach, on the back of an envelope, and `why` the envelope. `samples` are
    the measurements as they were taken, in order, with units in their names. Raises ValueError for a figure that is no
    finite number: it would fail no comparison, or every one.
    """

    name: str
    value: float
    unit: str
    op: Literal[">=", "<="]
    bar: float
    bound: float
    why: str
    samples: tuple[dict[str, float], ...]

    def __post_init__(self) -> None:
        numbers = {"value": self.value, "bar": self.bar, "bound": self.bound}
        for sample in self.samples:
            numbers |= sample
        for key, number in numbers.items():
            if not math.isfinite(number):
                raise ValueError(f"{self.name}: {key} is {number}")
        if not self.samples:
            raise ValueError(f"{self.name}: a figure without samples")

    @property
    def passes(self) -> bool:
        return self.value >= self.bar if self.op == ">=" else self.value <= self.bar

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "pass": self.passes}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Row":
        """The verdict is reached anew, not read."""
        given = {key: value for key, value in fields.items() if key != "pass"}
        return cls(**{**given, "samples": tuple(given["samples"])})


@dataclass(frozen=True, slots=True)
class NotMeasured:
    """A figure that could not be taken here, and why: neither a pass nor a failure."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Setting:
    """What the figures depend on beside the code: `load` is the machine's load average over a minute at the start."""

    cpu: str
    cores: int
    memory_gib: float
    load: float
    commit: str
    seed: int
    configuration: str

    @classmethod
    def here(cls, seed: int, configuration: str) -> "Setting":
        return cls(
            cpu=_cpu(),
            cores=os.cpu_count() or 1,
            memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
            load=round(os.getloadavg()[0], 2),
            commit=_commit(),
            seed=seed,
            configuration=configuration,
        )


@dataclass(frozen=True, slots=True)
class Report:
    """What one benchmark found."""

    benchmark: str
    setting: Setting
    rows: tuple[Row, ...]
    not_measured: tuple[NotMeasured, ...] = ()

    @property
    def passes(self) -> bool:
        """Does every figure that was taken meet its bar?"""
        return all(row.passes for row in self.rows)

    def write(self, path: Path) -> None:
        rows = [row.to_json() for row in self.rows]
        content = {
            "benchmark": self.benchmark,
            "setting": asdict(self.setting),
            "rows": rows,
            "not_measured": [asdict(one) for one in self.not_measured],
        }
        path.write_text(json.dumps(content, indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> "Report":
        content = json.loads(path.read_text())
        rows = tuple(Row.from_json(row) for row in content["rows"])
        not_measured = tuple(NotMeasured(**one) for one in content["not_measured"])
        return cls(content["benchmark"], Setting(**content["setting"]), rows, not_measured)


def show(reports: Sequence[Report], console: Console) -> None:
    """One table for all, under the settings they were measured in; below it, what each bound stands for."""
    table = Table(
        Column("figure", no_wrap=True),
        "value",
        "bar",
        "bound",
        "n",
        "",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for report in reports:
        setting = report.setting
        console.print(
            f"[bold]{report.benchmark}[/]: {setting.cpu}, {setting.cores} cores, {setting.memory_gib} GiB, load "
            f"{setting.load} · commit {setting.commit} · seed {setting.seed}\n{setting.configuration}",
            highlight=False,
        )
        for row in report.rows:
            verdict = "[green]pass[/]" if row.passes else "[bold red]FAIL[/]"
            value, bar = f"{row.value:.3g} {row.unit}", f"{row.op} {row.bar:g}"
            table.add_row(row.name, value, bar, f"{row.bound:.2g}", str(len(row.samples)), verdict)
        for one in report.not_measured:
            table.add_row(one.name, "", "", "", "0", "[yellow]not measured[/]")
    console.print(table)
    for report in reports:
        for row in report.rows:
            console.print(f"bound of {row.name}: {row.why}", style="dim", highlight=False)
        for one in report.not_measured:
            console.print(f"{one.name}: {one.reason}", style="dim", highlight=False)


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str:
    """Short hash of the checkout, marked when files differ from it; `unknown` outside a repository."""
    git = ["git", "-C", str(_REPOSITORY)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        )
        changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + (" with changes" if changed.stdout.strip() else "")
