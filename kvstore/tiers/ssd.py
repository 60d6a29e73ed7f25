"""The SSD tier: one file a block, by O_DIRECT between disk and arena slots.

    <folder>/<layout>/<first byte of the hash>/<hash>     a page of header, then the payload as it lies in a slot

The header has magic, version, hash, layout, encoding, shard, sizes and the XXH3 of each segment as the block's writer
sealed it, and ends in a checksum of itself. A file is written under a temporary name and renamed when it is whole, so
a killed process leaves no torn file under a block's name. There is no fsync: after a power loss a file may be torn or
empty, and a reader finds that out as it finds out a flipped bit. Such a file is a miss, counted and deleted.

Blocks of layouts that the node does not serve now are left where they are; they count against no quota.
"""

import asyncio
import errno
import fcntl
import mmap
import os
import shutil
import struct
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from kvstore.core.blocks import HASH_BYTES, BlockHash, KVLayout
from kvstore.tiers.dram import segment_sum

Payload = npt.NDArray[np.uint8]
"""A slot's bytes: shape [layers, segment_bytes], contiguous."""

_Result = TypeVar("_Result")
_PAGE = 4096
_MAGIC = b"moonpool"
_VERSION = 1
_FIXED = struct.Struct(
    "<8sII32s16s16sHHQ"
)  # magic, version, layers, hash, layout, encoding, shard, shards, bytes
_SUM = struct.Struct("<Q")
_TEMPORARY = ".part"
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class Written:
    file_bytes: int


@dataclass(frozen=True, slots=True)
class NotWritten:
    """`full`: there is no room on the disk; otherwise the disk refused for another reason."""

    reason: str
    full: bool


@dataclass(frozen=True, slots=True)
class Loaded:
    """The block is in the buffer, each segment verified; `sums` are the segments' checksums, one a layer."""

    sums: npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Missed:
    """The block is not there (any more). `corrupt`: what was there was not what was written, and is deleted."""

    reason: str
    corrupt: bool


@dataclass(slots=True)
class SsdCounters:
    """Since the node started."""

    writes: int = 0
    written_bytes: int = 0
    reads: int = 0
    read_bytes: int = 0
    corrupt: int = 0
    full: int = 0


