"""The directory on Redis: a key a member, which expires with its lease, and one stream for the changes of all nodes.

Keys, all below `moonpool:{cluster}`: `member:ID` the record, `epoch:ID` the latest epoch, `memory` a random word that
is there as long as Redis remembers anything, `blocks` the stream. What must not be torn apart is a script.
"""

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, cast

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from kvstore.core.blocks import HASH_BYTES, BlockHash, NodeId, Tier
from kvstore.directory.directory import (
    CHANGES_KEPT,
    AwayError,
    BlockChange,
    FencedError,
    Gap,
    Published,
    Roster,
)
from kvstore.directory.membership import LEASE_S, Member

logger = logging.getLogger(__name__)

_BATCH = 1000
_BLOCK_MS = 1000
_TIMEOUT_S = 5.0
_RETRY_S = 0.2
_EPOCH_KEPT_MS = 24 * 3600 * 1000

# A counter, which begins at the time of day: so an epoch is larger than those that a lost counter gave.
_JOIN = """
local time = redis.call('TIME')
redis.call('SET', KEYS[1], time[1] * 1000 + math.floor(time[2] / 1000), 'NX')
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return redis.call('INCR', KEYS[1])
"""
# The latest epoch that anyone came with stands for a counter that was lost.
_FENCE = """
local latest = tonumber(redis.call('GET', KEYS[1]) or '0')
if latest > tonumber(ARGV[1]) then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
"""
_RENEW = _FENCE + "redis.call('SET', KEYS[2], ARGV[3], 'PX', ARGV[4])\nreturn 1"
_LEAVE = _FENCE + "redis.call('DEL', KEYS[2])\nreturn 1"
_PUBLISH = (
    _FENCE
    + """
for i = 5, #ARGV, 3 do
  redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[3], '*', 'node', ARGV[4], 'epoch', ARGV[1],
             'sequence', ARGV[i], 'tier', ARGV[i + 1], 'hashes', ARGV[i + 2])
end
return 1
"""
)


def connect(url: str) -> Redis:
    """A client that gives up soon: whoever uses it knows what to do meanwhile. One retry is for stale connections."""
    retry = Retry(NoBackoff(), 1)
    return Redis.from_url(url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S, retry=retry)


class RedisDirectory:
    """See the contract in `directory.py`. The connection is the caller's to close."""

    def __init__(
        self, redis: Redis, cluster: str, lease_s: float = LEASE_S, changes_kept: int = CHANGES_KEPT
    ) -> None:
        self._redis = redis
        self._prefix = f"moonpool:{cluster}"
        self._stream = f"{self._prefix}:blocks"
        self._lease_ms = round(lease_s * 1000)
        self._kept = changes_kept

    async def join(self, member: Member) -> Member:
        return replace(
            member, epoch=int(await self._call(_JOIN, [self._key("epoch", member)], _EPOCH_KEPT_MS))
        )

    async def renew(self, member: Member) -> None:
        keys = [self._key("epoch", member), self._key("member", member)]
        await self._fenced(member, _RENEW, keys, json.dumps(asdict(member)), self._lease_ms)

    async def leave(self, member: Member) -> None:
        keys = [self._key("epoch", member), self._key("member", member)]
        try:
            await self._eval(_LEAVE, keys, member.epoch, _EPOCH_KEPT_MS)
        except RedisError as error:
            raise AwayError(str(error)) from error

    async def publish(self, member: Member, changes: Sequence[BlockChange]) -> None:
        keys = [self._key("epoch", member), self._stream]
        words: list[str | bytes | int] = [
            word
            for change in changes
            for word in (change.sequence, change.tier or "", b"".join(change.hashes))
        ]
        await self._fenced(member, _PUBLISH, keys, self._kept, member.id, *words)

    async def roster(self) -> Roster:
        word = uuid.uuid4().hex
        with _asking():
            before = cast(
                bytes | None, await self._redis.set(f"{self._prefix}:memory", word, nx=True, get=True)
            )
            keys = [key async for key in self._redis.scan_iter(f"{self._prefix}:member:*", count=1000)]
            records = await self._redis.mget(keys) if keys else []
        present = [Member(**json.loads(record)) for record in records if record is not None]
        memory = before.decode() if before is not None else word
        return Roster(memory, tuple(sorted(present, key=lambda member: member.id)))

    async def changes(self) -> AsyncGenerator[Published | Gap, None]:
        while True:
            try:
                run, last = await self._newest()
                yield Gap()
                while (entries := await self._after(run, last)) is not None:
                    for last, fields in entries:  # noqa: B007  # the next read goes on from the last one
                        yield _published(fields)
            except AwayError as error:
                logger.warning("changes of the nodes' blocks are unknown for now: %s", error)
                await asyncio.sleep(_RETRY_S)

    async def _newest(self) -> tuple[str, bytes]:
        """The run of the server, and the newest entry of its stream."""
        with _asking():
            both = self._redis.pipeline(transaction=False)
            both.xrevrange(self._stream, count=1)
            both.info("server")
            newest, info = await both.execute()
        return info["run_id"], newest[0][0] if newest else b"0-0"

    async def _after(self, run: str, last: bytes) -> list[tuple[bytes, dict[bytes, bytes]]] | None:
        """What follows the entry `last`, none if nothing comes for a while. None if something else may have followed:
        trimmed before it was read, or known to another run of the server (the client connects again by itself).
        """
        with _asking():
            all_three = self._redis.pipeline(transaction=False)
            all_three.xread({self._stream: last}, count=_BATCH, block=_BLOCK_MS)
            all_three.xrange(self._stream, last, last)
            all_three.info("server")
            found, before, info = await all_three.execute()
        entries = found[0][1] if found else []
        trimmed = len(entries) >= min(_BATCH, self._kept) and not before
        return None if trimmed or info["run_id"] != run else entries

    # -- inside -----------------------------------------------------------------------------------------------

    def _key(self, kind: str, member: Member) -> str:
        return f"{self._prefix}:{kind}:{member.id}"

    async def _call(self, script: str, keys: list[str], *words: str | bytes | int) -> int:
        with _asking():
            return await self._eval(script, keys, *words)

    async def _eval(self, script: str, keys: list[str], *words: str | bytes | int) -> int:
        return cast(int, await cast(Any, self._redis.eval(script, len(keys), *keys, *words)))

    async def _fenced(self, member: Member, script: str, keys: list[str], *words: str | bytes | int) -> None:
        if not await self._call(script, keys, member.epoch, _EPOCH_KEPT_MS, *words):
            raise FencedError(f"{member.id}, epoch {member.epoch}: it was started anew since")


@contextmanager
def _asking() -> Iterator[None]:
    """The client's errors become ours. A cancellation that came while it connected, which it swallows, is heeded."""
    try:
        yield
    except RedisError as error:
        _heed_cancellation()
        raise AwayError(str(error)) from error
    _heed_cancellation()


def _heed_cancellation() -> None:
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _published(fields: dict[bytes, bytes]) -> Published:
    names, tier = fields[b"hashes"], fields[b"tier"].decode()
    hashes = tuple(BlockHash(names[at : at + HASH_BYTES]) for at in range(0, len(names), HASH_BYTES))
    change = BlockChange(int(fields[b"sequence"]), Tier(tier) if tier else None, hashes)
    return Published(NodeId(fields[b"node"].decode()), int(fields[b"epoch"]), change)
