import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import closing

import httpx
import pytest
import uvicorn

from cluster.gateway.app import create_app
from cluster.gateway.request import GatewayConfig
from tests.gateway.scripted import ScriptedBackend, write_model_folder

BODY_BYTES_MAX = 64 << 10


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> GatewayConfig:
    folder = write_model_folder(tmp_path_factory.mktemp("model"), {"temperature": 0.25, "top_k": 7})
    return GatewayConfig(
        model=str(folder),
        served_model_names=("tiny", "tiny-alias"),
        tool_call_parser="hermes",
        ttft_slo_s=9.0,
        body_bytes_max=BODY_BYTES_MAX,
    )


@pytest.fixture(scope="session")
def shared_backend(config: GatewayConfig) -> Iterator[ScriptedBackend]:
    backend = ScriptedBackend(config)
    yield backend
    backend.renderer.shutdown()


@pytest.fixture
def backend(shared_backend: ScriptedBackend) -> Iterator[ScriptedBackend]:
    shared_backend.reset()
    yield shared_backend
    assert not shared_backend.live, "a request outlived its HTTP exchange"


@pytest.fixture
async def url(config: GatewayConfig, backend: ScriptedBackend) -> AsyncIterator[str]:
    """A real uvicorn on loopback, in this loop, so that a test may look into the backend without races."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
        server = uvicorn.Server(uvicorn.Config(create_app(config, backend), log_level="warning"))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:  # uvicorn offers a flag, not an event
            await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{port}"
        server.should_exit = True
        await serving


@pytest.fixture
async def http(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, timeout=10, trust_env=False) as client:
        yield client
