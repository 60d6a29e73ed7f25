"""The gateway's HTTP edge: routes, request ids, limits, disconnects. What a body means is decided in `openai.py`."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any, TypeAlias, TypeVar, cast

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.gateway.metrics import Metrics
from cluster.gateway.openai import (
    Call,
    ChatCompletionRequest,
    CompletionRequest,
    Frontend,
    Reply,
    VLLMError,
    Whole,
    error_reply,
    validate_json_request,
    validation_exception_handler,
)
from cluster.gateway.request import Backend, GatewayConfig, UnservedRequest

TTFT_HEADER = "X-Moonpool-TTFT-SLO"
TBT_HEADER = "X-Moonpool-TBT-SLO"
"""A request's own limits, in seconds."""

KEYED = ("/v1/", "/moonpool/")
"""Where an API key is needed, if there are any."""

ROUTES = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}
REQUEST_ID = re.compile(r"[!-~]{1,128}")
CLIENT_CLOSED_REQUEST = 499

Answerer: TypeAlias = Callable[[Any, Request, Call], Coroutine[Any, Any, Reply]]
T = TypeVar("T")


class Edge:
    """Around every route: the request id in and out, the body's limit, and one count a served request.

    Plain ASGI, since Starlette's BaseHTTPMiddleware hides disconnects from the routes.
    """

    def __init__(self, app: ASGIApp, config: GatewayConfig, metrics: Metrics) -> None:
        self._app = app
        self._config = config
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        route = ROUTES.get(scope["path"])
        if route is None:
            await self._pass(scope, receive, send)
            return
        start_s = time.perf_counter()
        outcome = "error"
        with self._metrics.in_flight.track_inprogress():
            try:
                outcome = await self._pass(scope, receive, send)
            finally:
                self._metrics.requests.labels(route, outcome).inc()
                self._metrics.e2e_s.labels(route).observe(time.perf_counter() - start_s)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> str:
        """Serve one request and tell its outcome."""
        headers = Headers(scope=scope)
        state = scope.setdefault("state", {})
        app, status = self._app, 0
        if scope["path"].startswith(KEYED):
            state["tenant"] = self._tenant(headers)
            app = self._app if state["tenant"] is not None else _UNAUTHORIZED

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(raw=message["headers"])["X-Request-Id"] = _request_id(headers, state)
            await send(message)

        await app(scope, self._limited(headers, receive), send_with_id)
        return _outcome(status, state.get("call"))

    def _tenant(self, headers: Headers) -> str | None:
        """Whose request it is; None: nobody's who may ask."""
        keys = self._config.api_keys
        return keys.tenant(headers.get("authorization")) if keys is not None else self._config.tenant

    def _limited(self, headers: Headers, receive: Receive) -> Receive:
        limit = self._config.body_bytes_max
        declared = headers.get("content-length", "0")
        seen = 0

        async def receive_limited() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > limit or (declared.isdecimal() and int(declared) > limit):
                raise HTTPException(
                    HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"The body is longer than {limit} bytes."
                )
            return message

        return receive_limited


def _request_id(headers: Headers, state: dict[str, Any]) -> str:
    """The client's id, or the one that vLLM made: the body's id less its prefix, so that it names the same request."""
    if (sent := headers.get("X-Request-Id")) is not None:
        return sent
    metadata = state.get("request_metadata")
    return uuid.uuid4().hex if metadata is None else str(metadata.request_id).partition("-")[2]


def _outcome(status: int, call: Call | None) -> str:
    if call is not None and call.disconnected:
        return "disconnected"
    if call is not None and status == HTTPStatus.OK and any(answer.failed for answer in call.answers):
        return "error"
    named = {200: "ok", 429: "overloaded", 503: "unavailable"}
    return named.get(status, "refused" if 400 <= status < 500 else "error")


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Run `work`, or cancel it when the client goes away and return None. The body must have been read."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.create_task(work), asyncio.create_task(disconnected())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.wait({working, leaving})


