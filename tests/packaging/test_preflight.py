import ast
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import preflight
from scripts.preflight import GIB, Folder, Machine, before, torch_trouble

SOURCE = Path(preflight.__file__)
FINE = Machine(
    python=(3, 11),
    has_venv=True,
    os="Linux",
    glibc=(2, 36),
    arch="x86_64",
    cpu_flags=frozenset({"sse4_2", "avx2"}),
    ram_bytes=7.7 * GIB,
    folders=(Folder("/srv/moonpool", 1, 20.0 * GIB, 5.0 * GIB), Folder("/home/me", 2, 9.0 * GIB, 2.0 * GIB)),
)
SHARED_DISK = (Folder("/srv", 1, 7.0 * GIB, 5.0 * GIB), Folder("/home", 1, 7.0 * GIB, 2.5 * GIB))


def test_a_fine_machine_passes() -> None:
    assert before(FINE) is None


@pytest.mark.parametrize(
    ("machine", "problem", "remedy"),
    [
        (FINE._replace(python=(3, 12)), "needs Python 3.11, this is 3.12", "PYTHON="),
        (FINE._replace(python=(3, 6)), "needs Python 3.11, this is 3.6", "PYTHON="),
        (FINE._replace(has_venv=False), "venv or ensurepip is missing", "apt-get install python3.11-venv"),
        (FINE._replace(os="Darwin"), "this is Darwin", "Linux machine or container"),
        (FINE._replace(arch="aarch64"), "this is aarch64:", "another machine"),
        (FINE._replace(cpu_flags=frozenset({"avx"})), "x86_64 without AVX2", "another machine"),
        (FINE._replace(glibc=(2, 27)), "this system has glibc 2.27", "Debian 12"),
        (FINE._replace(glibc=None), "another C library", "Debian 12"),
        (FINE._replace(ram_bytes=4 * GIB), "has 4.0 GiB", "raise the container's limit"),
        (
            FINE._replace(folders=SHARED_DISK),
            "needs 7.5 GiB of free disk for /srv and /home, there are 7.0",
            "TMPDIR",
        ),
    ],
)
def test_one_sentence_says_what_to_do(machine: Machine, problem: str, remedy: str) -> None:
    sentence = before(machine)
    assert sentence is not None
    assert problem in sentence
    assert remedy in sentence
    assert sentence.endswith(".")
    assert "\n" not in sentence


def test_space_on_one_disk_does_not_help_another() -> None:
    full = Folder("/home", 2, 1.0 * GIB, 2.0 * GIB)
    sentence = before(FINE._replace(folders=(FINE.folders[0], full)))
    assert sentence is not None
    assert "2.0 GiB of free disk for /home, there are 1.0 GiB" in sentence


def test_only_a_cpu_build_of_torch_is_accepted() -> None:
    assert torch_trouble(None) is None
    sentence = torch_trouble("13.0")
    assert sentence is not None
    assert "CUDA 13.0" in sentence
    assert "make clean venv TORCH_INDEX=" in sentence


def test_an_old_python_can_still_read_the_check() -> None:
    ast.parse(SOURCE.read_text(), feature_version=(3, 6))


@pytest.mark.parametrize("when", ["before", "torch", "after"])
def test_this_machine_passes(when: str) -> None:
    run = subprocess.run([sys.executable, SOURCE, when], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
