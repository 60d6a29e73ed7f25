"""Several KV nodes: KV follows its request from node to node, and blocks are found wherever they are."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest

from cluster.control.pool import inspect
from cluster.core.commands import Place
from cluster.core.events import Aborted, Arrive
from cluster.core.state import TenantId
from kvstore.core.blocks import BlockHash, RequestId
from kvstore.transfer import kv_pb2 as pb
from kvstore.transfer.kv_pb2_grpc import KVNodeStub
from kvstore.transfer.server import channel_to
from tests.cluster.conftest import LAYOUT, SmallCluster, Start, until
from tests.network import certificates

if TYPE_CHECKING:
    from kvstore.transfer.kv_pb2_grpc import KVNodeAsyncStub

BLOCK = LAYOUT.block_tokens


def prompt(tokens: int, start: int = 0) -> list[int]:
    return list(range(start, start + tokens))


async def status(node: "KVNodeAsyncStub") -> pb.NodeStatus:
    return await node.Status(pb.Empty())


async def known_blocks(cluster: SmallCluster, node: int) -> int:
    rows = cluster.driver.status()["conductor"]["nodes"]
    return next((row["blocks"] for row in rows if row["node"] == f"node-{node}"), 0)


@pytest.mark.parametrize("tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 2])
async def test_the_decode_node_reads_the_prompt_from_the_prefill_node(start: Start, tokens: int) -> None:
    cluster = await start(nodes=2, save_generated=False)
    await cluster.answered_right(prompt(tokens))
    assert cluster.computed("decode") == 1, "only the last prompt token is computed by the decode engine"
    there = await status(cluster.nodes[1])
    assert there.fetched_peer_blocks == there.followed_blocks == -(-tokens // BLOCK)
    assert there.committed == tokens // BLOCK, "the tail is private and goes with its request"


async def test_the_transfer_overlaps_the_prefill(start: Start) -> None:
    """The decode node has most of the prompt before the prefill node has written all of it."""
    cluster = await start(nodes=2, chunk_tokens=BLOCK, prefill_token_s=0.005)
    task = asyncio.create_task(cluster.answered_right(prompt(20 * BLOCK)))

    async def half_there() -> bool:
        return (await status(cluster.nodes[1])).filling > 0

    await until(half_there, "the decode node follows")
    assert (await status(cluster.nodes[0])).filling > 0, "while the prefill node still writes"
    await task


async def test_a_prefix_comes_from_the_node_that_has_it(start: Start) -> None:
    """Two prefill workers on two nodes: what one has computed, the other brings instead of computing it."""
    cluster = await start(prefill=2, decode=2, nodes=2)
    await cluster.answered_right(prompt(8 * BLOCK))
    computed = cluster.computed("prefill")
    for _ in range(2):  # in any order of placement, each node has the blocks in the end
        await cluster.answered_right([*prompt(8 * BLOCK), 7])
    assert cluster.computed("prefill") - computed <= 2 * (BLOCK + 1)


async def test_blocks_that_left_dram_come_from_the_ssd(start: Start, tmp_path: Path) -> None:
    """Eight blocks and their tail fit into DRAM once, so the second prompt drives out the first."""
    cluster = await start(slots=10, ssd_dir=tmp_path, save_generated=False)
    first, second = [*prompt(8 * BLOCK), 1], [*prompt(8 * BLOCK, start=500), 1]
    await cluster.answered_right(first)

    async def written(blocks: int) -> bool:
        return (await status(cluster.node)).ssd_blocks == blocks

    await until(lambda: written(8), "the first prompt's blocks are on the ssd")
    await cluster.answered_right(second)
    await until(lambda: written(16), "the second's too")
    computed = cluster.computed("prefill")
    await cluster.answered_right(first)
    assert cluster.computed("prefill") - computed == 1
    now = await status(cluster.node)
    assert now.fetched_ssd_blocks >= 7, "as many as had left DRAM"
    assert (now.asked_blocks, now.hit_dram_blocks + now.fetched_ssd_blocks) == (3 * 8, 8)


async def test_blocks_come_from_the_ssd_of_another_node(start: Start, tmp_path: Path) -> None:
    """Only node-0's SSD is left of a prompt that was prefilled there: the decode node has it read there and sent."""
    cluster = await start(nodes=2, ssd_dir=tmp_path)
    near, far = cluster.nodes
    await cluster.answered_right(prompt(8 * BLOCK))
    await cluster.settled()

    async def written() -> bool:
        return (await status(near)).ssd_blocks == 8

    await until(written, "the blocks are on the ssd")
    await far.Drop(pb.DropRequest(all=True))
    await near.Drop(pb.DropRequest(hashes=await held(near), tier="dram"))

    async def known() -> bool:
        rows = cluster.driver.status()["conductor"]["nodes"]
        return [(row["blocks"], row["dram_blocks"]) for row in rows] == [(8, 0), (0, 0)]

    await until(known, "the conductor knows where they are left")
    computed = cluster.computed("decode")
    await cluster.answered_right(prompt(8 * BLOCK))
    assert cluster.attempts()[-1]["decision"]["prefill"] is None
    assert cluster.computed("decode") - computed == 1
    assert ((await status(near)).fetched_ssd_blocks, (await status(far)).fetched_peer_blocks) == (8, 16)


