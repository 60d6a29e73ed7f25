"""Runs the gateway: `python -m cluster.gateway.main SETTINGS.json`."""

import asyncio
import contextlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from kvstore.engine.spawned import after_imports, before_imports


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """`descriptor` is a listening socket that the parent has bound; without one `host` and `port` are bound here."""

    model: str
    served_model_names: tuple[str, ...]
    max_model_len: int | None
    body_bytes_max: int
    conductor_address: str
    handoff_lease_s: float
    host: str
    port: int
    chat_template: str | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str = ""
    api_keys: str | None = None
    descriptor: int | None = None


async def run(settings: GatewaySettings) -> None:
    """Serves until SIGINT or SIGTERM; open answers get a moment to end."""
    before_imports()
    import uvicorn

    from cluster.gateway.app import create_app
    from cluster.gateway.dispatch import ClusterBackend
    from cluster.gateway.keys import ApiKeys
    from cluster.gateway.request import GatewayConfig

    backend = ClusterBackend(settings.conductor_address, settings.handoff_lease_s)
    config = GatewayConfig(
        model=settings.model,
        served_model_names=settings.served_model_names,
        max_model_len=settings.max_model_len,
        body_bytes_max=settings.body_bytes_max,
        chat_template=settings.chat_template,
        tool_call_parser=settings.tool_call_parser,
        reasoning_parser=settings.reasoning_parser,
        api_keys=ApiKeys(Path(settings.api_keys)) if settings.api_keys is not None else None,
    )
    app = await asyncio.to_thread(create_app, config, backend)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            fd=settings.descriptor,
            log_level="warning",
            timeout_graceful_shutdown=3,
        )
    )
    after_imports()
    background = asyncio.create_task(backend.run())
    # Without it every answer is stale or an error: then better no gateway, which `moonpool up` reports.
    background.add_done_callback(lambda _: setattr(server, "should_exit", True))
    try:
        await server.serve()
    finally:
        background.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await background


def main() -> None:
    fields = json.loads(Path(sys.argv[1]).read_text())
    fields["served_model_names"] = tuple(fields["served_model_names"])
    asyncio.run(run(GatewaySettings(**fields)))


if __name__ == "__main__":
    main()
