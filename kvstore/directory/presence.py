"""One process's presence in the directory: it joins, renews its lease, publishes what its node says, and leaves."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Coroutine
from typing import Any, TypeVar

from kvstore.directory.directory import AwayError, BlockChange, Directory
from kvstore.directory.membership import RENEW_S, Member

logger = logging.getLogger(__name__)

T = TypeVar("T")

BACKLOG_MAX = 10_000
_BATCH = 100


class Presence:
    """`run` it beside the process's work; `publish` may be called at any time, also before and between.

    A directory that is away is tried again. Changes wait for it, of which the oldest are dropped above `backlog_max`:
    followers see the gap in their sequence.
    """

    def __init__(self, directory: Directory, member: Member, backlog_max: int = BACKLOG_MAX) -> None:
        self.member = member
        self._directory = directory
        self._waiting: deque[BlockChange] = deque(maxlen=backlog_max)
        self._news = asyncio.Event()

    def publish(self, change: BlockChange) -> None:
        """Never waits; changes must come in order of their sequence."""
        self._waiting.append(change)
        self._news.set()

    async def beside(self, work: Coroutine[Any, Any, T]) -> T:
        """Does the process's work while it is present. Raises what `work` raises, and FencedError."""
        present, working = asyncio.create_task(self.run()), asyncio.create_task(work)
        try:
            await asyncio.wait((present, working), return_when=asyncio.FIRST_COMPLETED)
            if present.done():
                present.result()
            return working.result()
        finally:
            present.cancel()
            working.cancel()
            await asyncio.gather(present, working, return_exceptions=True)

    async def run(self) -> None:
        """Until cancelled; then the member leaves. Raises FencedError when it was started anew elsewhere."""
        try:
            while True:
                try:
                    await self._keep()
                except AwayError as error:
                    logger.warning("the directory does not hear %s: %s", self.member.id, error)
                    await asyncio.sleep(RENEW_S)
        finally:
            if self.member.epoch:
                try:
                    await self._directory.leave(self.member)
                except AwayError:
                    logger.debug("membership of %s will lapse by itself", self.member.id)

    async def _keep(self) -> None:
        if not self.member.epoch:
            self.member = await self._directory.join(self.member)
        while True:
            await self._directory.renew(self.member)
            renew_s = time.monotonic() + RENEW_S
            while (left_s := renew_s - time.monotonic()) > 0:
                await self._flush()
                try:
                    await asyncio.wait_for(self._news.wait(), left_s)
                except TimeoutError:
                    break

    async def _flush(self) -> None:
        """Publishes what waits. What was not certainly published stays, and may so be published twice."""
        self._news.clear()
        while self._waiting:
            batch = [self._waiting[at] for at in range(min(_BATCH, len(self._waiting)))]
            await self._directory.publish(self.member, batch)
            while self._waiting and self._waiting[0].sequence <= batch[-1].sequence:
                self._waiting.popleft()
