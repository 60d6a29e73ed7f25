"""OpenAI semantics: vLLM's own serving code over our cluster.

A body means here what it means to `vllm serve` because the same classes read it: vLLM parses the request, renders the
chat template, tokenises, builds the sampling parameters, and afterwards formats choices, logprobs, tool calls, usage
and server-sent events. Between the two halves stands `ClusterClient`, which takes the place of vLLM's engine.

    HTTP body -> OpenAIServingChat -> ClusterClient.generate -> Backend (prefill and decode nodes)
                                   <- Answer               <-

This is the only module of the gateway that imports vLLM at run time.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, TypeAlias, cast

from fastapi import Request
from vllm import AsyncEngineArgs
from vllm.config import VllmConfig
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse
from vllm.entrypoints.serve.exception_handling.handlers.validation import validation_exception_handler
from vllm.entrypoints.serve.utils.api_utils import validate_json_request
from vllm.exceptions import GenerationError, VLLMError
from vllm.inputs import EngineInput
from vllm.outputs import RequestOutput
from vllm.renderers import BaseRenderer, renderer_from_config
from vllm.renderers.chat_utils import load_chat_template
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import RequestOutputCollector

from cluster.gateway.metrics import AnswerClock, Metrics
from cluster.gateway.request import (
    Backend,
    GatewayConfig,
    GenerateRequest,
    Overloaded,
    Refusal,
    RequestInFlight,
    Unavailable,
    UnservedRequest,
)

__all__ = [
    "Call",
    "ChatCompletionRequest",
    "CompletionRequest",
    "Frontend",
    "Reply",
    "VLLMError",
    "Whole",
    "error_reply",
    "validate_json_request",
    "validation_exception_handler",
]

logger = logging.getLogger(__name__)

TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})
INTERNAL_ERROR = "Internal server error"


class Answer:
    """One request's outputs on their way from the backend into vLLM's serving code, which iterates over this.

    A task of its own pulls them, so that ending the work never depends on where the consumer is suspended: `aclose`
    cancels the task and waits until the backend has seen it. Between the two stands vLLM's collector, which merges
    deltas when the client reads slower than the engines write, and so holds at most one output.
    """

    def __init__(
        self,
        outputs: AsyncGenerator[RequestOutput, None],
        request: GenerateRequest,
        clock: AnswerClock,
        on_close: Callable[[], None],
    ) -> None:
        self.request_id = request.request_id
        self.failed = False
        self._on_close = on_close
        self._outputs = outputs
        self._clock = clock
        self._collector = RequestOutputCollector(request.sampling_params.output_kind, request.request_id)
        self._pull_task: asyncio.Task[None] | None = None
        self._held: RequestOutput | None = None
        self._finished = False

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._finished:
            raise StopAsyncIteration
        output = self._held if self._held is not None else await self._next()
        self._held = None
        self._finished = output.finished
        return output

    async def begin(self) -> None:
        """Wait for the first output and keep it for the consumer. Raises what prevented it."""
        self._held = await self._next()

    async def aclose(self) -> None:
        """End the work if it has not ended, and wait for that. Idempotent."""
        self._finished = True
        if self._pull_task is None:
            await self._outputs.aclose()
        else:
            self._pull_task.cancel()
            await asyncio.wait({self._pull_task})
        self._on_close()

    async def _next(self) -> RequestOutput:
        if self._pull_task is None:
            self._pull_task = asyncio.create_task(self._pull(), name=f"answer {self.request_id}")
        output = await self._collector.get()
        assert isinstance(output, RequestOutput)
        return output

    async def _pull(self) -> None:
        try:
            async with aclosing(self._outputs):
                async for output in self._outputs:
                    for choice in output.outputs:
                        self._clock.tokens(choice.index, len(choice.token_ids))
                    self._collector.put(output)
                    if output.finished:
                        return
            raise RuntimeError("the backend ended the answer without finishing it")
        except Refusal as refusal:
            self.failed = True
            self._collector.put(refusal)
        except (
            Exception
        ):  # the backend's bug ends this answer only, and tells the client nothing of its making
            logger.exception("request %s failed", self.request_id)
            self.failed = True
            self._collector.put(GenerationError(INTERNAL_ERROR))


@dataclass(slots=True)
class Call:
    """One HTTP request while it is served: what its engine requests inherit, and the answers it has opened."""

    tenant: str
    arrival_s: float
    ttft_slo_s: float | None
    tbt_slo_s: float | None
    answers: list[Answer] = field(default_factory=list)
    disconnected: bool = False

    async def begin(self) -> None:
        """Wait until every answer has begun. Raises the first refusal: a batch is served whole or refused whole."""
        beginnings = [asyncio.ensure_future(answer.begin()) for answer in self.answers]
        try:
            await asyncio.gather(*beginnings)
        finally:
            for beginning in beginnings:
                beginning.cancel()

    async def close(self) -> None:
        """End whatever still runs on the engines. Idempotent."""
        await asyncio.gather(*(answer.aclose() for answer in self.answers))


_CALL: ContextVar[Call] = ContextVar("call")


class ClusterClient:
    """What vLLM's serving classes use of an `EngineClient`, and nothing more of it.

    They reach it through a cast, not as a subclass: of that class's 25 abstract methods (sleep, profiling, LoRA, weight
    transfer) serving a request touches none, and an attribute that a later vLLM begins to use fails in the tests.
    """

    errored = False
    dead_error = Unavailable("the engine is dead")

    def __init__(
        self, vllm_config: VllmConfig, renderer: BaseRenderer, backend: Backend, metrics: Metrics
    ) -> None:
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.renderer = renderer
        self.input_processor = InputProcessor(vllm_config, renderer)
        self._backend = backend
        self._metrics = metrics
        self._live: set[str] = set()

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Called by vLLM before it renders. Raises `Unavailable` while the cluster cannot serve."""
        if (reason := self._backend.ready()) is not None:
            raise Unavailable(reason)

    def generate(
        self,
        prompt: EngineInput,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: Mapping[str, Any] | None = None,
        **_of_one_engine: object,
    ) -> Answer:
        """Open one request's answer; nothing is asked of the cluster until it is iterated or begun.

        vLLM's own validation runs first, on a copy since it writes to what it checks: what an engine would refuse
        is refused here, before any work. Raises vLLM's client errors and `Refusal`.
        """
        if request_id in self._live:
            raise RequestInFlight(f"Request id {request_id!r} is in flight.", field="X-Request-Id")
        if prompt["type"] != "token":
            raise UnservedRequest(f"Prompts of type {prompt['type']!r} are not served.", field="prompt")
        self.input_processor.process_inputs(
            request_id, prompt, copy.deepcopy(sampling_params), supported_tasks=("generate",)
        )
        call = _CALL.get()
        request = GenerateRequest(
            request_id=request_id,
            tenant=call.tenant,
            token_ids=tuple(prompt["prompt_token_ids"]),
            sampling_params=sampling_params,
            arrival_s=call.arrival_s,
            ttft_slo_s=call.ttft_slo_s,
            tbt_slo_s=call.tbt_slo_s,
            cache_salt=prompt.get("cache_salt"),
            reasoning_ended=reasoning_ended,
            reasoning_parser_kwargs=reasoning_parser_kwargs,
        )
        self._metrics.prompt_tokens.inc(len(request.token_ids))
        streamed = sampling_params.output_kind is RequestOutputKind.DELTA
        clock = AnswerClock(self._metrics, call.arrival_s, streamed)
        self._live.add(request_id)
        answer = Answer(
            self._backend.generate(request), request, clock, on_close=lambda: self._live.discard(request_id)
        )
        call.answers.append(answer)
        return answer


