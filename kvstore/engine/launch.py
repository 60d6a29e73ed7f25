"""Starts a vLLM engine that exchanges KV with the node: its environment, its layout, its arguments.

vLLM's own prefix cache is off on both sides: it bypasses our tenant salt and publishes loaded pages before the last
slot is rewritten. Prefixes are reused through the pool instead.
"""

import functools
import importlib.util
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cluster.config import EngineConfig
from kvstore.codecs.pages import PageShape, Permutation
from kvstore.core.blocks import KVLayout

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

Role = Literal["prefill", "decode", "alone"]
_GiB = 2**30


def engine_environment(config: EngineConfig, inherited: Mapping[str, str]) -> dict[str, str]:
    """Environment of a process that will import vLLM and start an engine; set before it starts.

    On a CPU: as many threads as configured and no pinning, so that several engines share the cores fairly; Intel's
    OpenMP preloaded as vLLM's CPU build wants it. The model runner is chosen, not left to vLLM's default.
    """
    environment = {
        "OMP_NUM_THREADS": str(config.threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": str(-(-config.kv_bytes // _GiB)),
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": inherited.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "TOKENIZERS_PARALLELISM": "false",
        "TORCHDYNAMO_DISABLE": "1",  # engines run eagerly; see kvstore/engine/spawned.py
    }
    openmp = _intel_openmp()
    if openmp is not None:
        # A process has one OpenMP. vLLM puts GNU's into the environment of a process that it finds without Intel's,
        # and a worker process that inherits both fails an assertion of vLLM's.
        inherited_libraries = inherited.get("LD_PRELOAD", "").replace(" ", ":").split(":")
        others = [library for library in inherited_libraries if library and "libgomp" not in library]
        environment["LD_PRELOAD"] = ":".join(dict.fromkeys([str(openmp), *others]))
    return environment


def engine_args(model: str, config: EngineConfig, role: Role) -> "AsyncEngineArgs":
    """VLLM's arguments for a prefill engine, a decode engine, or one plain engine that does both (`alone`)."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    batch_max = config.prefill_batch_max if role == "prefill" else config.decode_batch_max
    return AsyncEngineArgs(
        model=model,
        dtype=engine_dtype(config),
        seed=config.seed,
        block_size=config.page_tokens,
        max_model_len=config.max_model_len,
        max_num_seqs=batch_max,
        # vLLM 0.32 cannot take back the draw of a seeded request after part of its prompt on a CPU (its sampler asks
        # the generator for an offset, and the engine dies), so an engine that samples there takes prompts whole.
        enable_chunked_prefill=role == "prefill" or not on_cpu,
        max_num_batched_tokens=(
            max(config.prefill_chunk_tokens, batch_max) if role == "prefill" or not on_cpu else None
        ),
        enable_prefix_caching=False,
        enforce_eager=True,
        disable_log_stats=False,
        tensor_parallel_size=config.tensor_parallel,
        # A model of one rank runs inside the engine core's process: one import of vLLM less to wait for at start, one
        # hop less a step. `engine_environment` sets the switch that vLLM wants for it on a CPU. Several ranks are
        # processes of this machine; left to itself vLLM would have Ray start them, since its actors run in Ray.
        distributed_executor_backend="uni" if config.tensor_parallel == 1 else "mp",
        generation_config="auto",
        # The engine that samples must know where reasoning ends: guided output begins there.
        reasoning_parser="" if role == "prefill" else config.reasoning_parser,
        skip_tokenizer_init=role == "prefill",  # it sees token ids only
    )


def engine_dtype(config: EngineConfig) -> str:
    """The configured dtype; `auto` is the model's own, but float32 on a CPU.

    There bfloat16 is five times slower without units for it, and with them gives each shape of a batch other roundings:
    log-probabilities of one prompt, computed whole or in parts, differ by up to .2, and near ties go another way.
    """
    from vllm.platforms import current_platform

    if config.dtype == "auto" and current_platform.is_cpu():
        return "float32"
    return config.dtype


def with_connector(
    args: "AsyncEngineArgs", layout: KVLayout, arena_path: Path, slots: int, verify: bool
) -> "AsyncEngineArgs":
    """The arguments with our connector on the node's arena. Failed loads are recomputed, never failed."""
    from vllm.config import KVTransferConfig

    args.kv_transfer_config = KVTransferConfig(
        kv_connector="MoonpoolConnector",
        kv_connector_module_path="kvstore.engine.connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={
            "layout": asdict(layout),
            "arena_path": str(arena_path),
            "slots": slots,
            "verify": verify,
        },
    )
    return args


def kv_layout(args: "AsyncEngineArgs", block_tokens: int) -> KVLayout:
    """How an engine with these arguments will hold KV; the connector checks it against the real tensors."""
    import torch
    from vllm.config import ParallelConfig

    model: ModelConfig = args.create_model_config()
    parallel = ParallelConfig(tensor_parallel_size=args.tensor_parallel_size)
    dtype: Any = model.dtype
    heads = model.get_num_kv_heads(parallel)
    page_tokens = args.block_size
    assert page_tokens is not None
    return KVLayout(
        layers=model.get_num_layers(parallel),
        block_tokens=block_tokens,
        page_tokens=page_tokens,
        page_bytes=2
        * page_tokens
        * heads
        * model.get_head_size()
        * torch.empty((), dtype=dtype).element_size(),
        dtype=str(dtype).removeprefix("torch."),
        packing=_packing(dtype, page_tokens, model.get_head_size()),
        shards=args.tensor_parallel_size,
    )


def page_packing(args: "AsyncEngineArgs", layout: KVLayout) -> Permutation:
    """Where an engine with these arguments puts each element in a page: learned here, before it starts.

    Raises `kvstore.engine.layout.LayoutError` where it cannot be learned.
    """
    from vllm.platforms import current_platform

    from kvstore.engine.layout import learn

    head_dim = args.create_model_config().get_head_size()
    one_head = PageShape(layout.page_tokens, 1, head_dim, layout.dtype)
    shape = PageShape(layout.page_tokens, layout.page_bytes // one_head.page_bytes, head_dim, layout.dtype)
    return learn(shape, "cpu" if current_platform.is_cpu() else "cuda")


def _packing(dtype: Any, page_tokens: int, head_size: int) -> str:
    """What fixes the order of bytes in a page: on CPUs vLLM packs by instruction set."""
    import platform

    import torch
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return str(current_platform.device_type)
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    vectors = "avx512" if torch.cpu._is_avx512_supported() else "avx2"
    return f"cpu-{platform.machine()}-{vectors}-{_get_attn_isa(dtype, page_tokens, head_size)}"


@functools.cache
def _intel_openmp() -> Path | None:
    """The libiomp5.so that the package intel-openmp installs beside the interpreter's libraries."""
    import sys

    found = Path(sys.prefix) / "lib" / "libiomp5.so"
    return found if found.exists() and importlib.util.find_spec("torch") else None
