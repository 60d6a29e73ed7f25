"""What disaggregation costs: the hand-off of one prompt's KV, its overlap with the prefill, the tokens per second.

`python -m benchmarks.handoff [--json FILE] [--seed N]` starts a cluster of the default configuration on this machine
and asks it over HTTP. Progress goes to stderr, the table to stdout; the exit status is 1 when a row misses its bar.
Run it on a machine that does nothing else.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rich.console import Console

from benchmarks.alone import Arrivals, EngineAlone
from benchmarks.report import Report, Row, Setting, show
from cluster.config import ClusterConfig, load_config
from cluster.control.local import LocalCluster

_PROMPT_TOKENS = 1000
_HANDOFFS = 7
_COPIES = 5  # around each hand-off; their median is the sample
_STREAMS, _STREAM_PROMPT_TOKENS, _STREAM_TOKENS = 8, 16, 128
_RATES = 3
_SETTLE_S = 0.3  # until the reports that follow an answer are told
_TIMEOUT_S = 300.0

progress = Console(stderr=True, highlight=False)


@dataclass(frozen=True, slots=True)
class Handoff:
    """One prompt through the cluster.

    `handoff_s` runs from the moment when the last segment of the last layer was sealed in the arena (that is, the
    prefill engine has computed it, copied it and published its checksum) until the decode engine's own pages hold
    the whole prompt, verified. `prefill_s` is the prefill engine's time with the prompt, from its first step to its
    last. `early` is the share of the bytes that were sealed in the arena when the last chunk's last layer began, taken
    as the moment when the last chunk's last layer but one was sealed. `memcpy_s` is one plain copy of `kv_bytes`
    (numpy, between two buffers that were touched before) while the cluster is idle, right after.
    """

    handoff_s: float
    prefill_s: float
    early: float
    kv_bytes: int
    memcpy_s: float


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--json", type=Path, help="write the rows here")
    arguments.add_argument("--seed", type=int, default=0, help="of the prompts")
    given = arguments.parse_args()
    config = load_config(flags={"gateway": {"port": 0}})
    setting = Setting.here(given.seed, _described(config))
    with LocalCluster(config) as cluster:
        signal.signal(
            signal.SIGTERM, lambda *_: sys.exit(1)
        )  # Ray's own handler ends the process without clean-up
        progress.print(f"cluster ready at {cluster.url}")
        prompts = _Prompts(cluster.model, given.seed)
        handoffs = _handoffs(cluster, prompts)
        rates = _rates(cluster, prompts)
        layers = _layers(cluster.model)
    report = Report("handoff", setting, (*_handoff_rows(handoffs, config, layers), _rate_row(rates)))
    if given.json is not None:
        report.write(given.json)
    show([report], Console())
    return 0 if report.passes else 1


def _described(config: ClusterConfig) -> str:
    engine, pool = config.engine, config.pool
    return (
        f"model {config.model or 'SmolLM2-135M-Instruct'}, {config.prefill} prefill and {config.decode} decode engine, "
        f"dtype {engine.dtype}, {engine.threads} thread each, pages of {engine.page_tokens} and blocks of "
        f"{pool.block_tokens} tokens, prefill chunks of {engine.prefill_chunk_tokens}"
    )


class _Prompts:
    """Random token ids, never the same twice: nothing is found in the pool."""

    def __init__(self, model: str, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._vocabulary = int(_model_config(model)["vocab_size"])

    def next(self, tokens: int) -> list[int]:
        ids: list[int] = self._random.integers(0, self._vocabulary, tokens).tolist()
        return ids


def _model_config(model: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((Path(model) / "config.json").read_text())
    return config


def _layers(model: str) -> int:
    return int(_model_config(model)["num_hidden_layers"])


# -- the hand-off ---------------------------------------------------------------------------------------------------


def _handoffs(cluster: LocalCluster, prompts: _Prompts) -> list[Handoff]:
    """One prompt at a time; the first warms both engines and is not counted."""
    found = []
    for number in range(_HANDOFFS + 1):
        handoff = _handoff(cluster, prompts.next(_PROMPT_TOKENS))
        progress.print(
            f"hand-off {number}: {handoff.handoff_s * 1e3:.2f} ms for {handoff.kv_bytes / 1e6:.1f} MB, plain copy "
            f"{handoff.memcpy_s * 1e3:.2f} ms, prefill {handoff.prefill_s:.2f} s, early {handoff.early:.3f}"
        )
        found.append(handoff)
    return found[1:]


def _handoff(cluster: LocalCluster, prompt: list[int]) -> Handoff:
    """Raises RuntimeError when the prompt did not go the way that is measured: all of it computed, all handed over."""
    body = {**_completion(cluster, prompt, 1), "stream": False}
    response = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=_TIMEOUT_S)
    response.raise_for_status()
    time.sleep(_SETTLE_S)
    identity = f"{response.json()['id']}-0"  # a completion has one request a prompt
    story = httpx.get(f"{cluster.url}/moonpool/v1/requests/{identity}", timeout=10).json()
    (attempt,) = story["attempts"]
    prefill, decode = attempt["prefill"], attempt["decode"]
    if prefill["computed_tokens"] != len(prompt) or decode["computed_prompt_tokens"] != 1:
        raise RuntimeError(f"this was no plain hand-off: {attempt}")
    return Handoff(
        handoff_s=decode["resident_at"] - prefill["last_layer_at"],
        prefill_s=prefill["seconds"],
        early=prefill["early_kv_bytes"] / prefill["kv_bytes"],
        kv_bytes=decode["kv_bytes"],
        memcpy_s=_memcpy_s(decode["kv_bytes"]),
    )


def _memcpy_s(size_bytes: int) -> float:
    source, sink = np.ones(size_bytes, np.uint8), np.zeros(size_bytes, np.uint8)
    times_s = []
    for _ in range(_COPIES):
        began_s = time.perf_counter()
        np.copyto(sink, source)
        times_s.append(time.perf_counter() - began_s)
    return statistics.median(times_s)


def _handoff_rows(handoffs: list[Handoff], config: ClusterConfig, layers: int) -> tuple[Row, Row, Row]:
    """Medians over the samples. The bounds: what cannot be done before the last segment is there."""
    block, chunk = config.pool.block_tokens, config.engine.prefill_chunk_tokens
    blocks = -(-_PROMPT_TOKENS // block)
    last_blocks = blocks - (_PROMPT_TOKENS - 1) // chunk * chunk // block
    segments = blocks * layers
    memcpy_s, prefill_s = (
        _median(handoffs, lambda one: one.memcpy_s),
        _median(handoffs, lambda one: one.prefill_s),
    )

    def samples(*names: str) -> tuple[dict[str, float], ...]:
        return tuple({name: getattr(one, name) for name in names} for one in handoffs)

    return (
        Row(
            name="handoff_over_memcpy",
            value=_median(handoffs, lambda one: one.handoff_s / one.memcpy_s),
            unit="×",
            op="<=",
            bar=5.0,
            bound=1 / segments,
            why=f"one of {segments} segments left to copy",
            samples=samples("handoff_s", "memcpy_s", "kv_bytes"),
        ),
        Row(
            name="handoff_over_prefill",
            value=_median(handoffs, lambda one: one.handoff_s / one.prefill_s),
            unit="share",
            op="<=",
            bar=0.02,
            bound=memcpy_s / segments / prefill_s,
            why=f"that segment's copy in {prefill_s:.2f} s",
            samples=samples("handoff_s", "prefill_s"),
        ),
        Row(
            name="bytes_in_arena_before_last_layer",
            value=_median(handoffs, lambda one: one.early),
            unit="share",
            op=">=",
            bar=0.9,
            bound=1 - last_blocks / segments,
            why=f"all but {last_blocks} segments",
            samples=samples("early"),
        ),
    )


def _median(handoffs: list[Handoff], figure: Callable[[Handoff], float]) -> float:
    return statistics.median(figure(one) for one in handoffs)


# -- tokens per second ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens per second over all streams while all of them decode, one pair of runs on the same prompts."""

    cluster_tok_s: float
    alone_tok_s: float


