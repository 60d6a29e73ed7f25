"""Several KV nodes: KV follows its request from node to node, and blocks are found wherever they are."""

import asyncio
from typing import TYPE_CHECKING

import pytest

from kvstore.transfer import kv_pb2 as pb
from tests.cluster.conftest import LAYOUT, SmallCluster, Start, until

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
    cluster = await start(nodes=2)
    await cluster.answered_right(prompt(tokens))
    assert cluster.computed("decode") == 1, "only the last prompt token is computed by the decode engine"
    there = await status(cluster.nodes[1])
    assert there.fetched_peer_blocks == -(-tokens // BLOCK)
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