def error_response(
    message: str | Exception,
    err_type: str = "BadRequestError",
    status_code: HTTPStatus = HTTPStatus.BAD_REQUEST,
    param: str | None = None,
) -> ErrorResponse:
    """The OpenAI error body of an exception: vLLM's, with our refusals and without the words of internal errors."""
    if isinstance(message, Refusal):
        return ErrorResponse(
            error=ErrorInfo(message=str(message), type=message.kind, param=message.field, code=message.status)
        )
    response = create_error_response(message, err_type, status_code, param)
    if isinstance(message, Exception) and response.error.code == HTTPStatus.INTERNAL_SERVER_ERROR:
        response.error.message = INTERNAL_ERROR
    return response


class _Chat(OpenAIServingChat):  # type: ignore[misc]  # vLLM is untyped to us
    create_error_response = staticmethod(error_response)


class _Completion(OpenAIServingCompletion):  # type: ignore[misc]  # as above
    create_error_response = staticmethod(error_response)


@dataclass(frozen=True, slots=True)
class Whole:
    """A reply in one piece: an answer or an error."""

    status: int
    body: dict[str, Any]
    retry_after_s: int | None = None


Reply: TypeAlias = Whole | AsyncGenerator[str, None]
"""A whole body, or the server-sent events of an answer that has begun."""


def error_reply(error: Exception) -> Whole:
    """The reply for an exception that ended a request before its answer began."""
    response = error_response(error)
    if response.error.code >= HTTPStatus.INTERNAL_SERVER_ERROR and not isinstance(error, Refusal):
        logger.error("request failed", exc_info=error)
    retry_after_s = max(1, math.ceil(error.retry_after_s)) if isinstance(error, Overloaded) else None
    return Whole(response.error.code, response.model_dump(), retry_after_s)


