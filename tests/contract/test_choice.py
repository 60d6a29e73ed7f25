"""Which link is used to a neighbour: the fastest of those that both ends have, and another when it breaks."""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from kvstore.core.blocks import KVLayout, NodeId, RequestId
from kvstore.core.slots import SlotRef
from kvstore.tiers.dram import Arena, ArenaShape
from kvstore.transfer import choice
from kvstore.transfer.choice import Neighbour, Neighbours
from kvstore.transfer.grpc_link import KINDS, Kind
from kvstore.transfer.link import Complete, Lost, Progress
from kvstore.transfer.nixl_link import LazyMemory
from kvstore.transfer.probe import Probe, probe_layout
from kvstore.transfer.serve_reads import Offer
from tests.contract.source_node import SourceNode, bytes_of, layout_of, name_of
from tests.contract.test_links import memory_or_skip
from tests.network import certificates, free_port

LAYOUT = layout_of(layers=4, page_bytes=65536)
SHARDED = layout_of(layers=2, page_bytes=65536, shards=2)
SHAPE = ArenaShape(LAYOUT, slots=8)
SOON_S = 20.0


@dataclass(slots=True)
class Reader:
    """A node's reading half."""

    arena: Arena
    neighbours: Neighbours
    address: str
    epoch: int = 0

    @property
    def neighbour(self) -> Neighbour:
        return self.neighbours.known[self.address]

    async def read(self, numbers: Sequence[int]) -> list[Progress]:
        refs = []
        for slot, number in enumerate(numbers):
            self.epoch += 1
            self.arena.begin(slot, self.epoch, name_of(number))
            refs.append(SlotRef(slot, self.epoch, name_of(number), filled=False))
        link = self.neighbours.link(self.address, {})
        async with aclosing(link.read(RequestId("r"), refs, False, time.monotonic() + SOON_S)) as progress:
            steps = [step async for step in progress]
        for ref, number in zip(refs, numbers, strict=True):
            if Complete(ref.slot) in steps:
                np.testing.assert_array_equal(
                    self.arena.payload[ref.slot], bytes_of(self.arena.shape.layout, number)
                )
        return steps

    async def measured(self) -> Neighbour:
        self.neighbours.link(self.address, {})
        async with asyncio.timeout(SOON_S):
            while not (self.neighbour.bytes_per_s or self.neighbour.refused):
                await asyncio.sleep(0.01)
        return self.neighbour


@dataclass(slots=True)
class Source:
    """A node's serving half; `offers` are its links."""

    node: SourceNode
    probe: Probe
    memory: LazyMemory
    address: str
    offers: Sequence[Kind]

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        nixl = "nixl" in self.offers
        async with self.node.serving(
            self.address,
            memory=self.memory if nixl else None,
            others=[Offer(self.probe, self.probe.memory if nixl else None)],
            bulk="bulk" in self.offers,
        ):
            yield


@asynccontextmanager
async def two(
    folder: Path,
    offers: Sequence[Kind] = KINDS,
    allowed: Sequence[Kind] = KINDS,
    address: str = "",
    layout: KVLayout = LAYOUT,
) -> AsyncIterator[tuple[Source, Reader]]:
    arenas = [Arena.create(folder / name, ArenaShape(layout, SHAPE.slots)) for name in ("there", "here")]
    probes = [Probe(NodeId(name), layout, folder) for name in ("there", "here")]
    memories = [LazyMemory(NodeId(name), arena) for name, arena in zip("th", arenas, strict=True)]
    node = SourceNode(arenas[0])  # type: ignore[abstract]  # its other methods answer UNIMPLEMENTED
    node.store(range(4))
    source = Source(node, probes[0], memories[0], address or f"127.0.0.1:{free_port()}", offers)
    neighbours = Neighbours(NodeId("here"), arenas[1], probes[1], memories[1], allowed)
    try:
        yield source, Reader(arenas[1], neighbours, source.address)
    finally:
        await neighbours.close()
        for memory in (*memories, *(probe.memory for probe in probes)):
            await memory.close()


@pytest.mark.parametrize("layout", [LAYOUT, SHARDED], ids=["one rank", "two ranks"])
async def test_the_fastest_of_the_links_of_both_is_used(tmp_path: Path, layout: KVLayout) -> None:
    offers: list[Kind] = ["inline", "bulk"]
    async with two(tmp_path, offers, layout=layout) as (source, reader), source.serving():
        steps = await reader.read(range(4))
        assert sum(isinstance(step, Complete) for step in steps) == 4, (
            "the first read waits for no measurement"
        )
        neighbour = await reader.measured()
        assert set(neighbour.bytes_per_s) == {"inline", "bulk"}
        assert neighbour.in_use == max(neighbour.bytes_per_s, key=lambda kind: neighbour.bytes_per_s[kind])
        assert neighbour.refused["nixl"]
        await reader.read(range(4))
        assert neighbour.read_bytes[neighbour.in_use] >= 4 * LAYOUT.block_bytes
        message = neighbour.message()
        assert (message.address, message.link) == (source.address, neighbour.in_use)
        assert [one.link for one in message.links] == ["inline", "bulk", "nixl"]
        assert [one.bytes_per_s > 0 for one in message.links] == [True, True, False]


