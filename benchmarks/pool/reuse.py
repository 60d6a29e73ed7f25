"""The same prompt again, its KV found in the pool: time to first token against that of computing it.

A cluster of two KV nodes: the prefill worker beside one, the decode worker beside the other. Each round takes a prompt
that was never seen; before each further request all copies are dropped but those that it is to find, and the nodes'
counters prove where the blocks came from. Last the cluster is stopped and another started on the same SSD folder.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
from rich.console import Console

from benchmarks.report import Row
from cluster.config import ClusterConfig, load_config
from cluster.control.local import LocalCluster
from kvstore.transfer import kv_pb2 as pb
from kvstore.transfer.kv_pb2_grpc import KVNodeStub

PROMPT_TOKENS = 2000
_ROUNDS = 3
_ANSWER_TOKENS = 4
_TIMEOUT_S = 300.0
_BARS = {"dram": 0.08, "peer": 0.10, "ssd": 0.12, "restart": 0.12}
_KEYS = {"one": "key-of-one", "two": "key-of-two"}
"""API key by tenant."""
_NEAR, _FAR = "node-0", "node-1"  # beside the prefill worker, beside the decode worker

progress = Console(stderr=True, highlight=False)


@dataclass(frozen=True, slots=True)
class Asked:
    ttft_s: float
    token_ids: list[int]
    cached_tokens: int


def config(folder: Path) -> ClusterConfig:
    keys = folder / "keys"
    keys.write_text("".join(f"{key} {tenant}\n" for tenant, key in _KEYS.items()))
    gateway = {"port": 0, "api_keys": keys}
    return load_config(
        flags={"nodes": 2, "gateway": gateway, "pool": {"ssd_dir": folder / "ssd"}}, environ={}
    )


def rows(seed: int) -> list[Row]:
    """Raises RuntimeError when blocks did not come from where they were to come from, or tokens differ."""
    found: dict[str, list[dict[str, float]]] = {source: [] for source in _BARS}
    prompts = [
        np.random.default_rng([seed, number]).integers(0, 49_000, PROMPT_TOKENS).tolist()
        for number in range(_ROUNDS)
    ]
    with tempfile.TemporaryDirectory(prefix="moonpool-bench-") as folder:
        colds: list[Asked] = []
        with LocalCluster(config(Path(folder))) as cluster:
            _ask(cluster, list(range(100, 164)))  # warms both engines
            for number, prompt in enumerate(prompts):
                colds.append(_round(cluster, prompt, found))
                progress.print(
                    f"round {number}: cold {colds[-1].ttft_s:.2f} s, then "
                    + ", ".join(
                        f"{source} {each[-1]['ttft_s']:.2f} s" for source, each in found.items() if each
                    )
                )
            tenants = _tenants(cluster, prompts[0])
        with LocalCluster(config(Path(folder))) as cluster:
            _ask(cluster, list(range(100, 164)))
            for prompt, cold in zip(prompts, colds, strict=True):
                _again(cluster, "restart", prompt, cold, found, _came_from(cluster, "fetched_ssd_blocks"))
                progress.print(f"after a restart: {found['restart'][-1]['ttft_s']:.2f} s")
    return [*(_row(source, samples) for source, samples in found.items()), tenants]


def _round(cluster: LocalCluster, prompt: list[int], found: dict[str, list[dict[str, float]]]) -> Asked:
    before = _held(cluster, _NEAR)
    cold = _ask(cluster, prompt)
    _settle()
    names = sorted(_held(cluster, _NEAR) - before)
    blocks = len(prompt) // cluster.config.pool.block_tokens
    _until(lambda: _status(cluster, _NEAR).ssd_blocks >= len(before) + blocks, "the blocks are on the ssd")
    _again(cluster, "dram", prompt, cold, found, _came_from(cluster))
    _drop(cluster, _NEAR, names, "")
    _again(cluster, "peer", prompt, cold, found, _came_from(cluster, "fetched_peer_blocks"))
    _until(
        lambda: _status(cluster, _NEAR).ssd_blocks >= len(before) + blocks, "the blocks are on the ssd again"
    )
    _drop(cluster, _NEAR, names, "dram")
    _drop(cluster, _FAR, names, "")
    _again(cluster, "ssd", prompt, cold, found, _came_from(cluster, "fetched_ssd_blocks"))
    return cold


def _again(
    cluster: LocalCluster,
    source: str,
    prompt: list[int],
    cold: Asked,
    found: dict[str, list[dict[str, float]]],
    prove: Callable[[int], None],
) -> None:
    asked = _ask(cluster, prompt)
    prove(len(prompt) // cluster.config.pool.block_tokens)
    if asked.token_ids != cold.token_ids:
        raise RuntimeError(f"from {source}: {asked.token_ids}, cold {cold.token_ids}")
    found[source].append({"ttft_s": asked.ttft_s, "cold_ttft_s": cold.ttft_s})


def _came_from(cluster: LocalCluster, counter: str = "") -> Callable[[int], None]:
    """Checks afterwards that the near node brought the prompt's blocks from there, or (without) none at all."""
    counters = ("fetched_ssd_blocks", "fetched_peer_blocks")
    before = {each: getattr(_status(cluster, _NEAR), each) for each in counters}

    def prove(blocks: int) -> None:
        after = {each: getattr(_status(cluster, _NEAR), each) - before[each] for each in counters}
        wanted = {each: blocks if each == counter else 0 for each in counters}
        if after != wanted:
            raise RuntimeError(f"blocks came from elsewhere: {after}, not {wanted}")

    return prove


