"""`moonpool status`, over the HTTP edge of a cluster that works."""

import asyncio
import os
import pty
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

from cluster.gateway.app import create_app
from cluster.gateway.request import GatewayConfig
from tests.gateway.scripted import write_model_folder

if TYPE_CHECKING:
    from tests.cluster.conftest import SmallCluster, Start

WIDE = {**os.environ, "COLUMNS": "160", "LINES": "40", "TERM": "xterm", "NO_COLOR": "1"}


@asynccontextmanager
async def edge(cluster: "SmallCluster", folder: Path) -> AsyncIterator[list[str]]:
    """The command that asks a gateway over this cluster."""
    config = GatewayConfig(model=str(write_model_folder(folder, {})), served_model_names=("tiny",))
    app = await asyncio.to_thread(
        create_app, config, cluster.backend
    )  # its imports would stop the cluster's loop
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        port = listener.getsockname()[1]
        try:
            yield [sys.executable, "-m", "cluster.cli", "status", "--url", f"http://127.0.0.1:{port}"]
        finally:
            server.should_exit = True
            await serving


async def test_status_is_shown_once_where_nobody_watches(start: "Start", tmp_path: Path) -> None:
    cluster = await start(prefill=2, decode=1)
    await cluster.answered_right(list(range(26)))
    await cluster.settled()
    async with edge(cluster, tmp_path) as command:
        await asyncio.sleep(1.1)  # the gateway asks the conductor twice a second
        asked = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=WIDE)
        shown = (await asked.communicate())[0].decode()
    assert asked.returncode == 0
    assert [line.split()[0] for line in shown.splitlines()[1:5]] == [
        "decode-0",
        "node-0",
        "prefill-0",
        "prefill-1",
    ]
    assert "7 blocks" in shown, "six of the prompt, one that the answer filled"
    assert "1 placed" in shown
    assert "1 finished" in shown


async def test_status_stays_on_a_terminal_until_it_is_interrupted(start: "Start", tmp_path: Path) -> None:
    cluster = await start(prefill=1, decode=1)
    async with edge(cluster, tmp_path) as command:
        ours, theirs = pty.openpty()
        asked = await asyncio.create_subprocess_exec(*command, stdout=theirs, stderr=theirs, env=WIDE)
        os.close(theirs)
        try:
            await asyncio.wait_for(shows(ours, "0 placed"), 30)
            await cluster.answered_right(list(range(26)))
            await asyncio.wait_for(shows(ours, "1 finished"), 10)
            asked.send_signal(signal.SIGINT)
            assert await asyncio.wait_for(asked.wait(), 10) == 0
        finally:
            if asked.returncode is None:
                asked.kill()
                await asked.wait()
            os.close(ours)


async def shows(terminal: int, text: str) -> None:
    """Waits until the text has been written to the terminal."""
    seen = ""
    while text not in seen:
        seen += (await asyncio.to_thread(os.read, terminal, 65536)).decode()
