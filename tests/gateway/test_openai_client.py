"""The official client, unchanged, against the gateway."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.gateway.scripted import CACHED_TOKENS, ScriptedBackend

ASK: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
RENDERED = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
WEATHER: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
WEATHER_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    http_client = openai.DefaultAsyncHttpxClient(trust_env=False)
    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http_client
    ) as client:
        yield client


async def test_chat_whole(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
    answer = await client.chat.completions.create(model="tiny", messages=ASK)
    (request,) = backend.requests
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == "tiny"
    assert answer.id == request.request_id
    assert answer.id == f"chatcmpl-{answer._request_id}"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(request.token_ids)
    assert answer.usage.completion_tokens == len(ANSWER) + 1  # and the end-of-sequence token
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == CACHED_TOKENS
    assert backend.tokenizer.decode(request.token_ids) == RENDERED  # rendered once, no second <|im_start|>


async def test_chat_streamed_with_usage(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="tiny", messages=ASK, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(deltas) == ANSWER
    assert sum(map(bool, deltas)) > 5
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(ANSWER) + 1
    assert len({chunk.id for chunk in chunks}) == 1


async def test_the_synchronous_client(url: str) -> None:
    def talk() -> tuple[str | None, str, list[str]]:
        with openai.OpenAI(
            base_url=f"{url}/v1",
            api_key="none",
            max_retries=0,
            http_client=openai.DefaultHttpxClient(trust_env=False),
        ) as client:
            whole = client.chat.completions.create(model="tiny", messages=ASK)
            streamed = client.completions.create(model="tiny", prompt="Say it", stream=True, max_tokens=64)
            text = "".join(chunk.choices[0].text for chunk in streamed)
            return whole.choices[0].message.content, text, [model.id for model in client.models.list()]

    assert await asyncio.to_thread(talk) == (ANSWER, ANSWER, ["tiny", "tiny-alias"])


async def test_multibyte_characters_arrive_whole(
    client: openai.AsyncOpenAI, backend: ScriptedBackend
) -> None:
    backend.script = "Zürich 東京 🗼"
    stream = await client.chat.completions.create(model="tiny", messages=ASK, stream=True)
    deltas = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(deltas) == backend.script
    assert not any("\N{REPLACEMENT CHARACTER}" in delta for delta in deltas)


async def test_logprobs(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="tiny", messages=ASK, logprobs=True, top_logprobs=2, max_tokens=4
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert [entry.token for entry in content] == list("The ")
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    assert answer.choices[0].finish_reason == "length"


async def test_completion_logprobs_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(
        model="tiny", prompt="Say", logprobs=1, max_tokens=3, stream=True
    )
    tokens = [
        token async for chunk in stream if (lp := chunk.choices[0].logprobs) for token in lp.tokens or []
    ]
    assert tokens == list("The")


async def test_two_choices(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
    answer = await client.chat.completions.create(model="tiny", messages=ASK, n=2, max_tokens=3)
    assert [(choice.index, choice.message.content) for choice in answer.choices] == [(0, "The"), (1, "The")]
    assert len(backend.requests) == 1
    assert backend.requests[0].sampling_params.n == 2
    stream = await client.chat.completions.create(model="tiny", messages=ASK, n=2, max_tokens=3, stream=True)
    texts = ["", ""]
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == ["The", "The"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_stop_string(client: openai.AsyncOpenAI, streamed: bool) -> None:
    common: dict[str, Any] = {"model": "tiny", "prompt": "Say", "stop": [" France"], "max_tokens": 64}
    if streamed:
        chunks = [chunk async for chunk in await client.completions.create(**common, stream=True)]
        text, finish = "".join(chunk.choices[0].text for chunk in chunks), chunks[-1].choices[0].finish_reason
    else:
        answer = await client.completions.create(**common)
        text, finish = answer.choices[0].text, answer.choices[0].finish_reason
    assert (text, finish) == ("The capital of", "stop")


@pytest.mark.parametrize("tool_choice", ["auto", "required"])
async def test_tools(client: openai.AsyncOpenAI, backend: ScriptedBackend, tool_choice: Any) -> None:
    backend.script = WEATHER_CALL
    answer = await client.chat.completions.create(
        model="tiny", messages=ASK, tools=WEATHER, tool_choice=tool_choice
    )
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    (call,) = calls
    assert call.type == "function"
    assert (call.function.name, call.function.arguments.replace(" ", "")) == ("weather", '{"city":"Paris"}')
    assert answer.choices[0].finish_reason == "tool_calls"
    assert "tool weather" in backend.tokenizer.decode(backend.requests[0].token_ids)
    constrained = backend.requests[0].sampling_params.structured_outputs is not None
    assert constrained == (tool_choice == "required")


async def test_tools_named_and_streamed(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
    backend.script = WEATHER_CALL
    named: Any = {"type": "function", "function": {"name": "weather"}}
    stream = await client.chat.completions.create(
        model="tiny", messages=ASK, tools=WEATHER, tool_choice=named, stream=True
    )
    calls = [
        call async for chunk in stream if chunk.choices for call in chunk.choices[0].delta.tool_calls or ()
    ]
    assert [call.function.name for call in calls if call.function and call.function.name] == ["weather"]
    arguments = "".join(call.function.arguments or "" for call in calls if call.function)
    assert arguments.replace(" ", "") == '{"city":"Paris"}'


async def test_prompts_as_text_as_ids_and_in_batches(
    client: openai.AsyncOpenAI, backend: ScriptedBackend
) -> None:
    ids = backend.tokenizer.encode("two", add_special_tokens=False)
    for prompt in ("two", ids):
        await client.completions.create(model="tiny", prompt=prompt, max_tokens=1)
    assert [list(request.token_ids) for request in backend.requests] == [ids, ids]
    batch = await client.completions.create(model="tiny", prompt=["one", "two"], max_tokens=3, n=2)
    assert [choice.text for choice in batch.choices] == ["The"] * 4
    assert [request.request_id for request in backend.requests[2:]] == [f"{batch.id}-0", f"{batch.id}-1"]
    stream = await client.completions.create(model="tiny", prompt=[ids, ids], max_tokens=3, stream=True)
    texts = ["", ""]
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["The", "The"]


async def test_echo_and_unknown_fields(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model="tiny", prompt="Say: ", echo=True, max_tokens=3, best_of=1, extra_body={"no_such_field": 1}
    )
    assert answer.choices[0].text == "Say: The"


async def test_what_reaches_the_engine(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
    """Defaults come from generation_config.json and the context length, as in plain vLLM; a body overrides them."""
    await client.chat.completions.create(model="tiny", messages=ASK)
    extra = {"top_k": 3, "ignore_eos": True, "min_tokens": 40, "add_special_tokens": True}
    answer = await client.chat.completions.create(
        model="tiny-alias", messages=ASK, temperature=0, seed=5, max_completion_tokens=40, extra_body=extra
    )
    first, second = (request.sampling_params for request in backend.requests)
    assert (first.temperature, first.top_k, first.max_tokens) == (
        0.25,
        7,
        512 - len(backend.tokenizer.encode(RENDERED, add_special_tokens=False)),
    )
    assert (second.temperature, second.seed, second.max_tokens, second.min_tokens) == (0, 5, 40, 40)
    assert second.ignore_eos
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 40
    assert answer.model == "tiny"  # vLLM answers with the first served name
    assert [request.ttft_slo_s for request in backend.requests] == [9.0, 9.0]


async def test_response_format(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
    backend.script = '{"city": "Paris"}'
    await client.chat.completions.create(model="tiny", messages=ASK, response_format={"type": "json_object"})
    structured = backend.requests[0].sampling_params.structured_outputs
    assert structured is not None
    assert structured.json_object


async def test_errors_are_the_clients_own(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist") as unknown:
        await client.chat.completions.create(model="huge", messages=ASK)
    assert unknown.value.param == "model"
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        await client.completions.create(model="tiny", prompt="x" * 600)
