"""One engine of two tensor-parallel ranks beside a real node and under both workers' services: each rank saves and
loads its own shard, and what one of them lacks has failed.

`python two_ranks.py MODEL FOLDER`. What is handed over must equal what the same engine computes by itself, without a
plan: then our connector does nothing. (A whole cluster of such engines is in `test_tensor_parallel.py`.)
"""

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import psutil
import pytest
from vllm import SamplingParams
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from cluster.config import EngineConfig, PoolConfig
from decode_worker import decode_pb2
from decode_worker.decode_pb2_grpc import DecodeWorkerStub, add_DecodeWorkerServicer_to_server
from decode_worker.worker import DecodeWorker
from kvstore.core.blocks import BlockHash, ChainRoot, NodeId, RequestId, WorkerId, block_hashes, tail_hash
from kvstore.engine.engine import Engine
from kvstore.engine.reference import Answer
from kvstore.engine.settings import WorkerSettings
from kvstore.engine.wire import decode_output, encode_params
from kvstore.node import KVNode, NodeConfig
from kvstore.transfer import kv_pb2
from kvstore.transfer.server import OPTIONS, serving
from prefill_worker import prefill_pb2
from prefill_worker.prefill_pb2_grpc import PrefillWorkerStub, add_PrefillWorkerServicer_to_server
from prefill_worker.worker import PrefillWorker

if TYPE_CHECKING:
    from decode_worker.decode_pb2_grpc import DecodeWorkerAsyncStub
    from prefill_worker.prefill_pb2_grpc import PrefillWorkerAsyncStub

BLOCK = 32
LAYERS = 3
GREEDY = SamplingParams(
    temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0, output_kind=RequestOutputKind.DELTA
)
LEASE_S = 20.0


def tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(4, 250) for _ in range(count)]


def answer_of(outputs: Sequence[RequestOutput]) -> Answer:
    token_ids = [token for output in outputs for token in output.outputs[0].token_ids]
    logprobs = [at for output in outputs for at in output.outputs[0].logprobs or ()]
    return Answer(token_ids, [at[token].logprob for at, token in zip(logprobs, token_ids, strict=True)])


@dataclass
class Served:
    """The engine, and clients of both services over it."""

    engine: Engine
    node: KVNode
    prefill: "PrefillWorkerAsyncStub"
    decode: "DecodeWorkerAsyncStub"
    settings: WorkerSettings
    requests: int = 0

    @property
    def root(self) -> BlockHash:
        return ChainRoot(self.engine.fingerprint, "float32", BLOCK).digest()

    async def alone(self, prompt: list[int]) -> Answer:
        """What the engine computes by itself."""
        self.requests += 1
        async with aclosing(self.engine.generate(prompt, GREEDY, f"alone-{self.requests}", None)) as outputs:
            return answer_of([output async for output in outputs])

    async def handed_over(self, prompt: list[int]) -> tuple[Answer, decode_pb2.Loaded]:
        """Prefilled into the pool, decoded from there, as the gateway has it done. Nothing may stay held."""
        self.requests += 1
        name = RequestId(f"r{self.requests}")
        root, hashes = self.root, block_hashes(self.root, prompt, BLOCK)
        rest = prompt[len(hashes) * BLOCK :]
        tail = tail_hash(hashes[-1] if hashes else root, rest, name) if rest else b""
        wanted = prefill_pb2.PrefillRequest(
            request_id=name, token_ids=prompt, hashes=hashes, tail_hash=tail, lease_s=LEASE_S
        )
        prefill = self.prefill.Prefill(wanted)
        from_prefill = aiter(prefill)
        slots = (await anext(from_prefill)).plan.slots
        call = self.decode.Decode(
            decode_pb2.DecodeRequest(
                request_id=f"{name}/1",
                token_ids=prompt,
                sampling_params=encode_params(GREEDY),
                slots=slots,
                has_tail=bool(rest),
                root=root,
                load_timeout_s=LEASE_S,
            )
        )
        replies = [reply async for reply in call]
        assert (await anext(from_prefill)).HasField("done")
        prefill.cancel()
        outputs = [decode_output(reply.output, name, None, prompt) for reply in replies]
        await self.settled()
        return answer_of(outputs), replies[-1].loaded

    async def settled(self) -> None:
        """No slot waits for a rank's word, no lease is held, no page."""
        for _ in range(400):
            status = await self.engine.node.Status(kv_pb2.Empty())
            if not status.filling + status.draining + status.leases + self.engine.counters().kv_usage:
                await self.engine.node.Check(kv_pb2.Empty())
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"still held: {status}")


