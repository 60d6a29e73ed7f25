"""A deterministic engine without a model, for tests that need many workers: everything around it is real.

It attaches to a real KV node and moves real bytes through the arena, in the order and with the words of the real
connector. Its "KV" is arithmetic that depends on every token before, as attention does, and its answer is a hash of
all KV bytes that it ended up with. So a block that is wrong, misplaced or of another prefix gives a wrong answer,
unless it is noticed and computed anew. `fake_answer` says what is right.

    kv[layer, p, word] = seed(layer) + sum(token[i] * weight(i), i <= p) + word      (u32, wrapping)
"""

import asyncio
import os
import select
import struct
import subprocess
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import numpy.typing as npt
from blake3 import blake3
from vllm import SamplingParams
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.stats import RequestStateStats

from kvstore.codecs.pages import PageShape, Permutation
from kvstore.core.blocks import KVLayout, RequestId, WorkerId
from kvstore.engine.engine import EngineCounters
from kvstore.engine.plan import KVPlan, LoadReport, PlannedBlock
from kvstore.tiers.dram import Arena, ArenaShape
from kvstore.transfer import kv_pb2 as pb
from kvstore.transfer.kv_pb2_grpc import KVNodeStub
from kvstore.transfer.messages import layout_message, packing_message
from kvstore.transfer.server import OPTIONS

if TYPE_CHECKING:
    from kvstore.transfer.kv_pb2_grpc import KVNodeAsyncStub

KV = npt.NDArray[np.uint32]
"""Shape [layers, prompt tokens, words of a token in one layer]."""

VOCABULARY = 50_000
_POLL_S = 0.001
_HEALTH_POLL_S = 0.05
_NODE_CALL_S = 5.0
_NOTHING_LOADED = LoadReport(blocks=0, failed=(), failure="", kv_bytes=0, load_s=0.0, resident_at=0.0)


def fake_answer(layout: KVLayout, token_ids: Sequence[int], count: int, index: int = 0) -> list[int]:
    """The right answer number `index` to a prompt: `count` token ids."""
    kv = _empty(layout, len(token_ids))
    for layer in range(layout.layers):
        _extend(kv, layer, token_ids, 0, len(token_ids))
    return _answer(kv, count, index)


