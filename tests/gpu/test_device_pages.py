"""Copies between a device and the arena, on a real one. `make test-gpu`; skipped with a reason where there is none."""

import tempfile
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kvstore.engine.pages import Bytes, DevicePages, Streams, pages_of, pin

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

PAGES, PAGE_BYTES = 64, 2**18


@pytest.fixture
def arena() -> Iterator[Bytes]:
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(PAGES * PAGE_BYTES)
        memory = np.memmap(file, np.uint8, "r+", shape=(PAGES, PAGE_BYTES))
        yield memory
        torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)  # type: ignore[no-untyped-call]


def filled(seed: int) -> torch.Tensor:
    chance = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randint(0, 256, (PAGES, PAGE_BYTES), dtype=torch.uint8, device="cuda", generator=chance)


def test_what_is_saved_is_what_was_written_before(arena: Bytes) -> None:
    """The pages are written on the present stream just before, by work that takes longer than the copy."""
    [pages] = pages_of([torch.zeros((PAGES, PAGE_BYTES), dtype=torch.uint8, device="cuda")], arena)
    assert isinstance(pages, DevicePages)
    slow = torch.randn((4096, 4096), device="cuda")
    for _ in range(20):
        slow = slow @ slow / 64
    pages._pages.copy_(filled(1))
    wait = pages.save([(page, arena[PAGES - 1 - page]) for page in range(PAGES)])
    assert wait is not None
    wait()
    assert np.array_equal(arena[::-1], filled(1).cpu().numpy())


def test_what_is_loaded_is_in_the_engine_when_it_has_settled(arena: Bytes) -> None:
    content = filled(2).cpu().numpy()
    arena[:] = content
    [pages] = pages_of([torch.zeros((PAGES, PAGE_BYTES), dtype=torch.uint8, device="cuda")], arena)
    assert isinstance(pages, DevicePages)
    done = threading.Event()

    def load() -> None:  # in a thread, as the loader does
        for page in range(PAGES):
            assert pages.load(page, arena[page]) is not None
        pages.settle()
        done.set()

    threading.Thread(target=load).start()
    assert done.wait(60.0)
    assert np.array_equal(pages._pages.cpu().numpy(), content)


def test_pinned_copies_are_faster_than_pageable_ones(arena: Bytes) -> None:
    streams = Streams(torch.device("cuda"))
    pages = DevicePages(filled(3), streams)

    def seconds() -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record(streams.loading)
        for page in range(PAGES):
            pages.load(page, arena[page])
        end.record(streams.loading)
        pages.settle()
        return float(begin.elapsed_time(end)) / 1e3

    seconds()
    before = min(seconds() for _ in range(5))
    assert pin(arena)
    assert min(seconds() for _ in range(5)) < before
