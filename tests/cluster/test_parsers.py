"""The parsers that `moonpool up` is given are those that its parts get."""

from cluster.config import load_config
from kvstore.engine.launch import engine_args


def test_the_engine_that_samples_knows_where_reasoning_ends() -> None:
    config = load_config(flags={"engine": {"reasoning_parser": "qwen3"}}, environ={}).engine
    found = {role: engine_args("m", config, role).reasoning_parser for role in ("prefill", "decode", "alone")}
    assert found == {"prefill": "", "decode": "qwen3", "alone": "qwen3"}