@asynccontextmanager
async def two_ranks(model: Path, folder: Path) -> AsyncIterator[Served]:
    config = EngineConfig(dtype="float32", max_model_len=1024, prefill_chunk_tokens=128, tensor_parallel=2)
    node = KVNode(NodeConfig(NodeId("node-0"), f"unix:{folder}/node.sock", 16 << 20, folder))
    settings = WorkerSettings(
        worker_id=WorkerId("w"),
        model=str(model),
        engine=config,
        pool=PoolConfig(),
        address=f"unix:{folder}/w.sock",
        node_address=f"unix:{folder}/node.sock",
        redis_url="",
        cluster="",
    )
    serving_node = asyncio.create_task(node.serve())
    engine = await Engine.start(settings, "decode")

    def add(server: grpc.aio.Server) -> None:
        add_PrefillWorkerServicer_to_server(PrefillWorker(engine), server)
        add_DecodeWorkerServicer_to_server(DecodeWorker(engine), server)

    try:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(serving(settings.address, add))
            channel = grpc.aio.insecure_channel(settings.address, options=OPTIONS)
            await stack.enter_async_context(channel)
            yield Served(engine, node, PrefillWorkerStub(channel), DecodeWorkerStub(channel), settings)
    finally:
        await engine.close()
        serving_node.cancel()
        await asyncio.gather(serving_node, return_exceptions=True)


async def what_was_handed_over_is_what_one_engine_answers(served: Served) -> None:
    shared = tokens(1, 5 * BLOCK)
    for prompt in [
        tokens(2, 1),
        tokens(3, 31),
        tokens(4, BLOCK),
        tokens(5, 300),
        shared,
        [*shared, 7, 8],
        shared,
    ]:
        right = await served.alone(prompt)
        before: dict[str, Any] = vars_of(served)
        answer, loaded = await served.handed_over(prompt)
        assert not right.difference(answer)
        external = (
            len(prompt) if len(prompt) > 1 else 0
        )  # the only token of a prompt is computed, not matched
        assert (loaded.external_tokens, loaded.computed_tokens) == (external or 1, 1)
        assert vars_of(served)["failed_blocks"] == before["failed_blocks"]
    before = vars_of(served)
    await served.handed_over([*shared, 9])
    after = vars_of(served)
    assert after["loaded_blocks"] - before["loaded_blocks"] == 5 + 6, "prefill finds five, decode loads six"
    assert after["loaded_bytes"] - before["loaded_bytes"] == 11 * served.engine.layout.block_bytes
    assert after["computed_prompt_tokens"] - before["computed_prompt_tokens"] == 1 + 1


async def a_flipped_byte_of_either_rank_is_a_counted_recompute(served: Served) -> None:
    prompt, arena = tokens(6, 6 * BLOCK), served.engine.arena
    right = await served.alone(prompt)
    for rank in (0, 1):
        await served.handed_over(prompt)
        name = block_hashes(served.root, prompt, BLOCK)[2]
        [slot] = [s for s in arena.epoch.nonzero()[0] if arena.hash[s].tobytes() == name]
        arena.payload[slot, rank * LAYERS + 1, 77] ^= 64
        counted = vars_of(served)
        dropped = (await served.engine.node.Status(kv_pb2.Empty())).dropped
        answer, _ = await served.handed_over(prompt)
        assert not right.difference(answer)
        assert vars_of(served)["failed_blocks"] - counted["failed_blocks"] >= 1
        assert (await served.engine.node.Status(kv_pb2.Empty())).dropped > dropped


async def another_number_of_ranks_is_refused_by_name(served: Served) -> None:
    one = replace(
        served.settings,
        worker_id=WorkerId("one"),
        engine=served.settings.engine.model_copy(update={"tensor_parallel": 1}),
    )
    with pytest.raises(grpc.aio.AioRpcError, match=r"worker one has tensor parallelism 1, .* is for 2") as no:
        await Engine.start(one, "decode")
    assert no.value.code() is grpc.StatusCode.FAILED_PRECONDITION


def the_node_watches_every_rank(served: Served) -> None:
    """It frees what they write only when all of them have ended."""
    [life] = served.node._lives.values()  # who is watched is nobody else's business
    ranks = [p.pid for p in psutil.Process().children(recursive=True) if "Worker_TP" in p.name()]
    assert len(ranks) == 2
    assert set(ranks) <= set(life.watched.values())


def vars_of(served: Served) -> dict[str, Any]:
    counters = served.engine.counters()
    return {name: getattr(counters, name) for name in counters.__slots__}


async def main() -> None:
    async with two_ranks(Path(sys.argv[1]), Path(sys.argv[2])) as served:
        await what_was_handed_over_is_what_one_engine_answers(served)
        await a_flipped_byte_of_either_rank_is_a_counted_recompute(served)
        await another_number_of_ranks_is_refused_by_name(served)
        the_node_watches_every_rank(served)
    print("all as one engine alone")


if __name__ == "__main__":
    asyncio.run(main())
