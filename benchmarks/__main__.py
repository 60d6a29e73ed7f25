"""`make bench`: runs every benchmark, each in a process of its own, and shows all rows in one table.

Exits with 1 when a row misses its bar or a benchmark does not come to an end.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from benchmarks.report import Report, show

_BENCHMARKS = ("handoff", "pool")


def main() -> int:
    reports, broken = [], []
    with tempfile.TemporaryDirectory(prefix="moonpool-bench-") as folder:
        for name in _BENCHMARKS:
            path = Path(folder) / f"{name}.json"
            command = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(path)]
            status = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
            if path.exists():
                reports.append(Report.read(path))
            else:
                broken.append(f"benchmarks.{name} ended with status {status} and no rows")
    console = Console()
    show(reports, console)
    for problem in broken:
        console.print(f"[bold red]{problem}")
    return 1 if broken or not all(report.passes for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
