"""Drives the tier machine on the real SSD tier: writes blocks back from the arena, and reads them into it again.

Write-back never holds up a request: it leases the slot for as long as the copy takes, and the lease keeps the block
from being evicted under it. A read fills slots that the fetcher has reserved.
"""

import asyncio
import logging
import mmap
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

import numpy as np

from kvstore.codecs.at_rest import AtRest
from kvstore.core.blocks import BlockHash, RequestId, Tier
from kvstore.core.slots import SlotPool, SlotRef
from kvstore.core.tiers import (
    Asked,
    Demote,
    Drop,
    Event,
    Found,
    Lost,
    Removed,
    Stored,
    TierMachine,
    Timer,
    WakeAt,
    WriteDone,
    WriteFailed,
)
from kvstore.tiers.dram import Arena
from kvstore.tiers.ssd import Loaded, Missed, SsdTier, Written

logger = logging.getLogger(__name__)

_HOLDER = "write-back"
_UNTIL_DONE_S = float("inf")


class Tiering:
    """Owned by the node; runs on its event loop. `changed` is called with blocks that came to the SSD or left it."""

    kind = "ssd"

    def __init__(
        self,
        machine: TierMachine,
        ssd: SsdTier,
        pool: SlotPool,
        arena: Arena,
        changed: Callable[[Iterable[BlockHash]], None],
        coding: AtRest | None = None,
    ) -> None:
        self.machine = machine
        self.ssd = ssd
        self._pool = pool
        self._arena = arena
        self._changed = changed
        self.evictions = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._spawn(self._scan())
        if coding is not None:
            self._spawn(_tell_speed(coding))

    # -- what the node tells --------------------------------------------------------------------------------

    def stored(self, names: Iterable[BlockHash]) -> None:
        """These blocks are in DRAM now."""
        for name in names:
            self._handle(Stored(name, *self._pool.place(name)))

    def removed(self, names: Iterable[BlockHash]) -> None:
        """These blocks are in DRAM no more."""
        for name in names:
            self._handle(Removed(name))

    def asked(self, names: Sequence[BlockHash]) -> None:
        """A request asked for this chain."""
        self._handle(Asked(names))

    def forget(self, name: BlockHash) -> bool:
        """Deletes a block that is wrong, or not wanted any more. False if it is not there."""
        if not self.machine.has(name):
            return False
        self._lost(name)
        self._spawn(self.ssd.drop(name))
        return True

    # -- a source of blocks ---------------------------------------------------------------------------------

    def has(self, name: BlockHash) -> bool:
        return self.machine.has(name)

    async def read(self, request: RequestId, blocks: Sequence[SlotRef], deadline_s: float) -> set[BlockHash]:
        """Returns the blocks that were there and verified."""
        read = await asyncio.gather(*(self._read(ref, deadline_s) for ref in blocks))
        return {ref.hash for ref, came in zip(blocks, read, strict=True) if came}

    async def verify(self) -> tuple[int, int]:
        """Reads every block on the SSD; those that do not verify are deleted. Returns (blocks, corrupt)."""
        names = self.machine.names()
        shape = self._arena.payload[0].shape
        memory = mmap.mmap(-1, -(-self._arena.payload[0].size // mmap.PAGESIZE) * mmap.PAGESIZE)
        buffer = np.frombuffer(memory, np.uint8, self._arena.payload[0].size).reshape(shape)
        corrupt = 0
        for name in names:
            result = await self.ssd.read(name, buffer)
            if isinstance(result, Missed):
                corrupt += result.corrupt
                self._lost(name)
        return len(names), corrupt

    async def close(self) -> None:
        """Ends when nothing reads or writes any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.ssd.close()

    # -- inside ---------------------------------------------------------------------------------------------

    async def _read(self, ref: SlotRef, deadline_s: float) -> bool:
        if time.monotonic() > deadline_s:
            return False
        result = await self.ssd.read(ref.hash, self._arena.payload[ref.slot])
        if isinstance(result, Loaded):
            for layer, checksum in enumerate(result.sums.tolist()):
                self._arena.seal(ref.slot, layer, ref.epoch, ref.hash, checksum)
            return True
        logger.warning("block %s is not on the ssd: %s", ref.hash.hex()[:8], result.reason)
        self._lost(ref.hash)
        return False

    def _lost(self, name: BlockHash) -> None:
        self._handle(Lost(name))
        self._changed([name])

    async def _scan(self) -> None:
        """What an earlier run of the node left; meanwhile the node serves."""
        async for names in self.ssd.scan():
            for name in names:
                self._handle(Found(name))
            self._changed(names)

    def _handle(self, event: Event) -> None:
        for command in self.machine.handle(event, time.monotonic()):
            match command:
                case Demote(name):
                    self._spawn(self._write(name))
                case Drop(Tier.SSD, name):
                    self.evictions += 1
                    self._changed([name])
                    self._spawn(self.ssd.drop(name))
                case WakeAt(at_s):
                    self._spawn(self._wake(at_s))

    async def _wake(self, at_s: float) -> None:
        await asyncio.sleep(at_s - time.monotonic())
        self._handle(Timer())

    async def _write(self, name: BlockHash) -> None:
        key = (RequestId(f"write {name.hex()}"), _HOLDER)
        refs = self._pool.acquire(*key, [name], _UNTIL_DONE_S, used=False)
        if not refs:
            self._handle(WriteFailed(name, full=False))
            return
        [ref] = refs
        try:
            written = await self.ssd.write(
                name, self._arena.payload[ref.slot], self._arena.segment_sum[ref.slot]
            )
        finally:
            self._pool.release(*key)
        if isinstance(written, Written):
            self._handle(WriteDone(name))
            self._changed([name])
        else:
            logger.warning("block %s stays off the ssd: %s", name.hex()[:8], written.reason)
            self._handle(WriteFailed(name, written.full))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _tell_speed(coding: AtRest) -> None:
    speed = await asyncio.to_thread(coding.speed)
    logger.info(
        "codec %s: encodes %.2f GB/s of raw KV and decodes %.2f, to a size %.2f times smaller; between nodes it would pay on "
        "links below %.2f GB/s",
        coding.codec.name,
        speed.encode_bytes_per_s / 1e9,
        speed.decode_bytes_per_s / 1e9,
        speed.ratio,
        speed.pays_below_bytes_per_s / 1e9,
    )
