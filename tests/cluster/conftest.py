"""A cluster of real parts around fake engines, in one process: node, conductor, workers, gateway's backend.

Everything talks over Unix sockets in a short temporary folder; membership goes through a real Valkey.
"""

import asyncio
import shutil
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from vllm import SamplingParams
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from cluster.config import SchedulingConfig
from cluster.control.driver import Driver
from cluster.control.service import serve
from cluster.gateway.dispatch import ClusterBackend
from cluster.gateway.request import GenerateRequest
from decode_worker.decode_pb2_grpc import add_DecodeWorkerServicer_to_server
from decode_worker.worker import DecodeWorker
from kvstore.codecs.choice import codec_named
from kvstore.core.blocks import KVLayout, NodeId, WorkerId
from kvstore.directory.membership import Member
from kvstore.directory.presence import Presence
from kvstore.directory.redis_directory import RedisDirectory, connect
from kvstore.engine.fake import FakeEngine, fake_answer
from kvstore.node import KVNode, NodeConfig
from kvstore.tiers.dram import ArenaShape
from kvstore.transfer import kv_pb2 as pb
from kvstore.transfer.kv_pb2_grpc import KVNodeStub
from kvstore.transfer.server import OPTIONS, serving
from kvstore.transfer.tls import TlsConfig
from prefill_worker.prefill_pb2_grpc import add_PrefillWorkerServicer_to_server
from prefill_worker.worker import PrefillWorker
from tests.network import free_port
from tests.valkey import running_valkey

if TYPE_CHECKING:
    from kvstore.transfer.kv_pb2_grpc import KVNodeAsyncStub

LAYOUT = KVLayout(layers=3, block_tokens=4, page_tokens=2, page_bytes=16, dtype="float32", packing="fake")
SSD_BYTES = 2**20
LEASE_S = 10.0
SETTLED_S = 10.0
ANSWER_TOKENS = 5


