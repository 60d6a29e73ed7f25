"""Says, before any download, why this machine cannot run Moonpool; and after it, whether torch is the right build.

Standard library only, and every Python from 3.6 on must be able to parse this file: a wrong Python should get a
sentence, not a SyntaxError. `before()` and `torch_trouble()` are functions of facts alone; `look()` gathers them.
"""

import importlib.util
import os
import platform
import runpy
import shutil
import sys
import tempfile
from typing import FrozenSet, List, NamedTuple, Optional, Tuple

GIB = 1 << 30
RAM_NEED_BYTES = 7.5 * GIB  # an 8 GiB machine reports a little less
VENV_NEED_BYTES = int(4.5 * GIB)  # the installed packages; vLLM, torch and triton are most of it
CACHE_NEED_BYTES = int(2.5 * GIB)  # pip's wheels and the default model
TMP_NEED_BYTES = int(1.5 * GIB)  # wheels while they are being unpacked
GLIBC_NEED = (2, 28)  # what the engine's wheels are built for


class Folder(NamedTuple):
    """Where the installation will write, and how much. Folders with one `device` share their free space."""

    path: str
    device: int
    free_bytes: float
    need_bytes: float


class Machine(NamedTuple):
    """All that decides whether Moonpool can be installed and run here."""

    python: Tuple[int, int]
    has_venv: bool
    os: str
    glibc: Optional[Tuple[int, int]]
    arch: str
    cpu_flags: FrozenSet[str]
    ram_bytes: float
    folders: Tuple[Folder, ...]


def before(machine: Machine) -> Optional[str]:
    """One sentence that says what to do, or None where the installation may go ahead."""
    return (
        _python_trouble(machine)
        or _platform_trouble(machine)
        or _ram_trouble(machine)
        or _disk_trouble(machine)
    )


def torch_trouble(cuda: Optional[str]) -> Optional[str]:
    """`cuda` is `torch.version.cuda`: None for a CPU build, the only one that works beside the CPU engine."""
    if cuda is None:
        return None
    return (
        "pip installed a CUDA {} build of torch, but the CPU engine needs a CPU build: run"
        " `make clean venv TORCH_INDEX=URL`, where URL is a package index that serves CPU wheels of torch"
        " (the public index serves CUDA builds for Linux; see README.md).".format(cuda)
    )


def _python_trouble(machine: Machine) -> Optional[str]:
    if machine.python != (3, 11):
        return (
            "Moonpool needs Python 3.11, this is {}.{}: install it and run `make venv PYTHON=python3.11`"
            " (or the path of your 3.11).".format(*machine.python)
        )
    if not machine.has_venv:
        return (
            "This Python cannot make virtual environments (venv or ensurepip is missing): on Debian or Ubuntu run"
            " `apt-get install python3.11-venv`, then `make venv` again."
        )
    return None


def _platform_trouble(machine: Machine) -> Optional[str]:
    if machine.os != "Linux":
        return "Moonpool's engines run on Linux, this is {}: use a Linux machine or container.".format(
            machine.os
        )
    if machine.arch != "x86_64" or "avx2" not in machine.cpu_flags:
        return (
            "The CPU engine needs an x86-64 processor with AVX2, this is {}{}: use another machine, or install"
            " the `gpu` extra on one with a GPU.".format(
                machine.arch, " without AVX2" if machine.arch == "x86_64" else ""
            )
        )
    if machine.glibc is None or machine.glibc < GLIBC_NEED:
        found = "another C library" if machine.glibc is None else "glibc {}.{}".format(*machine.glibc)
        return (
            "The engine's wheels need glibc {}.{} or newer, this system has {}: use a newer distribution, for"
            " instance Debian 12 or Ubuntu 22.04.".format(GLIBC_NEED[0], GLIBC_NEED[1], found)
        )
    return None


def _ram_trouble(machine: Machine) -> Optional[str]:
    if machine.ram_bytes >= RAM_NEED_BYTES:
        return None
    return (
        "Two engines, the KV pool and the model need 8 GiB of memory, this machine (or its container) has"
        " {:.1f} GiB: use a larger one or raise the container's limit.".format(machine.ram_bytes / GIB)
    )


def _disk_trouble(machine: Machine) -> Optional[str]:
    for device in sorted({folder.device for folder in machine.folders}):
        shared = [folder for folder in machine.folders if folder.device == device]
        need_bytes = sum(folder.need_bytes for folder in shared)
        free_bytes = min(folder.free_bytes for folder in shared)
        if free_bytes < need_bytes:
            return (
                "Installing needs {:.1f} GiB of free disk for {}, there are {:.1f} GiB: free some, or set"
                " XDG_CACHE_HOME, PIP_CACHE_DIR or TMPDIR to folders on a larger disk.".format(
                    need_bytes / GIB, " and ".join(folder.path for folder in shared), free_bytes / GIB
                )
            )
    return None


def look(repository: str) -> Machine:
    """The facts of this machine."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Machine(
        python=(sys.version_info[0], sys.version_info[1]),
        has_venv=all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")),
        os=platform.system(),
        glibc=_glibc(),
        arch=platform.machine(),
        cpu_flags=_cpu_flags(),
        ram_bytes=_ram_bytes(),
        folders=(
            _folder(repository, VENV_NEED_BYTES),
            _folder(cache, CACHE_NEED_BYTES),
            _folder(tempfile.gettempdir(), TMP_NEED_BYTES),
        ),
    )


def _folder(path: str, need_bytes: float) -> Folder:
    there = os.path.abspath(path)
    while not os.path.isdir(there):
        there = os.path.dirname(there)
    return Folder(path, os.stat(there).st_dev, shutil.disk_usage(there).free, need_bytes)


def _glibc() -> Optional[Tuple[int, int]]:
    name, version = platform.libc_ver()
    if name != "glibc":
        return None
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _cpu_flags() -> FrozenSet[str]:
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("flags"):
            return frozenset(line.split(":", 1)[1].split())
    return frozenset()


def _ram_bytes() -> float:
    """Memory of the machine, or of the container where that is less."""
    limits = [
        float(line.split()[1]) * 1024 for line in _lines("/proc/meminfo") if line.startswith("MemTotal:")
    ]
    limits += [float(line) for line in _lines("/sys/fs/cgroup/memory.max") if line.strip() != "max"]
    return min(limits) if limits else 0.0


def _lines(path: str) -> List[str]:
    try:
        with open(path) as lines:
            return lines.readlines()
    except OSError:
        return []


def _installed_torch_cuda() -> Optional[str]:
    """What the installed torch was built for, read without importing it: its dependencies come later."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise SystemExit("preflight: torch is not installed; run `make venv`.")
    cuda = runpy.run_path(os.path.join(os.path.dirname(spec.origin), "version.py"))["cuda"]
    return None if cuda is None else str(cuda)


def _imported_torch_cuda() -> Optional[str]:
    try:
        import torch
    except (ImportError, OSError) as error:
        raise SystemExit(
            "preflight: torch does not import ({}): run `make clean venv`, with TORCH_INDEX set to an index"
            " of CPU wheels if the public one gave you a CUDA build.".format(error)
        ) from error
    return torch.version.cuda


def main(when: str) -> int:
    repository = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if when == "before":
        trouble = before(look(repository))
    elif when == "torch":
        trouble = torch_trouble(_installed_torch_cuda())
    else:
        trouble = torch_trouble(_imported_torch_cuda())
    if trouble:
        sys.stderr.write("preflight: " + trouble + "\n")
    return 1 if trouble else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "before"))