@pytest.mark.parametrize("layout", [LAYOUT, SHARDED], ids=["one rank", "two ranks"])
async def test_nixl_is_measured_where_both_have_it_and_read_by_if_it_is_the_fastest(
    tmp_path: Path, layout: KVLayout
) -> None:
    async with two(tmp_path, layout=layout) as (source, reader), source.serving():
        await memory_or_skip(source.probe.memory)
        neighbour = await reader.measured()
        assert set(neighbour.bytes_per_s) == {"inline", "bulk", "nixl"}, neighbour.refused
        neighbour.judge({**neighbour.bytes_per_s, "nixl": 1e15})
        steps = await reader.read(range(4))
        assert sum(isinstance(step, Complete) for step in steps) == 4
        assert neighbour.read_bytes["nixl"] == 4 * LAYOUT.block_bytes


@pytest.mark.parametrize("kind", ["inline", "bulk"])
async def test_a_link_that_is_not_allowed_here_is_never_used(tmp_path: Path, kind: Kind) -> None:
    async with two(tmp_path, allowed=[kind]) as (source, reader), source.serving():
        neighbour = await reader.measured()
        await reader.read(range(2))
        assert list(neighbour.bytes_per_s) == [kind]
        assert neighbour.read_bytes == {kind: 2 * LAYOUT.block_bytes}


async def test_a_lost_link_is_left_for_the_next_and_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "_AGAIN_S", 0.0)
    with tempfile.TemporaryDirectory(prefix="mp-") as short:
        address = f"unix:{short}/n"
        async with two(tmp_path, allowed=["inline", "bulk"], address=address) as (source, reader):
            async with source.serving():
                neighbour = await reader.measured()
                neighbour.judge({**neighbour.bytes_per_s, "bulk": 1e15})
                Path(f"{short}/n.bulk").unlink()  # as if a firewall had come up
                [step] = await reader.read([0])
                assert isinstance(step, Lost)
                assert (neighbour.in_use, neighbour.lost_reads) == ("inline", 1)
                assert Complete(0) in await reader.read([0])
                async with asyncio.timeout(SOON_S):
                    while "bulk" not in neighbour.refused:
                        await asyncio.sleep(0.01)
            assert isinstance((await reader.read([0]))[-1], Lost)
            async with source.serving():  # started again, all its links too
                async with asyncio.timeout(SOON_S):
                    while set(neighbour.bytes_per_s) != {"inline", "bulk"}:
                        await reader.read([0])
                        await asyncio.sleep(0.05)
                assert not neighbour.refused


async def test_nodes_of_another_layout_are_refused_when_they_measure(tmp_path: Path) -> None:
    other = layout_of(layers=4, page_bytes=32768)
    assert probe_layout(other).fingerprint() != probe_layout(LAYOUT).fingerprint()
    async with two(tmp_path) as (source, reader):
        source.probe = Probe(NodeId("other"), other, tmp_path)
        async with source.serving():
            neighbour = await reader.measured()
            assert not neighbour.bytes_per_s
            assert neighbour.in_use == "inline"
            assert probe_layout(LAYOUT).fingerprint() in neighbour.refused["inline"]


async def test_tls_is_for_the_network_and_not_for_unix_sockets(tmp_path: Path) -> None:
    tls = certificates(tmp_path)
    arena, probe = Arena.create(tmp_path / "a", SHAPE), Probe(NodeId("n"), LAYOUT, tmp_path)
    neighbours = Neighbours(NodeId("n"), arena, probe, LazyMemory(NodeId("n"), arena), KINDS, tls)
    neighbours.link("unix:/nowhere", {})
    neighbours.link("127.0.0.1:1", {})
    assert [one.peer.tls for one in neighbours.known.values()] == [None, tls]
    await neighbours.close()


def test_a_nixl_that_does_not_start_is_a_reason(tmp_path: Path) -> None:
    pytest.importorskip("nixl_cu12")
    code = (
        "import sys; from pathlib import Path; from kvstore.transfer.nixl_link import NixlMemory, Unavailable\n"
        "from tests.contract.test_choice import SHAPE, Arena, NodeId\n"
        "found = NixlMemory.open(NodeId('n'), Arena.create(Path(sys.argv[1]), SHAPE))\n"
        "assert isinstance(found, Unavailable) and 'does not start' in found.reason, found"
    )
    environment = {**os.environ, "NIXL_PLUGIN_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "arena")], env=environment, check=True, timeout=60
    )