class FakeEngine:
    """Has the surface of `kvstore.engine.engine.Engine` (`KVEngine`); make it with `start`.

    Times are virtual: `prefill_token_s` for each prompt token computed (one prompt at a time), `decode_step_s` for
    each token of an answer. A step is one layer of one chunk of `chunk_tokens`, or one token of an answer.
    """

    def __init__(
        self,
        node: "KVNodeAsyncStub",
        channel: grpc.aio.Channel,
        arena: Arena,
        worker_id: WorkerId,
        fingerprint: str,
        attached: pb.AttachReply,
        process: "subprocess.Popen[bytes]",
        *,
        prefill_token_s: float,
        decode_step_s: float,
        chunk_tokens: int,
        max_model_len: int,
        verify: bool,
    ) -> None:
        self._channel = channel
        self.node = node
        self.arena = arena
        self.worker_id = worker_id
        self.fingerprint = fingerprint
        self.node_id = attached.node_id
        self.max_model_len = max_model_len
        self.dead = False
        self._node_pidfd = os.pidfd_open(attached.pid)
        self._process = process
        self._prefill_token_s = prefill_token_s
        self._decode_step_s = decode_step_s
        self._chunk_tokens = chunk_tokens
        self._verify = verify
        self._turn = asyncio.Lock()
        self._steps_left: int | None = None
        self._running = 0
        self._loads = self._loaded_blocks = self._failed_blocks = 0
        self._computed_tokens = self._pool_tokens = 0
        self._held: dict[RequestId, KV] = {}

    @classmethod
    async def start(
        cls,
        node_address: str,
        worker_id: WorkerId,
        layout: KVLayout,
        fingerprint: str = "fake",
        *,
        codec: str = "identity",
        prefill_token_s: float = 0.0,
        decode_step_s: float = 0.0,
        chunk_tokens: int = 512,
        max_model_len: int = 4096,
        verify: bool = True,
    ) -> "FakeEngine":
        """Attaches to the node. Raises grpc.aio.AioRpcError when the node refuses, and leaves nothing then."""
        channel = grpc.aio.insecure_channel(node_address, options=OPTIONS)
        node, process = KVNodeStub(channel), _process()
        try:
            attached = await node.Attach(
                pb.AttachRequest(
                    worker_id=worker_id,
                    layout=layout_message(layout),
                    pids=[process.pid],
                    codec=codec,
                    packing=packing_message(_in_order(layout)),
                ),
                wait_for_ready=True,
            )
            await node.Watch(pb.WatchRequest(worker_id=worker_id, pids=[], fingerprint=fingerprint))
            arena = Arena.attach(Path(attached.arena_path), ArenaShape(layout, attached.slots))
        except BaseException:
            _end(process)
            await channel.close()
            raise
        return cls(
            node,
            channel,
            arena,
            worker_id,
            fingerprint,
            attached,
            process,
            prefill_token_s=prefill_token_s,
            decode_step_s=decode_step_s,
            chunk_tokens=chunk_tokens,
            max_model_len=max_model_len,
            verify=verify,
        )

    # -- what a worker uses ---------------------------------------------------------------------------------

    @property
    def layout(self) -> KVLayout:
        return self.arena.shape.layout

    @property
    def dtype(self) -> str:
        return self.layout.dtype

    async def until_dead(self) -> str:
        """Waits for the end of the engine or of the node. Returns which (cancel to stop)."""
        while not self.dead:
            if select.select([self._node_pidfd], [], [], 0)[0]:
                return "the KV node has ended"
            await asyncio.sleep(_HEALTH_POLL_S)
        return "the engine has died"

    async def generate(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str,
        plan: KVPlan | None,
        **more: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Runs one request as `Engine.generate` does. Raises ValueError for a prompt that is too long."""
        if len(token_ids) >= self.max_model_len:
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens, the model takes {self.max_model_len - 1}"
            )
        kv = _empty(self.layout, len(token_ids))
        fed = list(token_ids)
        times = RequestStateStats(queued_ts=time.monotonic())
        self._running += 1
        try:
            start, report = await self._load(plan, kv) if plan is not None else (0, _NOTHING_LOADED)
            async with self._turn:
                times.scheduled_ts = time.monotonic()
                await self._compute(kv, token_ids, min(start, len(token_ids) - 1), plan)
            times.first_token_ts = time.monotonic()
            async for output, sampled in self._sample(kv, token_ids, params, request_id):
                fed = [*token_ids, *sampled[:-1]]
                if output.finished:
                    output.metrics = times
                    if plan is not None:
                        held = plan.hold and self._hold(plan, kv, fed)
                        plan = replace(plan, hold=False)
                        output.kv_transfer_params = replace(report, held=held).to_params()
                yield output
        finally:
            self._running -= 1
            if plan is not None:
                self._stop(plan)
                if plan.hold:
                    self._hold(plan, kv, fed)

    async def fence(self, plan: KVPlan) -> None:
        """Says in the arena that nothing more is written for `plan`."""
        self._stop(plan)

    async def save_held(self, plan: KVPlan) -> None:
        """See `KVEngine`."""
        kv = self._held.pop(plan.request, None)
        if kv is not None and plan.save:
            for layer in range(self.layout.layers):
                await self._step(0.0)
                self._save(plan, kv, layer, 0, kv.shape[1])
        self._stop(plan)

    def counters(self) -> EngineCounters:
        """There is no prefix cache of its own: what is not from the pool was computed."""
        return EngineCounters(
            prompt_tokens_computed=self._computed_tokens,
            prompt_tokens_from_own_cache=0,
            prompt_tokens_from_pool=self._pool_tokens,
            computed_prompt_tokens=self._computed_tokens,
            loads=self._loads,
            loaded_blocks=self._loaded_blocks,
            loaded_bytes=self._loaded_blocks * self.layout.block_bytes,
            failed_blocks=self._failed_blocks,
            running=self._running + len(self._held),
            waiting=0,
            kv_usage=0.0,
        )

    async def close(self) -> None:
        """Ends the engine, and with it what it holds at the node. Idempotent."""
        if self._node_pidfd >= 0:
            os.close(self._node_pidfd)
            self._node_pidfd = -1
        self.die()
        await self._channel.close()

    # -- what a test uses -----------------------------------------------------------------------------------

    def die(self) -> None:
        """The engine's process is gone, without a word to anyone."""
        self.dead = True
        _end(self._process)

    def die_after(self, steps: int) -> None:
        """Die when that many more steps have been done: 0 is before the next layer, or token, is finished."""
        self._steps_left = steps

    # -- inside ---------------------------------------------------------------------------------------------

    async def _step(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if self._steps_left is not None:
            if self._steps_left == 0:
                self.die()
            self._steps_left -= 1
        if self.dead:
            raise EngineDeadError

    async def _load(self, plan: KVPlan, kv: KV) -> tuple[int, LoadReport]:
        """Loads planned blocks; those before the first failure count. Returns (tokens loaded, how it went)."""
        started_s, failed = time.monotonic(), dict[int, str]()
        for layer in range(self.layout.layers):
            for index, block in enumerate(plan.load):
                if index not in failed and (
                    problem := await self._load_segment(kv, layer, index, block, plan)
                ):
                    failed[index] = problem
        first_failed = min(failed, default=len(plan.load))
        tokens = min(first_failed * self.layout.block_tokens, plan.load_tokens)
        computed = max(plan.prompt_tokens - tokens, 1)
        loaded = len(plan.load) - len(failed)
        self._loads += bool(plan.load)
        self._loaded_blocks += loaded
        self._failed_blocks += len(failed)
        self._pool_tokens += plan.prompt_tokens - computed
        now = time.monotonic()
        return tokens, LoadReport(
            blocks=len(plan.load),
            failed=tuple(sorted(failed)),
            failure="; ".join(f"block {index} {problem}" for index, problem in failed.items()),
            kv_bytes=loaded * self.layout.block_bytes,
            load_s=now - started_s,
            resident_at=now,
            corrupt=tuple(
                plan.load[index].hash.hex() for index, problem in failed.items() if "verify" in problem
            ),
            computed_tokens=computed,
        )

    async def _load_segment(self, kv: KV, layer: int, index: int, block: PlannedBlock, plan: KVPlan) -> str:
        """Waits for one segment and copies it. Returns what was wrong, if anything."""
        arena, slot = self.arena, block.slot
        while True:
            if self.dead:
                raise EngineDeadError
            if arena.epoch[slot] != block.epoch:
                return "is no longer held by its writer"
            if self._verify and arena.hash[slot].tobytes() != block.hash:
                return "is another block"
            if arena.segment_epoch[slot, layer] == block.epoch:
                break
            if time.monotonic() > plan.deadline_s:
                return "came too late"
            await asyncio.sleep(_POLL_S)
        copy = arena.payload[slot, layer].copy()
        if self._verify and not arena.verify(slot, layer, block.epoch, block.hash, copy):
            return f"layer {layer} does not verify"
        begin = index * self.layout.block_tokens
        here = kv[layer, begin : begin + self.layout.block_tokens]
        here[:] = copy.view(np.uint32).reshape(self.layout.block_tokens, -1)[: len(here)]
        return ""

    async def _compute(self, kv: KV, token_ids: Sequence[int], start: int, plan: KVPlan | None) -> None:
        """Computes from `start` on, chunk by chunk and layer by layer; saves each block when it is complete."""
        layers = self.layout.layers
        for begin in range(start, len(token_ids), self._chunk_tokens):
            end = min(begin + self._chunk_tokens, len(token_ids))
            for layer in range(layers):
                await self._step((end - begin) * self._prefill_token_s / layers)
                _extend(kv, layer, token_ids, begin, end)
                if plan is not None:
                    self._save(plan, kv, layer, begin, end)
            self._computed_tokens += end - begin

    def _save(self, plan: KVPlan, kv: KV, layer: int, begin: int, end: int) -> None:
        """Writes and seals one layer of the blocks that end in this chunk, and of the prompt's last."""
        arena, size = self.arena, self.layout.block_tokens
        complete = end // size if end < plan.prompt_tokens else -(-end // size)
        first = len(plan.load)
        for index in range(max(begin // size, first), min(complete, first + len(plan.save))):
            block = plan.save[index - first]
            if arena.epoch[block.slot] != block.epoch:
                continue  # the reservation is over
            tokens = kv[layer, index * size : (index + 1) * size]
            arena.payload[block.slot, layer].fill(0)
            arena.payload[block.slot, layer, : tokens.nbytes] = tokens.reshape(-1).view(np.uint8)
            arena.seal(block.slot, layer, block.epoch, block.hash)

    def _hold(self, plan: KVPlan, kv: KV, token_ids: Sequence[int]) -> bool:
        """Keeps the KV of the whole sequence, if it fills a block beyond the prompt's, until `save_held`."""
        blocks = len(token_ids) // self.layout.block_tokens
        if blocks <= plan.prompt_tokens // self.layout.block_tokens:
            return False
        whole = _empty(self.layout, len(token_ids))
        whole[:, : kv.shape[1]] = kv
        for layer in range(self.layout.layers):
            _extend(whole, layer, token_ids, kv.shape[1], len(token_ids))
        self._held[plan.request] = whole
        return True

    def _stop(self, plan: KVPlan) -> None:
        if not self.dead:
            for block in plan.save:
                self.arena.stop(block.slot, block.epoch)

    async def _sample(
        self, kv: KV, token_ids: Sequence[int], params: SamplingParams, request_id: str
    ) -> AsyncGenerator[tuple[RequestOutput, list[int]], None]:
        """All `params.n` answers step by step, each as long as it may be: nothing here stops early.

        With each output come all tokens of the first answer so far.
        """
        count = min(params.max_tokens or self.max_model_len, self.max_model_len - len(token_ids))
        answers = [_answer(kv, count, index) for index in range(params.n)]
        delta = params.output_kind is RequestOutputKind.DELTA
        for done in range(1, count + 1):
            await self._step(self._decode_step_s)
            finished = done == count
            if params.output_kind is RequestOutputKind.FINAL_ONLY and not finished:
                continue
            output = RequestOutput(
                request_id=request_id,
                prompt=None,
                prompt_token_ids=list(token_ids),
                prompt_logprobs=None,
                outputs=[
                    _completion(index, answer[done - 1 if delta else 0 : done], finished)
                    for index, answer in enumerate(answers)
                ],
                finished=finished,
            )
            yield output, answers[0][:done]


def _completion(index: int, token_ids: list[int], finished: bool) -> CompletionOutput:
    return CompletionOutput(
        index=index,
        text="".join(f"{token} " for token in token_ids),
        token_ids=token_ids,
        cumulative_logprob=None,
        logprobs=None,
        finish_reason="length" if finished else None,
    )


def _in_order(layout: KVLayout) -> Permutation:
    """One head, one element after the other: an order as good as any."""
    one = PageShape(layout.page_tokens, 1, 1, layout.dtype)
    shape = replace(one, head_dim=layout.page_bytes // one.page_bytes)
    return Permutation(shape, np.arange(shape.elements).reshape(shape.logical))


def _empty(layout: KVLayout, tokens: int) -> KV:
    words, rest = divmod(layout.segment_bytes, layout.block_tokens * 4)
    if rest or not words:
        raise ValueError(f"a token's KV is a whole number of 4-byte words in each layer, not so in {layout}")
    return np.zeros((layout.layers, tokens, words), np.uint32)


def _extend(kv: KV, layer: int, token_ids: Sequence[int], begin: int, end: int) -> None:
    """Computes positions `begin` to `end` of one layer from what is before them."""
    seed = np.array([0x9E3779B1 * (layer + 1) & 0xFFFFFFFF], np.uint32)
    before = kv[layer, begin - 1, :1] if begin else seed
    weights = np.arange(begin, end, dtype=np.uint32) * np.uint32(2_654_435_762) | np.uint32(1)
    summed = np.cumsum(np.asarray(token_ids[begin:end], np.uint32) * weights, dtype=np.uint32)
    kv[layer, begin:end] = (before + summed)[:, None] + np.arange(kv.shape[2], dtype=np.uint32)


def _answer(kv: KV, count: int, index: int) -> list[int]:
    seed = blake3(kv.tobytes()).digest()
    digests = (blake3(seed + struct.pack("<II", index, step)).digest() for step in range(count))
    return [int.from_bytes(digest[:4], "little") % VOCABULARY for digest in digests]


def _process() -> "subprocess.Popen[bytes]":
    """A process that stands for the engine's, so that the node sees its end; it never outlives this one."""
    return subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    if process.stdin is not None:
        process.stdin.close()
