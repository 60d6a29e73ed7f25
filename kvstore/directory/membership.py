"""Who is in the cluster: each process keeps a record in Redis that ends shortly after it stops renewing it.

A member's `incarnation` is new at each start, so that a restarted worker is never taken for the one before.
"""

import asyncio
import json
import logging
from dataclasses import asdict, dataclass

from redis.asyncio import Redis
from redis.exceptions import RedisError

logger = logging.getLogger(__name__)

LEASE_S = 10.0
_RENEW_S = 1.0


@dataclass(frozen=True, slots=True)
class Member:
    """One process. Fields that a role does not have are empty or 0; `role` is node, prefill or decode."""

    id: str
    role: str
    incarnation: str
    node: str
    address: str
    pid: int
    fingerprint: str = ""
    dtype: str = ""
    block_tokens: int = 0
    kv_bytes_per_token: int = 0
    max_model_len: int = 0
    batch_max: int = 0
    kv_tokens_max: int = 0


def _key(cluster: str, member: str) -> str:
    return f"moonpool:{cluster}:member:{member}"


async def keep_announced(redis: Redis, cluster: str, member: Member) -> None:
    """Renews the member's record until cancelled, then withdraws it. A Redis that is away is tried again."""
    key, record = _key(cluster, member.id), json.dumps(asdict(member))
    try:
        while True:
            try:
                await redis.set(key, record, px=int(LEASE_S * 1000))
            except RedisError as error:
                logger.warning("cannot renew membership of %s: %s", member.id, error)
            await asyncio.sleep(_RENEW_S)
    finally:
        try:
            await redis.delete(key)
        except RedisError:
            logger.debug("membership of %s will lapse by itself", member.id)


async def members(redis: Redis, cluster: str) -> list[Member]:
    """All present members, in order of id. Raises RedisError when Redis is away."""
    keys = [key async for key in redis.scan_iter(match=_key(cluster, "*"), count=1000)]
    records = await redis.mget(keys) if keys else []
    found = [Member(**json.loads(record)) for record in records if record is not None]
    return sorted(found, key=lambda member: member.id)
