"""The environment of a process that will start an engine."""

import sys
from pathlib import Path

import pytest

from cluster.config import EngineConfig
from kvstore.engine.launch import engine_environment

INTEL_OPENMP = Path(sys.prefix) / "lib" / "libiomp5.so"


@pytest.mark.skipif(not INTEL_OPENMP.exists(), reason="there is no Intel OpenMP here")
@pytest.mark.parametrize(
    ("inherited", "expected"),
    [
        ("", [str(INTEL_OPENMP)]),
        (f"{INTEL_OPENMP}:/lib/other.so", [str(INTEL_OPENMP), "/lib/other.so"]),
        ("/lib/other.so /venv/torch/lib/libgomp.so.1", [str(INTEL_OPENMP), "/lib/other.so"]),
        ("/lib/other.so:/venv/torch/lib/libgomp.so.1", [str(INTEL_OPENMP), "/lib/other.so"]),
    ],
)
def test_one_openmp_is_preloaded(inherited: str, expected: list[str]) -> None:
    environment = engine_environment(EngineConfig(), {"LD_PRELOAD": inherited})
    assert environment["LD_PRELOAD"].split(":") == expected
