"""`make demo`: a cluster on this machine, one chat, a proof, a replay, and nothing left behind.

Every step is numbered, says how long it should take and how long it took, and is never silent for five seconds.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from cluster.config import load_config
from cluster.control.local import LocalCluster, Part, PartFailedError
from cluster.model import ModelError, resolve_model
from kvstore.engine.launch import engine_environment
from kvstore.engine.reference import Answer

_REPOSITORY = Path(__file__).resolve().parent.parent
_TRACE = _REPOSITORY.parent / "shared" / "traces" / "conversation_trace.jsonl.gz"
_REPORT = Path("demo-report")
_QUESTION = "What is the capital of France?"
_CHAT_TOKENS = 64
_PROOFS = 16
_PROOF_TOKENS = 16
_PROOFS_AT_ONCE = 4
_REPLAYED = 12
_BEAT_S = 4.0

console = Console(highlight=False)


class Steps:
    """Numbered steps with a beat: while a step is quiet, a line every few seconds says that it goes on."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._number = 0
        self._started_s = time.monotonic()
        self._spoke_s = time.monotonic()
        self._note = ""

    @contextmanager
    def step(self, title: str, expected_s: int) -> Iterator[None]:
        self._number += 1
        began_s = time.monotonic()
        self._note = ""
        self.say(f"\n[bold]\\[{self._number}/{self._total}] {title}[/]  [dim](about {expected_s} s)")
        over = threading.Event()
        beat = threading.Thread(target=self._beat, args=(over, began_s), daemon=True)
        beat.start()
        try:
            yield
        finally:
            over.set()
            beat.join()
        self.say(f"      [dim]{time.monotonic() - began_s:.0f} s, {self.elapsed_s():.0f} s in all")

    def say(self, text: str, end: str = "\n") -> None:
        self._spoke_s = time.monotonic()
        console.print(text, end=end, soft_wrap=True)
        console.file.flush()

    def spoke(self) -> None:
        """Somebody else has written to the terminal."""
        self._spoke_s = time.monotonic()

    def note(self, text: str) -> None:
        """What the next beat says."""
        self._note = text

    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def _beat(self, over: threading.Event, began_s: float) -> None:
        while not over.wait(0.5):
            if time.monotonic() - self._spoke_s >= _BEAT_S:
                self.say(f"      [dim]… {time.monotonic() - began_s:.0f} s {self._note}")


def main() -> int:
    steps = Steps(5)
    try:
        return _run(steps)
    except (ModelError, PartFailedError, OSError) as error:
        console.print(f"[bold red]{error}")
        return 1
    except KeyboardInterrupt:
        console.print("interrupted: everything is stopped")
        return 130


def _run(steps: Steps) -> int:
    with steps.step("The default model, SmolLM2-135M-Instruct", 60):
        model = str(resolve_model(None))
        steps.say(f"      {model}")
    config = load_config(flags={"gateway": {"port": 0}, "engine": {"max_model_len": 2048}})
    cluster = LocalCluster(config, _starting(steps))
    failures: list[str] = []
    try:
        with steps.step(
            "A cluster: Valkey, Ray, KV node, prefill worker, decode worker, conductor, gateway", 60
        ):
            cluster.start()
            steps.say(f"      serving at {cluster.url}")
        with steps.step(f"A chat, streamed: {_QUESTION!r}", 5):
            chat = _chat(steps, cluster)
            if "Paris" not in chat.text:
                failures.append(f"the answer does not contain 'Paris': {chat.text!r}")
        with steps.step(f"Proof: {_PROOFS} prompts, token by token equal to one engine alone", 120):
            failures += _prove(steps, cluster, model, chat)
        with steps.step(f"Replay of {_REPLAYED} requests of a trace, lengths ÷ 16", 120):
            failures += _replay(steps, cluster)
    finally:
        with console.status("stopping") if console.is_terminal else _announced(steps, "stopping"):
            cluster.stop()
    for failure in failures:
        console.print(f"[bold red]FAILED[/] {failure}")
    _close(steps)
    return 1 if failures else 0


@contextmanager
def _announced(steps: Steps, text: str) -> Iterator[None]:
    steps.say(text)
    yield


def _starting(steps: Steps) -> Any:
    """Says each part once when it is ready, and keeps the beat informed of those that are not."""
    said: set[str] = set()

    def show(parts: list[Part]) -> None:
        for part in parts:
            if part.state == "ready" and part.name not in said:
                said.add(part.name)
                steps.say(f"      {part.name:<10} [green]ready[/] {part.seconds:5.1f} s  [dim]{part.where}")
        steps.note("waiting for " + ", ".join(part.name for part in parts if part.state == "starting"))

    return show


