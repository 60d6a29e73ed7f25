"""Real clusters, shared by the tests of one module: vLLM engines take half a minute to start."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from cluster.config import ClusterConfig, load_config
from cluster.control import conductor_pb2
from cluster.control.conductor_pb2_grpc import ConductorStub
from decode_worker import decode_pb2
from decode_worker.decode_pb2_grpc import DecodeWorkerStub
from kvstore.core.blocks import KVLayout
from kvstore.engine.launch import engine_environment
from kvstore.engine.reference import Answer
from kvstore.tiers.dram import Arena, ArenaShape
from kvstore.transfer import kv_pb2
from kvstore.transfer.kv_pb2_grpc import KVNodeStub
from prefill_worker import prefill_pb2
from prefill_worker.prefill_pb2_grpc import PrefillWorkerStub


def small_config(model: Path, **flags: Any) -> ClusterConfig:
    """Everything small, float32; `flags` as the tree's parts."""
    engine = {
        "dtype": "float32",
        "max_model_len": 1024,
        "prefill_chunk_tokens": 128,
        **flags.pop("engine", {}),
    }
    tree = {"model": str(model), "gateway": {"port": 0}, "engine": engine, **flags}
    return load_config(flags=tree, environ={})


def reference_answers(
    model: Path, config: ClusterConfig, requests: list[dict[str, Any]], folder: Path
) -> list[Answer]:
    """What one plain engine answers, all requests at once."""
    folder.mkdir(parents=True, exist_ok=True)
    task = {"model": str(model), "engine": config.engine.model_dump(), "requests": requests}
    (folder / "requests.json").write_text(json.dumps(task))
    done = subprocess.run(
        [sys.executable, "-m", "kvstore.engine.reference", "requests.json", "answers.json"],
        cwd=folder,
        env={
            **os.environ,
            **engine_environment(config.engine, os.environ),
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(Path(__file__).parents[2]),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [Answer(**answer) for answer in json.loads((folder / "answers.json").read_text())]


class RunningCluster:
    """`moonpool up` in a process of its own, as its users start it."""

    def __init__(self, config: ClusterConfig, folder: Path) -> None:
        self.config = config
        self._folder = folder
        environment = {
            f"MOONPOOL_{name.upper()}": str(value)
            for name, value in flattened(json.loads(config.model_dump_json(exclude_none=True)))
        }
        with (folder / "said").open("wb") as said:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "cluster.cli", "up"],
                cwd=Path(__file__).parents[2],
                env={**os.environ, **environment, "TMPDIR": str(folder)},
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
            )

    def wait_ready(self) -> None:
        assert self._process.stdout is not None
        curl = self._process.stdout.readline()
        found = re.search(r"http://[0-9.:]+", curl)
        assert found is not None, (self._folder / "said").read_text()[-3000:]
        self.url = found[0]
        (self.run_dir,) = self._folder.glob("moonpool-*")

    def stop(self) -> None:
        self._process.terminate()
        self._process.communicate(timeout=90)

    @property
    def model_name(self) -> str:
        return Path(str(self.config.model)).name

    def address(self, name: str) -> str:
        return f"unix:{self.run_dir}/{name}.sock"