def _tenants(cluster: LocalCluster, prompt: list[int]) -> Row:
    """The prompt is in the pool as one tenant's; another asks it twice."""
    asked = [_ask(cluster, prompt, tenant).cached_tokens for tenant in ("one", "two", "two")]
    _settle()
    whole = len(prompt) // cluster.config.pool.block_tokens * cluster.config.pool.block_tokens
    if asked[0] < whole or asked[2] < whole:
        raise RuntimeError(f"cached tokens of a tenant's own prompt: {asked[0]} and {asked[2]}, not {whole}")
    return Row(
        name="cached_tokens_of_another_tenant",
        value=asked[1],
        unit="tokens",
        op="<=",
        bar=0,
        bound=0,
        why=f"the tenant is in every block's name; its own prompt a second time: {asked[2]} cached",
        samples=tuple({"cached_tokens": cached} for cached in asked),
    )


def _ask(cluster: LocalCluster, prompt: list[int], tenant: str = "one") -> Asked:
    body: dict[str, Any] = {
        "model": cluster.model_name,
        "prompt": prompt,
        "max_tokens": _ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"Authorization": f"Bearer {_KEYS[tenant]}"}
    ids: list[int] = []
    ttft_s, cached = 0.0, 0
    began_s = time.perf_counter()
    with httpx.stream(
        "POST", f"{cluster.url}/v1/completions", json=body, headers=headers, timeout=_TIMEOUT_S
    ) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            ttft_s = ttft_s or time.perf_counter() - began_s
            data = json.loads(line.removeprefix("data: "))
            if "error" in data:
                raise RuntimeError(str(data["error"]))
            ids += data["choices"][0]["token_ids"] or [] if data["choices"] else []
            if data.get("usage"):
                cached = data["usage"]["prompt_tokens_details"]["cached_tokens"]
    if len(ids) != _ANSWER_TOKENS:
        raise RuntimeError(f"{len(ids)} tokens instead of {_ANSWER_TOKENS}: {response.status_code}")
    return Asked(ttft_s, ids, cached)


def _status(cluster: LocalCluster, node: str) -> pb.NodeStatus:
    with grpc.insecure_channel(cluster.address(node)) as channel:
        return KVNodeStub(channel).Status(pb.Empty(), timeout=10)


def _held(cluster: LocalCluster, node: str) -> set[bytes]:
    """The names of all blocks that the node holds: the snapshot that its events begin with."""
    with grpc.insecure_channel(cluster.address(node)) as channel:
        events = KVNodeStub(channel).Events(pb.EventsRequest(), timeout=10)
        names = set(next(iter(events)).stored)
        events.cancel()
    return names


def _drop(cluster: LocalCluster, node: str, names: list[bytes], tier: str) -> None:
    """Drops, and waits until the conductor knows what is left."""
    with grpc.insecure_channel(cluster.address(node)) as channel:
        KVNodeStub(channel).Drop(pb.DropRequest(hashes=names, tier=tier), timeout=10)
    _settle()


def _settle() -> None:
    """Until leases are released, events have come, and the conductor's index is up to date."""
    time.sleep(1.0)


def _until(holds: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + 60.0
    while not holds():
        if time.monotonic() > end_s:
            raise RuntimeError(f"not within a minute: {what}")
        time.sleep(0.1)


def _row(source: str, samples: list[dict[str, float]]) -> Row:
    cold_s = statistics.median(sample["cold_ttft_s"] for sample in samples)
    step_s = 0.15  # the last block's tail in the prefill engine, and the last token in the decode engine
    return Row(
        name=f"ttft_again_from_{source}",
        value=statistics.median(sample["ttft_s"] / sample["cold_ttft_s"] for sample in samples),
        unit="of cold",
        op="<=",
        bar=_BARS[source],
        bound=step_s / cold_s,
        why=f"one small prefill step and one decode step, {step_s} s, of {cold_s:.1f} s cold",
        samples=tuple(samples),
    )