class EventStream(StreamingResponse):
    """Server-sent events of one call. However the sending ends, the call is closed when this returns."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None], call: Call) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._call.disconnected = await until_disconnect(receive, self._sent(send)) is None
        finally:
            await self._call.close()

    async def _sent(self, send: Send) -> bool:
        await self.stream_response(send)
        return True


def _limit_s(raw: Request, header: str, default_s: float | None) -> float | None:
    if (text := raw.headers.get(header)) is None:
        return default_s
    try:
        limit_s = float(text)
    except ValueError:
        limit_s = math.nan
    if not 0 < limit_s < math.inf:
        raise UnservedRequest(f"{header} must be a positive number of seconds, not {text!r}.", field=header)
    return limit_s


def _call(raw: Request, config: GatewayConfig) -> Call:
    request_id = raw.headers.get("X-Request-Id")
    if request_id is not None and REQUEST_ID.fullmatch(request_id) is None:
        raise UnservedRequest("X-Request-Id must be 1 to 128 visible ASCII characters.", field="X-Request-Id")
    return Call(
        tenant=raw.state.tenant,
        arrival_s=time.time(),
        ttft_slo_s=_limit_s(raw, TTFT_HEADER, config.ttft_slo_s),
        tbt_slo_s=_limit_s(raw, TBT_HEADER, config.tbt_slo_s),
    )


class _Json(JSONResponse):
    """JSON of what clients may have sent: half a surrogate pair, which no UTF-8 holds, goes back as the escape it was."""

    def render(self, content: Any) -> bytes:
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode(errors="backslashreplace")


def _response(reply: Whole) -> Response:
    headers = None if reply.retry_after_s is None else {"Retry-After": str(reply.retry_after_s)}
    return _Json(reply.body, reply.status, headers)


async def _serve(answerer: Answerer, body: object, raw: Request, config: GatewayConfig) -> Response:
    """Answer one request, streamed or whole. A client that leaves takes its work on the engines with it."""
    try:
        call = raw.state.call = _call(raw, config)
    except UnservedRequest as refusal:
        return _response(error_reply(refusal))
    reply: Reply | None = None
    try:
        reply = await until_disconnect(raw.receive, answerer(body, raw, call))
    finally:
        if reply is None or isinstance(reply, Whole):
            await call.close()
    if reply is None:
        call.disconnected = True
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return _response(reply) if isinstance(reply, Whole) else EventStream(reply, call)


def _error_body(status: int, message: str, kind: str) -> dict[str, object]:
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


_UNAUTHORIZED = JSONResponse(
    _error_body(
        401, "An API key that this server knows is needed: Authorization: Bearer KEY.", "Unauthorized"
    ),
    HTTPStatus.UNAUTHORIZED,
    {"WWW-Authenticate": "Bearer"},
)


async def _on_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, StarletteHTTPException)
    body = _error_body(error.status_code, str(error.detail), HTTPStatus(error.status_code).phrase)
    return JSONResponse(body, error.status_code, error.headers)


async def _on_invalid_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return cast(Response, await validation_exception_handler(request, error))


async def _on_failed_parse(request: Request, error: Exception) -> Response:
    """The validators of vLLM run before the types are checked; they refuse, or trip over wrong ones (`"messages": 7`).

    On the served routes nothing but parsing can raise this far, see `_serve`; elsewhere it is a bug.
    """
    if request.url.path in ROUTES and not isinstance(error, VLLMError):
        error = UnservedRequest(f"The body is not valid: {error}")
    return _response(error_reply(error))


async def _on_bug(_: Request, error: Exception) -> Response:
    return _response(error_reply(error))


def create_app(config: GatewayConfig, backend: Backend) -> FastAPI:
    """The gateway's application. Reads the model's tokenizer and templates; starts nothing else."""
    metrics = Metrics()
    frontend = Frontend(config, backend, metrics)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        frontend.close()

    app = FastAPI(title="Moonpool", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.args = SimpleNamespace(log_error_stack=False)  # vLLM's handler of invalid bodies reads it
    app.add_middleware(Edge, config=config, metrics=metrics)
    app.add_exception_handler(StarletteHTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_body)
    for failure in (VLLMError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        app.add_exception_handler(failure, _on_failed_parse)
    app.add_exception_handler(Exception, _on_bug)
    _add_openai_routes(app, frontend, config)
    _add_own_routes(app, backend, metrics)
    return app


def _add_openai_routes(app: FastAPI, frontend: Frontend, config: GatewayConfig) -> None:
    json_only = [Depends(validate_json_request)]

    @app.post("/v1/chat/completions", dependencies=json_only, response_model=None)
    async def chat(body: ChatCompletionRequest, raw: Request) -> Response:
        return await _serve(frontend.chat, body, raw, config)

    @app.post("/v1/completions", dependencies=json_only, response_model=None)
    async def completions(body: CompletionRequest, raw: Request) -> Response:
        return await _serve(frontend.complete, body, raw, config)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return await frontend.models()


def _add_own_routes(app: FastAPI, backend: Backend, metrics: Metrics) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> Response:
        reason = backend.ready()
        status = HTTPStatus.OK if reason is None else HTTPStatus.SERVICE_UNAVAILABLE
        return JSONResponse({"ready": reason is None, "reason": reason}, status)

    @app.get("/metrics")
    async def prometheus() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/moonpool/v1/status")
    async def status() -> dict[str, object]:
        return backend.status()

    @app.get("/moonpool/v1/requests/{request_id:path}")
    async def explain(request_id: str) -> dict[str, object]:
        if (explanation := backend.explain(request_id)) is None:
            raise HTTPException(HTTPStatus.NOT_FOUND, f"No request {request_id!r} is known.")
        return explanation
