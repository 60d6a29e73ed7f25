"""One vLLM engine beside one KV node: started, attached, counted, closed."""

import asyncio
import logging
import os
import select
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import grpc
import psutil
from prometheus_client import REGISTRY
from vllm import SamplingParams
from vllm.outputs import RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM

from kvstore.codecs.choice import LOSSLESS
from kvstore.core.blocks import KVLayout, WorkerId
from kvstore.engine.fingerprint import model_fingerprint, weights_folder
from kvstore.engine.launch import Role, engine_args, kv_layout, page_packing, with_connector
from kvstore.engine.plan import KVPlan
from kvstore.engine.settings import WorkerSettings
from kvstore.engine.spawned import as_main_of_children
from kvstore.engine.stats import COUNTED, PREFIX
from kvstore.tiers.dram import Arena, ArenaShape
from kvstore.transfer import kv_pb2 as pb
from kvstore.transfer.kv_pb2_grpc import KVNodeStub
from kvstore.transfer.messages import layout_message, packing_message
from kvstore.transfer.server import OPTIONS

if TYPE_CHECKING:
    from kvstore.transfer.kv_pb2_grpc import KVNodeAsyncStub

logger = logging.getLogger(__name__)

_HEALTH_POLL_S = 0.5
_NODE_CALL_S = 5.0


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """The engine's counters since it started: vLLM's own (prompt tokens by where their KV came from as scheduled, work
    that runs and waits) and our connector's (`kvstore.engine.stats`: what was really computed, loaded and failed).
    """

    prompt_tokens_computed: int
    prompt_tokens_from_own_cache: int
    prompt_tokens_from_pool: int
    computed_prompt_tokens: int
    loads: int
    loaded_blocks: int
    loaded_bytes: int
    failed_blocks: int
    running: int
    waiting: int
    kv_usage: float