@dataclass(frozen=True, slots=True)
class Chat:
    """What the chat was in token ids, and what the gateway recorded of it."""

    prompt: list[int]
    token_ids: list[int]
    text: str
    story: str


def _chat(steps: Steps, cluster: LocalCluster) -> Chat:
    body = {
        "model": cluster.model_name,
        "messages": [{"role": "user", "content": _QUESTION}],
        "temperature": 0,
        "max_tokens": _CHAT_TOKENS,
        "stream": True,
        "return_token_ids": True,
    }
    prompt: list[int] = []
    token_ids: list[int] = []
    text, request = "", ""
    steps.say("      ", end="")
    with httpx.stream("POST", f"{cluster.url}/v1/chat/completions", json=body, timeout=120) as response:
        if response.status_code != httpx.codes.OK:
            raise OSError(f"the chat was answered {response.status_code}: {response.read().decode()}")
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                event = json.loads(line.removeprefix("data: "))
                request = event.get("id", request)
                prompt = event.get("prompt_token_ids") or prompt
                token_ids += event["choices"][0].get("token_ids") or []
                piece = event["choices"][0]["delta"].get("content") or ""
                text += piece
                steps.say(f"[cyan]{piece}", end="")
    steps.say("")
    story = _story_line(cluster, request)
    steps.say(f"      [dim]{story}")
    return Chat(prompt, token_ids, text, story)


