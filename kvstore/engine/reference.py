"""One plain vLLM engine of the same configuration, without disaggregation: what every answer must equal.

`python -m kvstore.engine.reference REQUESTS.json ANSWERS.json`, in a process of its own with `engine_environment`.
"""

import asyncio
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Answer:
    """Token ids of one answer and the log-probability of each."""

    token_ids: list[int]
    logprobs: list[float]

    def difference(self, other: "Answer", logprob_tolerance: float = 1e-4) -> str:
        """Empty if `other` has the same tokens and, within the tolerance, the same log-probabilities."""
        if self.token_ids != other.token_ids:
            first = next(
                (i for i, (a, b) in enumerate(zip(self.token_ids, other.token_ids, strict=False)) if a != b),
                min(len(self.token_ids), len(other.token_ids)),
            )
            return (
                f"tokens differ from token {first} on: {self.token_ids[first:]} and {other.token_ids[first:]}"
            )
        gap = max((abs(a - b) for a, b in zip(self.logprobs, other.logprobs, strict=True)), default=0.0)
        return f"log-probabilities differ by {gap:.2e}" if gap > logprob_tolerance else ""


async def _answer(model: str, config: EngineConfig, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All requests at once, in order of arrival; each is {"prompt": token ids, "params": SamplingParams fields}."""
    from vllm import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    from kvstore.engine.launch import engine_args

    llm = AsyncLLM.from_engine_args(engine_args(model, config, "alone"))

    async def one(number: int, request: dict[str, Any]) -> dict[str, Any]:
        params = SamplingParams(**{"logprobs": 0, **request["params"]})
        async for output in llm.generate(
            {"prompt_token_ids": request["prompt"]}, params, f"reference-{number}"
        ):
            final = output.outputs[0]
        chosen = [at[token].logprob for at, token in zip(final.logprobs, final.token_ids, strict=True)]
        return {"token_ids": list(final.token_ids), "logprobs": chosen}

    try:
        return list(await asyncio.gather(*(one(number, request) for number, request in enumerate(requests))))
    finally:
        llm.shutdown()


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text())
    answers = asyncio.run(_answer(task["model"], EngineConfig(**task["engine"]), task["requests"]))
    Path(sys.argv[2]).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
