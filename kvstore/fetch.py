"""Brings blocks into this node's arena: from its SSD, and from other nodes, before and while they are written there.

Everything brought here is filled under the node's own name and becomes visible by the same commit as what an engine
writes. A fetch runs as a task of its own to its end or its deadline: whoever waits for it may give up, but no one
takes its slots while a read may still write into them. What does not come is not there: the request computes it.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvstore.core.blocks import BlockHash, RequestId, WorkerId
from kvstore.core.slots import Fenced, NoRoom, SlotPool, SlotRef
from kvstore.tiers.dram import Arena

_NODE = WorkerId("the node")
_UNTIL_DONE_S = float("inf")  # a fetch ends by itself, and its leases with it


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """Another node, and where its gRPC service listens."""

    node_id: str
    address: str


class Source(Protocol):
    """Somewhere that blocks come from: "ssd" or "peer"."""

    kind: str

    def has(self, name: BlockHash) -> bool:
        """May the block be there?"""
        ...

    async def read(self, request: RequestId, blocks: Sequence[SlotRef], deadline_s: float) -> set[BlockHash]:
        """Fills and seals slots. Returns the blocks that are complete and verified; afterwards it writes no more.

        `deadline_s` is in CLOCK_MONOTONIC seconds.
        """
        ...


class Fetcher:
    """Owned by the node; runs on its event loop. `changed` is called when the pool has changed."""

    def __init__(self, pool: SlotPool, arena: Arena, changed: Callable[[], None]) -> None:
        self._pool = pool
        self._arena = arena
        self._changed = changed
        self._coming: dict[BlockHash, asyncio.Event] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._numbers = itertools.count(1)
        self.blocks = {"ssd": 0, "peer": 0}
        """Brought here, by kind of source."""
        self.followed_blocks = 0
        """Of those from peers: filled there while they came."""
        self.failed_blocks = 0

    async def prefix(
        self, names: Sequence[BlockHash], ssd: Source | None, peer: Source | None, deadline_s: float
    ) -> None:
        """Makes the chain's longest committed prefix here as long as the sources allow."""
        while (missing := names[self._pool.match(names) :]) and missing[0] in self._coming:
            try:  # another request brings it already
                await asyncio.wait_for(
                    self._coming[missing[0]].wait(), max(0.0, deadline_s - time.monotonic())
                )
            except TimeoutError:
                return
        from_ssd: list[BlockHash] = []
        from_peer: list[BlockHash] = []
        for name in missing:
            if ssd is not None and ssd.has(name):
                from_ssd.append(name)
            elif peer is not None and peer.has(name):
                from_peer.append(name)
            else:
                break
        count = len(from_ssd) + len(from_peer)
        if count:
            reach = names[: len(names) - len(missing) + count]
            wanted = [(ssd, from_ssd), (peer, from_peer)]
            await self._shielded(self._bring(reach, wanted, deadline_s))

    def follow(
        self,
        request: RequestId,
        holder: str,
        names: Sequence[BlockHash],
        tail: BlockHash | None,
        peer: Source,
        until_s: float,
        deadline_s: float,
    ) -> list[SlotRef] | NoRoom | Fenced:
        """Slots for blocks that another node is filling, leased by `holder`; they are filled as the blocks come."""
        mine = RequestId(f"{request}@{holder}")
        refs = self._reserve(mine, names, tail)
        if not isinstance(refs, list):
            return refs
        leased = self._pool.lease(request, holder, [(ref.slot, ref.epoch) for ref in refs], until_s)
        assert isinstance(leased, list), leased
        self._spawn(self._follow(mine, refs, [(peer, list(names) + ([tail] if tail else []))], deadline_s))
        return leased

    async def close(self) -> None:
        """Ends all fetches; returns when none writes any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- inside -------------------------------------------------------------------------------------------

    async def _bring(
        self,
        names: Sequence[BlockHash],
        wanted: Sequence[tuple[Source | None, list[BlockHash]]],
        deadline_s: float,
    ) -> None:
        request = RequestId(f"fetch {next(self._numbers)}")
        refs = self._reserve(request, names, None)
        if isinstance(refs, list):
            await self._fill(request, refs, wanted, deadline_s)

    def _reserve(
        self, request: RequestId, names: Sequence[BlockHash], tail: BlockHash | None
    ) -> list[SlotRef] | NoRoom | Fenced:
        """The slots' new uses begin before anyone can hear of them: a follower takes an old epoch for the end."""
        refs = self._pool.reserve(request, _NODE, names, tail, _UNTIL_DONE_S)
        self._changed()
        if isinstance(refs, list):
            for ref in refs:
                if not ref.filled:
                    self._arena.begin(ref.slot, ref.epoch, ref.hash)
                    self._coming.setdefault(ref.hash, asyncio.Event())
        return refs

    async def _follow(
        self,
        request: RequestId,
        refs: Sequence[SlotRef],
        wanted: Sequence[tuple[Source | None, list[BlockHash]]],
        deadline_s: float,
    ) -> None:
        self.followed_blocks += await self._fill(request, refs, wanted, deadline_s)

    async def _fill(
        self,
        request: RequestId,
        refs: Sequence[SlotRef],
        wanted: Sequence[tuple[Source | None, list[BlockHash]]],
        deadline_s: float,
    ) -> int:
        """Reads into the reserved slots; what came without a gap is committed, the rest given up. Returns how many came."""
        filling = [ref for ref in refs if not ref.filled]
        came: set[BlockHash] = set()
        try:
            reads = [
                self._read(source, request, [ref for ref in filling if ref.hash in set(names)], deadline_s)
                for source, names in wanted
                if source is not None
            ]
            for part in await asyncio.gather(*reads):
                came |= part
        finally:
            whole = list(itertools.takewhile(lambda ref: ref.hash in came, filling))
            self._end(request, filling, len(whole))
        return len(came)

    async def _read(
        self, source: Source, request: RequestId, blocks: Sequence[SlotRef], deadline_s: float
    ) -> set[BlockHash]:
        if not blocks:
            return set()
        came = await source.read(request, blocks, deadline_s)
        self.blocks[source.kind] += len(came)
        return came

    def _end(self, request: RequestId, filling: Sequence[SlotRef], whole: int) -> None:
        for ref in filling[whole:]:
            self._arena.end(ref.slot)
        done = self._pool.commit(request, _NODE, blocks=whole)
        assert not isinstance(done, Fenced), done
        self._pool.release(request, _NODE)
        self.failed_blocks += len(filling) - whole
        self._changed()
        for ref in filling:
            event = self._coming.pop(ref.hash, None)
            if event is not None:
                event.set()

    async def _shielded(self, work: Coroutine[Any, Any, None]) -> None:
        await asyncio.shield(self._spawn(work))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
