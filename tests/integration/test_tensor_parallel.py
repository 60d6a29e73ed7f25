"""Tensor parallelism: engines of two ranks, each with its own shard of every block.

The whole story is one process, because each process of an engine takes half a minute to start.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.config import EngineConfig
from kvstore.engine.launch import engine_environment

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]


def test_two_ranks(tiny: Path, short_folder: Callable[[], Path]) -> None:
    """See `two_ranks.py`, which asserts."""
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "integration" / "two_ranks.py", tiny, short_folder()],
        env={
            **os.environ,
            **engine_environment(EngineConfig(), os.environ),
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "all as one engine alone"