async def held(node: "KVNodeAsyncStub") -> list[bytes]:
    events = node.Events(pb.EventsRequest())
    message = await events.read()
    assert isinstance(message, pb.BlockEvents)
    events.cancel()
    return list(message.stored)


async def test_blocks_on_the_ssd_outlive_the_cluster(start: Start, tmp_path: Path) -> None:
    before = await start(ssd_dir=tmp_path, save_generated=False)
    whole = [*prompt(8 * BLOCK), 1]
    await before.answered_right(whole)

    async def written() -> bool:
        return (await status(before.node)).ssd_blocks == 8

    await until(written, "the blocks are on the ssd")
    after = await start(ssd_dir=tmp_path, save_generated=False)

    async def found() -> bool:
        return await known_blocks(after, 0) == 8

    await until(found, "the conductor knows what the new node found")
    await after.answered_right(whole)
    assert after.computed("prefill") == 1
    assert (await status(after.node)).fetched_ssd_blocks == 8


async def test_two_precisions_never_meet_on_one_ssd(start: Start, tmp_path: Path) -> None:
    """Exact blocks on the SSD, then a cluster with a lossy codec on the same folder, and then an exact one again."""
    whole, names = [*prompt(8 * BLOCK), 1], []
    for codec, found in (("identity", 0), ("int8-token-head-1", 0), ("identity", 8)):
        cluster = await start(ssd_dir=tmp_path, save_generated=False, codec=codec)

        async def known(cluster: SmallCluster = cluster, found: int = found) -> bool:
            return (await known_blocks(cluster, 0), (await status(cluster.node)).ssd_blocks) == (found, found)

        await until(known, f"{found} blocks are known to a cluster of {codec}")
        await cluster.answered_right(whole)
        assert cluster.computed("prefill") == len(whole) - found * BLOCK
        assert (await status(cluster.node)).fetched_ssd_blocks == found

        async def settled(cluster: SmallCluster = cluster) -> bool:
            now = await status(cluster.node)
            return (
                now.ssd_blocks + now.ssd_refused == 8
            )  # made-up KV is at times no number that int8 could keep

        await until(settled, "the blocks are on the ssd, or refused")
        names.append(set(await held(cluster.node)))
    exact, lossy, again = names
    assert exact == again
    assert len(lossy) == 8 and not exact & lossy