def _story_line(cluster: LocalCluster, request: str) -> str:
    """`prefill-0 1.9 s · 12 blocks, 17 MB in 21 ms · decode-0 8.1 tok/s`, from what the gateway recorded."""
    story = httpx.get(f"{cluster.url}/moonpool/v1/requests/{request}", timeout=10).json()
    attempt = story["attempts"][-1]
    prefill, decode = attempt.get("prefill"), attempt["decode"]
    blocks = -(-story["prompt_tokens"] // cluster.config.pool.block_tokens)
    parts = [f"{prefill['worker']} {prefill['seconds']:.1f} s"] if prefill else ["no prefill needed"]
    parts.append(f"{blocks} blocks, {decode['kv_bytes'] / 1e6:.0f} MB in {decode['load_s'] * 1e3:.0f} ms")
    rate = 1 / decode["tbt_mean_s"] if decode["tbt_mean_s"] else 0.0
    parts.append(f"{decode['worker']} {rate:.1f} tok/s")
    return " · ".join(parts)


def _prove(steps: Steps, cluster: LocalCluster, model: str, chat: Chat) -> list[str]:
    """The same prompts to the cluster and to one plain engine, the chat's too; then what the decode engine counted."""
    prompts = _prompts(model)
    before = _decode_counters(cluster)
    steps.note("one plain engine computes the same 16 answers")
    proof = {"temperature": 0.0, "max_tokens": _PROOF_TOKENS, "ignore_eos": True}
    asked = [{"prompt": prompt, "params": proof} for prompt in prompts]
    asked.append({"prompt": chat.prompt, "params": {"temperature": 0.0, "max_tokens": _CHAT_TOKENS}})
    reference = _Reference(cluster, model, asked)
    try:
        with ThreadPoolExecutor(_PROOFS_AT_ONCE) as pool:
            answers = list(pool.map(lambda prompt: _complete(cluster, prompt), prompts))
        steps.say(f"      the cluster has answered {len(answers)}; waiting for the one engine")
        *expected, chatted = reference.answers()
    finally:
        reference.stop()
    differences = [
        f"prompt {number}: {difference}"
        for number, (answer, right) in enumerate(zip(answers, expected, strict=True))
        if (difference := right.difference(answer))
    ]
    equal = len(prompts) - len(differences)
    steps.say(f"      [bold]{equal}/{len(prompts)} identical[/] to one engine, {_PROOF_TOKENS} tokens each")
    if chatted.token_ids == chat.token_ids:
        steps.say(f"      the chat: {chat.story} · [bold]equal to one engine[/]")
    else:
        differences.append(f"the chat's tokens: {chat.token_ids}, of one engine: {chatted.token_ids}")
    return differences + _uncounted(steps, before, _decode_counters(cluster), prompts)


def _uncounted(
    steps: Steps, before: dict[str, int], after: dict[str, int], prompts: list[list[int]]
) -> list[str]:
    """What the decode engine's own counters must say: one prompt token computed a request, and nothing else."""
    grown = {key: after[key] - before[key] for key in after}
    wanted = {
        "computed_prompt_tokens": len(prompts),
        "prompt_tokens_from_own_cache": 0,
        "prompt_tokens_from_pool": sum(len(prompt) for prompt in prompts),
        "failed_blocks": 0,
    }
    steps.say(
        f"      decode engine: {grown['prompt_tokens_from_pool']} prompt tokens from the pool, "
        f"{grown['computed_prompt_tokens']} computed (the last of each prompt), "
        f"{grown['failed_blocks']} recomputed after failure"
    )
    return [
        f"decode counter {key}: {grown[key]}, not {value}"
        for key, value in wanted.items()
        if grown[key] != value
    ]


def _prompts(model: str) -> list[list[int]]:
    """Token ids of 16 prompts: short, around a block, many blocks, and prefixes shared with one another."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    ids: list[int] = tokenizer.encode((_REPOSITORY / "LICENSE").read_text()).ids
    lengths = [3, 17, 31, 32, 33, 48, 63, 64, 65, 96, 128, 160, 200, 256, 320, 400]
    starts = [0, 0, 0, 0, 0, 50, 50, 50, 50, 100, 100, 0, 0, 0, 50, 50]
    assert len(lengths) == len(starts) == _PROOFS
    return [ids[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def _complete(cluster: LocalCluster, prompt: list[int]) -> Answer:
    body = {
        "model": cluster.model_name,
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": _PROOF_TOKENS,
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
    }
    response = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=300)
    response.raise_for_status()
    choice = response.json()["choices"][0]
    return Answer(choice["token_ids"], choice["logprobs"]["token_logprobs"])


class _Reference:
    """The plain engine in a process of its own, started at construction."""

    def __init__(self, cluster: LocalCluster, model: str, requests: list[dict[str, Any]]) -> None:
        folder = cluster.run_dir / "reference"
        folder.mkdir()
        self._answers, self._log = folder / "answers.json", folder / "log"
        task = {"model": model, "engine": cluster.config.engine.model_dump(), "requests": requests}
        (folder / "requests.json").write_text(json.dumps(task))
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "kvstore.engine.reference",
                    str(folder / "requests.json"),
                    str(self._answers),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={
                    **os.environ,
                    **engine_environment(cluster.config.engine, os.environ),
                    "HF_HUB_OFFLINE": "1",
                },
            )

    def answers(self) -> list[Answer]:
        """Raises PartFailedError with the log's last lines when the engine fails."""
        if self._process.wait() != 0:
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
            raise PartFailedError("reference engine", f"status {self._process.returncode}", tail)
        return [Answer(**answer) for answer in json.loads(self._answers.read_text())]

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait()


def _decode_counters(cluster: LocalCluster) -> dict[str, int]:
    import grpc

    from decode_worker import decode_pb2
    from decode_worker.decode_pb2_grpc import DecodeWorkerStub

    with grpc.insecure_channel(cluster.address("decode-0")) as channel:
        status = json.loads(
            DecodeWorkerStub(channel).Status(decode_pb2.StatusRequest(), timeout=30).status_json
        )
    names = (
        "computed_prompt_tokens",
        "prompt_tokens_from_own_cache",
        "prompt_tokens_from_pool",
        "failed_blocks",
    )
    return {name: int(status[name]) for name in names}


def _replay(steps: Steps, cluster: LocalCluster) -> list[str]:
    """Open-loop replay by the load tool, whose own report is the demo's."""
    shutil.rmtree(_REPORT, ignore_errors=True)
    tool = _REPOSITORY / "tests" / "load" / "replay_trace.py"
    command = [sys.executable, str(tool), "--url", f"{cluster.url}/v1", "--requests", str(_REPLAYED)]
    command += ["--length-scale", "1/16", "--max-output", "16", "--slo-ttft", "30", "--slo-tbt", "1"]
    command += ["--out", str(_REPORT), "--overall-timeout", "240"]
    if _TRACE.exists():
        command += ["--trace", str(_TRACE), "--speedup", "0.15"]  # denser than two cores can take
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    while process.poll() is None:
        steps.spoke() if console.is_terminal else steps.note("requests are on their way")
        time.sleep(0.2)
    steps.spoke()
    if process.returncode != 0 or not (_REPORT / "report.json").exists():
        return [f"the replay ended with status {process.returncode}"]
    errors: dict[str, int] = json.loads((_REPORT / "report.json").read_text())["summary"]["errors"]
    return [f"the replay had errors: {errors}"] if errors else []


def _close(steps: Steps) -> None:
    console.print(f"\nDone in {steps.elapsed_s():.0f} s. Report: {_REPORT}/report.json and report.png. Next:")
    console.print(
        "  make serve                                       a cluster that stays; it prints a curl line"
    )
    console.print("  .venv/bin/moonpool status                        what runs, while it does")
    console.print("  .venv/bin/python tests/load/replay_trace.py --help   replay your own trace against it")


if __name__ == "__main__":
    sys.exit(main())