def refuse_unserved(body: ChatCompletionRequest | CompletionRequest) -> None:
    """Raise `UnservedRequest`, naming the field, for what cannot work when prefill and decode are apart.

    - `prompt_logprobs`, and `echo` where it implies them: the logits of the prompt exist on the prefill node alone,
      and only for the part of the prompt that no cache held. (In chat, vLLM's `echo` always implies them.)
    - `use_beam_search`: each step forks and drops hypotheses as requests of their own, every one a hand-off.
    - multimodal input and `prompt_embeds`: blocks are named by token ids, which do not tell what an image shows.
    - `kv_transfer_params`, `ec_transfer_params`: the cluster's own words to its engines; from a client they would
      name memory that is not its own.
    """
    is_chat = isinstance(body, ChatCompletionRequest)
    if body.prompt_logprobs is not None:
        raise UnservedRequest(
            "`prompt_logprobs` is not served by a disaggregated cluster.", field="prompt_logprobs"
        )
    if body.echo and (is_chat or body.logprobs is not None):
        raise UnservedRequest(
            "`echo` with prompt logprobs is not served by a disaggregated cluster.", field="echo"
        )
    if body.use_beam_search:
        raise UnservedRequest(
            "`use_beam_search` is not served by a disaggregated cluster.", field="use_beam_search"
        )
    if isinstance(body, CompletionRequest) and body.prompt_embeds is not None:
        raise UnservedRequest("`prompt_embeds` is not served; send text or token ids.", field="prompt_embeds")
    if isinstance(body, ChatCompletionRequest) and not all(map(_is_text, body.messages)):
        raise UnservedRequest("Only text is served, not images, audio or video.", field="messages")
    for name in ("kv_transfer_params", "ec_transfer_params"):
        if getattr(body, name) is not None or name in (body.vllm_xargs or ()):
            raise UnservedRequest(f"`{name}` is set by the cluster, not by clients.", field=name)


def _is_text(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    if not isinstance(content, list):
        return True
    return all(isinstance(part, str) or part.get("type", "text") in TEXT_PARTS for part in content)


def engine_config(config: GatewayConfig) -> VllmConfig:
    """The vLLM configuration of a process that renders and formats but has no engine, and so no weights and no KV.

    As vLLM's own render server builds it; quantisation is cleared since it would be checked against a device.
    """
    arguments = AsyncEngineArgs(
        model=config.model,
        served_model_name=list(config.served_model_names),
        max_model_len=config.max_model_len,
        reasoning_parser=config.reasoning_parser,
        enforce_eager=True,
    )
    model_config = arguments.create_model_config()
    model_config.quantization = None
    return VllmConfig(
        model_config=model_config, structured_outputs_config=arguments.create_structured_outputs_config()
    )


class Frontend:
    """Turns parsed bodies into replies. Owns the tokenizer and its threads; `close` ends them.

    Building one reads the model's configuration, tokenizer and templates and takes about two seconds.
    """

    def __init__(self, config: GatewayConfig, backend: Backend, metrics: Metrics) -> None:
        vllm_config = engine_config(config)
        self._renderer = renderer_from_config(vllm_config)
        client = cast(EngineClient, ClusterClient(vllm_config, self._renderer, backend, metrics))
        self._models = OpenAIServingModels(
            client, [BaseModelPath(name=name, model_path=config.model) for name in config.served_model_names]
        )
        chat_template = load_chat_template(config.chat_template)
        parsers = {
            "enable_auto_tools": config.tool_call_parser is not None,
            "tool_parser": config.tool_call_parser,
            "reasoning_parser": config.reasoning_parser,
        }
        online_renderer = OnlineRenderer(
            vllm_config.model_config,
            self._renderer,
            request_logger=None,
            chat_template=chat_template,
            chat_template_content_format="auto",
            **parsers,
        )
        online_renderer.warmup()
        self._chat = _Chat(
            client,
            self._models,
            "assistant",
            online_renderer=online_renderer,
            request_logger=None,
            chat_template=chat_template,
            chat_template_content_format="auto",
            enable_prompt_tokens_details=config.prompt_tokens_details,
            **parsers,
        )
        self._completion = _Completion(
            client,
            self._models,
            online_renderer=online_renderer,
            request_logger=None,
            enable_prompt_tokens_details=config.prompt_tokens_details,
        )

    async def models(self) -> dict[str, Any]:
        """The body of /v1/models."""
        return cast(dict[str, Any], (await self._models.show_available_models()).model_dump())

    async def chat(self, body: ChatCompletionRequest, raw: Request, call: Call) -> Reply:
        """Reply to /v1/chat/completions. The caller closes `call` when the reply is sent or given up."""
        return await self._reply(self._chat.create_chat_completion, body, raw, call)

    async def complete(self, body: CompletionRequest, raw: Request, call: Call) -> Reply:
        """Reply to /v1/completions. The caller closes `call` when the reply is sent or given up."""
        return await self._reply(self._completion.create_completion, body, raw, call)

    def close(self) -> None:
        """End the tokenizer's threads."""
        self._renderer.shutdown()

    async def _reply(
        self, create: Callable[[Any, Request], Awaitable[Any]], body: Any, raw: Request, call: Call
    ) -> Reply:
        """A stream is handed out only once every answer has begun, so that a refusal still has its HTTP status."""
        _CALL.set(call)
        try:
            refuse_unserved(body)
            result = await create(body, raw)
            if isinstance(result, ErrorResponse):
                return Whole(result.error.code, result.model_dump())
            if isinstance(result, AsyncGenerator):
                await call.begin()
                return result
            return Whole(HTTPStatus.OK, result.model_dump())
        except Exception as error:  # noqa: BLE001  # the edge of the process: every error becomes a body
            return error_reply(error)