class SsdTier:
    """One node's folder of blocks. Made by `open`; its methods do their work in threads of its own.

    A buffer that is given to `read` or `write` must stay as it is until the call has returned; a cancelled caller must
    not touch it before `close` has.
    """

    def __init__(self, folder: Path, layout: KVLayout, lock: int, threads: int) -> None:
        self.folder = folder
        self._layout = layout
        self._lock = lock
        self._blocks = folder / layout.fingerprint()
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="ssd")
        self._headers = threading.local()
        self._header_bytes = -(-(_FIXED.size + layout.layers * _SUM.size + _SUM.size) // _PAGE) * _PAGE
        self.counters = SsdCounters()
        self.direct = layout.block_bytes % _PAGE == 0 and _supports_direct(folder)

    @classmethod
    def open(cls, folder: Path, layout: KVLayout, threads: int = 4) -> "SsdTier":
        """Takes the folder for this process. Raises OSError naming it when another node has it, or it is no folder."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise OSError(error.errno, f"ssd folder {folder}: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise OSError(error.errno, f"ssd folder {folder} belongs to another node that runs") from error
        tier = cls(folder, layout, lock, threads)
        tier._blocks.mkdir(exist_ok=True)
        return tier

    @property
    def file_bytes(self) -> int:
        """Of every block's file."""
        return self._header_bytes + self._layout.block_bytes

    def free_bytes(self) -> int:
        """What the disk has room for."""
        return shutil.disk_usage(self.folder).free

    async def scan(self) -> AsyncIterator[list[BlockHash]]:
        """The blocks that are there, folder by folder, so that others get their turn; removes unfinished files.

        Looks at names and sizes; headers and checksums are read with the block.
        """
        for number in range(256):
            found = await self._run(partial(self._scan, self._blocks / f"{number:02x}"))
            if found:
                yield found

    async def write(
        self, name: BlockHash, payload: Payload, sums: npt.NDArray[np.uint64]
    ) -> Written | NotWritten:
        """Stores a block whose segments have these checksums."""
        return await self._run(lambda: self._write(name, payload, sums))

    async def read(self, name: BlockHash, payload: Payload) -> Loaded | Missed:
        """Reads a block into `payload` and verifies it there."""
        return await self._run(lambda: self._read(name, payload))

    async def drop(self, name: BlockHash) -> None:
        """Deletes a block; one that is not there is no error."""
        await self._run(lambda: self._path(name).unlink(missing_ok=True))

    async def close(self) -> None:
        """Waits for what is going on, and gives the folder back."""
        await asyncio.to_thread(self._threads.shutdown)
        os.close(self._lock)

    # -- in the tier's threads ------------------------------------------------------------------------------

    async def _run(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _scan(self, folder: Path) -> list[BlockHash]:
        found: list[BlockHash] = []
        with suppress(FileNotFoundError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith(_TEMPORARY):
                    Path(entry.path).unlink(missing_ok=True)
                elif len(entry.name) == 2 * HASH_BYTES and entry.stat().st_size == self.file_bytes:
                    with suppress(ValueError):
                        found.append(BlockHash(bytes.fromhex(entry.name)))
        return found

    def _write(self, name: BlockHash, payload: Payload, sums: npt.NDArray[np.uint64]) -> Written | NotWritten:
        path = self._path(name)
        temporary = path.with_name(path.name + _TEMPORARY)
        header = self._header()
        header[:] = self._encoded(name, sums)
        try:
            path.parent.mkdir(exist_ok=True)
            self._with_file(
                temporary,
                os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
                lambda file: _whole(os.pwritev, file, [memoryview(header), _bytes(payload)]),
            )
            temporary.rename(path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            full = error.errno in _FULL
            self.counters.full += full
            return NotWritten(f"{path.parent}: {error.strerror or error}", full)
        self.counters.writes += 1
        self.counters.written_bytes += self.file_bytes
        return Written(self.file_bytes)

    def _read(self, name: BlockHash, payload: Payload) -> Loaded | Missed:
        path, header = self._path(name), self._header()
        try:
            self._with_file(
                path,
                os.O_RDONLY,
                lambda file: _whole(os.preadv, file, [memoryview(header), _bytes(payload)]),
            )
        except FileNotFoundError:
            return Missed("no file", corrupt=False)
        except OSError as error:
            return self._discard(path, str(error.strerror or error))
        wrong = self._wrong(name, bytes(header))
        if wrong:
            return self._discard(path, wrong)
        sums = np.frombuffer(header, np.uint64, self._layout.layers, _FIXED.size).copy()
        for layer, wanted in enumerate(sums):
            if segment_sum(payload[layer], name, layer) != wanted:
                return self._discard(path, f"layer {layer} does not verify")
        self.counters.reads += 1
        self.counters.read_bytes += self.file_bytes
        return Loaded(sums)

    def _discard(self, path: Path, reason: str) -> Missed:
        with suppress(OSError):
            path.unlink()
        self.counters.corrupt += 1
        return Missed(reason, corrupt=True)

    # -- the format -----------------------------------------------------------------------------------------

    def _path(self, name: BlockHash) -> Path:
        return self._blocks / f"{name[0]:02x}" / name.hex()

    def _fixed(self, name: BlockHash) -> bytes:
        layout = self._layout
        return _FIXED.pack(
            _MAGIC,
            _VERSION,
            layout.layers,
            name,
            layout.fingerprint().encode(),
            b"identity",
            0,
            1,
            layout.block_bytes,
        )

    def _encoded(self, name: BlockHash, sums: npt.NDArray[np.uint64]) -> bytes:
        body = self._fixed(name) + sums.astype("<u8").tobytes()
        body = body.ljust(self._header_bytes - _SUM.size, b"\0")
        return body + _SUM.pack(xxh3_64_intdigest(body))

    def _wrong(self, name: BlockHash, header: bytes) -> str:
        """What is wrong with a header; empty when it is that of this block."""
        body, own = header[: -_SUM.size], _SUM.unpack(header[-_SUM.size :])[0]
        if xxh3_64_intdigest(body) != own:
            return "the header does not verify"
        return "" if body.startswith(self._fixed(name)) else "the file holds another block"

    def _header(self) -> mmap.mmap:
        """This thread's page-aligned buffer for headers."""
        if not hasattr(self._headers, "page"):
            self._headers.page = mmap.mmap(-1, self._header_bytes)
        page: mmap.mmap = self._headers.page
        return page

    def _with_file(self, path: Path, flags: int, work: Callable[[int], None]) -> None:
        file = os.open(path, flags | (os.O_DIRECT if self.direct else 0), 0o600)
        try:
            work(file)
            if not self.direct:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def _bytes(payload: Payload) -> memoryview:
    return payload.reshape(-1).data


def _whole(move: Callable[[int, list[memoryview], int], int], file: int, buffers: list[memoryview]) -> None:
    """Moves all of the buffers, in as many calls as it takes. Raises OSError when the file ends before."""
    offset, left = 0, buffers
    while left:
        moved = move(file, left, offset)
        if moved == 0:
            raise OSError(errno.EIO, "the file is shorter than the block")
        offset += moved
        while left and moved >= len(left[0]):
            moved -= len(left[0])
            left = left[1:]
        if moved:
            left = [left[0][moved:], *left[1:]]


def _supports_direct(folder: Path) -> bool:
    """O_DIRECT is refused by tmpfs and some others."""
    probe = folder / f"direct{_TEMPORARY}"
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600))
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)
    return True
