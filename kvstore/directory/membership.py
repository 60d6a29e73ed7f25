"""What a process says of itself, and how long that holds."""

from dataclasses import dataclass

LEASE_S = 10.0
RENEW_S = 1.0


@dataclass(frozen=True, slots=True)
class Member:
    """One process. Fields that a role does not have are empty or 0; `role` is node, prefill or decode.

    `incarnation` is new at each start, so that a restarted worker is never taken for the one before. `epoch` is the
    directory's token for it: larger than that of any earlier start under the same id; 0 before it has joined.
    """

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
    epoch: int = 0
    peer_address: str = ""
    """Where other nodes read from this one; empty: at `address` too."""
    precision: str = "exact"
    """The family of a worker's blocks."""
