"""vLLM's KV connector over the node's arena (vLLM 0.32 `KVConnectorBase_V1`, found by `kv_connector_module_path`).

Scheduler half (`_Scheduler`, in the engine core): reads plans out of `kv_transfer_params` and turns each step into
page copies. It makes no call to anyone: a call would stall all decoding.
Worker half (`_Worker`, beside the model): copies pages from the engine to the arena as each layer finishes
(`save_kv_layer`), loads planned blocks on a thread of its own while the engine goes on (`Loader`), and on another
saves what an answer leaves (`_Saver`). With tensor parallelism there is a worker half in each rank: it copies, seals
and stops in its own shard of each slot, and a load has ended when it has in all ranks.

Rules that vLLM 0.32 sets, and where they are kept:
- Each pending load is reported finished exactly once, also when it failed or its request was aborted: vLLM holds the
  request's pages until then (`Loader.take_finished`).
- Failed pages are reported no later than the pass that reports the request (`take_failed_pages`).
- After a failed load nothing is matched any more: the request computes what is missing (`_Scheduler.matched`).
- Slots come from our metadata, never from `attn_metadata`; a layer whose attention did not run is copied in
  `wait_for_save`.
- A page is copied once, when it is full or ends the prompt; a segment is sealed with its last page.
- A writer says that it has stopped (`Arena.stop`) one step after its request ended: the steps that could still copy
  are over by then, because a worker runs its steps one after another. A request that ended before it was ever
  scheduled says so too: its slots wait for that word.
- An answer is saved once, at its end: names depend on the tokens sampled, so slots are reserved when all are known.
  Until then the engine holds the request's pages (`KVPlan.hold`). Each hold is ended by one word from outside, a plan
  for the same request that came with a request of its own; it may come before the end. A request whose load is under
  way is never held: it has no answer yet, and vLLM would free its pages twice.
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.model_executor.models.utils import extract_layer_index

from kvstore.core.blocks import KVLayout, RequestId
from kvstore.engine.loading import DevicePages, HostPages, Loader, LoadJob, Pages, Shard
from kvstore.engine.orphan import exit_with_parent
from kvstore.engine.plan import KVPlan, LoadReport, PlannedBlock
from kvstore.engine.spawned import after_imports
from kvstore.engine.stats import ConnectorMetrics, ConnectorStats
from kvstore.tiers.dram import Arena, ArenaShape

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_NOTHING_LOADED = LoadReport(blocks=0, failed=(), failure="", kv_bytes=0, load_s=0.0, resident_at=0.0)


@dataclass(frozen=True, slots=True)
class PageSave:
    """Copy engine page `page` into piece `piece` of the block's slot; `seals`: it is the block's last page."""

    page: int
    block: PlannedBlock
    piece: int
    seals: bool


@dataclass(frozen=True, slots=True)
class HeldSave:
    """Copy what an ended request leaves (nothing, perhaps), say that `blocks` are written no more, let its pages go."""

    engine_request: str
    saves: tuple[PageSave, ...]
    blocks: tuple[PlannedBlock, ...]


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is untyped here
    """Scheduler half to worker half, one engine step."""

    saves: list[PageSave] = field(default_factory=list)
    loads: list[LoadJob] = field(default_factory=list)
    stopped: list[PlannedBlock] = field(default_factory=list)
    held: list[HeldSave] = field(default_factory=list)


@dataclass
class LoadReports(KVConnectorWorkerMetadata):  # type: ignore[misc]  # as above
    """Worker halves to scheduler half: how loads ended, by engine request id, one report a rank."""

    reports: list[tuple[str, LoadReport]]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "LoadReports":
        assert isinstance(other, LoadReports)
        return LoadReports(self.reports + other.reports)


class MoonpoolConnector(KVConnectorBase_V1):  # type: ignore[misc]  # as above
    """The seam to vLLM: forwards each hook to the half that this process is."""

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        in_core = role is KVConnectorRole.SCHEDULER
        if in_core or vllm_config.parallel_config.world_size > 1:  # once in each process of the engine
            exit_with_parent()
            after_imports()
        extra = self._kv_transfer_config.kv_connector_extra_config
        layout = KVLayout(**extra["layout"])
        shape = ArenaShape(layout, extra["slots"])
        self._scheduler = _Scheduler(layout) if in_core else None
        self._worker: _Worker | None = None
        if role is KVConnectorRole.WORKER:
            arena = Arena.attach(Path(extra["arena_path"]), shape)
            self._worker = _Worker(arena, extra.get("verify", True), get_tensor_model_parallel_rank())

    @property
    def requires_kv_delivery(self) -> bool:
        """A preempted prefill starts again and overwrites nothing that is sealed: no delivery to protect."""
        return False

    def get_loaded_kv_cache_group_ids(self, request: "Request") -> tuple[int, ...]:
        return tuple(self._kv_cache_config.transfer_group_ids)

    # -- scheduler half -------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int, bool]:
        assert self._scheduler is not None
        return self._scheduler.matched(request.request_id, request.kv_transfer_params, num_computed_tokens)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        assert self._scheduler is not None
        if num_external_tokens:
            self._scheduler.allocated(request.request_id, blocks.get_block_ids()[0])

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> StepMetadata:
        assert self._scheduler is not None
        return self._scheduler.step(scheduler_output)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        assert self._scheduler is not None
        reports = connector_output.kv_connector_worker_meta
        if isinstance(reports, LoadReports):
            self._scheduler.loads_ended(reports.reports)

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        fed_tokens = request.num_tokens - 1  # the last token sampled was not fed: it has no KV
        return self._scheduler.finished(request.request_id, request.kv_transfer_params, block_ids, fed_tokens)

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        return self._scheduler.take_stats() if self._scheduler is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        return ConnectorStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *arguments: Any) -> ConnectorMetrics:
        return ConnectorMetrics(*arguments)

    # -- worker half ----------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        assert self._worker is not None
        self._worker.register(kv_caches)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        assert self._worker is not None
        self._worker.start(self._step_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads end before their request is scheduled, so no layer waits."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: "AttentionMetadata", **kwargs: Any
    ) -> None:
        assert self._worker is not None
        self._worker.save_layer(extract_layer_index(layer_name), self._step_metadata().saves)

    def wait_for_save(self) -> None:
        assert self._worker is not None
        self._worker.end_step(self._step_metadata())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        assert self._worker is not None
        return self._worker.saver.take_finished() or None, self._worker.loader.take_finished() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        assert self._worker is not None
        return self._worker.loader.take_failed_pages()

    def build_connector_worker_meta(self) -> LoadReports | None:
        assert self._worker is not None
        reports = self._worker.loader.take_reports()
        return LoadReports(list(reports.items())) if reports else None

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.loader.stop()
            self._worker.saver.stop()

    def _step_metadata(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata


@dataclass(slots=True)
class _Saving:
    """A request whose prompt is being computed and saved: its plan and its engine pages so far."""

    plan: KVPlan
    pages: list[int]
    saved_tokens: int


@dataclass(frozen=True, slots=True)
class _Held:
    """An ended request whose pages vLLM keeps for us; `pages` are those of full blocks, in token order."""

    engine_request: str
    pages: tuple[int, ...]


class _Scheduler:
    """The scheduler half: pure book-keeping, one entry per request with a plan."""

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        self._loading: dict[str, KVPlan] = {}  # matched, pages not yet given
        self._load_once: set[str] = set()  # has loaded, or failed to: matches nothing any more
        self._saving: dict[str, _Saving] = {}
        self._reports: dict[str, LoadReport] = {}
        self._loaded_in: dict[str, list[LoadReport]] = {}  # by ranks, until all have told
        self._jobs: list[LoadJob] = []
        self._stopped: list[PlannedBlock] = []
        self._plans: dict[str, KVPlan] = {}
        self._computed: dict[str, int] = {}  # prompt tokens scheduled for computing, by request
        self._stats = ConnectorStats()
        self._to_hold: set[RequestId] = set()  # running, with `hold` in their plan
        self._held: dict[RequestId, _Held] = {}
        self._told: dict[RequestId, KVPlan] = {}  # what to save of requests that still run
        self._held_saves: list[HeldSave] = []

    def matched(self, request: str, params: dict[str, Any] | None, computed: int) -> tuple[int, bool]:
        """(tokens to load beyond `computed`, asynchronously). May be asked again and again: changes no decision."""
        plan = self._plans.get(request) or KVPlan.from_params(params)
        if plan is None:
            return 0, False
        self._plans[request] = plan
        if plan.hold:
            self._to_hold.add(plan.request)
        tokens = plan.load_tokens - computed
        if request in self._load_once or tokens <= 0:
            return 0, False
        self._loading[request] = plan
        return tokens, True

    def allocated(self, request: str, pages: list[int]) -> None:
        plan = self._loading.pop(request, None)
        if plan is None:  # the second call for one load, after it ended
            return
        self._load_once.add(request)
        count = -(-plan.load_tokens // self._layout.page_tokens)
        self._jobs.append(LoadJob(request, plan.load, tuple(pages[:count]), plan.deadline_s))

    def take_stats(self) -> ConnectorStats:
        """What was counted since the last call."""
        stats, self._stats = self._stats, ConnectorStats()
        return stats

    def loads_ended(self, reports: Iterable[tuple[str, LoadReport]]) -> None:
        """Each rank tells of each load once, not all in one step."""
        for request, told in reports:
            ranks = self._loaded_in.setdefault(request, [])
            ranks.append(told)
            if len(ranks) == self._layout.shards:
                self._load_ended(request, reduce(LoadReport.with_rank, self._loaded_in.pop(request)))

    def _load_ended(self, request: str, report: LoadReport) -> None:
        self._stats.grow("loads", 1)
        self._stats.grow("loaded_blocks", report.blocks - report.failed_blocks)
        self._stats.grow("loaded_bytes", report.kv_bytes)
        self._stats.grow("failed_blocks", report.failed_blocks)
        if request in self._plans:
            self._reports[request] = report

    def finished(
        self, request: str, params: dict[str, Any] | None, pages: Sequence[int] = (), fed_tokens: int = 0
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request is over (or aborted, perhaps before it was ever asked about): no more copies for it.

        A load that is under way goes on, and is reported. `pages` hold the KV of its first `fed_tokens` tokens.
        Returns whether the pages are held, and what the request's last output carries.
        """
        plan = self._plans.pop(request, None) or KVPlan.from_params(params)
        self._loading.pop(request, None)
        self._load_once.discard(request)
        self._saving.pop(request, None)
        report = self._reports.pop(request, _NOTHING_LOADED)
        computed = self._computed.pop(request, 0)
        if plan is None:
            return False, None
        held = plan.hold and self._hold(request, plan, pages, fed_tokens)
        if not plan.hold:
            self._end_writing(plan)
        return held, replace(report, computed_tokens=computed, held=held).to_params()

    def _hold(self, request: str, plan: KVPlan, pages: Sequence[int], fed_tokens: int) -> bool:
        """Holds the pages if they fill a block beyond the prompt's."""
        layout = self._layout
        self._to_hold.discard(plan.request)
        told = self._told.pop(plan.request, None)
        blocks = min(fed_tokens // layout.block_tokens, len(pages) // layout.pieces)
        if blocks <= plan.prompt_tokens // layout.block_tokens:
            self._stopped.extend(told.save if told is not None else ())
            return False
        self._held[plan.request] = _Held(request, tuple(pages[: blocks * layout.pieces]))
        if told is not None:
            self._end_writing(told)
        return True

    def _end_writing(self, plan: KVPlan) -> None:
        """The request wrote what it had to write, unless it is the word on another that is held or will be."""
        if plan.request in self._to_hold:
            self._told[plan.request] = plan
        elif plan.request in self._held:
            held = self._held.pop(plan.request)
            saves = tuple(self._held_pages(held, plan))
            self._held_saves.append(HeldSave(held.engine_request, saves, plan.save))
        else:
            self._stopped.extend(plan.save)

    def _held_pages(self, held: _Held, plan: KVPlan) -> Iterable[PageSave]:
        pieces = self._layout.pieces
        for index, block in enumerate(plan.save, len(plan.load)):
            for piece, page in enumerate(held.pages[index * pieces : (index + 1) * pieces]):
                yield PageSave(page, block, piece, seals=piece == pieces - 1)

    def step(self, output: "SchedulerOutput") -> StepMetadata:
        """What the worker half does in this step."""
        self._note_pages(output)
        metadata = StepMetadata(loads=self._jobs, stopped=self._stopped, held=self._held_saves)
        self._jobs, self._stopped, self._held_saves = [], [], []
        for request, saving in self._saving.items():
            scheduled = output.num_scheduled_tokens.get(request, 0)
            if scheduled:
                metadata.saves.extend(self._saves(saving, saving.saved_tokens, scheduled))
        return metadata

    def _note_pages(self, output: "SchedulerOutput") -> None:
        """Follows the pages that the scheduler gives to requests that save."""
        for new in output.scheduled_new_reqs:
            plan = self._plans.get(new.req_id)
            if plan is None:
                continue
            self._count_computed(new.req_id, new.num_computed_tokens, output)
            if plan.save:
                self._saving[new.req_id] = _Saving(plan, list(new.block_ids[0]), new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for position, request in enumerate(cached.req_ids):
            self._count_computed(request, cached.num_computed_tokens[position], output)
            saving = self._saving.get(request)
            if saving is None:
                continue
            pages = cached.new_block_ids[position]
            if request in cached.resumed_req_ids:
                saving.pages = []
            if pages is not None:
                saving.pages.extend(pages[0])
            saving.saved_tokens = cached.num_computed_tokens[position]

    def _count_computed(self, request: str, before: int, output: "SchedulerOutput") -> None:
        plan = self._plans.get(request)
        if plan is not None and before < plan.prompt_tokens:
            end = min(before + output.num_scheduled_tokens.get(request, 0), plan.prompt_tokens)
            self._computed[request] = self._computed.get(request, 0) + end - before
            self._stats.grow("computed_prompt_tokens", end - before)

    def _saves(self, saving: _Saving, computed: int, scheduled: int) -> Iterable[PageSave]:
        """Pages that this step completes: full ones, and the prompt's last."""
        layout, plan = self._layout, saving.plan
        if computed >= plan.prompt_tokens:
            return
        end = min(computed + scheduled, plan.prompt_tokens)
        last = end // layout.page_tokens if end < plan.prompt_tokens else -(-end // layout.page_tokens)
        first = computed // layout.page_tokens
        pages_total = -(-plan.prompt_tokens // layout.page_tokens)
        for index in range(first, last):
            block_index, piece = divmod(index, layout.pieces)
            if block_index < len(plan.load):  # recomputed after a failed load: the pool keeps what it has
                continue
            seals = piece == layout.pieces - 1 or index == pages_total - 1
            yield PageSave(saving.pages[index], plan.save[block_index - len(plan.load)], piece, seals)


class _Worker:
    """The worker half in one rank: copies between the engine's pages and the rank's shard of the arena."""

    def __init__(self, arena: Arena, verify: bool, rank: int = 0) -> None:
        self._arena = arena
        self._shard = Shard(arena, rank)
        self._layers: list[Pages] = []
        self._saved: set[int] = set()
        self.loader = Loader(self._shard, verify)
        self.saver = _Saver(self._shard, self._copy)

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Takes the engine's tensors, one per layer; each page of a layer must be one run of bytes.

        Raises ValueError when they do not have the layout that the arena was made for.
        """
        layout = self._arena.shape.layout
        ordered = sorted(kv_caches.items(), key=lambda item: extract_layer_index(item[0]))
        if len(ordered) != layout.layers:
            raise ValueError(f"the engine has {len(ordered)} KV layers, the arena's layout {layout.layers}")
        self._layers = [_pages(name, tensor, layout) for name, tensor in ordered]
        self.loader.begin(self._layers)
        self.saver.begin()

    def start(self, step: StepMetadata) -> None:
        self._shard.stop(step.stopped)
        for job in step.loads:
            self.loader.submit(job)
        for held in step.held:
            self.saver.submit(held)

    def save_layer(self, layer: int, saves: list[PageSave]) -> None:
        """Copies this step's finished pages of one layer, and seals the segments that are complete."""
        self._saved.add(layer)
        self._copy(layer, saves)

    def _copy(self, layer: int, saves: Iterable[PageSave]) -> None:
        """May run on several threads at once: each slot has one writer."""
        pages, arena, segment = self._layers[layer], self._arena, self._shard.segment(layer)
        for save in saves:
            block = save.block
            if (
                arena.segment_epoch[block.slot, segment] == block.epoch
                or arena.epoch[block.slot] != block.epoch
            ):
                continue  # sealed before a preemption, or the reservation is over
            pages.save(save.page, self._shard.pieces[block.slot, layer, save.piece])
            if save.seals:
                arena.seal(block.slot, segment, block.epoch, block.hash)

    def end_step(self, step: StepMetadata) -> None:
        """Layers whose attention did not run through vLLM's hook are copied now."""
        if step.saves:
            for layer in set(range(len(self._layers))) - self._saved:
                self.save_layer(layer, step.saves)
        self._saved.clear()


def _pages(name: str, tensor: torch.Tensor, layout: KVLayout) -> Pages:
    """The layer's KV as [pages, page_bytes] of bytes, without copying."""
    page_elements = tensor[0].numel()
    if not tensor[0].is_contiguous() or tensor.stride(0) != page_elements:
        raise ValueError(
            f"KV of {name} is not one run of bytes a page: shape {tensor.shape}, stride {tensor.stride()}"
        )
    pages = tensor.view(tensor.shape[0], page_elements).view(torch.uint8)
    if pages.shape[1] != layout.page_bytes:
        raise ValueError(
            f"a page of {name} has {pages.shape[1]} bytes, the arena's layout {layout.page_bytes}"
        )
    return HostPages(pages) if pages.device.type == "cpu" else DevicePages(pages)


class _Saver:
    """Saves what ended requests leave, on a thread of its own; `copy` copies pages of one layer and seals them."""

    def __init__(self, shard: Shard, copy: Callable[[int, Iterable[PageSave]], None]) -> None:
        self._shard = shard
        self._copy = copy
        self._jobs: queue.Queue[HeldSave | None] = queue.Queue()
        self._lock = threading.Lock()
        self._finished: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="moonpool-save", daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def submit(self, job: HeldSave) -> None:
        self._jobs.put(job)

    def stop(self) -> None:
        self._jobs.put(None)

    def take_finished(self) -> set[str]:
        with self._lock:
            finished, self._finished = self._finished, set()
            return finished

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                for layer in range(self._shard.layout.layers):
                    self._copy(layer, job.saves)
            except Exception:  # the thread's edge: a request that is never let go holds its pages for ever
                logger.exception("request %s: saving broke", job.engine_request)
            self._shard.stop(job.blocks)
            with self._lock:
                self._finished.add(job.engine_request)
