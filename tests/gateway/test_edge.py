"""What clients see at the HTTP edge: errors, refusals, ids, limits, disconnects, metrics."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from cluster.gateway.request import Overloaded, Unavailable, UnservedRequest
from tests.gateway.conftest import BODY_BYTES_MAX
from tests.gateway.scripted import ScriptedBackend

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
ASK: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
SAY: dict[str, Any] = {"model": "tiny", "prompt": "Say", "max_tokens": 64}
IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/never-fetched.png"}}


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of an OpenAI error body; asserts that it is one, and that it shows nothing of our insides."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["code"] == status
    assert "Traceback" not in response.text
    assert ".py" not in response.text
    assert response.headers["x-request-id"]
    return dict(error)


@pytest.mark.parametrize(
    ("path", "content", "status"),
    [
        (CHAT, b"{", 400),
        (CHAT, b"[]", 400),
        (CHAT, json.dumps({"model": "tiny", "messages": 7}).encode(), 400),
        (CHAT, json.dumps(ASK | {"messages": ["Hi"]}).encode(), 400),
        (CHAT, json.dumps(ASK | {"tools": 7}).encode(), 400),
        (CHAT, json.dumps(ASK | {"tool_choice": "auto"}).encode(), 400),
        (CHAT, json.dumps(ASK | {"stream_options": 7}).encode(), 400),
        (CHAT, json.dumps(ASK | {"response_format": 7}).encode(), 400),
        (CHAT, b"[" * 50_000, 400),
        (CHAT, json.dumps(ASK | {"temperature": "hot"}).encode(), 400),
        (CHAT, json.dumps(ASK | {"temperature": -1}).encode(), 400),
        (CHAT, json.dumps(ASK | {"model": "huge"}).encode(), 404),
        (COMPLETIONS, json.dumps(SAY | {"prompt": "x" * 600}).encode(), 400),
        (COMPLETIONS, json.dumps(SAY | {"prompt": [7] * 512}).encode(), 400),
        (COMPLETIONS, json.dumps(SAY | {"prompt": [99999]}).encode(), 400),
        (COMPLETIONS, json.dumps(SAY | {"logprobs": 10_000}).encode(), 400),
        (COMPLETIONS, json.dumps(SAY | {"logit_bias": {"99999": 1}}).encode(), 400),
        (COMPLETIONS, json.dumps(SAY | {"prompt": "x" * BODY_BYTES_MAX}).encode(), 413),
        (CHAT, json.dumps(ASK | {"model": "\ud800"}).encode(), 404),
        (CHAT, json.dumps(ASK | {"messages": [{"role": "user", "content": "\ud800"}]}).encode(), 400),
        (COMPLETIONS, json.dumps(SAY | {"prompt": "\ud800"}).encode(), 400),
        (COMPLETIONS, json.dumps(SAY | {"stop": "\ud800", "temperature": float("nan")}).encode(), 400),
        (COMPLETIONS, json.dumps(SAY | {"temperature": float("inf")}).encode(), 400),
        (COMPLETIONS, json.dumps(SAY | {"seed": 10**300}).encode(), 400),
        (COMPLETIONS, json.dumps(SAY | {"max_tokens": 10**300}).encode(), 400),
        (COMPLETIONS, json.dumps(SAY | {"n": 10**9}).encode(), 400),
        (COMPLETIONS, json.dumps(SAY | {"prompt": [10**30]}).encode(), 400),
        (COMPLETIONS, json.dumps(SAY | {"prompt": []}).encode(), 400),
        (COMPLETIONS, json.dumps(SAY | {"prompt": [-1]}).encode(), 400),
        (COMPLETIONS, json.dumps(SAY | {"logit_bias": {"x": 1}}).encode(), 400),
        (COMPLETIONS, json.dumps(SAY | {"structured_outputs": {"regex": "("}}).encode(), 400),
        (COMPLETIONS, b' {"model": "tiny", "prompt": "\xff"}', 400),
        (COMPLETIONS, b"", 400),
        ("/v1/nothing", b"{}", 404),
        ("/v1/models", b"{}", 405),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_bad_requests(
    http: httpx.AsyncClient, backend: ScriptedBackend, path: str, content: bytes, status: int, stream: bool
) -> None:
    if stream and content.startswith(b'{"'):
        content = json.dumps(json.loads(content) | {"stream": True}).encode()
    error_of(await http.post(path, content=content, headers={"content-type": "application/json"}), status)
    assert not backend.requests


async def test_a_body_of_unknown_length_is_limited_too(http: httpx.AsyncClient) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b" " * (BODY_BYTES_MAX // 8)

    response = await http.post(COMPLETIONS, content=chunks(), headers={"content-type": "application/json"})
    error_of(response, 413)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (COMPLETIONS, SAY | {"prompt_logprobs": 0}, "prompt_logprobs"),
        (COMPLETIONS, SAY | {"echo": True, "logprobs": 1}, "echo"),
        (COMPLETIONS, SAY | {"use_beam_search": True, "n": 2}, "use_beam_search"),
        (COMPLETIONS, SAY | {"prompt_embeds": "AAAA"}, "prompt_embeds"),
        (COMPLETIONS, SAY | {"kv_transfer_params": {"slot": 1}}, "kv_transfer_params"),
        (COMPLETIONS, SAY | {"vllm_xargs": {"kv_transfer_params": "x"}}, "kv_transfer_params"),
        (CHAT, ASK | {"prompt_logprobs": 1}, "prompt_logprobs"),
        (CHAT, ASK | {"echo": True}, "echo"),
        (CHAT, ASK | {"use_beam_search": True}, "use_beam_search"),
        (CHAT, ASK | {"messages": [{"role": "user", "content": [IMAGE]}]}, "messages"),
    ],
)
async def test_what_cannot_be_disaggregated_is_named(
    http: httpx.AsyncClient, backend: ScriptedBackend, path: str, body: dict[str, Any], field: str
) -> None:
    assert error_of(await http.post(path, json=body), 400)["param"] == field
    assert not backend.requests


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("refusal", "status", "kind"),
    [
        (Overloaded("ttft: predicted 9.1 s, limit 2.0 s", 2.2), 429, "rate_limit_exceeded"),
        (Unavailable("no decode worker"), 503, "ServiceUnavailableError"),
        (UnservedRequest("too long for any node"), 400, "BadRequestError"),
        (ValueError("secret of /etc"), 500, "InternalServerError"),
    ],
)
async def test_refusals_before_the_first_token_have_a_status(
    http: httpx.AsyncClient,
    backend: ScriptedBackend,
    refusal: Exception,
    status: int,
    kind: str,
    stream: bool,
) -> None:
    backend.refusal = refusal
    response = await http.post(COMPLETIONS, json=SAY | {"stream": stream, "prompt": ["a", "b"]})
    error = error_of(response, status)
    assert error["type"] == kind
    assert error["message"] == (str(refusal) if status != 500 else "Internal server error")
    assert response.headers.get("retry-after") == ("3" if status == 429 else None)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("refusal", "code", "message"),
    [
        (Unavailable("decode-0 died"), 503, "decode-0 died"),
        (KeyError("secret"), 500, "Internal server error"),
    ],
)
async def test_refusals_within_a_stream_are_an_event(
    http: httpx.AsyncClient, backend: ScriptedBackend, path: str, refusal: Exception, code: int, message: str
) -> None:
    backend.refusal, backend.refuse_at_token, backend.step_s = refusal, 3, 0.02
    response = await http.post(path, json=(ASK if path == CHAT else SAY) | {"stream": True})
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert response.status_code == 200
    assert events[-1] == "[DONE]"
    error = json.loads(events[-2])["error"]
    assert (error["code"], error["message"]) == (code, message)
    assert "The" in "".join(_text_of(json.loads(event)) for event in events[:-2])
    await _until_outcome(http, "error")


def _text_of(chunk: dict[str, Any]) -> str:
    (choice,) = chunk["choices"]
    return str(choice["text"] if "text" in choice else choice["delta"].get("content") or "")


async def test_not_ready(http: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    assert (await http.get("/ready")).json() == {"ready": True, "reason": None}
    backend.not_ready = "decode-0 is loading"
    ready = await http.get("/ready")
    assert (ready.status_code, ready.json()["reason"]) == (503, "decode-0 is loading")
    assert error_of(await http.post(CHAT, json=ASK), 503)["message"] == "decode-0 is loading"
    assert (await http.get("/health")).status_code == 200


async def test_a_bug_of_ours_is_not_shown(http: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    backend.bug = KeyError("secret")
    assert error_of(await http.post(CHAT, json=ASK), 500)["message"] == "Internal server error"
    ready = await http.get("/ready")
    assert (ready.status_code, ready.json()["error"]["message"]) == (500, "Internal server error")


async def test_request_ids(http: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    mine = await http.post(CHAT, json=ASK, headers={"X-Request-Id": "mine"})
    assert mine.headers["x-request-id"] == "mine"
    assert mine.json()["id"] == "chatcmpl-mine"
    theirs = await http.post(COMPLETIONS, json=SAY)
    assert theirs.json()["id"] == f"cmpl-{theirs.headers['x-request-id']}"
    assert [request.request_id for request in backend.requests] == [
        "chatcmpl-mine",
        f"{theirs.json()['id']}-0",
    ]
    long = await http.post(CHAT, json=ASK, headers={"X-Request-Id": "x" * 129})
    assert error_of(long, 400)["param"] == "X-Request-Id"


async def test_one_request_id_is_in_flight_once(http: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    backend.step_s = 0.02
    first = asyncio.create_task(http.post(CHAT, json=ASK, headers={"X-Request-Id": "one"}))
    await _until(lambda: bool(backend.live))
    error_of(await http.post(CHAT, json=ASK, headers={"X-Request-Id": "one"}), 409)
    assert (await first).status_code == 200
    assert (await http.post(CHAT, json=ASK, headers={"X-Request-Id": "one"})).status_code == 200


async def test_slo_headers(http: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    headers = {"X-Moonpool-TTFT-SLO": "0.5", "X-Moonpool-TBT-SLO": "0.05"}
    await http.post(CHAT, json=ASK | {"cache_salt": "s"}, headers=headers)
    (request,) = backend.requests
    assert (request.ttft_slo_s, request.tbt_slo_s) == (0.5, 0.05)
    assert (request.tenant, request.cache_salt) == ("default", "s")
    for bad in ("soon", "-1", "nan", "inf"):
        error_of(await http.post(CHAT, json=ASK, headers={"X-Moonpool-TTFT-SLO": bad}), 400)


async def test_status_and_explain(http: httpx.AsyncClient) -> None:
    identity = (await http.post(CHAT, json=ASK)).json()["id"]
    explained = await http.get(f"/moonpool/v1/requests/{identity}")
    assert explained.json()["prompt_tokens"] > 0
    error_of(await http.get("/moonpool/v1/requests/chatcmpl-unknown"), 404)
    assert (await http.get("/moonpool/v1/status")).json() == {"live": []}


async def test_metrics(http: httpx.AsyncClient) -> None:
    await http.post(COMPLETIONS, json=SAY | {"stream": True})
    await http.post(COMPLETIONS, json=SAY | {"model": "huge"})
    lines = (await http.get("/metrics")).text.splitlines()
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}
    answer_tokens = len("The capital of France is Paris.") + 1
    assert values['moonpool_requests_total{outcome="ok",route="completions"}'] == 1
    assert values['moonpool_requests_total{outcome="refused",route="completions"}'] == 1
    assert values["moonpool_requests_in_flight"] == 0
    assert values["moonpool_prompt_tokens_total"] == len("Say")
    assert values["moonpool_generated_tokens_total"] == answer_tokens
    assert values["moonpool_ttft_seconds_count"] == 1
    assert values["moonpool_tbt_seconds_count"] == answer_tokens - 1
    assert values['moonpool_e2e_seconds_count{route="completions"}'] == 2


@pytest.mark.parametrize("when", ["before the first token", "mid-answer"])
@pytest.mark.parametrize(
    "body",
    [
        ASK,
        ASK | {"stream": True},
        SAY,
        SAY | {"prompt": ["a", "b"]},
        SAY | {"prompt": ["a", "b"], "stream": True},
    ],
)
async def test_a_client_that_leaves_ends_the_work(
    url: str, http: httpx.AsyncClient, backend: ScriptedBackend, body: dict[str, Any], when: str
) -> None:
    backend.step_s = 60.0 if when == "before the first token" else 0.02
    path = CHAT if "messages" in body else COMPLETIONS
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    payload = json.dumps(body | {"max_tokens": 400, "ignore_eos": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(payload) + payload)
    prompts = 2 if isinstance(body.get("prompt"), list) else 1
    await _until(lambda: len(backend.live) == prompts)
    if when == "mid-answer":
        await (reader.readuntil(b"data: ") if body.get("stream") else asyncio.sleep(0.1))
    writer.close()
    async with asyncio.timeout(1.0):
        await _until(lambda: len(backend.aborted) == prompts)
    assert not backend.live
    await _until_outcome(http, "disconnected")


async def _until(condition: Any) -> None:
    async with asyncio.timeout(5.0):
        while not condition():  # what is awaited happens in the server
            await asyncio.sleep(0.005)


async def _until_outcome(http: httpx.AsyncClient, outcome: str) -> None:
    async with asyncio.timeout(5.0):
        while f'outcome="{outcome}"' not in (await http.get("/metrics")).text:
            await asyncio.sleep(0.02)
