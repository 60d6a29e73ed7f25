"""What travels to an engine with a request: which arena slots to load, which to fill.

A plan rides in vLLM's `kv_transfer_params`, so it must be JSON-like. It is keyed by our request id, because vLLM
suffixes its own ids and prefixes the children of n > 1: all children share one plan.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvstore.core.blocks import BlockHash, RequestId

_KEY = "moonpool"


@dataclass(frozen=True, slots=True)
class PlannedBlock:
    """One use of one slot, by name: a reader or writer of it must see this epoch and this hash."""

    slot: int
    epoch: int
    hash: BlockHash


@dataclass(frozen=True, slots=True)
class KVPlan:
    """The blocks of one prompt in order: first those to load, then those to fill (one of the two may be empty).

    `load_tokens` is the number of prompt tokens whose KV the loaded blocks hold; `prompt_tokens` the prompt's length.
    `deadline_s` is in CLOCK_MONOTONIC seconds: a block that is not complete by then counts as failed.
    `hold`: when the request has ended, and has filled a block beyond its prompt, its pages are held until
    `KVEngine.save_held` tells which blocks of the whole sequence to save.
    """

    request: RequestId
    load: tuple[PlannedBlock, ...]
    load_tokens: int
    save: tuple[PlannedBlock, ...]
    prompt_tokens: int
    deadline_s: float
    hold: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for a plan that would load past the prompt's end."""
        if not 0 <= self.load_tokens <= self.prompt_tokens:
            raise ValueError(f"{self.load_tokens} tokens to load for a prompt of {self.prompt_tokens}")

    def to_params(self) -> dict[str, Any]:
        """The value for `SamplingParams.extra_args["kv_transfer_params"]`."""
        return {
            _KEY: {
                "request": self.request,
                "load": _pack(self.load),
                "load_tokens": self.load_tokens,
                "save": _pack(self.save),
                "prompt_tokens": self.prompt_tokens,
                "deadline_s": self.deadline_s,
                "hold": self.hold,
            }
        }

    @classmethod
    def from_params(cls, params: dict[str, Any] | None) -> "KVPlan | None":
        """The plan in `params`, or None when the request came without one."""
        if not params or _KEY not in params:
            return None
        fields = params[_KEY]
        return cls(
            request=RequestId(fields["request"]),
            load=_unpack(fields["load"]),
            load_tokens=fields["load_tokens"],
            save=_unpack(fields["save"]),
            prompt_tokens=fields["prompt_tokens"],
            deadline_s=fields["deadline_s"],
            hold=fields["hold"],
        )


def _pack(blocks: Sequence[PlannedBlock]) -> list[list[Any]]:
    return [[block.slot, block.epoch, block.hash.hex()] for block in blocks]


def _unpack(rows: list[list[Any]]) -> tuple[PlannedBlock, ...]:
    return tuple(PlannedBlock(slot, epoch, BlockHash(bytes.fromhex(name))) for slot, epoch, name in rows)


@dataclass(frozen=True, slots=True)
class LoadReport:
    """How one load ended, in one rank or in all; travels back in the request's last output.

    `computed_tokens` is the number of prompt tokens that the engine's scheduler had computed there (1 when all KV came
    from the pool: the last one is always computed anew). `failed` blocks, by number, are computed here; `corrupt` names those (in
    hex) whose bytes were not what their writer had sealed. `held`: the engine holds the request's pages (`KVPlan.hold`).
    """

    blocks: int
    failed: tuple[int, ...]
    failure: str
    kv_bytes: int
    load_s: float
    resident_at: float
    """CLOCK_MONOTONIC seconds when the last segment was in the engine."""
    corrupt: tuple[str, ...] = ()
    computed_tokens: int = 0
    held: bool = False

    @property
    def failed_blocks(self) -> int:
        return len(self.failed)

    def with_rank(self, other: "LoadReport") -> "LoadReport":
        """The same load in another rank of tensor parallelism besides: a block that one rank lacks has failed."""
        return replace(
            self,
            failed=tuple(sorted({*self.failed, *other.failed})),
            failure=self.failure or other.failure,
            kv_bytes=self.kv_bytes + other.kv_bytes,
            load_s=max(self.load_s, other.load_s),
            resident_at=max(self.resident_at, other.resident_at),
            corrupt=tuple(dict.fromkeys((*self.corrupt, *other.corrupt))),
        )

    def to_params(self) -> dict[str, Any]:
        return {_KEY: asdict(self)}

    @classmethod
    def from_params(cls, params: dict[str, Any] | None) -> "LoadReport | None":
        if not params or _KEY not in params or "blocks" not in params[_KEY]:
            return None
        fields = params[_KEY]
        return cls(**{**fields, "failed": tuple(fields["failed"]), "corrupt": tuple(fields["corrupt"])})
