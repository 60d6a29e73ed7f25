"""The directory in one process's memory: for tests and simulations, behind the same contract as the one on Redis."""

import asyncio
import itertools
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace

from kvstore.core.blocks import NodeId
from kvstore.directory.directory import CHANGES_KEPT, BlockChange, FencedError, Gap, Published, Roster
from kvstore.directory.membership import LEASE_S, Member


class MemoryDirectory:
    """See the contract in `directory.py`. It is never away; `forget` makes it lose its memory."""

    def __init__(
        self,
        lease_s: float = LEASE_S,
        changes_kept: int = CHANGES_KEPT,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lease_s = lease_s
        self._now = now
        self._tokens = itertools.count(1)
        self._changes: deque[Published] = deque(maxlen=changes_kept)
        self._published = 0
        self._news = asyncio.Event()
        self._memory = ""
        self._epochs: dict[str, int] = {}
        self._present: dict[str, tuple[Member, float]] = {}
        self.forget()

    def forget(self) -> None:
        """As a server without persistence that starts again: everyone who follows has a gap."""
        self._memory = uuid.uuid4().hex
        self._epochs.clear()
        self._present.clear()
        self._changes.clear()
        self._published += 1
        self._tell()

    async def join(self, member: Member) -> Member:
        epoch = self._epochs[member.id] = next(self._tokens)
        return replace(member, epoch=epoch)

    async def renew(self, member: Member) -> None:
        self._fence(member)
        self._present[member.id] = (member, self._now() + self._lease_s)

    async def leave(self, member: Member) -> None:
        if self._epochs.get(member.id, 0) <= member.epoch:
            self._present.pop(member.id, None)

    async def roster(self) -> Roster:
        now = self._now()
        present = [member for _, (member, until_s) in sorted(self._present.items()) if now < until_s]
        return Roster(self._memory, tuple(present))

    async def publish(self, member: Member, changes: Sequence[BlockChange]) -> None:
        self._fence(member)
        self._changes.extend(Published(NodeId(member.id), member.epoch, change) for change in changes)
        self._published += len(changes)
        self._tell()

    async def changes(self) -> AsyncGenerator[Published | Gap, None]:
        seen = self._published
        yield Gap()
        while True:
            behind = self._published - seen
            if behind > len(self._changes):
                seen = self._published
                yield Gap()
            elif behind:
                seen += 1
                yield self._changes[-behind]
            else:
                await self._news.wait()

    def _fence(self, member: Member) -> None:
        if self._epochs.get(member.id, 0) > member.epoch:
            raise FencedError(f"{member.id}, epoch {member.epoch}: it was started anew since")
        self._epochs[member.id] = member.epoch

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
