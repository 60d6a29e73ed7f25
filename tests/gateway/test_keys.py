"""API keys: who may ask, and as whom."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from cluster.gateway.app import create_app
from cluster.gateway.keys import ApiKeys, KeyFileError, read_keys
from cluster.gateway.request import GatewayConfig
from tests.gateway.scripted import ScriptedBackend

ASK = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
CHAT = "/v1/chat/completions"

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(text: str) -> Path:
        path = tmp_path / "keys"
        path.write_text(text)
        os.utime(path, ns=(0, len(text)))  # another time for another text, whatever the file system's clock
        return path

    return written


def test_a_key_names_a_tenant(write: Write) -> None:
    keys = ApiKeys(write("# staff\nk-1 acme  # the first\nk-2 acme\n\n  k-3\n"))
    assert keys.tenant("Bearer k-1") == keys.tenant("bearer  k-2") == "acme"
    alone = keys.tenant("Bearer k-3")
    assert alone is not None and alone.startswith("key-") and "k-3" not in alone.removeprefix("key-")
    for other in (None, "", "k-1", "Bearer", "Bearer k-4", "Basic k-1", "Bearer k-1 acme", "Bearer \udcff"):
        assert keys.tenant(other) is None, other


def test_keys_change_while_serving(write: Write) -> None:
    now = [0.0]
    keys = ApiKeys(path := write("k-1 acme"), lambda: now[0])
    write("k-2 acme # new")
    assert keys.tenant("Bearer k-1") == "acme", "it is looked at once a second"
    now[0] = 1.5
    assert (keys.tenant("Bearer k-1"), keys.tenant("Bearer k-2")) == (None, "acme")
    write("")
    now[0] = 3.0
    assert keys.tenant("Bearer k-2") == "acme", "what cannot be used changes nothing"
    path.unlink()
    now[0] = 4.5
    assert keys.tenant("Bearer k-2") == "acme"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no key"),
        ("# k", "no key"),
        ("k a b", "line 1: a key and a tenant"),
        ("k a\nk b", "line 2: the key is"),
    ],
)
def test_a_file_that_cannot_be_used(write: Write, text: str, words: str) -> None:
    with pytest.raises(KeyFileError, match=words) as caught:
        read_keys(write(text))
    assert "keys" in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="nowhere"):
        ApiKeys(tmp_path / "nowhere")


async def test_the_edge_asks_for_a_key(config: GatewayConfig, backend: ScriptedBackend, write: Write) -> None:
    keyed = replace(config, api_keys=ApiKeys(write("k-1 acme\nk-2")))
    transport = httpx.ASGITransport(create_app(keyed, backend))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            for answer in (
                await http.post(CHAT, json=ASK, headers=headers),
                await http.get("/v1/models", headers=headers),
                await http.get("/moonpool/v1/status", headers=headers),
            ):
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == 401
                assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert not backend.requests
        for path in ("/health", "/ready", "/metrics"):
            assert (await http.get(path)).status_code == 200, path
        for key in ("k-1", "k-2"):
            answer = await http.post(CHAT, json=ASK, headers={"Authorization": f"Bearer {key}"})
            assert answer.status_code == 200
        first, second = (request.tenant for request in backend.requests)
        assert first == "acme" and second.startswith("key-")
