"""The whole configuration tree: read once from TOML, environment and flags here and nowhere else.

Precedence: flags, then environment (`MOONPOOL_ENGINE__MAX_MODEL_LEN=2048`), then the TOML file, then the defaults
below, which suit a laptop's CPU. Every process gets its own part, frozen.
"""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cluster.core.policies import POLICIES, policy
from cluster.core.state import Overload

_ENV_PREFIX = "MOONPOOL_"
API_KEY_VARIABLE = "MOONPOOL_API_KEY"
"""Of clients; no part of the configuration."""
MiB = 2**20


class ConfigError(ValueError):
    """A configuration value is wrong; the message names the key."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EngineConfig(_Part):
    """One vLLM engine; prefill and decode engines of a cluster share it, so that they can exchange KV."""

    dtype: Literal["float32", "bfloat16", "float16", "auto"] = Field(
        "auto",
        description="auto: the model's own, but float32 on CPUs, where it alone is exact across batches",
    )
    tensor_parallel: int = Field(
        1, ge=1, description="ranks that share each engine's model; equal in all engines of a cluster"
    )
    page_tokens: int = Field(32, ge=1, description="the engine's own block size in tokens")
    max_model_len: int | None = Field(None, ge=2, description="context length; none: the model's own")
    prefill_chunk_tokens: int = Field(
        512, ge=32, description="most prompt tokens a prefill engine takes in one step"
    )
    decode_batch_max: int = Field(64, ge=1, description="most requests in one decode step")
    prefill_batch_max: int = Field(8, ge=1, description="most requests in one prefill step")
    kv_bytes: int = Field(1024 * MiB, ge=16 * MiB, description="each rank's own KV memory (CPU: whole GiB)")
    threads: int = Field(1, ge=1, description="compute threads of each rank (CPU)")
    seed: int = 0
    reasoning_parser: str = Field("", description="vLLM's parser of the model's reasoning; none: it is text")


LINKS = ("inline", "bulk", "nixl")


class TransferConfig(_Part):
    """How KV goes from node to node."""

    links: str = Field(
        "auto",
        description="those that may be used, with commas: inline, bulk, nixl; auto: all that there are. Of these each "
        "node measures, for each other node, which is the fastest",
    )
    tcp_host: str | None = Field(
        None, description="nodes read from each other over TCP on this host; none: on Unix sockets"
    )
    tls_ca: Path | None = Field(None, description="PEM of the authority that signed the nodes' certificates")
    tls_cert: Path | None = Field(None, description="PEM of this node's certificate, for the name moonpool")
    tls_key: Path | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """The links that may be used, as a tuple."""
        return LINKS if self.links == "auto" else tuple(name.strip() for name in self.links.split(","))

    @model_validator(mode="after")
    def _links_are_known(self) -> "TransferConfig":
        if unknown := [name for name in self.kinds if name not in LINKS]:
            raise ValueError(f"links {self.links!r}: {unknown[0]!r} is none of {', '.join(LINKS)}")
        return self

    @model_validator(mode="after")
    def _tls_is_whole(self) -> "TransferConfig":
        given = [path for path in (self.tls_ca, self.tls_cert, self.tls_key) if path is not None]
        if len(given) not in (0, 3):
            raise ValueError("tls_ca, tls_cert and tls_key belong together")
        if given and self.tcp_host is None:
            raise ValueError("TLS is for TCP: set tcp_host too")
        return self


class PoolConfig(_Part):
    """The KV node of one machine."""

    block_tokens: int = Field(32, ge=1, description="tokens of a block; a multiple of engine.page_tokens")
    dram_bytes: int = Field(1024 * MiB, ge=MiB, description="size of the shared-memory arena")
    arena_dir: Path = Field(
        Path("/dev/shm"), description="folder of the arena: a tmpfs, or a mounted hugetlbfs for huge pages"
    )
    ssd_dir: Path | None = Field(
        None, description="folder of the SSD tier, one below it a node; none: no such tier"
    )
    ssd_bytes: int = Field(
        8192 * MiB, ge=MiB, description="how much of the disk each node's SSD tier may take"
    )
    ssd_admission: Literal["all", "second", "budget", "second_budget"] = Field(
        "all",
        description="which blocks go to the SSD: all, or those asked for a second time; within ssd_write_mib_s or not",
    )
    ssd_write_mib_s: float = Field(
        100.0, gt=0, description="how fast the admissions within a budget write, in MiB a second"
    )
    eviction: Literal["cost_aware", "lru", "lfu", "length_aware", "s3fifo"] = Field(
        "cost_aware", description="which blocks leave DRAM and SSD first"
    )
    codec: Literal["identity", "int8-token-head-1"] = Field(
        "identity",
        description="how blocks lie on the SSD; int8 is a quarter of float32, half of bfloat16, and not exact",
    )
    handoff_lease_s: float = Field(
        30.0, gt=0, description="how long prefilled KV waits for its decode engine"
    )
    save_generated: bool = Field(
        True, description="answers' KV goes to the pool too, for the conversation's next turn"
    )
    transfer: TransferConfig = TransferConfig()
    metrics_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="Prometheus finds the first node's metrics there, on gateway.host, the next node's one port above; 0: none",
    )
    verify: bool = Field(True, description="readers check epoch, name and checksum (off only in tests)")

    @model_validator(mode="after")
    def _codec_has_a_disk(self) -> "PoolConfig":
        if self.codec != "identity" and self.ssd_dir is None:
            raise ValueError(f"codec {self.codec} is for blocks on the SSD: set ssd_dir too")
        return self


class GatewayConfig(_Part):
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    body_bytes_max: int = Field(16 * MiB, ge=1024)
    served_model_name: str | None = None
    chat_template: str | None = Field(None, description="file or text; none: the model's own")
    api_keys: Path | None = Field(
        None, description="file with a key a line, and its tenant; none: everyone may ask, as one tenant"
    )
    tool_call_parser: str | None = Field(
        None, description="vLLM's parser of the model's tool calls; with one, tool_choice `auto` is served"
    )


class SchedulingConfig(_Part):
    policy: str = Field("load", description="how workers are chosen: " + ", ".join(POLICIES))
    options: dict[str, float] = Field({}, description="the policy's own numbers")
    overload: Overload = Field(
        Overload.RESERVED, description="what of the load counts when an SLO is at stake"
    )
    inflight_max: int = Field(1024, ge=1, description="requests in the cluster; more are told to retry")
    record_events: Path | None = Field(
        None, description="write every event and command here, one JSON a line"
    )

    @model_validator(mode="after")
    def _policy_knows_its_options(self) -> "SchedulingConfig":
        policy(self.policy, self.options)
        return self


class ClusterConfig(_Part):
    """Everything `moonpool up` needs."""

    model: str | None = Field(None, description="folder or hub id; none: the default model")
    prefill: int = Field(1, ge=1, le=64)
    decode: int = Field(1, ge=1, le=64)
    nodes: int = Field(1, ge=1, le=16, description="KV nodes; workers are dealt out to them in turn")
    engine: EngineConfig = EngineConfig()
    pool: PoolConfig = PoolConfig()
    gateway: GatewayConfig = GatewayConfig()
    scheduling: SchedulingConfig = SchedulingConfig()
    ready_timeout_s: float = Field(600.0, gt=0, description="how long workers may take to start")

    @model_validator(mode="after")
    def _nodes_have_workers(self) -> "ClusterConfig":
        if self.nodes > self.prefill + self.decode:
            raise ValueError(f"nodes {self.nodes} is more than the {self.prefill + self.decode} workers")
        return self

    @model_validator(mode="after")
    def _blocks_hold_pages(self) -> "ClusterConfig":
        if self.pool.block_tokens % self.engine.page_tokens:
            raise ValueError(
                f"pool.block_tokens {self.pool.block_tokens} is not a multiple of engine.page_tokens "
                f"{self.engine.page_tokens}"
            )
        return self


def load_config(
    path: Path | None = None, flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
) -> ClusterConfig:
    """The tree from `path`, the environment and `flags` (nested as the tree; None means not given).

    Raises ConfigError naming each wrong key and where it came from.
    """
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            _merge(tree, tomllib.loads(path.read_text()))
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"configuration file {path}: {error}") from error
    _merge(tree, _from_environment(os.environ if environ is None else environ))
    _merge(tree, flags or {})
    try:
        return ClusterConfig.model_validate(tree)
    except ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(str(part) for part in problem['loc']) or 'configuration'}: {problem['msg']}"
            for problem in error.errors()
        )
        raise ConfigError(wrong) from error


def _merge(into: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, Mapping):
            _merge(into.setdefault(key, {}), value)
        elif value is not None:
            into[key] = value


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in environ.items():
        if name.startswith(_ENV_PREFIX) and name != API_KEY_VARIABLE:
            *parents, key = name.removeprefix(_ENV_PREFIX).lower().split("__")
            branch = tree
            for parent in parents:
                branch = branch.setdefault(parent, {})
            branch[key] = value
    return tree
