"""The seam between the HTTP edge and the cluster: what the edge asks for, and what it may be told.

The edge validates, renders and tokenises; a `Backend` places the work, runs it on a prefill and a decode node and
yields the answer. Nothing here knows HTTP, and vLLM is imported for its types only.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams

    from cluster.gateway.keys import ApiKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """What one gateway serves. The parser fields have the meaning of vLLM's flags of the same name."""

    model: str
    """A model folder or hub id: the gateway reads its configuration, tokenizer and templates, never its weights."""
    served_model_names: tuple[str, ...]
    """Names clients may ask for; the first is the one that answers carry."""
    max_model_len: int | None = None
    """Context length in tokens; None takes the model's own. Must be that of the engines."""
    chat_template: str | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str = ""
    prompt_tokens_details: bool = True
    """Whether `usage` tells how many prompt tokens came from the pool (vLLM's --enable-prompt-tokens-details)."""
    tenant: str = "default"
    """Whose KV the requests may share, where no API keys are asked for."""
    api_keys: ApiKeys | None = None
    """Who may ask; None: everyone."""
    ttft_slo_s: float | None = None
    tbt_slo_s: float | None = None
    """Limits for requests that carry none of their own."""
    body_bytes_max: int = 8 << 20
    """Longest request body accepted. A million token ids take about 7 MB of JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One prompt to answer. From here on a request is token ids; they are final, special tokens included.

    `sampling_params` are exactly what a plain vLLM server would hand to its engine: `n`, `stop`, logprobs, the
    structured-output grammar and `output_kind` included. They have been validated against the model, not changed.
    """

    request_id: str
    tenant: str
    token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    arrival_s: float
    """Unix time at which the HTTP request reached the gateway."""
    ttft_slo_s: float | None
    tbt_slo_s: float | None
    cache_salt: str | None = None
    """The client's own salt: prefixes are shared only between requests of one tenant with equal salts."""
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: Mapping[str, Any] | None = None
    """Both go unchanged to `AsyncLLM.generate`; they matter to structured output of reasoning models only."""


class Refusal(Exception):  # noqa: N818  # an answer of the system, not a fault of it
    """Why a request gets no answer, in words for the client. Raised before or during an answer."""

    status = 500
    kind = "InternalServerError"

    def __init__(self, reason: str, *, field: str | None = None) -> None:
        super().__init__(reason)
        self.field = field


class Overloaded(Refusal):
    """The answer would miss its limits. `reason` names the term that failed; try again in `retry_after_s`."""

    status = 429
    kind = "rate_limit_exceeded"

    def __init__(self, reason: str, retry_after_s: float) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class Unavailable(Refusal):
    """The cluster cannot serve now: no worker, no conductor, a worker lost and no way to go on."""

    status = 503
    kind = "ServiceUnavailableError"


class UnservedRequest(Refusal):
    """The request asks for something that this cluster does not do. `field` names the part of the body."""

    status = 400
    kind = "BadRequestError"


class RequestInFlight(Refusal):
    """The client chose a request id that is being served at this moment."""

    status = 409
    kind = "ConflictError"


class Backend(Protocol):
    """What answers requests. The gateway owns each request it makes, and its end."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        """Yield the answer's outputs, deltas or the whole as `sampling_params.output_kind` says.

        The last output has `finished` set. Closing or cancelling the generator aborts the work on both engines.
        Raises `Refusal`; anything else counts as a bug and reaches the client as a bare internal error.
        """
        ...

    def ready(self) -> str | None:
        """None while requests can be served, else the reason why not. Cheap: asked once for each request."""
        ...

    def status(self) -> dict[str, object]:
        """The cluster as `moonpool status` shows it; JSON values only."""
        ...

    def explain(self, request_id: str) -> dict[str, object] | None:
        """What was decided and what happened for one request; None when it is not (or no longer) known."""
        ...
