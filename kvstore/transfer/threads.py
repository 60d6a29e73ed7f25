"""Threads that touch the arena, as the event loop sees them."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any


async def finished(work: "asyncio.Future[Any]", stop: Callable[[], None]) -> None:
    """Waits for a thread. A caller that is cancelled has it stopped, and leaves only when it has ended."""
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        stop()
        while not work.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([work])
        raise
