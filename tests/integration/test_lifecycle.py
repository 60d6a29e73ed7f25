"""`moonpool up` as people use it: it serves, says what failed, and leaves nothing behind."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

REPOSITORY = Path(__file__).parents[2]


def up(*flags: str, folder: Path) -> "subprocess.Popen[str]":
    """`folder` is its temporary folder, so that what it leaves there is seen."""
    return subprocess.Popen(
        [sys.executable, "-m", "cluster.cli", "up", "--port", "0", "--dram-bytes", str(16 << 20), *flags],
        cwd=REPOSITORY,
        env={**os.environ, "TMPDIR": str(folder), "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def traces(folder: Path, family: list[psutil.Process]) -> set[str]:
    """What a cluster could leave: files in its temporary folder, shared memory named after its processes."""
    pids = {str(process.pid) for process in family}
    shared = {str(path) for path in Path("/dev/shm").iterdir() if pids & set(re.findall(r"\d+", path.name))}
    return {str(path) for path in folder.iterdir()} | shared


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def test_two_cycles_leave_nothing(tiny: Path, short_folder: Callable[[], Path]) -> None:
    folder = short_folder()
    for stop in (signal.SIGINT, signal.SIGTERM):
        process = up("--model", str(tiny), "--max-model-len", "512", folder=folder)
        assert process.stdout is not None
        curl = process.stdout.readline()
        found = re.search(r"http://[0-9.:]+", curl)
        assert found is not None, (
            curl,
            process.stderr.read() if process.poll() is not None and process.stderr else "",
        )
        assert httpx.get(f"{found[0]}/ready", timeout=10).status_code == httpx.codes.OK
        body = {"model": tiny.name, "prompt": [9, 8, 7], "max_tokens": 2}
        assert httpx.post(f"{found[0]}/v1/completions", json=body, timeout=60).status_code == httpx.codes.OK
        family = descendants(process.pid)
        assert len(family) > 8, "the cluster is not made of processes of its own"
        started = time.monotonic()
        process.send_signal(stop)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0, said[-2000:]
        assert time.monotonic() - started < 40
        assert not [one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
        assert not traces(folder, family)


def test_a_failed_worker_is_named_with_its_log(tmp_path: Path, short_folder: Callable[[], Path]) -> None:
    """A model folder without weights: both workers fail; the message names one, the reason, and its log."""
    model = tmp_path / "broken"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "nonsense"}')
    temporary = short_folder()
    process = up("--model", str(model), folder=temporary)
    _, said = process.communicate(timeout=240)
    assert process.returncode == 1
    assert re.search(r"(gateway|prefill-0|decode-0) failed to start:", said), said[-2000:]
    assert "nonsense" in said or "model type" in said, said[-2000:]
    assert not list(temporary.iterdir())


def test_a_taken_port_is_said_at_once(tiny: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = subprocess.run(
            [sys.executable, "-m", "cluster.cli", "up", "--model", str(tiny), "--port", str(port)],
            cwd=REPOSITORY,
            env={**os.environ, "TMPDIR": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    assert process.returncode == 1
    assert str(port) in process.stderr and "--port" in process.stderr
    assert not list(tmp_path.iterdir())


def test_a_wrong_flag_names_its_key(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "cluster.cli", "up", "--prefill", "0"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert process.returncode == 2
    assert "prefill" in process.stderr
