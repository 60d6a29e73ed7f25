"""What a KV node did and holds, for Prometheus: the node's status in other words, on an HTTP port of its own."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvstore.transfer import kv_pb2 as pb

logger = logging.getLogger(__name__)

_STATUS_S = 5.0

Values = dict[tuple[str, ...], float]


def families(status: pb.NodeStatus) -> Iterable[Metric]:
    """One family a kind of number; labels name its kinds. Every family is there from the start, links excepted."""
    block_bytes, ssd_block_bytes = status.block_bytes, status.ssd_block_bytes
    slots = {"free": status.free, "committed": status.committed, "writing": status.filling + status.draining}
    yield _gauge("slots", "Slots of the arena", ("state",), {(state,): n for state, n in slots.items()})
    yield _gauge("leased_slots", "Slots that readers hold", (), {(): status.leased})
    yield _gauge(
        "bytes",
        "KV held",
        ("tier",),
        {("dram",): status.committed * block_bytes, ("ssd",): status.ssd_blocks * ssd_block_bytes},
    )
    yield _counter(
        "asked_blocks", "Full blocks of prompts that workers asked for", (), {(): status.asked_blocks}
    )
    yield _counter(
        "hit_blocks",
        "Of the blocks asked for, those found, by where they were",
        ("tier",),
        {
            ("dram",): status.hit_dram_blocks,
            ("ssd",): status.fetched_ssd_blocks,
            ("peer",): status.fetched_peer_blocks - status.followed_blocks,
        },
    )
    yield _counter(
        "handed_over_blocks",
        "Blocks read from the node that prefilled them",
        (),
        {(): status.followed_blocks},
    )
    yield _counter(
        "missed_fetch_blocks",
        "Blocks that were expected and did not come",
        (),
        {(): status.fetch_failed_blocks},
    )
    yield _counter(
        "removed_blocks",
        "Blocks that left a tier, by reason",
        ("tier", "reason"),
        {
            ("dram", "evicted"): status.evictions,
            ("dram", "corrupt"): status.corrupt,
            ("dram", "operator"): status.dropped - status.corrupt,
            ("ssd", "evicted"): status.ssd_evictions,
            ("ssd", "corrupt"): status.ssd_corrupt,
        },
    )
    yield _counter(
        "failed_verifications",
        "What differed from what was written: blocks of a tier, segments from other nodes",
        ("where",),
        {("dram",): status.corrupt, ("ssd",): status.ssd_corrupt, ("peer",): status.rejected_segments},
    )
    yield _counter("expired_leases", "Leases that ended by time", (), {(): status.leases_expired})
    yield _counter(
        "ssd_bytes",
        "Bytes of blocks moved between DRAM and SSD",
        ("direction",),
        {("written",): status.ssd_written_bytes, ("read",): status.ssd_read_bytes},
    )
    yield _counter(
        "ssd_refused_blocks",
        "Blocks that stayed off the SSD, by reason",
        ("reason",),
        {("full",): status.ssd_full, ("failed",): status.ssd_failed, ("codec",): status.ssd_refused},
    )
    yield from _links(status.neighbours)


def _links(neighbours: Iterable[pb.Neighbour]) -> Iterable[Metric]:
    in_use: Values = {}
    moved: Values = {}
    speed: Values = {}
    lost: Values = {}
    for there in neighbours:
        lost[(there.address,)] = there.lost_reads
        in_use[(there.address, there.link)] = 1
        for one in there.links:
            moved[(there.address, one.link)] = one.read_bytes
            if one.bytes_per_s:
                speed[(there.address, one.link)] = one.bytes_per_s
    labels = ("peer", "link")
    yield _gauge("link_in_use", "1 for the link that another node is read by", labels, in_use)
    yield _gauge("link_bytes_per_second", "Verified reads, when last measured", labels, speed)
    yield _counter("link_bytes", "Bytes read from another node", labels, moved)
    yield _counter("lost_reads", "Reads from another node that found no end", ("peer",), lost)


def _gauge(name: str, words: str, labels: tuple[str, ...], values: Values) -> Metric:
    return _filled(GaugeMetricFamily(f"moonpool_pool_{name}", words, labels=labels), values)


def _counter(name: str, words: str, labels: tuple[str, ...], values: Values) -> Metric:
    return _filled(CounterMetricFamily(f"moonpool_pool_{name}", words, labels=labels), values)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: Values) -> Metric:
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family


class _Node(Collector):
    """Asks the node, on its own event loop, whenever it is scraped; Prometheus's server has threads of its own."""

    def __init__(self, status: Callable[[], pb.NodeStatus]) -> None:
        self._status = status
        self._loop = asyncio.get_running_loop()

    def collect(self) -> Iterable[Metric]:
        asked = asyncio.run_coroutine_threadsafe(self._ask(), self._loop)
        return list(families(asked.result(_STATUS_S)))

    async def _ask(self) -> pb.NodeStatus:
        return self._status()


@contextmanager
def exported(address: str, status: Callable[[], pb.NodeStatus]) -> Iterator[None]:
    """Serves `http://ADDRESS/metrics` meanwhile; `address` is host:port. Raises OSError if it cannot listen there."""
    host, port = address.rsplit(":", 1)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Node(status))
    try:
        server, thread = start_http_server(int(port), host.strip("[]"), registry)
    except OSError as error:
        raise OSError(f"cannot serve metrics on {address}: {error}") from error
    logger.info("metrics at http://%s/metrics", address)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
