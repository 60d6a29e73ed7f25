"""Writes requirements/cpu.txt and requirements/dev.txt from the environment it runs in.

    .venv/bin/python -m pip install --upgrade ... && .venv/bin/python scripts/lock.py

cpu.txt is the closure of `moonpool[cpu]`, dev.txt what `moonpool[dev]` adds to it. Both are complete, so they are
installed with `--no-deps`. `ABSENT` is what the engine asks for and nothing here uses.
"""

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


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    runtime = closure(project["dependencies"] + extras["cpu"])
    tools = {name: pin for name, pin in closure(extras["dev"]).items() if name not in runtime}
    _write(ROOT / "requirements" / "cpu.txt", "The runtime on CPUs, moonpool[cpu]", runtime)
    _write(ROOT / "requirements" / "dev.txt", "What tests and checks add to cpu.txt, moonpool[dev]", tools)


if __name__ == "__main__":
    main()
