"""What a model costs on a device: data files beside this module, each with its source, by name in `PROFILES`.

A profile's seconds are fitted (`[fitted]`, the coefficients themselves) or follow from a roofline (`[roofline]`):

    prefill_token_s = 2 parameters / (flops x flops_share)      prefill_pair_s = 4 layers hidden / (flops x flops_share)
    step_base_s = weight_bytes / (bytes_per_s x bytes_share) + step_overhead_s
    step_stream_s = prefill_token_s                             step_token_s = kv_bytes_per_token / (bytes_per_s x share)

where a (query, key) pair costs 4 x hidden FLOP a layer: a product and a sum each for the score and for the value.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.core.cost import Coefficients, Link
from cluster.core.state import Capacity

_FOLDER = Path(__file__).parent / "profiles"
PROFILES = tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One node: an engine, and beside it DRAM for blocks, an SSD and a network card. `tiers` are in blocks."""

    name: str
    source: str
    block_tokens: int
    kv_bytes_per_token: int
    layers: int
    coefficients: Coefficients
    capacity: Capacity
    memory: Link
    network: Link
    ssd: Link
    dram_blocks: int
    ssd_blocks: int

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * self.kv_bytes_per_token


def profile(name: str) -> Profile:
    """The profile of that name, or in that file. Raises ValueError naming what is wrong with it."""
    path = Path(name) if name.endswith(".toml") else _FOLDER / f"{name}.toml"
    if not path.is_file():
        raise ValueError(f"profile {name!r} is neither a .toml file nor one of {', '.join(PROFILES)}")
    data = tomllib.loads(path.read_text())
    try:
        return Profile(
            name=path.stem,
            source=data["source"],
            block_tokens=data["block_tokens"],
            kv_bytes_per_token=data["kv_bytes_per_token"],
            layers=data["layers"],
            coefficients=_coefficients(data),
            capacity=Capacity(**data["capacity"]),
            memory=Link(**data["memory"]),
            network=Link(**data["network"]),
            ssd=Link(**data["ssd"]),
            dram_blocks=int(data["dram_bytes"] / (data["block_tokens"] * data["kv_bytes_per_token"])),
            ssd_blocks=int(data["ssd_bytes"] / (data["block_tokens"] * data["kv_bytes_per_token"])),
        )
    except KeyError as missing:
        raise ValueError(f"profile {path}: {missing} is missing") from missing
    except TypeError as wrong:
        raise ValueError(f"profile {path}: {wrong}") from wrong


def _coefficients(data: Mapping[str, Any]) -> Coefficients:
    if "fitted" in data:
        return Coefficients(**data["fitted"])
    roof = data["roofline"]
    flops, bytes_per_s = roof["flops"] * roof["flops_share"], roof["bytes_per_s"] * roof["bytes_share"]
    token_s = 2 * roof["parameters"] / flops
    return Coefficients(
        prefill_base_s=roof["prefill_overhead_s"],
        prefill_token_s=token_s,
        prefill_pair_s=4 * data["layers"] * roof["hidden"] / flops,
        step_base_s=roof["weight_bytes"] / bytes_per_s + roof["step_overhead_s"],
        step_stream_s=token_s,
        step_token_s=data["kv_bytes_per_token"] / bytes_per_s,
    )
