"""What one worker process must know; imports no engine, so that a supervisor can build it."""

from dataclasses import dataclass

from cluster.config import EngineConfig, PoolConfig
from kvstore.core.blocks import WorkerId


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """`address` is where the worker listens, `node_address` where the KV node beside it does, `redis_url` and
    `cluster` where it announces itself.
    """

    worker_id: WorkerId
    model: str
    engine: EngineConfig
    pool: PoolConfig
    address: str
    node_address: str
    redis_url: str
    cluster: str