def decode_rate(streams: list[Arrivals]) -> float:
    """Tokens per second from the moment all streams have a token to the end of the first of them.

    Raises ValueError when they never ran together.
    """
    begin_s = max(stream[0][0] for stream in streams)
    end_s = min(stream[-1][0] for stream in streams)
    if end_s <= begin_s:
        raise ValueError("the streams never ran together")
    tokens = sum(count for stream in streams for at_s, count in stream if begin_s < at_s <= end_s)
    return tokens / (end_s - begin_s)


def _rates(cluster: LocalCluster, prompts: _Prompts) -> list[Rates]:
    """The same engine under the cluster and alone, in turns (A B B A A B), each once before to warm up.

    One is idle while the other works; prefills are over when the window opens.
    """
    progress.print("starting the decode engine alone")
    found = []
    with EngineAlone(
        cluster.model, cluster.config.engine, dict(os.environ), cluster.run_dir / "logs" / "alone.log"
    ) as alone:

        def measure(who: str, batch: list[list[int]]) -> float:
            streams = (
                alone.sample(batch, _STREAM_TOKENS)
                if who == "alone"
                else asyncio.run(_through_cluster(cluster, batch, _STREAM_TOKENS))
            )
            counts = {sum(count for _, count in stream) for stream in streams}
            if counts != {_STREAM_TOKENS}:
                raise RuntimeError(f"streams of {counts} tokens from {who}, not {_STREAM_TOKENS}")
            time.sleep(_SETTLE_S)
            return decode_rate(streams)

        order = ["alone", "cluster"]  # to warm up: the first answer of the one alone waits for its start
        for number in range(_RATES + 1):
            batch = [prompts.next(_STREAM_PROMPT_TOKENS) for _ in range(_STREAMS)]
            rates = {who: measure(who, batch) for who in order}
            progress.print(
                f"{_STREAMS} streams {number}: cluster {rates['cluster']:.1f} tok/s, alone {rates['alone']:.1f} tok/s"
            )
            found.append(Rates(rates["cluster"], rates["alone"]))
            order.reverse()
    return found[1:]


