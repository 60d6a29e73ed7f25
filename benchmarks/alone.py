"""The decode engine alone: no gateway, no worker, no KV to load; a process of its own that the benchmark asks.

`python -m benchmarks.alone DESCRIPTOR MODEL ENGINE_JSON`, with `engine_environment`. DESCRIPTOR is a socket: each line
in is {"prompts": [token ids], "tokens": how many to sample of each}, each line out the arrivals of all streams,
[[[CLOCK_MONOTONIC seconds, tokens], ...], ...]. The process ends when the socket does.
"""

import asyncio
import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cluster.config import EngineConfig
from kvstore.engine.launch import engine_environment

_STOP_S = 20.0

Arrivals = list[tuple[float, int]]
"""One stream's tokens: when they arrived (CLOCK_MONOTONIC seconds) and how many at once."""


class EngineAlone:
    """The process, for the side that asks. It starts with this object; the first `sample` waits until it can serve."""

    def __init__(self, model: str, engine: EngineConfig, environment: dict[str, str], log: Path) -> None:
        ours, theirs = socket.socketpair()
        with log.open("wb") as output, theirs:
            command = [sys.executable, "-m", "benchmarks.alone", str(theirs.fileno()), model]
            self._process = subprocess.Popen(
                [*command, engine.model_dump_json()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                env={**environment, **engine_environment(engine, environment), "HF_HUB_OFFLINE": "1"},
            )
        self._log = log
        self._socket = ours
        self._lines = ours.makefile("r")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._lines.close()
        self._socket.close()  # the process ends by itself
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def sample(self, prompts: list[list[int]], tokens: int) -> list[Arrivals]:
        """All prompts at once. Raises RuntimeError with the log's last lines when the engine is gone."""
        self._socket.sendall(json.dumps({"prompts": prompts, "tokens": tokens}).encode() + b"\n")
        line = self._lines.readline()
        if not line:
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
            raise RuntimeError(f"the engine alone has ended; its log's last lines:\n{tail}")
        return [[(at_s, count) for at_s, count in stream] for stream in json.loads(line)]


async def _serve(connection: socket.socket, model: str, config: EngineConfig) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    from kvstore.engine.launch import engine_args

    llm = AsyncLLM.from_engine_args(engine_args(model, config, "alone"))
    try:
        reader, writer = await asyncio.open_connection(sock=connection, limit=2**24)
        number = 0
        while line := await reader.readline():
            task = json.loads(line)
            streams = []
            for prompt in task["prompts"]:
                streams.append(_stream(llm, prompt, task["tokens"], f"alone-{number}"))
                number += 1
            writer.write(json.dumps(await asyncio.gather(*streams)).encode() + b"\n")
            await writer.drain()
    finally:
        llm.shutdown()


async def _stream(llm: Any, prompt: list[int], tokens: int, request: str) -> Arrivals:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=0.0, max_tokens=tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    return [
        (time.monotonic(), len(output.outputs[0].token_ids))
        async for output in llm.generate({"prompt_token_ids": prompt}, params, request)
    ]


if __name__ == "__main__":
    asyncio.run(
        _serve(
            socket.socket(fileno=int(sys.argv[1])), sys.argv[2], EngineConfig.model_validate_json(sys.argv[3])
        )
    )
