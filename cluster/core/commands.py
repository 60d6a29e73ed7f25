"""Everything the conductor can ask for, and the data that explains each decision.

The explanation is the one value that logs, metrics, `moonpool explain`, the web page and the simulator's report read.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.core.blocks import NodeId, RequestId, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Predicted seconds by term. Each term is what the request waits for it: work hidden behind other work is 0.

    `ttft_s` is the sum of all terms: the first token takes one decode step, `tbt_s`, itself.
    """

    queue_s: float
    fetch_s: float
    prefill_s: float
    handoff_s: float
    decode_wait_s: float
    tbt_s: float
    ttft_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to serve a request. `source` is the node its cached blocks come from, None where none are used.

    Without a prefill worker the decode worker computes what is not cached, in chunks beside the steps of its batch;
    `step_s_max` is how long these may make a step, if there is a limit.
    """

    prefill: WorkerId | None
    decode: WorkerId
    source: NodeId | None
    cached_tokens: int
    cost: Cost
    step_s_max: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What failed: `term` is predicted (or counted) to be `predicted`, and may be `allowed`."""

    term: str
    predicted: float
    allowed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why. `candidates` are the best considered, ranked by the policy; the chosen one and the runner-up are of them."""

    policy: str
    candidates: tuple[Candidate, ...] = ()
    chosen: Candidate | None = None
    runner_up: Candidate | None = None
    limit: Limit | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Serve the request there. `prefill` is None where the pool holds every token, or `decode` computes the rest."""

    request: RequestId
    attempt: int
    prefill: WorkerId | None
    decode: WorkerId
    cached_tokens_expected: int
    source: NodeId | None
    explanation: Explanation
    step_s_max: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryAfter:
    """Not now: what fails should be over in `seconds`."""

    request: RequestId
    attempt: int
    seconds: float
    reason: str
    explanation: Explanation


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """Not here: waiting would not help."""

    request: RequestId
    attempt: int
    reason: str
    explanation: Explanation


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """This attempt is over for the conductor: its worker left, or it took too long. The gateway decides what follows."""

    request: RequestId
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSnapshot:
    """Ask the node for all that it holds: it is new here, or its changes have a gap."""

    node: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeAt:
    """Send a `Timer` at `at_s`. A later WakeAt does not cancel an earlier one."""

    at_s: float


Command = Place | RetryAfter | Reject | Abort | RequestSnapshot | WakeAt
