"""Both halves of the vLLM connector over a real arena, with vLLM's own messages and no engine."""

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from kvstore.core.blocks import BlockHash, KVLayout, RequestId
from kvstore.engine.connector import LoadReports, PageSave, StepMetadata, _Scheduler, _Worker
from kvstore.engine.loading import LoadJob
from kvstore.engine.plan import KVPlan, LoadReport, PlannedBlock
from kvstore.tiers.dram import Arena, ArenaShape

DIM = 2  # float32 numbers of KV per token and layer
LAYERS = 2
LAYER_NAMES = [f"model.layers.{index}.self_attn.attn" for index in range(LAYERS)]
ENGINE_PAGES = 96
SOON_S = 20.0


def layout_of(page_tokens: int = 2, pieces: int = 2) -> KVLayout:
    return KVLayout(LAYERS, page_tokens * pieces, page_tokens, page_tokens * DIM * 4, "float32", "test")


def planned(count: int, first_slot: int = 0, epoch: int = 100) -> tuple[PlannedBlock, ...]:
    return tuple(
        PlannedBlock(first_slot + i, epoch + i, BlockHash(bytes([first_slot + i]) * 32)) for i in range(count)
    )


def plan_of(layout: KVLayout, prompt_tokens: int, cached_blocks: int = 0, reads: bool = False) -> KVPlan:
    """A prefill's plan: so many cached blocks, the rest saved. `reads`: the decode side's, which loads all."""
    blocks = planned(-(-prompt_tokens // layout.block_tokens))
    cached = len(blocks) if reads else cached_blocks
    return KVPlan(
        request=RequestId("r"),
        load=blocks[:cached],
        load_tokens=min(prompt_tokens, cached * layout.block_tokens),
        save=blocks[cached:],
        prompt_tokens=prompt_tokens,
        deadline_s=time.monotonic() + SOON_S,
    )


# -- vLLM's side of the scheduler half ------------------------------------------------------------------------------


def step_output(
    new: dict[str, tuple[list[int], int]] | None = None,
    cached: dict[str, tuple[list[int] | None, int]] | None = None,
    scheduled: dict[str, int] | None = None,
    resumed: set[str] | None = None,
) -> SchedulerOutput:
    """What vLLM's scheduler says of one step; `new` and `cached` are (pages, computed tokens) by request."""
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [
        NewRequestData(name, [], [], None, None, (pages,), computed, None)
        for name, (pages, computed) in (new or {}).items()
    ]
    rows = (cached or {}).items()
    output.scheduled_cached_reqs = CachedRequestData(
        req_ids=[name for name, _ in rows],
        resumed_req_ids=resumed or set(),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[None if pages is None else (pages,) for _, (pages, _) in rows],
        num_computed_tokens=[computed for _, (_, computed) in rows],
        num_output_tokens=[0 for _ in rows],
    )
    output.num_scheduled_tokens = scheduled or {}
    return output


@dataclass
class Prompt:
    """One prompt on its way through an engine with chunked prefill: gives pages, computes, is preempted."""

    scheduler: _Scheduler
    plan: KVPlan
    page_tokens: int
    name: str = "0_r-abc"
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    next_page: int = 7  # pages are not numbered from 0, nor consecutive with another request's
    seen: bool = False
    resumed: bool = False

    def step(self, tokens: int) -> StepMetadata:
        tokens = min(tokens, self.plan.prompt_tokens - self.computed)
        grown = -(-(self.computed + tokens) // self.page_tokens) - len(self.pages)
        fresh = [self.next_page + index for index in range(max(0, grown))]
        self.next_page += len(fresh)
        self.pages += fresh
        if not self.seen:
            output = step_output(
                new={self.name: (list(self.pages), self.computed)}, scheduled={self.name: tokens}
            )
        else:
            shown = list(self.pages) if self.resumed else (fresh or None)
            output = step_output(
                cached={self.name: (shown, self.computed)},
                scheduled={self.name: tokens},
                resumed={self.name} if self.resumed else set(),
            )
        self.seen, self.resumed = True, False
        metadata = self.scheduler.step(output)
        self.computed += tokens
        return metadata

    def preempt(self) -> None:
        self.computed, self.pages, self.resumed = 0, [], True

    @property
    def done(self) -> bool:
        return self.computed >= self.plan.prompt_tokens


chunk_sizes = st.lists(st.integers(1, 9), min_size=1, max_size=40)
layouts = st.builds(layout_of, page_tokens=st.sampled_from([1, 2, 4]), pieces=st.integers(1, 3))


@given(layout=layouts, prompt_tokens=st.integers(1, 40), data=st.data(), chunks=chunk_sizes)
@settings(max_examples=150, deadline=None)
def test_each_page_is_saved_once_and_each_block_sealed_once(
    layout: KVLayout, prompt_tokens: int, data: st.DataObject, chunks: list[int]
) -> None:
    cached = data.draw(st.integers(0, (prompt_tokens - 1) // layout.block_tokens))
    plan = plan_of(layout, prompt_tokens, cached)
    scheduler = _Scheduler(layout)
    prompt = Prompt(scheduler, plan, layout.page_tokens)
    matched = scheduler.matched(prompt.name, plan.to_params(), 0)
    assert matched == ((plan.load_tokens, True) if cached else (0, False))
    if cached:
        prompt.pages = list(range(100, 100 + plan.load_tokens // layout.page_tokens))
        scheduler.allocated(prompt.name, prompt.pages)
        (job,) = scheduler.step(step_output()).loads
        assert job == LoadJob(prompt.name, plan.load, tuple(prompt.pages), plan.deadline_s)
        scheduler.allocated(prompt.name, prompt.pages)  # vLLM's second call, after the load
        prompt.computed = plan.load_tokens
    saves: list[PageSave] = []
    for size in [*chunks, prompt_tokens]:
        if not prompt.done:
            metadata = prompt.step(size)
            assert metadata.loads == []
            saves += metadata.saves
    pages_total = -(-prompt_tokens // layout.page_tokens)
    first = cached * layout.pieces
    assert [save.page for save in saves] == prompt.pages[first:pages_total]
    assert [(save.block, save.piece) for save in saves] == [
        (plan.save[index // layout.pieces - cached], index % layout.pieces)
        for index in range(first, pages_total)
    ]
    sealed = [save.block for save in saves if save.seals]
    assert sealed == list(plan.save)
    generating = step_output(cached={prompt.name: (None, prompt_tokens)}, scheduled={prompt.name: 1})
    assert scheduler.step(generating).saves == [], "what follows the prompt is not saved"
    scheduler.finished(prompt.name, plan.to_params())
    assert scheduler.step(step_output()).stopped == list(plan.save)
    assert scheduler.step(step_output()) == StepMetadata()


@pytest.mark.parametrize("prompt_tokens", [1, 2, 3, 4, 5, 7, 8, 9])
def test_a_decode_plan_loads_all_pages_of_the_prompt(prompt_tokens: int) -> None:
    layout = layout_of(page_tokens=2, pieces=2)
    plan = plan_of(layout, prompt_tokens, reads=True)
    scheduler = _Scheduler(layout)
    assert scheduler.matched("r", plan.to_params(), 0) == (prompt_tokens, True)
    scheduler.allocated("r", [10, 11, 12, 13, 14, 15])  # more than the prompt needs
    (job,) = scheduler.step(step_output()).loads
    assert job.pages == tuple(range(10, 10 + -(-prompt_tokens // 2)))
    assert job.blocks == plan.load


def test_matching_decides_nothing_and_may_be_asked_again() -> None:
    layout = layout_of()
    scheduler, plan = _Scheduler(layout), plan_of(layout, 8, reads=True)
    for _ in range(3):
        assert scheduler.matched("r", plan.to_params(), 0) == (8, True)
    assert scheduler.step(step_output()).loads == []
    assert scheduler.matched("r", plan.to_params(), 8) == (0, False), "the engine has it all"
    assert scheduler.matched("no plan", None, 0) == (0, False)
    assert scheduler.matched("another's", {"do_remote_prefill": True}, 0) == (0, False)


def test_after_a_load_nothing_is_matched_any_more() -> None:
    layout = layout_of()
    scheduler, plan = _Scheduler(layout), plan_of(layout, 8, reads=True)
    scheduler.matched("r", plan.to_params(), 0)
    scheduler.allocated("r", [1, 2, 3, 4])
    assert len(scheduler.step(step_output()).loads) == 1
    assert scheduler.matched("r", plan.to_params(), 0) == (0, False), "it failed: vLLM asks anew and computes"
    assert scheduler.step(step_output()).loads == []


def test_children_of_one_request_load_the_same_blocks_into_their_own_pages() -> None:
    layout = layout_of()
    scheduler, plan = _Scheduler(layout), plan_of(layout, 6, reads=True)
    children = ["0_r", "1_r", "2_r"]
    for index, child in enumerate(children):
        assert scheduler.matched(child, plan.to_params(), 0) == (6, True)
        scheduler.allocated(child, [10 * index, 10 * index + 1, 10 * index + 2])
    jobs = scheduler.step(step_output()).loads
    assert [(job.engine_request, job.pages) for job in jobs] == [
        (child, (10 * index, 10 * index + 1, 10 * index + 2)) for index, child in enumerate(children)
    ]
    report = LoadReport(2, (), "", 128, 0.1, 5.0)
    scheduler.loads_ended([("1_r", report)])
    told = [LoadReport.from_params(scheduler.finished(child, plan.to_params())[1]) for child in children[:2]]
    assert told == [LoadReport(0, (), "", 0, 0.0, 0.0), report], "each child tells of its own load"
    assert scheduler.step(step_output()).stopped == []


def test_a_request_aborted_while_its_load_is_queued_is_still_loaded_and_so_reported() -> None:
    layout = layout_of()
    scheduler, plan = _Scheduler(layout), plan_of(layout, 8, reads=True)
    scheduler.matched("r", plan.to_params(), 0)
    scheduler.allocated("r", [1, 2, 3, 4])
    scheduler.finished("r", plan.to_params())
    assert [job.engine_request for job in scheduler.step(step_output()).loads] == ["r"]
    scheduler.loads_ended([("r", LoadReport(2, (), "", 128, 0.1, 5.0))])
    told = LoadReport.from_params(scheduler.finished("r", plan.to_params())[1])
    assert told is not None and told.blocks == 0, "the report of a request long gone is kept for ever"


@pytest.mark.parametrize("asked", [False, True])
def test_a_writer_aborted_before_it_was_scheduled_says_that_it_stopped(asked: bool) -> None:
    layout = layout_of()
    scheduler, plan = _Scheduler(layout), plan_of(layout, 8)
    if asked:
        scheduler.matched("r", plan.to_params(), 0)
    scheduler.finished("r", plan.to_params())
    assert scheduler.step(step_output()).stopped == list(plan.save)
    scheduler.finished("no plan", None)
    assert scheduler.step(step_output()) == StepMetadata()


def test_a_writer_aborted_in_the_middle_stops_one_step_later_and_saves_no_more() -> None:
    layout = layout_of()
    scheduler, plan = _Scheduler(layout), plan_of(layout, 12)
    prompt = Prompt(scheduler, plan, layout.page_tokens)
    scheduler.matched(prompt.name, plan.to_params(), 0)
    assert prompt.step(5).saves
    scheduler.finished(prompt.name, plan.to_params())
    metadata = scheduler.step(step_output())
    assert (metadata.saves, metadata.stopped) == ([], list(plan.save))


def test_what_a_failed_load_recomputes_is_not_saved_over_the_pools_own() -> None:
    layout = layout_of()
    scheduler, plan = _Scheduler(layout), plan_of(layout, 12, cached_blocks=2)
    prompt = Prompt(scheduler, plan, layout.page_tokens)
    scheduler.matched(prompt.name, plan.to_params(), 0)
    scheduler.allocated(prompt.name, [1, 2, 3, 4])
    assert scheduler.matched(prompt.name, plan.to_params(), 0) == (0, False)
    saves = prompt.step(12).saves
    assert {save.block for save in saves} == set(plan.save)


def test_a_load_has_ended_when_each_rank_has_told_and_what_one_rank_lacks_has_failed() -> None:
    layout = replace(layout_of(), shards=2)
    scheduler, plan = _Scheduler(layout), plan_of(layout, 12, reads=True)
    for request in ("a", "b"):
        scheduler.matched(request, plan.to_params(), 0)
    whole = LoadReport(3, (), "", 64, 0.1, 5.0)
    first = LoadReport(3, (1,), "block 1 came too late", 32, 0.3, 4.0, ("bb",))
    other = LoadReport(3, (1, 2), "block 2 does not verify", 16, 0.2, 6.0, ("cc", "bb"))
    in_one_step = LoadReports([("a", first), ("b", whole)]).aggregate(LoadReports([("b", whole)]))
    scheduler.loads_ended(in_one_step.reports)
    assert scheduler.take_stats().data["loads"] == 1, "one rank of `a` still loads"
    scheduler.loads_ended([("a", other)])
    counted = scheduler.take_stats().data
    assert counted == {"loads": 1, "loaded_blocks": 1, "loaded_bytes": 48, "failed_blocks": 2}
    joint = LoadReport(3, (1, 2), "block 1 came too late", 48, 0.3, 6.0, ("bb", "cc"))
    assert LoadReport.from_params(scheduler.finished("a", plan.to_params())[1]) == joint
    told = LoadReport.from_params(scheduler.finished("b", plan.to_params())[1])
    assert told == replace(whole, kv_bytes=128)


# -- the worker half ------------------------------------------------------------------------------------------------


class Engine:
    """The KV tensors of an engine, and the connector's worker half beside them, called as vLLM calls it."""

    def __init__(self, arena: Arena, verify: bool = True, rank: int = 0) -> None:
        layout = arena.shape.layout
        self.layout = layout
        self.kv = {name: torch.zeros(ENGINE_PAGES, layout.page_tokens, DIM) for name in LAYER_NAMES}
        self.worker = _Worker(Arena.attach(arena.path, arena.shape), verify, rank)
        self.worker.register(self.kv)
        self.failed_pages: set[int] = set()
        self.finished: list[str] = []
        self.let_go: list[str] = []
        self.reports: dict[str, LoadReport] = {}

    def write(self, pages: list[int], start: int, values: torch.Tensor) -> None:
        """The KV of tokens from `start` on: `values` is [tokens, layers, DIM]."""
        for offset, value in enumerate(values):
            page, inside = divmod(start + offset, self.layout.page_tokens)
            for layer, name in enumerate(LAYER_NAMES):
                self.kv[name][pages[page], inside] = value[layer]

    def read(self, pages: list[int], tokens: int) -> torch.Tensor:
        return torch.stack(
            [
                torch.stack(
                    [
                        self.kv[name][pages[t // self.layout.page_tokens], t % self.layout.page_tokens]
                        for name in LAYER_NAMES
                    ]
                )
                for t in range(tokens)
            ]
        )

    def run(self, step: StepMetadata, hooked_layers: int = LAYERS) -> None:
        """One forward pass: attention of `hooked_layers` calls the hook, the others (SwiftKV's) do not."""
        for layer in range(hooked_layers):
            self.worker.save_layer(layer, step.saves)
        self.worker.start(step)
        self.worker.end_step(step)
        self.poll()

    def poll(self) -> None:
        """In vLLM's order. Once a request is reported finished, all its failed pages must have been reported."""
        finished = self.worker.loader.take_finished()
        self.failed_pages |= self.worker.loader.take_failed_pages()
        self.finished += sorted(finished)
        self.let_go += sorted(self.worker.saver.take_finished())
        self.reports |= self.worker.loader.take_reports()
        assert finished <= self.reports.keys()

    def load(self, *jobs: LoadJob) -> None:
        self.run(StepMetadata(loads=list(jobs)))
        until_s = time.monotonic() + SOON_S
        while not {job.engine_request for job in jobs} <= set(self.finished):
            assert time.monotonic() < until_s, "a load was never reported: its request hangs"
            self.poll()
            time.sleep(0.001)


@contextmanager
def pool(layout: KVLayout, slots: int = 24) -> Iterator[Arena]:
    descriptor, name = tempfile.mkstemp(prefix="moonpool-test-", dir="/dev/shm")
    os.close(descriptor)
    path = Path(name)
    path.unlink()
    arena = Arena.create(path, ArenaShape(layout, slots))
    try:
        yield arena
    finally:
        arena.unlink()


@contextmanager
def engine(arena: Arena, verify: bool = True, rank: int = 0) -> Iterator[Engine]:
    one = Engine(arena, verify, rank)
    try:
        yield one
    finally:
        one.worker.loader.stop()
        one.worker.saver.stop()


def numbers(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((tokens, LAYERS, DIM), np.float32))


def begun(arena: Arena, blocks: tuple[PlannedBlock, ...]) -> None:
    for block in blocks:
        arena.begin(block.slot, block.epoch, block.hash)


def prefilled(writer: Engine, plan: KVPlan, values: torch.Tensor, chunk: int = 3) -> None:
    """The whole prompt through the scheduler half and the engine."""
    scheduler = _Scheduler(writer.layout)
    prompt = Prompt(scheduler, plan, writer.layout.page_tokens)
    scheduler.matched(prompt.name, plan.to_params(), 0)
    while not prompt.done:
        start = prompt.computed
        step = prompt.step(chunk)
        writer.write(prompt.pages, start, values[start : prompt.computed])
        writer.run(step)


def job_of(
    plan: KVPlan, layout: KVLayout, name: str = "r", deadline_s: float = SOON_S, first_page: int = 3
) -> LoadJob:
    pages = tuple(first_page + 2 * index for index in range(-(-plan.load_tokens // layout.page_tokens)))
    return LoadJob(name, plan.load, pages, time.monotonic() + deadline_s)


@given(
    layout=layouts,
    prompt_tokens=st.integers(1, 24),
    chunks=chunk_sizes,
    hooked_layers=st.integers(0, LAYERS),
    preempted_after=st.sets(st.integers(0, 6), max_size=2),
    seed=st.integers(0, 100),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_what_one_engine_saved_another_loads(
    layout: KVLayout,
    prompt_tokens: int,
    chunks: list[int],
    hooked_layers: int,
    preempted_after: set[int],
    seed: int,
) -> None:
    plan, values = plan_of(layout, prompt_tokens), numbers(prompt_tokens, seed)
    with pool(layout) as arena, engine(arena) as writer, engine(arena) as reader:
        begun(arena, plan.save)
        scheduler = _Scheduler(layout)
        prompt = Prompt(scheduler, plan, layout.page_tokens)
        scheduler.matched(prompt.name, plan.to_params(), 0)
        for turn, size in enumerate([*chunks, prompt_tokens, prompt_tokens]):
            if prompt.done:
                break
            start = prompt.computed
            step = prompt.step(size)
            writer.write(prompt.pages, start, values[start : prompt.computed])
            writer.run(step, hooked_layers)
            if turn in preempted_after and not prompt.done:
                prompt.preempt()
                prompt.next_page %= ENGINE_PAGES // 2
        scheduler.finished(prompt.name, plan.to_params())
        writer.run(scheduler.step(step_output()))
        for block in plan.save:
            assert arena.complete(block.slot, block.epoch)
            assert arena.has_stopped(block.slot, block.epoch)
        read = replace(plan, load=plan.save, load_tokens=prompt_tokens, save=())
        job = job_of(read, layout)
        reader.load(job)
        assert reader.finished == ["r"]
        assert reader.failed_pages == set()
        assert reader.reports["r"].failed_blocks == 0
        assert torch.equal(reader.read(list(job.pages), prompt_tokens), values)


@given(
    layout=layouts,
    prompt_tokens=st.integers(1, 24),
    answer_tokens=st.integers(1, 16),
    cached_blocks=st.integers(0, 4),
    lost_pages=st.sampled_from([0, 0, 0, 1, 40]),
    told_first=st.booleans(),
)
@example(  # the most pages
    layout=layout_of(page_tokens=1, pieces=1),
    prompt_tokens=24,
    answer_tokens=16,
    cached_blocks=0,
    lost_pages=0,
    told_first=False,
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_an_answer_is_saved_at_its_end_and_its_pages_are_let_go_once(
    layout: KVLayout,
    prompt_tokens: int,
    answer_tokens: int,
    cached_blocks: int,
    lost_pages: int,
    told_first: bool,
) -> None:
    """`lost_pages`: it was preempted when it was aborted. `told_first`: the word comes before the engine's end."""
    fed_tokens = prompt_tokens + answer_tokens - 1
    blocks = fed_tokens // layout.block_tokens
    values = numbers(fed_tokens)
    plan = replace(plan_of(layout, prompt_tokens, reads=True), hold=True)
    cached = min(cached_blocks, blocks)
    whole = plan_of(layout, blocks * layout.block_tokens, cached)
    with pool(layout, slots=48) as arena, engine(arena) as writer, engine(arena) as reader:
        begun(arena, whole.save)
        scheduler = _Scheduler(layout)
        scheduler.matched("0_r", plan.to_params(), 0)
        pages = list(range(5, 5 + -(-fed_tokens // layout.page_tokens)))
        writer.write(pages, 0, values)
        there = pages[: max(0, len(pages) - lost_pages)]
        if told_first:
            assert not scheduler.finished("save-r", whole.to_params())[0], "the word itself is never held"
        held, params = scheduler.finished("0_r", plan.to_params(), there, fed_tokens)
        if not told_first:
            writer.run(scheduler.step(step_output()))
            assert writer.let_go == [], "pages went before it was said what to save"
            assert not scheduler.finished("save-r", whole.to_params())[0]
        report = LoadReport.from_params(params)
        assert report is not None
        assert report.held == held
        full = min(blocks, len(there) // layout.pieces)
        assert held == (full > prompt_tokens // layout.block_tokens)
        writer.run(scheduler.step(step_output()))
        until_s = time.monotonic() + SOON_S
        while held and not writer.let_go:
            assert time.monotonic() < until_s, "the pages are held for ever"
            writer.poll()
            time.sleep(0.0005)
        for index, block in enumerate(whole.save, cached):
            assert arena.has_stopped(block.slot, block.epoch), "the slot is never free again"
            assert arena.complete(block.slot, block.epoch) == (held and index < full)
        writer.run(scheduler.step(step_output()))
        assert writer.let_go == (["0_r"] if held else [])
        good = whole.save[: max(0, full - cached)] if held else ()
        if good:
            job = job_of(
                replace(whole, load=good, load_tokens=len(good) * layout.block_tokens, save=()), layout
            )
            reader.load(job)
            assert reader.reports["r"].failed_blocks == 0
            start = cached * layout.block_tokens
            loaded = reader.read(list(job.pages), len(good) * layout.block_tokens)
            assert torch.equal(loaded, values[start : start + len(loaded)])


@pytest.mark.parametrize("told_first", [True, False])
def test_an_answer_that_is_not_wanted_is_let_go(told_first: bool) -> None:
    """Its client left."""
    layout = layout_of()
    plan = replace(plan_of(layout, 4, reads=True), hold=True)
    nothing = replace(plan, load=(), load_tokens=0, hold=False)
    with pool(layout) as arena, engine(arena) as writer:
        scheduler = _Scheduler(layout)
        scheduler.matched("r", plan.to_params(), 0)
        if told_first:
            scheduler.finished("save-r", nothing.to_params())
        assert scheduler.finished("r", plan.to_params(), [1, 2, 3, 4], 8)[0]
        if not told_first:
            scheduler.finished("save-r", nothing.to_params())
        writer.run(scheduler.step(step_output()))
        until_s = time.monotonic() + SOON_S
        while not writer.let_go:
            assert time.monotonic() < until_s, "the pages are held for ever"
            writer.poll()
        assert (arena.segment_epoch == 0).all(), "something was saved"


def test_a_request_aborted_while_it_loads_is_not_held() -> None:
    """vLLM frees its pages when the load is reported, and asserts on a request that it frees twice."""
    layout = layout_of()
    scheduler, plan = _Scheduler(layout), replace(plan_of(layout, 8, reads=True), hold=True)
    scheduler.matched("r", plan.to_params(), 0)
    scheduler.allocated("r", [1, 2, 3, 4])
    assert not scheduler.finished("r", plan.to_params(), [1, 2, 3, 4], 7)[0]
    scheduler.finished("save-r", replace(plan, load=(), load_tokens=0, hold=False).to_params())
    assert scheduler.step(step_output()).held == []


def test_a_save_that_breaks_lets_the_pages_go() -> None:
    layout = layout_of()
    plan = replace(plan_of(layout, 4, reads=True), hold=True)
    whole = plan_of(layout, 8)
    with pool(layout) as arena, engine(arena) as writer:
        begun(arena, whole.save)
        scheduler = _Scheduler(layout)
        scheduler.matched("r", plan.to_params(), 0)
        scheduler.finished("r", plan.to_params(), [10**6] * 4, 8)
        scheduler.finished("save-r", whole.to_params())
        writer.run(scheduler.step(step_output()))
        until_s = time.monotonic() + SOON_S
        while not writer.let_go:
            assert time.monotonic() < until_s, "the pages are held for ever"
            writer.poll()
        assert all(arena.has_stopped(block.slot, block.epoch) for block in whole.save)


def test_a_load_follows_a_writer_that_is_still_at_work() -> None:
    layout = layout_of()
    plan, values = plan_of(layout, 23), numbers(23)
    with pool(layout) as arena, engine(arena) as writer, engine(arena) as reader:
        begun(arena, plan.save)
        job = job_of(replace(plan, load=plan.save, load_tokens=23), layout)
        reader.run(StepMetadata(loads=[job]))
        assert reader.finished == []

        def slowly() -> None:
            time.sleep(0.05)
            prefilled(writer, plan, values, chunk=5)

        thread = threading.Thread(target=slowly)
        thread.start()
        reader.load()
        while "r" not in reader.finished:
            reader.poll()
            time.sleep(0.001)
        thread.join()
        assert reader.reports["r"].failed_blocks == 0
        assert torch.equal(reader.read(list(job.pages), 23), values)


def test_each_of_many_loads_is_reported_once() -> None:
    layout = layout_of()
    plan, values = plan_of(layout, 8), numbers(8)
    with pool(layout) as arena, engine(arena) as writer, engine(arena) as reader:
        begun(arena, plan.save)
        prefilled(writer, plan, values)
        good = replace(plan, load=plan.save, load_tokens=8)
        bad = replace(good, load=(plan.save[0], replace(plan.save[1], epoch=1)))
        nothing = LoadJob("nothing", (), (), 0.0)
        reader.load(
            *(job_of(good, layout, f"g{i}", first_page=3) for i in range(5)),
            *(job_of(bad, layout, f"b{i}", first_page=30) for i in range(5)),
            nothing,
        )
        time.sleep(0.05)
        reader.poll()
        assert sorted(reader.finished) == sorted(
            [f"{kind}{i}" for kind in "bg" for i in range(5)] + ["nothing"]
        )
        assert [reader.reports[f"{kind}0"].failed_blocks for kind in "bg"] == [1, 0]


def test_what_does_not_come_in_time_fails_and_what_came_is_kept() -> None:
    layout = layout_of()
    plan, values = plan_of(layout, 12), numbers(12)
    with pool(layout) as arena, engine(arena) as writer, engine(arena) as reader:
        begun(arena, plan.save)
        prefilled(writer, replace(plan, save=plan.save[:2], prompt_tokens=8), values[:8])
        job = job_of(replace(plan, load=plan.save, load_tokens=12), layout, deadline_s=0.1)
        started_s = time.monotonic()
        reader.load(job)
        assert 0.1 <= time.monotonic() - started_s < SOON_S / 2
        assert reader.failed_pages == set(job.pages[4:])
        assert reader.reports["r"].failed_blocks == 1
        assert reader.reports["r"].failure == "block 2 came too late"
        assert reader.reports["r"].kv_bytes == 2 * layout.block_bytes
        assert torch.equal(reader.read(list(job.pages), 8), values[:8])


def test_a_writer_that_gives_up_fails_its_followers_at_once() -> None:
    layout = layout_of()
    plan = plan_of(layout, 8)
    with pool(layout) as arena, engine(arena) as reader:
        begun(arena, plan.save)
        job = job_of(replace(plan, load=plan.save, load_tokens=8), layout)
        reader.run(StepMetadata(loads=[job]))
        arena.end(plan.save[0].slot)
        arena.end(plan.save[1].slot)
        started_s = time.monotonic()
        reader.load()
        while "r" not in reader.finished:
            reader.poll()
            time.sleep(0.001)
        assert time.monotonic() - started_s < SOON_S / 2
        assert reader.failed_pages == set(job.pages)
        assert "no longer held" in reader.reports["r"].failure


def test_a_writer_that_gave_up_writes_no_more() -> None:
    layout = layout_of()
    plan = plan_of(layout, 8)
    with pool(layout) as arena, engine(arena) as writer:
        begun(arena, plan.save)
        arena.end(plan.save[0].slot)
        before = arena.payload[plan.save[0].slot].copy()
        prefilled(writer, plan, numbers(8))
        assert (arena.payload[plan.save[0].slot] == before).all()
        assert not arena.complete(plan.save[0].slot, plan.save[0].epoch)
        assert arena.complete(plan.save[1].slot, plan.save[1].epoch)


def test_a_sealed_segment_is_not_written_again() -> None:
    layout = layout_of()
    plan, values = plan_of(layout, 4), numbers(4)
    with pool(layout) as arena, engine(arena) as writer:
        begun(arena, plan.save)
        prefilled(writer, plan, values)
        before = arena.payload[0].copy()
        prefilled(writer, plan, values + 1)
        assert (arena.payload[0] == before).all()


def swapped(arena: Arena, blocks: tuple[PlannedBlock, ...]) -> tuple[PlannedBlock, ...]:
    """Right slots and epochs, each under the other's name."""
    first, second = blocks
    return replace(second, hash=first.hash), replace(first, hash=second.hash)


def swapped_with_forged_names(arena: Arena, blocks: tuple[PlannedBlock, ...]) -> tuple[PlannedBlock, ...]:
    """As above, and the arena's own names agree: only the checksum, bound to the name, can tell."""
    mistaken = swapped(arena, blocks)
    for block in mistaken:
        arena.hash[block.slot] = np.frombuffer(block.hash, np.uint8)
    return mistaken


def wrong_name(arena: Arena, blocks: tuple[PlannedBlock, ...]) -> tuple[PlannedBlock, ...]:
    """Another prompt's block where the first is wanted."""
    return replace(blocks[1], hash=BlockHash(b"?" * 32)), blocks[1]


def flipped_byte(arena: Arena, blocks: tuple[PlannedBlock, ...]) -> tuple[PlannedBlock, ...]:
    arena.payload[blocks[0].slot, 1, 5] ^= 0x40
    return blocks


def layers_exchanged(arena: Arena, blocks: tuple[PlannedBlock, ...]) -> tuple[PlannedBlock, ...]:
    """Right bytes with their right sums, each in the other layer."""
    slot = blocks[0].slot
    arena.payload[slot] = arena.payload[slot, ::-1].copy()
    arena.segment_sum[slot] = arena.segment_sum[slot, ::-1].copy()
    return blocks


def used_anew(arena: Arena, blocks: tuple[PlannedBlock, ...]) -> tuple[PlannedBlock, ...]:
    """The slot was given to another use while its old segment word still stands."""
    arena.payload[blocks[0].slot] ^= 0xFF
    arena.epoch[blocks[0].slot] += 50
    return blocks


Mistake = Callable[[Arena, tuple[PlannedBlock, ...]], tuple[PlannedBlock, ...]]
MISTAKES: dict[Mistake, str] = {
    swapped: "is another block",
    swapped_with_forged_names: "does not verify",
    wrong_name: "block 0 is another block",
    flipped_byte: "block 0 layer 1 does not verify",
    layers_exchanged: "block 0 layer 1 does not verify",
    used_anew: "block 0 is no longer held by its writer",
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("verify", [True, False])
def test_a_mistake_is_reported_and_without_verification_it_would_be_wrong_bytes(
    mistake: Mistake, verify: bool
) -> None:
    layout = layout_of()
    plan, values = plan_of(layout, 8), numbers(8)
    with pool(layout) as arena, engine(arena) as writer, engine(arena, verify) as reader:
        begun(arena, plan.save)
        prefilled(writer, plan, values)
        blocks = mistake(arena, plan.save)
        job = job_of(replace(plan, load=blocks, load_tokens=8), layout)
        reader.load(job)
        loaded, good = reader.read(list(job.pages), 8), 0
        for index in range(2):
            right = torch.equal(loaded[4 * index : 4 * index + 4], values[4 * index : 4 * index + 4])
            failed = set(job.pages[2 * index : 2 * index + 2]) <= reader.failed_pages
            assert right or failed or not verify, f"block {index} is wrong and was reported good"
            good += right
        assert good < 2, "the mistake made no difference: this test cannot fail"
        if verify:
            assert reader.reports["r"].failed_blocks >= 1
            assert MISTAKES[mistake] in reader.reports["r"].failure
        else:
            assert reader.failed_pages == set(), "without verification the mistake goes unseen"
            assert reader.reports["r"].failed_blocks == 0


@pytest.mark.parametrize("verify", [True, False])
def test_a_stale_epoch_or_a_missing_layer_is_never_loaded(verify: bool) -> None:
    layout = layout_of()
    plan, values = plan_of(layout, 8), numbers(8)
    with pool(layout) as arena, engine(arena) as writer, engine(arena, verify) as reader:
        begun(arena, plan.save)
        prefilled(writer, plan, values)
        arena.segment_epoch[plan.save[0].slot, 1] = 0  # one layer of the first block never came
        stale = replace(plan.save[1], epoch=plan.save[1].epoch - 1)
        job = job_of(replace(plan, load=(plan.save[0], stale), load_tokens=8), layout, deadline_s=0.1)
        reader.load(job)
        assert reader.failed_pages == set(job.pages)
        assert reader.reports["r"].failed_blocks == 2


def test_each_rank_has_its_own_shard_of_every_block() -> None:
    layout = replace(layout_of(), shards=2)
    plan, values = plan_of(layout, 8), [numbers(8, seed) for seed in (1, 2)]
    job = job_of(replace(plan, load=plan.save, load_tokens=8), layout)
    with (
        pool(layout) as arena,
        engine(arena, rank=0) as first,
        engine(arena, rank=1) as second,
        engine(arena, rank=1) as reader,
    ):
        begun(arena, plan.save)
        prefilled(first, plan, values[0])
        first.run(StepMetadata(stopped=list(plan.save)))
        for block in plan.save:
            assert not arena.complete(block.slot, block.epoch), "half a block is none"
            assert not arena.has_stopped(block.slot, block.epoch), "the other rank may still write"
        prefilled(second, plan, values[1])
        second.run(StepMetadata(stopped=list(plan.save)))
        for block in plan.save:
            assert arena.complete(block.slot, block.epoch)
            assert arena.has_stopped(block.slot, block.epoch)
        reader.load(job)
        assert torch.equal(reader.read(list(job.pages), 8), values[1])
        assert reader.reports["r"].kv_bytes == layout.block_bytes, "two blocks, one shard of two each"

        slot = plan.save[1].slot
        arena.payload[slot, 0, 3] ^= 1  # of the first rank, layer 0
        again = replace(job, engine_request="again")
        reader.load(again)
        assert reader.reports["again"].failed == (), "the second rank's bytes are as they were"
        first.load(again)
        assert first.reports["again"].failed == (1,)
        assert first.reports["again"].failure == "block 1 layer 0 of rank 0 does not verify"

        arena.payload[slot, LAYERS:] = arena.payload[slot, :LAYERS]
        arena.segment_sum[slot, LAYERS:] = arena.segment_sum[slot, :LAYERS]
        reader.load(replace(job, engine_request="exchanged"))
        assert reader.reports["exchanged"].failed == (1,), "one rank's bytes, with their sums, for another's"


def test_a_load_that_breaks_is_reported_and_the_next_one_works() -> None:
    layout = layout_of()
    plan, values = plan_of(layout, 8), numbers(8)
    with pool(layout) as arena, engine(arena) as writer, engine(arena) as reader:
        begun(arena, plan.save)
        prefilled(writer, plan, values)
        right = replace(plan, load=plan.save, load_tokens=8)
        nowhere = replace(right, load=(replace(plan.save[0], slot=10**6), plan.save[1]))
        broken = job_of(nowhere, layout, "broken", first_page=40)
        reader.load(broken)
        assert reader.failed_pages == set(broken.pages)
        assert "could not be loaded" in reader.reports["broken"].failure
        job = job_of(right, layout)
        reader.load(job)
        assert torch.equal(reader.read(list(job.pages), 8), values)


def test_an_engine_of_another_layout_is_refused() -> None:
    layout = layout_of()
    with pool(layout) as arena:
        worker = _Worker(arena, verify=True)
        right = {name: torch.zeros(4, layout.page_tokens, DIM) for name in LAYER_NAMES}
        with pytest.raises(ValueError, match="has 1 KV layers, the arena's layout 2"):
            worker.register(dict(list(right.items())[:1]))
        with pytest.raises(ValueError, match=r"a page of .* has 32 bytes, the arena's layout 16"):
            worker.register({name: torch.zeros(4, 2 * layout.page_tokens, DIM) for name in LAYER_NAMES})
        with pytest.raises(ValueError, match="not one run of bytes a page"):
            worker.register(
                {name: torch.zeros(DIM, layout.page_tokens, 4).transpose(0, 2) for name in LAYER_NAMES}
            )


def test_plans_and_reports_survive_the_journey() -> None:
    plan = plan_of(layout_of(), 11, cached_blocks=1)
    assert KVPlan.from_params(plan.to_params()) == plan
    report = LoadReport(3, (2,), "block 2 came too late", 99, 0.5, 7.0)
    assert LoadReport.from_params(report.to_params()) == report
    assert LoadReport.from_params(plan.to_params()) is None
    assert LoadReport.from_params(None) is None
