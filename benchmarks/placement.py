"""How long one placement takes on a large cluster: `python -m benchmarks.placement --json FILE`.

The conductor alone, without wires: 100 and 1,000 nodes (half prefill, half decode), 1,000,000 blocks known, a few requests in
flight on each node, and prompts of 24 blocks whose prefix some nodes hold.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from random import Random
from statistics import fmean
from time import perf_counter, thread_time

from rich.console import Console

from benchmarks.report import Report, Row, Setting, show
from cluster.core.commands import Place
from cluster.core.conductor import Conductor
from cluster.core.events import (
    Aborted,
    Arrive,
    Event,
    Finished,
    FirstToken,
    NodeSnapshot,
    PrefillFinished,
    WorkerJoined,
)
from cluster.core.state import ConductorConfig, Role, TenantId
from cluster.sim.profiles import profile
from kvstore.core.blocks import BlockHash, NodeId, RequestId, WorkerId

BLOCKS = 1_000_000
CHAIN_BLOCKS = 24
STREAMS_A_NODE = 8
BARS_MS = {100: (1.0, 0.5), 1000: (5.0, 2.0)}
"""p99 and mean, by nodes."""


def cluster(nodes: int, policy: str, rng: Random) -> tuple[Conductor, list[tuple[BlockHash, ...]]]:
    """A conductor that knows so many nodes and a million blocks; and the chains that they are of."""
    a800 = profile("llama-70b-8xa800")
    config = ConductorConfig(
        block_tokens=a800.block_tokens,
        kv_bytes_per_token=a800.kv_bytes_per_token,
        policy=policy,
        inflight_max=10**6,
        memory=a800.memory,
        network=a800.network,
    )
    made = Conductor(config, repeat(0.5).__next__)
    chains = [
        tuple(BlockHash(rng.randbytes(32)) for _ in range(CHAIN_BLOCKS))
        for _ in range(BLOCKS // CHAIN_BLOCKS)
    ]
    held: list[list[BlockHash]] = [[] for _ in range(nodes)]
    for chain in chains:
        for _ in range(1 + (rng.random() < 0.2)):  # a fifth of all have a second copy, of a part
            held[rng.randrange(nodes)].extend(chain[: rng.randrange(1, CHAIN_BLOCKS + 1)])
    for number, blocks in enumerate(held):
        node = NodeId(f"node-{number:04d}")
        made.handle(
            WorkerJoined(
                worker=WorkerId(f"worker-{number:04d}"),
                role=Role.DECODE if number % 2 else Role.PREFILL,
                node=node,
                address="",
                capacity=a800.capacity,
                coefficients=a800.coefficients,
            ),
            0,
        )
        made.handle(NodeSnapshot(node=node, hashes=tuple(dict.fromkeys(blocks)), sequence=0), 0)
    return made, chains


def placements_ms(nodes: int, policy: str, count: int, seed: int) -> list[tuple[float, float]]:
    """Of `count` arrivals in a cluster with a steady load: what each took, on the clock and of the processor."""
    rng = Random(seed)
    made, chains = cluster(nodes, policy, rng)
    flying: list[RequestId] = []
    taken: list[tuple[float, float]] = []
    gc.collect()
    gc.freeze()
    for number in range(nodes * STREAMS_A_NODE // 2 + count):
        request = RequestId(f"r{number}")
        chain = chains[rng.randrange(len(chains))]
        arrival = Arrive(
            request=request,
            tenant=TenantId("t"),
            tokens=CHAIN_BLOCKS * 512 + 100,
            chain=chain,
            max_new_tokens=1000,
        )
        start_s, cpu_s = perf_counter(), thread_time()
        commands = made.handle(arrival, float(number))
        taken.append((1000 * (perf_counter() - start_s), 1000 * (thread_time() - cpu_s)))
        assert any(isinstance(command, Place) for command in commands), "it was to be placed at once"
        for event in _prefilled(request):
            made.handle(event, float(number))
        flying.append(request)
        if len(flying) > nodes * STREAMS_A_NODE // 2:
            over = flying.pop(rng.randrange(len(flying)))
            made.handle(
                Finished(request=over, attempt=1, output_tokens=300, tbt_mean_s=0.03, tbt_p99_s=0.04),
                float(number),
            )
    for request in flying:
        made.handle(Aborted(request=request), 1e9)
    made.check()
    gc.unfreeze()
    return taken[-count:]


def _prefilled(request: RequestId) -> list[Event]:
    return [
        PrefillFinished(request=request, attempt=1, observed_s=1.3, computed_tokens=12_388, cached_tokens=0),
        FirstToken(request=request, attempt=1, ttft_s=1.5),
    ]


def rows(policy: str, nodes: int, count: int) -> Iterator[Row]:
    measured = placements_ms(nodes, policy, count, seed=0)
    ordered, cpu_ms = sorted(wall for wall, _ in measured), sorted(cpu for _, cpu in measured)
    last = int(0.99 * len(measured))
    p99_ms, mean_ms = ordered[last], fmean(ordered)
    sample = (
        {"p99_ms": p99_ms, "mean_ms": mean_ms, "cpu_p99_ms": cpu_ms[last], "cpu_mean_ms": fmean(cpu_ms)},
    )
    why = f"{CHAIN_BLOCKS} look-ups and one pass over {nodes} workers, at 100 ns each"
    bound_ms = (CHAIN_BLOCKS + nodes) * 1e-4
    for what, value, bar in zip(("p99", "mean"), (p99_ms, mean_ms), BARS_MS[nodes], strict=True):
        name = f"one placement by {policy}, {nodes:,} nodes, {BLOCKS:,} blocks: {what}"
        yield Row(name, value, "ms", "<=", bar, bound_ms, why, sample)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where the rows go")
    parser.add_argument("--count", type=int, default=2000, help="placements measured")
    parser.add_argument("--policy", action="append", help="default: load and moonpool")
    arguments = parser.parse_args()
    setting = Setting.here(
        seed=0, configuration=f"{arguments.count} placements, {CHAIN_BLOCKS} blocks a prompt"
    )
    found = [
        row
        for policy in arguments.policy or ("load", "moonpool")
        for nodes in BARS_MS
        for row in rows(policy, nodes, arguments.count)
    ]
    report = Report("placement", setting, tuple(found))
    report.write(arguments.json)
    show([report], Console())
    return 0 if report.passes else 1


if __name__ == "__main__":
    raise SystemExit(main())
