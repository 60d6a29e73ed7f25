"""What every directory promises, of each implementation; the one on Redis with a real Valkey."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import pytest

from kvstore.core.blocks import BlockHash, NodeId, Tier
from kvstore.directory.directory import (
    AwayError,
    BlockChange,
    Directory,
    FencedError,
    Gap,
    Published,
    Roster,
)
from kvstore.directory.membership import Member
from kvstore.directory.memory_directory import MemoryDirectory
from kvstore.directory.presence import Presence
from kvstore.directory.redis_directory import RedisDirectory, connect
from tests.valkey import running_valkey

LEASE_S = 0.4
KEPT = 200  # Redis trims whole nodes of its stream, of 100 entries
NODE = Member("node-0", "node", "first", "node-0", "unix:here", 7)
Follower: TypeAlias = AsyncGenerator[Published | Gap, None]


def change(number: int, tier: Tier | None = Tier.DRAM, blocks: int = 1) -> BlockChange:
    return BlockChange(number, tier, tuple(BlockHash(bytes([number % 256, at]) * 16) for at in range(blocks)))


@dataclass
class Made:
    directory: Directory
    lose_all: Callable[[], Awaitable[None]]


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with running_valkey() as server:
        yield f"unix://{server.unix_socket_path}"


@pytest.fixture(params=["memory", "redis"])
async def made(request: pytest.FixtureRequest) -> AsyncIterator[Made]:
    if request.param == "memory":
        memory = MemoryDirectory(LEASE_S, KEPT)

        async def forget() -> None:
            memory.forget()

        yield Made(memory, forget)
        return
    redis = connect(request.getfixturevalue("redis_url"))

    async def flush() -> None:
        await redis.flushall()

    yield Made(RedisDirectory(redis, uuid.uuid4().hex, LEASE_S, KEPT), flush)
    await redis.aclose()


async def present(directory: Directory) -> list[str]:
    return [member.id for member in (await directory.roster()).members]


async def told(follower: Follower, count: int) -> list[Published | Gap]:
    return [await asyncio.wait_for(anext(follower), 5) for _ in range(count)]


async def test_members_are_there_in_order_with_all_they_said(made: Made) -> None:
    directory = made.directory
    worker = Member(
        "decode-0", "decode", "x", "node-0", "unix:w", 8, "model", "float32", 32, 46_080, 4096, 8, 9000
    )
    joined = [await directory.join(NODE), await directory.join(worker)]
    assert await present(directory) == [], "a member is there from its first renewal"
    for member in joined:
        await directory.renew(member)
    assert (await directory.roster()).members == (joined[1], joined[0])
    assert replace(joined[1], epoch=0) == worker


async def test_a_member_lapses_unless_it_renews_its_lease(made: Made) -> None:
    directory = made.directory
    lasting, lapsing = await directory.join(NODE), await directory.join(replace(NODE, id="node-1"))
    await directory.renew(lapsing)
    for _ in range(3):
        await directory.renew(lasting)
        await asyncio.sleep(LEASE_S / 2)
    await directory.renew(lasting)
    assert await present(directory) == ["node-0"]
    await directory.renew(lapsing)
    assert await present(directory) == ["node-0", "node-1"], "late is not fenced: nobody took its place"


async def test_a_member_that_leaves_is_gone_at_once(made: Made) -> None:
    member = await made.directory.join(NODE)
    await made.directory.renew(member)
    await made.directory.leave(member)
    assert await present(made.directory) == []


async def test_what_is_older_under_the_same_id_is_refused(made: Made) -> None:
    directory = made.directory
    old = await directory.join(NODE)
    await directory.renew(old)
    new = await directory.join(replace(NODE, incarnation="second"))
    assert new.epoch > old.epoch > 0
    with pytest.raises(FencedError, match=f"node-0, epoch {old.epoch}: it was started anew since"):
        await directory.renew(old)
    await directory.renew(new)
    async with aclosing(directory.changes()) as follower:
        assert await told(follower, 1) == [Gap()]
        with pytest.raises(FencedError):
            await directory.publish(old, [change(1)])
        await directory.publish(new, [change(2)])
        await directory.leave(old)
        assert await told(follower, 1) == [Published(NodeId("node-0"), new.epoch, change(2))]
    assert (await directory.roster()).members == (new,)


async def test_epochs_go_on_after_all_was_lost(made: Made) -> None:
    """Whoever comes first stands for the counter that was lost, and a later start is later all the same."""
    directory = made.directory
    first = await directory.join(NODE)
    second = await directory.join(NODE)
    await made.lose_all()
    await directory.renew(second)
    with pytest.raises(FencedError):
        await directory.renew(first)
    await made.lose_all()
    await asyncio.sleep(0.01)
    third = await directory.join(NODE)
    assert third.epoch > second.epoch
    with pytest.raises(FencedError):
        await directory.publish(second, [change(1)])


async def test_the_roster_tells_that_all_was_lost(made: Made) -> None:
    before = await made.directory.roster()
    assert await made.directory.roster() == before == Roster(before.memory, ())
    await made.lose_all()
    after = await made.directory.roster()
    assert after.memory != before.memory
    assert await made.directory.roster() == after


async def test_changes_come_in_order_to_everyone_who_follows(made: Made) -> None:
    directory = made.directory
    one, two = await directory.join(NODE), await directory.join(replace(NODE, id="node-1"))
    await directory.publish(one, [change(1)])  # before anyone follows
    async with aclosing(directory.changes()) as a, aclosing(directory.changes()) as b:
        assert await told(a, 1) == await told(b, 1) == [Gap()]
        await directory.publish(one, [change(2, Tier.SSD, 3), change(3, None, 2)])
        await directory.publish(two, [change(1, Tier.DRAM, 0)])
        expected = [
            Published(NodeId("node-0"), one.epoch, change(2, Tier.SSD, 3)),
            Published(NodeId("node-0"), one.epoch, change(3, None, 2)),
            Published(NodeId("node-1"), two.epoch, change(1, Tier.DRAM, 0)),
        ]
        assert await told(a, 3) == await told(b, 3) == expected
        waiting = asyncio.create_task(told(a, 1))
        await asyncio.sleep(0.05)
        await directory.publish(two, [change(2)])
        assert await waiting == [Published(NodeId("node-1"), two.epoch, change(2))]


async def test_who_is_far_behind_has_a_gap_and_goes_on(made: Made) -> None:
    directory = made.directory
    member = await directory.join(NODE)
    async with aclosing(directory.changes()) as follower:
        await told(follower, 1)
        for start in range(1, 3001, 500):
            await directory.publish(member, [change(number) for number in range(start, start + 500)])
        assert await told(follower, 1) == [Gap()]
        await directory.publish(member, [change(3001)])
        assert await told(follower, 1) == [Published(NodeId("node-0"), member.epoch, change(3001))]


async def test_a_presence_joins_stays_publishes_and_leaves(made: Made) -> None:
    presence = Presence(made.directory, NODE)
    presence.publish(change(1))
    async with aclosing(made.directory.changes()) as follower:
        await told(follower, 1)
        present_task = asyncio.create_task(presence.run())
        [first] = await told(follower, 1)
        presence.publish(change(2))
        [second] = await told(follower, 1)
    assert [first, second] == [
        Published(NodeId("node-0"), presence.member.epoch, change(number)) for number in (1, 2)
    ]
    assert (await made.directory.roster()).members == (presence.member,)
    present_task.cancel()
    await asyncio.gather(present_task, return_exceptions=True)
    assert await present(made.directory) == []


async def test_work_ends_when_a_later_start_takes_its_place(made: Made) -> None:
    presence = Presence(made.directory, NODE)
    working = asyncio.create_task(presence.beside(asyncio.Event().wait()))
    while not await present(made.directory):
        await asyncio.sleep(0.01)
    later = await made.directory.join(replace(NODE, incarnation="second"))
    presence.publish(change(1))
    with pytest.raises(FencedError):
        await asyncio.wait_for(working, 5)
    await made.directory.renew(later)
    assert (await made.directory.roster()).members == (later,)


async def test_work_that_ends_says_how(made: Made) -> None:
    async def answer() -> int:
        return 42

    async def fail() -> None:
        raise OSError("no socket")

    assert await Presence(made.directory, NODE).beside(answer()) == 42
    with pytest.raises(OSError, match="no socket"):
        await Presence(made.directory, NODE).beside(fail())
    assert await present(made.directory) == []


async def test_clusters_in_one_redis_are_strangers(redis_url: str) -> None:
    redis = connect(redis_url)
    here, there = RedisDirectory(redis, "here"), RedisDirectory(redis, "there")
    await here.renew(await here.join(NODE))
    assert await present(here) == ["node-0"]
    assert await present(there) == []
    await redis.aclose()


async def test_a_redis_that_is_not_there_is_told(tmp_path: Path) -> None:
    redis = connect(f"unix://{tmp_path}/none.sock")
    directory = RedisDirectory(redis, "c")
    for call in (
        directory.join(NODE),
        directory.renew(NODE),
        directory.roster(),
        directory.publish(NODE, []),
    ):
        with pytest.raises(AwayError):
            await call
    await redis.aclose()
