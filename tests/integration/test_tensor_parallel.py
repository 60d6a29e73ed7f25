"""Tensor parallelism: engines of two ranks, each with its own shard of every block.

Each process of an engine takes half a minute to start: the story of `two_ranks.py` has as few as can be.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from cluster.config import EngineConfig
from kvstore.engine.launch import engine_environment
from kvstore.engine.reference import Answer
from tests.integration.conftest import Client, reference_answers, running, small_config, wait_until_idle

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[2]
GREEDY = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}


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


@pytest.mark.skipif(os.environ.get("MOONPOOL_FAULTS") != "full", reason="minutes; see make test-faults")
def test_a_killed_rank_ends_its_engine_and_a_new_one_answers_alike(
    tiny: Path, short_folder: Callable[[], Path], tmp_path: Path
) -> None:
    """A cluster of such engines on both sides, as its users start it."""
    rng = random.Random(5)
    prompts = [[rng.randrange(4, 250) for _ in range(count)] for count in (5, 32, 100, 300)]
    requests = [{"prompt": prompt, "params": GREEDY} for prompt in prompts]
    config = small_config(tiny, engine={"tensor_parallel": 2}, pool={"dram_bytes": 16 << 20})
    expected = reference_answers(tiny, config, requests, tmp_path / "reference")
    with running(config, short_folder()) as client:
        for request, right in zip(requests, expected, strict=True):
            assert not right.difference(client.complete(request))
        wait_until_idle(client)
        blocks = client.node_status().committed
        os.kill(a_rank_of(client, "decode"), signal.SIGKILL)
        for request, right in zip(requests, expected, strict=True):
            assert not right.difference(once_it_is_back(client, request))
        wait_until_idle(client)
        assert client.node_status().committed >= blocks
        assert client.decode_status()["failed_blocks"] == 0


def a_rank_of(client: Client, role: str) -> int:
    [pid] = [m["pid"] for m in client.conductor_status()["members"] if m["role"] == role]
    ranks = [p.pid for p in psutil.Process(pid).children(recursive=True) if "Worker_TP1" in p.name()]
    assert len(ranks) == 1
    return ranks[0]


def once_it_is_back(client: Client, request: dict[str, Any], seconds: float = 600.0) -> Answer:
    until_s = time.monotonic() + seconds
    while True:
        try:
            return client.complete(request)
        except (AssertionError, httpx.TransportError):
            assert time.monotonic() < until_s, "the worker did not come back"
            time.sleep(2.0)