async def test_a_cluster_has_one_precision(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker whose node has another codec is refused by the node, one beside another node by the conductor."""
    cluster = await start(ssd_dir=tmp_path)
    with pytest.raises(grpc.aio.AioRpcError, match=r"has pool\.codec int8-token-head-1, this node identity"):
        await cluster.start_worker("decode", "decode-1", codec="int8-token-head-1")
    cluster.announce(replace(cluster.member("decode", "decode-2"), precision="int8-token-head-1"))
    await until(lambda: "decode-2 is left out" in caplog.text, "the conductor says so")
    assert "precision='int8-token-head-1'" in caplog.text
    await cluster.answered_right(prompt(8 * BLOCK))
    assert "decode-2" not in {member["id"] for member in cluster.driver.status()["members"]}


async def test_an_operator_verifies_and_drops(start: Start, tmp_path: Path) -> None:
    cluster = await start(ssd_dir=tmp_path, save_generated=False)
    whole = [*prompt(8 * BLOCK), 1]
    await cluster.answered_right(whole)
    await cluster.settled()

    async def written() -> bool:
        return (await status(cluster.node)).ssd_blocks == 8

    await until(written, "the blocks are on the ssd")
    arena = cluster.workers["decode-0"].engine.arena
    arena.payload[int(arena.epoch.argmax())] ^= 1
    [file, *_] = [path for path in tmp_path.rglob("*") if len(path.name) == 64]
    file.write_bytes(b"x" + file.read_bytes()[1:])
    found: pb.VerifyReply = await cluster.node.Verify(pb.Empty())
    assert (found.dram_blocks, found.dram_corrupt, found.ssd_blocks, found.ssd_corrupt) == (8, 1, 8, 1)
    again: pb.VerifyReply = await cluster.node.Verify(pb.Empty())
    assert (again.dram_blocks, again.dram_corrupt, again.ssd_blocks, again.ssd_corrupt) == (7, 0, 7, 0)
    await cluster.answered_right(whole)
    dropped: pb.DropReply = await cluster.node.Drop(pb.DropRequest(all=True))
    assert dropped.dropped == 8
    await until(lambda: _empty(cluster), "nothing is left, and the conductor knows")


async def _empty(cluster: SmallCluster) -> bool:
    now = await status(cluster.node)
    return (now.committed, now.ssd_blocks, await known_blocks(cluster, 0)) == (0, 0, 0)


async def test_nodes_read_from_each_other_over_tcp_with_mutual_tls(start: Start, tmp_path: Path) -> None:
    cluster = await start(nodes=2, tls=certificates(tmp_path))
    await cluster.answered_right(prompt(6 * BLOCK))
    assert (await status(cluster.nodes[1])).fetched_peer_blocks == 6
    (tmp_path / "stranger").mkdir()
    async with channel_to(cluster.peer_addresses[0], certificates(tmp_path / "stranger")) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await KVNodeStub(channel).Status(pb.Empty(), timeout=5.0)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_what_other_nodes_may_ask_over_the_network_is_to_read(start: Start, tmp_path: Path) -> None:
    tls = certificates(tmp_path)
    cluster = await start(nodes=2, tls=tls)
    async with channel_to(cluster.peer_addresses[0], tls) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await KVNodeStub(channel).Drop(pb.DropRequest(all=True), timeout=5.0)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_an_operator_sees_the_link_in_use_and_what_was_measured(start: Start) -> None:
    cluster = await start(nodes=2)
    await cluster.answered_right(prompt(6 * BLOCK))

    async def measured() -> bool:
        return any(
            one.bytes_per_s for there in (await status(cluster.nodes[1])).neighbours for one in there.links
        )

    await until(measured, "the decode node has measured its links to the prefill node")
    shown = await asyncio.to_thread(inspect, "node-1", cluster.address("node-1"), "")
    assert f"reads from {cluster.address('node-0')} by " in shown
    assert "inline 0." in shown


@pytest.mark.parametrize("fault", ["gone", "hangs"])
async def test_a_source_that_is_gone_or_hangs_is_replaced(start: Start, fault: str) -> None:
    """The conductor names every node that has the blocks; the reading node asks the next where one does not answer."""
    cluster = await start(decode=2, nodes=3, save_generated=False)
    whole = prompt(6 * BLOCK)
    await cluster.answered_right(whole)
    await cluster.settled()
    names = await held(cluster.nodes[0])

    async def known() -> bool:
        return [await known_blocks(cluster, node) for node in range(3)] == [6, 6, 0]

    await until(known, "the conductor knows of both")
    arrival = Arrive(
        request=RequestId("another"),
        attempt=1,
        tenant=TenantId("t"),
        chain=tuple(BlockHash(name) for name in names),
        tokens=len(whole),
        max_new_tokens=1,
    )
    decided = await cluster.driver.decide(arrival)
    cluster.driver.report(Aborted(request=arrival.request))
    assert sorted(source.id for source in decided.sources) == ["node-0", "node-1"]
    assert isinstance(decided.command, Place)
    assert decided.sources[0].id == decided.command.source

    address = cluster.address("other")
    sources = [
        pb.Node(node_id="node-9", address=address),
        pb.Node(node_id="node-1", address=cluster.address("node-1")),
    ]
    asked = pb.LeaseRequest(
        request_id="r", holder="reader", hashes=names, lease_s=5.0, sources=sources, fetch_s=20.0
    )
    async with AsyncExitStack() as there:
        if fault == "hangs":
            there.enter_context(listening(address.removeprefix("unix:")))
        leased: pb.SlotList = await cluster.nodes[2].Lease(asked, timeout=20.0)
    await cluster.nodes[2].Release(pb.Holding(request_id="r", holder="reader"))
    assert [(slot.hash, slot.filled) for slot in leased.slots] == [(name, True) for name in names]
    assert (await status(cluster.nodes[2])).fetched_peer_blocks == 6


@contextmanager
def listening(path: str) -> Iterator[None]:
    """Something there takes connections and says nothing."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        yield
