"""A node's metrics, as Prometheus sees them."""

import asyncio
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvstore.core.blocks import NodeId
from kvstore.metrics import exported, families
from kvstore.node import KVNode, NodeConfig
from kvstore.transfer import kv_pb2 as pb
from tests.network import free_port

Sample = tuple[str, tuple[tuple[str, str], ...]]


def samples(text: str) -> dict[Sample, float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(found: dict[Sample, float], name: str, **labels: str) -> float:
    return found[(f"moonpool_pool_{name}", tuple(sorted(labels.items())))]


def scraped(address: str) -> dict[Sample, float]:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as reply:
        return samples(reply.read().decode())


STATUS = pb.NodeStatus(
    slots=10,
    free=3,
    filling=1,
    draining=1,
    committed=5,
    leased=2,
    block_bytes=100,
    asked_blocks=40,
    hit_dram_blocks=10,
    fetched_ssd_blocks=4,
    fetched_peer_blocks=9,
    followed_blocks=6,
    fetch_failed_blocks=1,
    evictions=11,
    dropped=7,
    corrupt=2,
    leases_expired=3,
    ssd_blocks=8,
    ssd_block_bytes=50,
    ssd_evictions=12,
    ssd_corrupt=1,
    ssd_written_bytes=800,
    ssd_read_bytes=200,
    ssd_full=1,
    ssd_failed=2,
    ssd_refused=3,
    rejected_segments=4,
    neighbours=[
        pb.Neighbour(
            address="unix:/there",
            link="bulk",
            lost_reads=1,
            links=[
                pb.LinkMeasured(link="inline", bytes_per_s=1e9, read_bytes=64),
                pb.LinkMeasured(link="bulk", bytes_per_s=2e9, read_bytes=128),
                pb.LinkMeasured(link="nixl", refused="not installed"),
            ],
        )
    ],
)


async def test_all_of_the_status_is_exported() -> None:
    address = f"127.0.0.1:{free_port()}"
    with exported(address, lambda: STATUS):
        found = await asyncio.to_thread(scraped, address)
    assert [value(found, "slots", state=state) for state in ("free", "committed", "writing")] == [3, 5, 2]
    assert (value(found, "bytes", tier="dram"), value(found, "bytes", tier="ssd")) == (500, 400)
    assert [value(found, "hit_blocks_total", tier=tier) for tier in ("dram", "ssd", "peer")] == [10, 4, 3]
    assert (value(found, "asked_blocks_total"), value(found, "handed_over_blocks_total")) == (40, 6)
    removed = {("dram", "evicted"): 11, ("dram", "corrupt"): 2, ("dram", "operator"): 5}
    removed |= {("ssd", "evicted"): 12, ("ssd", "corrupt"): 1}
    for (tier, reason), count in removed.items():
        assert value(found, "removed_blocks_total", tier=tier, reason=reason) == count
    failed = [value(found, "failed_verifications_total", where=where) for where in ("dram", "ssd", "peer")]
    assert failed == [2, 1, 4]
    assert value(found, "link_in_use", peer="unix:/there", link="bulk") == 1
    assert value(found, "link_bytes_total", peer="unix:/there", link="inline") == 64
    assert value(found, "link_bytes_per_second", peer="unix:/there", link="bulk") == 2e9
    assert value(found, "lost_reads_total", peer="unix:/there") == 1
    with pytest.raises(OSError, match="refused"):
        await asyncio.to_thread(scraped, address)


def test_each_number_of_the_status_is_in_some_family() -> None:
    """A counter that is added to the status and forgotten here is found: changing it must change what is exported."""
    elsewhere = {"leases", "slots"}  # the number of readers' names; the sum of the states
    for field in pb.NodeStatus.DESCRIPTOR.fields:
        if field.cpp_type not in (field.CPPTYPE_UINT32, field.CPPTYPE_UINT64) or field.name in elsewhere:
            continue
        changed = pb.NodeStatus()
        changed.CopyFrom(STATUS)
        setattr(changed, field.name, getattr(STATUS, field.name) + 1)
        assert _shown(changed) != _shown(STATUS), f"{field.name} is shown nowhere"


def _shown(status: pb.NodeStatus) -> list[object]:
    return [(sample.name, sample.labels, sample.value) for one in families(status) for sample in one.samples]


async def test_a_node_serves_its_own(tmp_path: Path) -> None:
    address, up = f"127.0.0.1:{free_port()}", asyncio.Event()
    config = NodeConfig(NodeId("n"), f"unix:{tmp_path}/n", 2**20, tmp_path, metrics_address=address)
    serving = asyncio.create_task(KVNode(config).serve(up.set))
    await asyncio.wait_for(up.wait(), 10)
    found = await asyncio.to_thread(scraped, address)
    assert value(found, "asked_blocks_total") == 0, "there is no arena yet"
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