async def _through_cluster(cluster: LocalCluster, batch: list[list[int]], tokens: int) -> list[Arrivals]:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=_TIMEOUT_S) as client:
        return await asyncio.gather(
            *(_stream(client, _completion(cluster, prompt, tokens)) for prompt in batch)
        )


async def _stream(client: httpx.AsyncClient, body: dict[str, Any]) -> Arrivals:
    arrivals: Arrivals = []
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != httpx.codes.OK:
            raise RuntimeError(f"{response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                now_s = time.monotonic()
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    if choice["token_ids"]:
                        arrivals.append((now_s, len(choice["token_ids"])))
    return arrivals


def _completion(cluster: LocalCluster, prompt: list[int], tokens: int) -> dict[str, Any]:
    return {
        "model": cluster.model_name,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }


def _rate_row(rates: list[Rates]) -> Row:
    cluster = statistics.median(one.cluster_tok_s for one in rates)
    alone = statistics.median(one.alone_tok_s for one in rates)
    return Row(
        name="throughput_over_engine_alone",
        value=cluster / alone,
        unit="×",
        op=">=",
        bar=0.9,
        bound=1.0,
        why="the same engine does the same steps",
        samples=tuple({"cluster_tok_s": one.cluster_tok_s, "alone_tok_s": one.alone_tok_s} for one in rates),
    )


if __name__ == "__main__":
    sys.exit(main())