class KVEngine(Protocol):
    """What the workers' services need of an engine: `Engine`, or a fake one in tests."""

    node: "KVNodeAsyncStub"
    arena: Arena
    worker_id: WorkerId

    @property
    def layout(self) -> KVLayout: ...

    @property
    def dead(self) -> bool: ...

    def generate(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str,
        plan: KVPlan | None,
        **more: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Runs one request; closing the iterator aborts it."""
        ...

    async def fence(self, plan: KVPlan) -> None:
        """Makes the engine say, in the arena, that it writes no more for `plan`."""
        ...

    async def save_held(self, plan: KVPlan) -> None:
        """Has the engine save the pages that it holds, or will hold, for the request that `plan` names, and let them go.

        `plan.load` are the sequence's first blocks, which the pool has; `plan.save` those to fill (none: just let go).
        When `Arena.stopped` is said for each of these, it is over: those that are complete can be committed. Call it
        once for each request whose plan has `hold`, unless its last output says that nothing is held.
        """
        ...

    def counters(self) -> EngineCounters: ...


class Engine:
    """A running engine. `node` is the stub of the KV node beside it, `arena` this process's view of the arena."""

    def __init__(
        self,
        llm: AsyncLLM,
        node: "KVNodeAsyncStub",
        channel: grpc.aio.Channel,
        arena: Arena,
        worker_id: WorkerId,
        fingerprint: str,
        node_id: str,
        node_pidfd: int,
    ) -> None:
        self._llm = llm
        self._channel = channel
        self.node = node
        self.arena = arena
        self.worker_id = worker_id
        self.fingerprint = fingerprint
        self.node_id = node_id
        self._node_pidfd = node_pidfd

    @classmethod
    async def start(cls, settings: WorkerSettings, role: Role) -> "Engine":
        """Attaches to the node and starts the engine; returns when it can serve."""
        args = engine_args(settings.model, settings.engine, role)
        layout = kv_layout(args, settings.pool.block_tokens)
        channel = grpc.aio.insecure_channel(settings.node_address, options=OPTIONS)
        node = KVNodeStub(channel)
        request = pb.AttachRequest(
            worker_id=settings.worker_id,
            layout=layout_message(layout),
            pids=[os.getpid()],
            codec=settings.pool.codec,
        )
        if settings.pool.codec != LOSSLESS.name:
            request.packing.CopyFrom(packing_message(page_packing(args, layout)))
        attached = await node.Attach(request, wait_for_ready=True)
        path, shape = Path(attached.arena_path), ArenaShape(layout, attached.slots)
        with as_main_of_children():
            llm = AsyncLLM.from_engine_args(
                with_connector(args, layout, path, attached.slots, settings.pool.verify)
            )
        try:
            fingerprint = model_fingerprint(weights_folder(settings.model))
            children = [child.pid for child in psutil.Process().children(recursive=True)]
            await node.Watch(
                pb.WatchRequest(worker_id=settings.worker_id, pids=children, fingerprint=fingerprint)
            )
            arena = Arena.attach(path, shape)
        except BaseException:
            llm.shutdown()
            raise
        node_pid = os.pidfd_open(attached.pid)
        return cls(llm, node, channel, arena, settings.worker_id, fingerprint, attached.node_id, node_pid)

    async def until_dead(self) -> str:
        """Waits for the end of the engine, or of the node, whose arena ends with it. Returns which (cancel to stop)."""
        while not self.dead:
            if select.select([self._node_pidfd], [], [], 0)[0]:
                return "the KV node has ended"
            await asyncio.sleep(_HEALTH_POLL_S)
        return "the engine has died"

    @property
    def layout(self) -> KVLayout:
        return self.arena.shape.layout

    @property
    def dtype(self) -> str:
        return self.layout.dtype

    @property
    def max_model_len(self) -> int:
        return int(self._llm.model_config.max_model_len)

    @property
    def dead(self) -> bool:
        return bool(self._llm.errored)

    async def generate(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str,
        plan: KVPlan | None,
        **more: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Runs one request; closing the iterator aborts it. `plan` says which KV to load and save.

        `more` goes unchanged to `AsyncLLM.generate`.
        """
        if plan is not None:
            params = params.clone()
            params.extra_args = {**(params.extra_args or {}), "kv_transfer_params": plan.to_params()}
        prompt = {"type": "token", "prompt_token_ids": list(token_ids)}
        async with aclosing(self._llm.generate(prompt, params, request_id, **more)) as outputs:
            async for output in outputs:
                yield output

    async def fence(self, plan: KVPlan) -> None:
        """Makes the engine say, in the arena, that it writes no more for `plan`, whatever it had seen of it.

        Call it when the request's generator is closed: what is said travels behind the abort on the same queue.
        """
        await self._tell(f"fence-{plan.request}", plan)

    async def save_held(self, plan: KVPlan) -> None:
        """See `KVEngine`."""
        await self._tell(f"save-{plan.request}", plan)

    async def _tell(self, request_id: str, plan: KVPlan) -> None:
        """Brings a plan to the connector's scheduler half, with a request that has ended before it begins."""
        if not self.dead:
            await self._llm.notify_kv_transfer_request_rejected(request_id, plan.to_params())

    def counters(self) -> EngineCounters:
        samples = {
            (sample.name, sample.labels.get("source", "")): sample.value
            for metric in REGISTRY.collect()
            if metric.name.startswith(("vllm:", PREFIX))
            for sample in metric.samples
        }

        def value(name: str, source: str = "", prefix: str = "vllm:") -> float:
            return samples.get((prefix + name, source), 0.0)

        return EngineCounters(
            prompt_tokens_computed=int(value("prompt_tokens_by_source_total", "local_compute")),
            prompt_tokens_from_own_cache=int(value("prompt_tokens_by_source_total", "local_cache_hit")),
            prompt_tokens_from_pool=int(value("prompt_tokens_by_source_total", "external_kv_transfer")),
            **{name: int(value(f"{name}_total", prefix=PREFIX)) for name in COUNTED},
            running=int(value("num_requests_running")),
            waiting=int(value("num_requests_waiting")),
            kv_usage=value("kv_cache_usage_perc"),
        )

    async def close(self) -> None:
        """Stops the engine's processes."""
        os.close(self._node_pidfd)
        await asyncio.to_thread(self._llm.shutdown)
        await self._channel.close()