async def until(
    holds: Callable[[], Awaitable[bool] | bool],
    what: str,
    seconds: float = SETTLED_S,
    why: object = "",
) -> None:
    """Waits until something holds. Fails after `seconds`, with `why` as it is then."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        answer = holds()
        if answer if isinstance(answer, bool) else await answer:
            return
        await asyncio.sleep(0.02)
    pytest.fail(f"not within {seconds} s: {what} {why}")


class Part:
    """Something that runs until it is stopped."""

    def __init__(self, work: Coroutine[Any, Any, None]) -> None:
        self._task = asyncio.create_task(work)

    async def stop(self) -> None:
        """Raises what it died of, if it did."""
        self._task.cancel()
        result = (await asyncio.gather(self._task, return_exceptions=True))[0]
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            raise result


@dataclass
class Worker:
    """A prefill or decode worker: its engine, and the parts that serve and announce it."""

    member: Member
    engine: FakeEngine
    serving: AsyncExitStack
    announcing: Part

    async def vanish(self) -> None:
        """The whole process is gone; its membership has yet to lapse."""
        self.engine.die()
        await self.serving.aclose()

    async def stop(self) -> None:
        await self.announcing.stop()
        await self.serving.aclose()
        await self.engine.close()


class SmallCluster:
    """See the module. `answer` asks for a whole answer, `stream` for deltas; `settled` checks every owner."""

    def __init__(self, folder: Path, redis_url: str) -> None:
        self._folder = folder
        self._redis = connect(redis_url)
        self.directory = RedisDirectory(self._redis, uuid.uuid4().hex)
        self._requests = 0
        self._save_generated = True
        self._tls: TlsConfig | None = None
        self._codec = "identity"
        self._parts: list[Part] = []
        self._announced: list[Part] = []
        self._channels: list[grpc.aio.Channel] = []
        self.nodes: list[KVNodeAsyncStub] = []
        self.peer_addresses: list[str] = []
        self.workers: dict[str, Worker] = {}
        self.driver: Driver
        self._conductor: Part
        self._gateway: Part
        self.backend = ClusterBackend(self.address("conductor"), LEASE_S)

    def address(self, name: str) -> str:
        return f"unix:{self._folder}/{name}.sock"

    # -- its parts ------------------------------------------------------------------------------------------

    @property
    def node(self) -> "KVNodeAsyncStub":
        return self.nodes[0]

    async def start(
        self,
        prefill: int,
        decode: int,
        nodes: int,
        slots: int,
        scheduling: SchedulingConfig,
        ssd_dir: Path | None,
        save_generated: bool = True,
        tls: TlsConfig | None = None,
        codec: str = "identity",
        **engine: Any,
    ) -> None:
        """Workers are dealt out to the nodes in turn. With `tls` nodes read from each other over TCP."""
        self._save_generated = save_generated
        self._tls = tls
        self._codec = codec
        for number in range(nodes):
            self.start_node(f"node-{number}", slots, ssd_dir)
        await self.start_conductor(scheduling)
        names = [f"prefill-{number}" for number in range(prefill)]
        names += [f"decode-{number}" for number in range(decode)]
        for place, name in enumerate(names):
            await self.start_worker(name.split("-")[0], name, f"node-{place % nodes}", **engine)
        self._gateway = Part(self.backend.run())
        await self.known(prefill + decode + nodes)

    def start_node(self, name: str, slots: int, ssd_dir: Path | None = None) -> None:
        peers = f"127.0.0.1:{free_port()}" if self._tls is not None else ""
        self.peer_addresses.append(peers)
        incarnation = uuid.uuid4().hex
        member = Member(name, "node", incarnation, name, self.address(name), 0, peer_address=peers)
        presence = Presence(self.directory, member)
        row_bytes = LAYOUT.block_bytes + ArenaShape(LAYOUT, 1).header_dtype.itemsize
        node = KVNode(
            NodeConfig(
                NodeId(name),
                self.address(name),
                slots * row_bytes,
                self._folder,
                ssd_dir=ssd_dir / name if ssd_dir is not None else None,
                ssd_bytes=SSD_BYTES,
                links=("inline", "bulk"),  # NIXL brings native code that not every test bears in its process
                peer_address=peers,
                tls=self._tls,
                codec=self._codec,
            ),
            publish=presence.publish,
        )
        self._parts.append(Part(node.serve()))
        self._announced.append(Part(presence.run()))
        channel = grpc.aio.insecure_channel(self.address(name), options=OPTIONS)
        self._channels.append(channel)
        self.nodes.append(KVNodeStub(channel))

    async def known(self, members: int) -> None:
        """Waits until conductor and gateway know that many members."""
        await until(
            lambda: (
                (
                    self.backend.ready() is None
                    and len(self.driver.status()["members"]) == members
                    and self.backend.status() == self.driver.status()
                )
                or False
            ),
            f"{members} members known",
        )

    async def start_conductor(self, scheduling: SchedulingConfig) -> None:
        self.driver = Driver(scheduling, self.directory)
        started = asyncio.Event()
        self._conductor = Part(serve(self.driver, self.address("conductor"), started.set))
        await started.wait()

    async def stop_conductor(self) -> None:
        await self._conductor.stop()

    async def start_worker(self, role: str, name: str, node: str = "node-0", **engine: Any) -> Worker:
        coded = {"codec": self._codec, **engine}
        made = await FakeEngine.start(self.address(node), WorkerId(name), LAYOUT, **coded)
        serving_stack = AsyncExitStack()

        def add(server: grpc.aio.Server) -> None:
            if role == "prefill":
                add_PrefillWorkerServicer_to_server(PrefillWorker(made), server)
            else:
                add_DecodeWorkerServicer_to_server(DecodeWorker(made, self._save_generated), server)

        await serving_stack.enter_async_context(serving(self.address(name), add))
        member = self.member(role, name, made.fingerprint, node)
        worker = self.workers[name] = Worker(member, made, serving_stack, self.announce(member))
        return worker

    def member(self, role: str, name: str, fingerprint: str = "fake", node: str = "node-0") -> Member:
        return Member(
            id=name,
            role=role,
            incarnation=uuid.uuid4().hex,
            node=node,
            address=self.address(name),
            pid=0,
            fingerprint=fingerprint,
            dtype=LAYOUT.dtype,
            precision=codec_named(self._codec).precision,
            block_tokens=LAYOUT.block_tokens,
            kv_bytes_per_token=LAYOUT.block_bytes // LAYOUT.block_tokens,
            max_model_len=4096,
            batch_max=8,
            kv_tokens_max=100_000,
        )

    def announce(self, member: Member) -> Part:
        part = Part(Presence(self.directory, member).run())
        self._announced.append(part)
        return part

    async def stop(self) -> None:
        await self._gateway.stop()
        for part in self._announced:
            await part.stop()
        for worker in self.workers.values():
            await worker.stop()
        for part in reversed(self._parts):
            await part.stop()
        await self.stop_conductor()
        for channel in self._channels:
            await channel.close()
        await self._redis.aclose()

    # -- its clients ----------------------------------------------------------------------------------------

    def request(
        self, prompt: Sequence[int], kind: RequestOutputKind, tokens: int, tenant: str = "t"
    ) -> GenerateRequest:
        self._requests += 1
        return GenerateRequest(
            request_id=f"r{self._requests}",
            tenant=tenant,
            token_ids=tuple(prompt),
            sampling_params=SamplingParams(max_tokens=tokens, output_kind=kind),
            arrival_s=time.time(),
            ttft_slo_s=None,
            tbt_slo_s=None,
        )

    async def answer(
        self, prompt: Sequence[int], tokens: int = ANSWER_TOKENS, tenant: str = "t"
    ) -> RequestOutput:
        """The whole answer, asked for at once. Raises Refusal."""
        request = self.request(prompt, RequestOutputKind.FINAL_ONLY, tokens, tenant)
        async with aclosing(self.backend.generate(request)) as outputs:
            [output] = [output async for output in outputs]
        return output

    async def stream(self, prompt: Sequence[int], into: list[int], tokens: int = ANSWER_TOKENS) -> None:
        """Appends each token to `into` as it comes. Raises Refusal."""
        request = self.request(prompt, RequestOutputKind.DELTA, tokens)
        async with aclosing(self.backend.generate(request)) as outputs:
            async for output in outputs:
                into.extend(output.outputs[0].token_ids)

    async def answered_right(self, prompt: Sequence[int], tenant: str = "t") -> RequestOutput:
        output = await self.answer(prompt, tenant=tenant)
        assert list(output.outputs[0].token_ids) == fake_answer(LAYOUT, prompt, ANSWER_TOKENS)
        return output

    def attempts(self) -> list[dict[str, Any]]:
        """What is explained of the latest request."""
        story = self.backend.explain(f"r{self._requests}")
        assert story is not None
        attempts = story["attempts"]
        assert isinstance(attempts, list)
        return attempts

    def computed(self, role: str) -> int:
        """Prompt tokens computed by all workers of a role."""
        return sum(
            worker.engine.counters().computed_prompt_tokens
            for worker in self.workers.values()
            if worker.member.role == role
        )

    async def settled(self) -> None:
        """Every owner is clean: the nodes, the conductor, the engines."""

        busy: dict[str, Any] = {}

        async def clean() -> bool:
            states = [await node.Status(pb.Empty()) for node in self.nodes]
            flights = self.driver.status()["conductor"]["inflight"]
            engines = [worker.engine.counters().running for worker in self.workers.values()]
            names = ("filling", "draining", "leased", "leases")
            busy["slots"] = [{name: getattr(state, name) for name in names} for state in states]
            held = [count for slots in busy["slots"] for count in slots.values()]
            busy["flights"], busy["engines"] = flights, dict(zip(self.workers, engines, strict=True))
            return not any(held) and not any(flights.values()) and not any(engines)

        await until(clean, "nothing in flight", why=busy)
        for node in self.nodes:
            await node.Check(pb.Empty())
        self.driver.check()


Start = Callable[..., Awaitable[SmallCluster]]


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    with running_valkey() as server:
        yield f"unix://{server.unix_socket_path}"


@pytest.fixture
async def start(redis_url: str) -> AsyncIterator[Start]:
    """Starts a cluster, in place of the one that was started before; whatever the story was, the owners must be clean
    in the end.
    """
    folder = Path(tempfile.mkdtemp(prefix="mp-"))
    running: list[SmallCluster] = []

    async def stop() -> None:
        while running:
            cluster = running.pop()
            try:
                await cluster.settled()
            finally:
                await cluster.stop()

    async def started(
        prefill: int = 1,
        decode: int = 1,
        nodes: int = 1,
        slots: int = 256,
        scheduling: SchedulingConfig | None = None,
        ssd_dir: Path | None = None,
        save_generated: bool = True,
        codec: str = "identity",
        **engine: Any,
    ) -> SmallCluster:
        await stop()
        cluster = SmallCluster(folder, redis_url)
        running.append(cluster)
        await cluster.start(
            prefill,
            decode,
            nodes,
            slots,
            scheduling or SchedulingConfig(),
            ssd_dir,
            save_generated,
            codec=codec,
            **engine,
        )
        return cluster

    yield started
    try:
        await stop()
    finally:
        shutil.rmtree(folder)
