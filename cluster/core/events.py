"""Everything that can happen to the conductor. Tokens are not among it: they never pass the conductor.

Events about a request carry the attempt they speak of (1, 2, ...): what is said of an attempt that was replaced since
is ignored, so nothing is counted twice.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.core.cost import Coefficients
from cluster.core.state import Capacity, Role, Slo, TenantId
from kvstore.core.blocks import BlockHash, NodeId, RequestId, Tier, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJoined:
    worker: WorkerId
    role: Role
    node: NodeId
    address: str
    capacity: Capacity
    coefficients: Coefficients = Coefficients()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLeft:
    worker: WorkerId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLeft:
    """A kvstore node is gone, or starts again: what it held is unknown, its sequence numbers begin at 1."""

    node: NodeId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrive:
    """A request wants a placement. `chain` names its full blocks; `tokens` counts the tail as well."""

    request: RequestId
    attempt: int = 1
    tenant: TenantId
    tokens: int
    chain: tuple[BlockHash, ...]
    max_new_tokens: int
    slo: Slo = Slo()


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillStarted:
    request: RequestId
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillFinished:
    request: RequestId
    attempt: int
    observed_s: float
    computed_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillLost:
    """The prefill worker failed; the attempt goes on, since the decode worker may compute what is missing."""

    request: RequestId
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStarted:
    """The KV is in the decode engine and the request in its batch."""

    request: RequestId
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """`ttft_s` is counted from the client's arrival, that of a later attempt from its own placement."""

    request: RequestId
    attempt: int
    ttft_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The answer is complete; the times between its tokens are None where it had only one."""

    request: RequestId
    attempt: int
    output_tokens: int
    tbt_mean_s: float | None
    tbt_p99_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """This attempt is over; the gateway may come back with the next one."""

    request: RequestId
    attempt: int
    stage: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Aborted:
    """The client is gone: every attempt is over."""

    request: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStored:
    """The node holds these blocks now, in `tier` at best, whatever it held of them before."""

    node: NodeId
    hashes: tuple[BlockHash, ...]
    sequence: int
    tier: Tier = Tier.DRAM


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRemoved:
    """The node holds these blocks no more, in no tier."""

    node: NodeId
    hashes: tuple[BlockHash, ...]
    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSnapshot:
    """All that the node held after its change number `sequence`: in its DRAM, and on its `ssd` alone."""

    node: NodeId
    hashes: tuple[BlockHash, ...]
    sequence: int
    ssd: tuple[BlockHash, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryLost:
    """Nobody knows any more who joins and who is lost. What was known last stays, for a while."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryFound:
    """Membership is known again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timer:
    """A `WakeAt` is due. It may come late, twice, or unasked."""

    at_s: float


Event = (
    WorkerJoined
    | WorkerLeft
    | NodeLeft
    | Arrive
    | PrefillStarted
    | PrefillFinished
    | PrefillLost
    | DecodeStarted
    | FirstToken
    | Finished
    | Failed
    | Aborted
    | BlockStored
    | BlockRemoved
    | NodeSnapshot
    | DirectoryLost
    | DirectoryFound
    | Timer
)
