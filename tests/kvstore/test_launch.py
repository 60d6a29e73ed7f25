"""The environment of a process that will start an engine."""

import sys
from pathlib import Path

import pytest
import torch

from cluster.config import EngineConfig
from kvstore.engine.launch import engine_dtype, engine_environment

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


def test_a_cpu_computes_in_float32_whatever_units_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen on a CPU with units for bfloat16: one prompt in six had other log-probabilities in the cluster than alone."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert engine_dtype(EngineConfig()) == "float32"
    assert engine_dtype(EngineConfig(dtype="bfloat16")) == "bfloat16"
