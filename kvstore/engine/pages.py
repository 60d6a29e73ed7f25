"""Copies between an engine's pages and the arena: at once in a CPU's memory, on streams of their own from and to a device.

A `piece` is a page's bytes in the arena. On a device the copies of a layer wait for the work that wrote it, and nothing
else waits for them but whoever must: the checksum of a saved segment, the end of the step, the report of a load.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]
Wait = Callable[[], None]


class Pages(Protocol):
    """One layer's KV in the engine."""

    def save(self, moves: Sequence[tuple[int, Bytes]]) -> Wait | None:
        """Copies each (page, piece) into the arena. Returns what waits for the end of that; None: it is done."""
        ...

    def load(self, page: int, piece: Bytes) -> Bytes:
        """Begins to copy. Returns the bytes to verify: the engine's where the host can read them, else the piece."""
        ...

    def settle(self) -> None:
        """Returns when all that `load` has begun is in the engine."""
        ...


class HostPages:
    """`pages` has shape [pages, page bytes] and lies in the host's memory."""

    def __init__(self, pages: torch.Tensor) -> None:
        self._pages: Bytes = pages.numpy()

    def save(self, moves: Sequence[tuple[int, Bytes]]) -> Wait | None:
        for page, piece in moves:
            piece[:] = self._pages[page]
        return None

    def load(self, page: int, piece: Bytes) -> Bytes:
        copy: Bytes = self._pages[page]
        copy[:] = piece
        return copy

    def settle(self) -> None:
        pass


class Streams:
    """Two streams of one device: what is saved does not queue behind what is loaded."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.saving = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # untyped in torch
        self.loading = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class DevicePages:
    """`pages` has shape [pages, page bytes] and lies in a device's memory."""

    def __init__(self, pages: torch.Tensor, streams: Streams) -> None:
        self._pages = pages
        self._streams = streams

    def save(self, moves: Sequence[tuple[int, Bytes]]) -> Wait | None:
        stream = self._streams.saving
        stream.wait_stream(torch.cuda.current_stream(self._streams.device))  # which writes these pages
        with torch.cuda.stream(stream):
            for page, piece in moves:
                torch.from_numpy(piece).copy_(self._pages[page], non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(stream)
        return copied.synchronize

    def load(self, page: int, piece: Bytes) -> Bytes:
        with torch.cuda.stream(self._streams.loading):
            self._pages[page].copy_(torch.from_numpy(piece), non_blocking=True)
        return piece

    def settle(self) -> None:
        self._streams.loading.synchronize()


def pages_of(layers: Sequence[torch.Tensor], arena: Bytes) -> list[Pages]:
    """The layers' pages; where they lie in a device's memory, `arena` is pinned for it, so that copies need no third one."""
    device = layers[0].device
    if device.type == "cpu":
        return [HostPages(pages) for pages in layers]
    pin(arena)
    streams = Streams(device)
    return [DevicePages(pages, streams) for pages in layers]


def pin(memory: Bytes) -> bool:
    """Registers host memory with CUDA. False where that fails: copies are slower then, and right all the same."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    failed = int(runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0))
    if failed:
        logger.warning("the arena is not pinned: cudaHostRegister returned %d", failed)
    return not failed
