import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("cluster", "kvstore", "prefill_worker", "decode_worker")
INFO = "moonpool-0.1.0.dist-info"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of a copy of this folder: setuptools would leave its build folder in the original."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    local = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, dirs_exist_ok=True, ignore=local)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
    ]
    subprocess.run([*command, "--wheel-dir", out, source], check=True)
    (built,) = out.glob("*.whl")
    return zipfile.ZipFile(built)


def test_the_wheel_ships_the_four_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    shipped = {name for name in wheel.namelist() if not name.startswith(f"{INFO}/")}
    sources = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix in {".py", ".pyi", ".proto", ".html", ".css", ".js", ".toml"}
    }
    assert shipped == sources
    assert {name.split("/")[0] for name in shipped} == set(PACKAGES)


def test_the_wheel_carries_the_command_and_the_licence(wheel: zipfile.ZipFile) -> None:
    assert "moonpool = cluster.cli:app" in wheel.read(f"{INFO}/entry_points.txt").decode()
    assert {f"{INFO}/licenses/LICENSE", f"{INFO}/licenses/NOTICE"} <= set(wheel.namelist())


def test_package_init_files_exist_and_are_empty() -> None:
    folders = {path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert {folder for folder in folders if not (folder / "__init__.py").is_file()} == set()
    assert {folder for folder in folders if (folder / "__init__.py").read_bytes()} == set()


@pytest.mark.parametrize("folder", ["docker", "helm", "tests", "benchmarks", "scripts"])
def test_a_folder_that_is_no_package_stays_none(folder: str) -> None:
    """`docker/__init__.py` would shadow the Docker SDK wherever the root is on sys.path; so for the others."""
    assert not (ROOT / folder / "__init__.py").exists()


def test_core_and_simulator_import_without_engines_and_wires() -> None:
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for package in ("kvstore/core", "cluster/core", "cluster/sim")
        for path in sorted((ROOT / package).rglob("*.py"))
        if path.stem not in {"__init__", "__main__"}
    ]
    absent = ["ray", "torch", "vllm", "transformers", "grpc", "redis", "fastapi"]
    program = f"""
import importlib, sys
sys.modules.update(dict.fromkeys({absent}))  # None: importing it fails, as where it is not installed
for module in {modules}:
    importlib.import_module(module)
"""
    assert modules
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
