"""Golden scripts: what the conductor answers to a story of events, in the manner of etcd raft's testdata.

A script is comments (#), events and, under `----`, the commands that followed. An event is a line
`<now> <Event> name=value ...`; values are JSON or bare words. `A*3` stands for the chain of blocks A0, A1, A2.
`REWRITE=1 pytest tests/golden` writes the answers anew: review the difference.
"""

import json
import os
import re
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any, cast

import pytest

from cluster.core.commands import Candidate, Command, Explanation
from cluster.core.conductor import Conductor
from cluster.core.cost import Coefficients
from cluster.core.events import Event
from cluster.core.log import decode, encode
from cluster.core.state import ConductorConfig

SCRIPTS = sorted(Path(__file__).parent.glob("*.txt"))
WORKER = {
    "node": "node-0",
    "address": "127.0.0.1:7000",
    "capacity": {"batch_max": 8, "kv_tokens_max": 8192},
    "coefficients": {field: getattr(Coefficients(), field) for field in Coefficients.__slots__},
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "WorkerJoined": WORKER,
    "WorkerLeft": {"reason": "lease expired"},
    "NodeLeft": {"reason": "lease expired"},
    "Arrive": {"tenant": "t", "attempt": 1, "max_new_tokens": 64, "chain": [], "slo": {}},
    "PrefillStarted": {"attempt": 1},
    "PrefillFinished": {"attempt": 1},
    "DecodeStarted": {"attempt": 1},
    "FirstToken": {"attempt": 1},
    "Finished": {"attempt": 1, "tbt_mean_s": None, "tbt_p99_s": None},
    "Failed": {"attempt": 1},
}


def value(text: str) -> Any:
    if match := re.fullmatch(r"([A-Z])\*(\d+)", text):
        return [f"{match[1]}{i}".encode().ljust(32, b".").hex() for i in range(int(match[2]))]
    try:
        return json.loads(text)
    except ValueError:
        return text


def event(kind: str, words: list[str]) -> Event:
    given = {name: value(text) for name, text in (word.split("=", 1) for word in words)}
    return cast(Event, decode({"type": kind, **DEFAULTS.get(kind, {}), **given}))


def number(data: Any) -> str:
    return f"{data:.4g}" if isinstance(data, float) else str(data)


def candidate(way: Candidate) -> str:
    terms = {name: getattr(way.cost, name) for name in way.cost.__slots__}
    costs = " ".join(f"{name}={number(seconds)}" for name, seconds in terms.items() if seconds)
    return f"{way.prefill} > {way.decode} cached={way.cached_tokens} from {way.source}: {costs}"


def explanation(why: Explanation) -> Iterator[str]:
    if why.limit:
        yield f"limit {why.limit.term}: {number(why.limit.predicted)}, allowed {number(why.limit.allowed)}"
    for way in why.candidates:
        role = "chosen" if way == why.chosen else "runner-up" if way == why.runner_up else "also"
        yield f"{role} {candidate(way)}"


def command(answer: Command) -> Iterator[str]:
    data = encode(answer)
    kind = data.pop("type")
    data.pop("explanation", None)
    yield " ".join([kind, *(f"{name}={number(item)}" for name, item in data.items())])
    if (why := getattr(answer, "explanation", None)) is not None:
        yield from (f"  {line}" for line in explanation(why))


def played(script: str) -> str:
    """The script with the answers of this code."""
    config, lines, answers = ConductorConfig(), [], cast(list[str], [])
    conductor: Conductor | None = None
    for line in script.splitlines():
        if line.startswith("config "):
            config = ConductorConfig(
                **{k: value(v) for k, v in (word.split("=") for word in line.split()[1:])}
            )
            lines.append(line)
        elif re.match(r"[\d.]+ [A-Z]", line):
            conductor = conductor or Conductor(config, repeat(0.5).__next__)
            now, kind, *words = line.split()
            commands = conductor.handle(event(kind, words), float(now))
            conductor.check()
            answers += [text for each in commands for text in command(each)]
            lines.append(line)
        elif line.startswith("----"):
            lines += [line, *(answers or ["ok"])]
            answers = []
        elif not line or line.startswith("#"):
            lines.append(line)
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script(path: Path) -> None:
    script = path.read_text()
    now = played(script)
    if os.environ.get("REWRITE"):
        path.write_text(now)
    else:
        assert now == script


def test_there_are_scripts() -> None:
    assert SCRIPTS
