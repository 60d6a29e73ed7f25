"""A sweep as one HTML file: a table of the runs, and plots of what they did. Plots are inline SVG; nothing is fetched."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from cluster.sim.sweep import REQUEST_FIELDS, Ran

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; font-variant-numeric: tabular-nums } td, th { padding: .2rem .8rem .2rem 0; text-align: right }
td:first-child, th:first-child { text-align: left } th { border-bottom: 1px solid #999 } svg { max-width: 100%; height: auto }
"""


def write_html(path: Path, runs: Sequence[Ran], title: str) -> None:
    plots = (
        ("Time to first token", _ttft),
        ("Time between tokens: the mean of a request's slowest tenth", _tbt),
        ("Goodput against rate", _goodput),
        ("Requests in the cluster over time", _load),
        ("Cached blocks by where they came from", _hits),
        ("Refusals by reason", _reasons),
    )
    figures = "".join(f"<h2>{escape(name)}</h2>{_svg(plot, runs)}" for name, plot in plots)
    path.write_text(
        f"<!doctype html><meta charset=utf-8><title>{escape(title)}</title><style>{_STYLE}</style>"
        f"<h1>{escape(title)}</h1>{_table(runs)}{figures}\n"
    )


def _table(runs: Sequence[Ran]) -> str:
    heads = (
        "run",
        "meet both limits",
        "goodput/s",
        "refused",
        "missed",
        "hit ratio",
        "TTFT mean",
        "p90",
        "TBT p90",
    )
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}' for cell in cells(ran))}" for ran in runs)
    return f"<table><tr>{''.join(f'<th>{head}' for head in heads)}{rows}</table>"


def cells(ran: Ran) -> tuple[str, ...]:
    """A run's row in a table of runs."""
    s = ran.summary
    ttft, tbt = s["ttft_s"], s["tbt_s"]
    return (
        ran.name,
        f"{s['attainment']:.1%}",
        f"{s['goodput_per_s']:.2f}",
        f"{s['refused']}",
        f"{s['missed']}",
        f"{s['hit_ratio']:.3f}",
        *(f"{ttft[key]:.2f} s" if ttft else "" for key in ("mean", "p90")),
        f"{1000 * tbt['p90']:.0f} ms" if tbt else "",
    )


def _svg(plot: Callable[[Any, Sequence[Ran]], None], runs: Sequence[Ran]) -> str:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.add_subplot()
    plot(axes, runs)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, frameon=False)
    drawn = io.StringIO()
    FigureCanvasSVG(figure).print_svg(drawn, metadata={"Date": None})
    return drawn.getvalue().partition("<svg")[1] + drawn.getvalue().partition("<svg")[2]


def _column(ran: Ran, name: str) -> list[float]:
    index = REQUEST_FIELDS.index(name)
    return [row[index] for row in ran.requests if row[index] is not None]


def _shares(axes: Any, runs: Iterable[Ran], name: str, limit: str, label: str) -> None:
    for ran in runs:
        ordered = sorted(_column(ran, name))
        axes.plot(ordered, [(i + 1) / len(ran.requests) for i in range(len(ordered))], label=ran.name)
        allowed = ran.summary["slo"][limit]
    if allowed is not None:
        axes.axvline(allowed, color="#999", linestyle=":", label="limit")
    axes.set_xlabel(label)
    axes.set_ylabel("share of all arrivals")


def _ttft(axes: Any, runs: Sequence[Ran]) -> None:
    _shares(axes, runs, "ttft_s", "ttft_s", "seconds")


def _tbt(axes: Any, runs: Sequence[Ran]) -> None:
    _shares(axes, runs, "tbt_s", "tbt_s", "seconds")


def _goodput(axes: Any, runs: Sequence[Ran]) -> None:
    lines: dict[str, list[tuple[float, float]]] = {}
    for ran in runs:
        s = ran.summary
        name = f"{s['policy']} {s['prefill']}+{s['decode']} {ran.trace}"
        lines.setdefault(name, []).append((s["rate"], s["goodput_per_s"]))
    for name, points in lines.items():
        points.sort()
        axes.plot([rate for rate, _ in points], [good for _, good in points], marker="o", label=name)
    axes.set_xlabel("rate, as a multiple of the trace's")
    axes.set_ylabel("requests/s within limits")


def _load(axes: Any, runs: Sequence[Ran]) -> None:
    arrived, finished = REQUEST_FIELDS.index("arrived_s"), REQUEST_FIELDS.index("finished_s")
    for ran in runs:
        served = [row for row in ran.requests if row[finished] is not None]
        changes = sorted([(row[arrived], 1) for row in served] + [(row[finished], -1) for row in served])
        times, counts, now = [], [], 0
        for time_s, change in changes:
            now += change
            times.append(time_s)
            counts.append(now)
        axes.plot(times, counts, label=ran.name, linewidth=0.8)
    axes.set_xlabel("seconds")
    axes.set_ylabel("requests")


def _bars(axes: Any, runs: Sequence[Ran], parts: Callable[[Ran], dict[str, float]], label: str) -> None:
    names = list(dict.fromkeys(part for ran in runs for part in parts(ran)))
    left = [0.0] * len(runs)
    for name in names:
        widths = [parts(ran).get(name, 0.0) for ran in runs]
        axes.barh([ran.name for ran in runs], widths, left=left, label=name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_xlabel(label)


def _hits(axes: Any, runs: Sequence[Ran]) -> None:
    _bars(axes, runs, lambda ran: dict(ran.summary["hit_blocks"]), "blocks")


def _reasons(axes: Any, runs: Sequence[Ran]) -> None:
    _bars(axes, runs, lambda ran: dict(ran.summary["refused_by_reason"]), "requests")