def flattened(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(key__key, value) of each leaf, as the environment names them."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flattened(value, f"{prefix}{key}__")
        else:
            yield prefix + key, value


@contextmanager
def running(config: ClusterConfig, folder: Path) -> "Iterator[Client]":
    """A cluster for as long as the block lasts."""
    cluster = RunningCluster(config, folder)
    try:
        cluster.wait_ready()
        yield Client(cluster)
    finally:
        cluster.stop()


class Client:
    """Talks to one cluster, over HTTP as clients do and over gRPC as its owners do."""

    def __init__(self, cluster: RunningCluster) -> None:
        self.cluster = cluster

    def complete(self, request: dict[str, Any]) -> Answer:
        """One completion by token ids; `request` is {"prompt", "params"} as for the reference."""
        params = dict(request["params"])
        body = {
            "model": self.cluster.model_name,
            "prompt": request["prompt"],
            "logprobs": 0,
            "return_token_ids": True,
            **params,
        }
        response = httpx.post(f"{self.cluster.url}/v1/completions", json=body, timeout=240)
        assert response.status_code == httpx.codes.OK, response.text
        choice = response.json()["choices"][0]
        return Answer(choice["token_ids"], choice["logprobs"]["token_logprobs"])

    def decode_status(self, name: str = "decode-0") -> dict[str, Any]:
        with grpc.insecure_channel(self.cluster.address(name)) as channel:
            status = DecodeWorkerStub(channel).Status(decode_pb2.StatusRequest(), timeout=30)
        return dict(json.loads(status.status_json))

    def prefill_status(self, name: str = "prefill-0") -> dict[str, Any]:
        with grpc.insecure_channel(self.cluster.address(name)) as channel:
            status = PrefillWorkerStub(channel).Status(prefill_pb2.StatusRequest(), timeout=30)
        return dict(json.loads(status.status_json))

    def node_status(self, name: str = "node-0") -> kv_pb2.NodeStatus:
        """Also runs the node's invariants."""
        with grpc.insecure_channel(self.cluster.address(name)) as channel:
            node = KVNodeStub(channel)
            node.Check(kv_pb2.Empty(), timeout=30)
            return node.Status(kv_pb2.Empty(), timeout=30)

    def drop_all(self, hashes: list[bytes]) -> int:
        with grpc.insecure_channel(self.cluster.address("node-0")) as channel:
            return KVNodeStub(channel).Drop(kv_pb2.DropRequest(hashes=hashes), timeout=30).dropped

    def drop(self, node: str, tier: str) -> int:
        """Everything, from one tier or from both ("")."""
        with grpc.insecure_channel(self.cluster.address(node)) as channel:
            return KVNodeStub(channel).Drop(kv_pb2.DropRequest(all=True, tier=tier), timeout=30).dropped

    def conductor_status(self) -> dict[str, Any]:
        """Also runs the conductor's invariants."""
        with grpc.insecure_channel(self.cluster.address("conductor")) as channel:
            conductor = ConductorStub(channel)
            conductor.Check(conductor_pb2.CheckRequest(), timeout=30)
            reply = conductor.Status(conductor_pb2.StatusRequest(), timeout=30)
        return dict(json.loads(reply.json))

    def tamper(self) -> Arena:
        """The node's arena, for tests that play memory corruption."""
        status = self.node_status()
        (node,) = [member for member in self.conductor_status()["members"] if member["role"] == "node"]
        engine, layers = self.cluster.config.engine, 3
        layout = KVLayout(
            layers=layers,
            block_tokens=self.cluster.config.pool.block_tokens,
            page_tokens=engine.page_tokens,
            page_bytes=status.block_bytes // layers,
            dtype="float32",
            packing="as the engines have it",
        )
        path = Path("/dev/shm") / f"moonpool-node-0-{node['pid']}"
        return Arena.attach(path, ArenaShape(layout, status.slots))


@pytest.fixture(scope="session")
def short_folder() -> Iterator[Callable[[], Path]]:
    """Makes temporary folders with short names: a Unix socket's path has at most 107 bytes."""
    made: list[Path] = []

    def make() -> Path:
        made.append(Path(tempfile.mkdtemp(prefix="mp-")))
        return made[-1]

    yield make
    for folder in made:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.tiny_model import tiny_model

    return tiny_model(tmp_path_factory.mktemp("tiny"), seed=1)


@pytest.fixture(scope="session")
def tiny_cluster(tiny: Path, short_folder: Callable[[], Path]) -> Iterator[Client]:
    """One cluster of the tiny model, for all tests that leave it as they found it."""
    with running(small_config(tiny, pool={"dram_bytes": 16 << 20}), short_folder()) as client:
        yield client


@pytest.fixture(autouse=True)
def nothing_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test on the shared cluster: invariants hold, nothing is held."""
    yield
    if "tiny_cluster" in request.fixturenames:
        wait_until_idle(request.getfixturevalue("tiny_cluster"))


def wait_until_idle(client: Client, seconds: float = 20.0) -> None:
    """No slot is being written or leased, no engine holds a page, the conductor has nothing in flight."""
    deadline = time.monotonic() + seconds
    while held := _held(client):
        assert time.monotonic() < deadline, f"still held after {seconds} s: {held}"
        time.sleep(0.2)


def _held(client: Client) -> dict[str, Any]:
    node, conductor = client.node_status(), client.conductor_status()["conductor"]
    engines = {"decode": client.decode_status(), "prefill": client.prefill_status()}
    counts: dict[str, Any] = {
        "filling": node.filling,
        "draining": node.draining,
        "leases": node.leases,
        "inflight": sum(conductor["inflight"].values()),
    }
    for name, engine in engines.items():
        counts[f"{name} requests"] = engine["running"] + engine["waiting"]
        counts[f"{name} pages"] = engine["kv_usage"]
    return {name: count for name, count in counts.items() if count}
