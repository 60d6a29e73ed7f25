"""The KV pool: how fast blocks come from each tier. `python -m benchmarks.pool [--json FILE] [--seed N] [TOPIC ...]`."""

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.pool import codecs, index, links, local, reuse, ssd
from benchmarks.report import NotMeasured, Report, Row, Setting, show

TOPICS: dict[str, Callable[[int], Sequence[Row | NotMeasured]]] = {
    "index": index.rows,
    "local": local.rows,
    "ssd": ssd.rows,
    "links": links.rows,
    "codecs": codecs.rows,
    "reuse": reuse.rows,
}


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--json", type=Path, help="write the rows here")
    arguments.add_argument("--seed", type=int, default=0, help="of prompts and blocks")
    arguments.add_argument("topics", nargs="*", choices=[[], *TOPICS], help="only these")
    given = arguments.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    setting = Setting.here(given.seed, "two KV nodes on one machine, SmolLM2-135M-Instruct")
    found = [one for topic in given.topics or TOPICS for one in TOPICS[topic](given.seed)]
    rows = tuple(one for one in found if isinstance(one, Row))
    report = Report("pool", setting, rows, tuple(one for one in found if isinstance(one, NotMeasured)))
    if given.json is not None:
        report.write(given.json)
    show([report], Console())
    return 0 if report.passes else 1


if __name__ == "__main__":
    sys.exit(main())
