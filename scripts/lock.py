"""Writes requirements/cpu.txt and requirements/dev.txt from the environment it runs in, requirements/gpu.txt from a report.

    .venv/bin/python -m pip install --upgrade ... && .venv/bin/python scripts/lock.py
    pip install --dry-run --ignore-installed --report REPORT '.[gpu]' && .venv/bin/python scripts/lock.py REPORT

cpu.txt is the closure of `moonpool[cpu]`, dev.txt what `moonpool[dev]` adds to it. Both are complete, so they are
installed with `--no-deps`. `ABSENT` is what the engine asks for and nothing here uses.
"""

import json
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
# Image, sound and video decoding: their builds clash with the CPU torch.
ABSENT = frozenset({"torchvision", "torchaudio", "torchcodec"})
HEADER = "# {what}. Complete: install with `pip install --no-deps -r`. Written by scripts/lock.py.\n"


def needs(requirements: Iterable[str], extras: Iterable[str] = ()) -> Iterator[Requirement]:
    """The requirements that hold on this machine with these extras."""
    for line in requirements:
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield requirement


def closure(requirements: Iterable[str]) -> dict[NormalizedName, Version]:
    """Everything installed that these requirements reach, with its public version (no `+cpu`)."""
    seen: set[tuple[NormalizedName, frozenset[str]]] = set()
    found: dict[NormalizedName, Version] = {}
    todo = list(needs(requirements))
    while todo:
        requirement = todo.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if name in ABSENT or (name, extras) in seen:
            continue
        seen.add((name, extras))
        installed = distribution(name)
        found[name] = Version(Version(installed.version).public)
        todo += needs(installed.requires or [], extras)
    return found


def _write(path: Path, what: str, pins: dict[NormalizedName, Version]) -> None:
    path.write_text(HEADER.format(what=what) + "".join(f"{n}=={pins[n]}\n" for n in sorted(pins)))


def reported(report: Path) -> dict[NormalizedName, Version]:
    """What pip would install, by its report: the closure of `moonpool[gpu]` on a machine that need not have a GPU.

    Raises ValueError for a report that was not made for this, or where pip found a CPU build of torch.
    """
    items = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    found = {canonicalize_name(item["name"]): Version(item["version"]) for item in items}
    if found.pop(canonicalize_name("moonpool"), None) is None:
        raise ValueError(f"{report} is not about moonpool")
    if local := [f"{name} {version}" for name, version in found.items() if version.local]:
        raise ValueError(f"{report} has builds that the package index does not: {', '.join(local)}")
    return found


def main() -> None:
    if sys.argv[1:]:
        pins = reported(Path(sys.argv[1]))
        _write(ROOT / "requirements" / "gpu.txt", "The runtime on NVIDIA GPUs, moonpool[gpu]", pins)
        return
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    runtime = closure(project["dependencies"] + extras["cpu"])
    tools = {name: pin for name, pin in closure(extras["dev"]).items() if name not in runtime}
    _write(ROOT / "requirements" / "cpu.txt", "The runtime on CPUs, moonpool[cpu]", runtime)
    _write(ROOT / "requirements" / "dev.txt", "What tests and checks add to cpu.txt, moonpool[dev]", tools)


if __name__ == "__main__":
    main()
