"""The SSD tier: one file a block, by O_DIRECT between disk and arena slots.

    <folder>/lock                                               held by the node that owns the folder
    <folder>/unfinished/<hash>.<n>.part                         being written
    <folder>/<layout>-<encoding>-<shard>of<shards>/<xx>/<hash>  a block; xx is the first byte of its hash

**Commit.** A file is written under a temporary name and renamed when it is whole, so a killed process leaves no torn
file under a block's name; its temporaries are removed at the next start. There is no fsync: after a power loss a
renamed file may be torn or empty, a reader finds that out as it finds out a flipped bit, and a cache may forget. What
does not verify is a miss, counted and deleted; what the disk fails to read is a miss and deleted.

**O_DIRECT** goes straight between disk and slot where slots are page-aligned (a block is a whole number of pages), else
through an aligned buffer of the thread. Where the filesystem refuses it, I/O is buffered, and the pages are given up
afterwards (`SsdTier.direct` says which).

**Quota.** A write beyond it is refused; who owns the tier decides what to drop. Files of other forms (another model,
layout, encoding) serve nobody while this tier runs. They count against the quota and make room, oldest first, so an
earlier configuration's blocks are there again if one goes back to it soon, and never keep the disk full. Until a
scan has ended, files that it has not come to are not counted.

**Encoding.** With a `Coding` the files hold encoded segments, with checksums of their own. A block is encoded and decoded in
the tier's threads, between a thread's buffer and the slot. What was encoded must be what the block's writer sealed,
and what is decoded must be what was encoded; the decoded segments are summed anew.

Two operations on one block at once may end in a miss, or in the file of either, never in wrong bytes.
"""

import asyncio
import errno
import fcntl
import itertools
import mmap
import os
import shutil
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.core.blocks import HASH_BYTES, BlockHash
from kvstore.tiers.block_file import PAGE_BYTES, FileForm, is_form_name
from kvstore.tiers.dram import segment_sum

Payload = npt.NDArray[np.uint8]
"""A slot's bytes: shape [layers, segment_bytes], contiguous."""

_Result = TypeVar("_Result")
_TEMPORARY = ".part"
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Coding(Protocol):
    """How blocks lie in files, where that is not as they lie in slots. Its methods run in the tier's threads."""

    @property
    def segment_bytes(self) -> int:
        """Of a segment as it lies in a slot."""

    def encode(self, block: Payload, out: Payload) -> str:
        """[layers, segment_bytes] into `out`, as the file has them. Returns why it refuses the block; empty: it is done."""

    def decode(self, encoded: Payload, out: Payload) -> None:
        """The way back. Raises ValueError for bytes that no encoder wrote."""


@dataclass(frozen=True, slots=True)
class Written:
    file_bytes: int


@dataclass(frozen=True, slots=True)
class NotWritten:
    """`full`: there is no room on the disk, or within the quota; `refused`: its encoding is not for these values.
    Otherwise the disk failed, or the block was not any more what its writer sealed.
    """

    reason: str
    full: bool = False
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Loaded:
    """The block is in the buffer, each segment verified; `sums` are the checksums of what is there, one a layer."""

    sums: npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Missed:
    """The block is not there (any more), and the buffer means nothing. `corrupt`: what was there was not what was
    written, and is deleted.
    """

    reason: str
    corrupt: bool


@dataclass(slots=True)
class SsdCounters:
    """Since the node started. `reads` are those asked for, `hits` those that brought a verified block."""

    writes: int = 0
    written_bytes: int = 0
    reads: int = 0
    hits: int = 0
    read_bytes: int = 0
    corrupt: int = 0
    full: int = 0
    refused: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class _Scanned:
    names: list[BlockHash]
    corrupt: int


@dataclass(frozen=True, slots=True)
class _Stranger:
    """A file of another form."""

    modified_s: float
    path: str
    file_bytes: int


class SsdTier:
    """One node's folder of blocks of one form. Made by `open`; its methods are called on one event loop, and do their
    work in threads of the tier's own.

    A buffer that is given to `read` or `write` must stay as it is until the call has returned; a cancelled caller must
    not touch it before `close` has. What is held is known from `scan`, and from writes since.
    """

    def __init__(
        self,
        folder: Path,
        form: FileForm,
        lock: BinaryIO,
        threads: int,
        quota_bytes: int | None,
        coding: Coding | None,
    ) -> None:
        self.folder = folder
        self.form = form
        self._coding = coding
        self._shape = (form.layers, coding.segment_bytes if coding is not None else form.segment_bytes)
        self.file_bytes = form.file_bytes
        """Of every block's file."""
        self.quota_bytes = quota_bytes
        self.counters = SsdCounters()
        self.direct = _supports_direct(folder)
        self._lock = lock
        self._blocks = folder / form.name
        self._unfinished = folder / "unfinished"
        self._numbers = itertools.count()
        self._lanes = max(1, threads - 1)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="ssd")
        self._buffers = threading.local()
        self._held: set[BlockHash] = set()
        self._writing = 0
        self._strangers: deque[_Stranger] = deque()
        self._strangers_bytes = 0

    @classmethod
    def open(
        cls,
        folder: Path,
        form: FileForm,
        threads: int = 4,
        quota_bytes: int | None = None,
        coding: Coding | None = None,
    ) -> "SsdTier":
        """Takes the folder for this process. Raises OSError naming it when another node has it, or it is no folder.

        Without a quota the disk's own size is the limit. `form` is that of the files; without `coding` it is the slots' too.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = (folder / "lock").open("ab")
        except OSError as error:
            raise OSError(error.errno, f"ssd folder {folder}: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            raise OSError(error.errno, f"ssd folder {folder} belongs to another node that runs") from error
        try:
            tier = cls(folder, form, lock, threads, quota_bytes, coding)
            tier._prepare()
        except OSError as error:
            lock.close()
            raise OSError(error.errno, f"ssd folder {folder}: {error.strerror}") from error
        return tier

    # -- asking ---------------------------------------------------------------------------------------------

    def contains(self, name: BlockHash) -> bool:
        return name in self._held

    def names(self) -> list[BlockHash]:
        """The blocks that are there, in no order."""
        return list(self._held)

    @property
    def used_bytes(self) -> int:
        """Of files that are there, are being written, or are of other forms."""
        return (len(self._held) + self._writing) * self.file_bytes + self._strangers_bytes

    def free_bytes(self) -> int:
        """What the disk has room for."""
        return shutil.disk_usage(self.folder).free

    # -- doing ----------------------------------------------------------------------------------------------

    async def scan(self) -> AsyncIterator[list[BlockHash]]:
        """The blocks that are there, some folders at a time, so that others get their turn.

        One thread stays free for reads and writes. Looks at names and sizes: header and segments are verified whenever
        the block is read, and opening each file as well costs a tenth of a millisecond of CPU, which is the engines'.
        """
        async for parts in self._lane_by_lane(self._scan, _fan(self._blocks)):
            self.counters.corrupt += sum(part.corrupt for part in parts)
            names = [name for part in parts for name in part.names]
            self._held.update(names)
            if names:
                yield names
        await self._scan_strangers()

    async def write(
        self, name: BlockHash, payload: Payload, sums: npt.NDArray[np.uint64]
    ) -> Written | NotWritten:
        """Stores a block whose segments have these checksums. Raises ValueError for arrays of another shape."""
        self._check(payload)
        if sums.shape != (self.form.layers,):
            raise ValueError(f"{sums.shape} checksums for {self.form.layers} layers")
        room = self._room()
        if room is None:
            self.counters.full += 1
            return NotWritten(f"{self.folder}: the quota of {self.quota_bytes} bytes is used", full=True)
        self._writing += 1
        work = partial(self._write, name, payload, sums, room)
        return await self._run(work, partial(self._note_write, name))

    async def read(self, name: BlockHash, payload: Payload) -> Loaded | Missed:
        """Reads a block into `payload` and verifies it there. Raises ValueError for an array of another shape."""
        self._check(payload)
        self.counters.reads += 1
        return await self._run(partial(self._read, name, payload), partial(self._note_read, name))

    async def drop(self, name: BlockHash) -> None:
        """Deletes a block; one that is not there is no error. Its room is free for the next write at once."""
        self._held.discard(name)
        await self._run(partial(_unlink, self._path(name)))

    async def close(self) -> None:
        """Waits for what is going on, and gives the folder back."""
        await asyncio.to_thread(self._threads.shutdown)
        self._lock.close()

    # -- on the event loop ----------------------------------------------------------------------------------

    async def _run(
        self, work: Callable[[], _Result], note: Callable[[_Result], None] | None = None
    ) -> _Result:
        """Runs `work` in a thread, then `note` on the loop: both also when the caller has given up."""
        future = asyncio.get_running_loop().run_in_executor(self._threads, work)
        if note is not None:
            future.add_done_callback(lambda done: note(done.result()))
        return await asyncio.shield(future)

    async def _lane_by_lane(
        self, work: Callable[[Path], _Result], folders: Sequence[Path]
    ) -> AsyncIterator[list[_Result]]:
        for start in range(0, len(folders), self._lanes):
            lanes = folders[start : start + self._lanes]
            yield await asyncio.gather(*(self._run(partial(work, folder)) for folder in lanes))

    def _room(self) -> list[_Stranger] | None:
        """Room for one more file: the strangers that make it, or None if there is none within the quota."""
        if self.quota_bytes is None:
            return []
        lacking = self.used_bytes + self.file_bytes - self.quota_bytes
        return self._victims(lacking) if lacking <= self._strangers_bytes else None

    def _victims(self, lacking_bytes: int) -> list[_Stranger]:
        victims = []
        while self._strangers and lacking_bytes > 0:
            victims.append(self._strangers.popleft())
            lacking_bytes -= victims[-1].file_bytes
            self._strangers_bytes -= victims[-1].file_bytes
        return victims

    async def _scan_strangers(self) -> None:
        """Counts the files of other forms, and deletes, oldest first, those beyond the quota."""
        strangers: list[_Stranger] = []
        async for parts in self._lane_by_lane(_strangers, await self._run(self._other_folders)):
            strangers += itertools.chain(*parts)
        strangers.sort(key=lambda each: (each.modified_s, each.path))
        self._strangers.extend(strangers)
        self._strangers_bytes = sum(each.file_bytes for each in strangers)
        if self.quota_bytes is not None:
            victims = self._victims(self.used_bytes - self.quota_bytes)
            await self._run(partial(_delete, victims))

    def _note_write(self, name: BlockHash, result: Written | NotWritten) -> None:
        self._writing -= 1
        match result:
            case Written(file_bytes):
                self._held.add(name)
                self.counters.writes += 1
                self.counters.written_bytes += file_bytes
            case NotWritten(_, full, refused):
                self.counters.full += full
                self.counters.refused += refused
                self.counters.failed += not (full or refused)

    def _note_read(self, name: BlockHash, result: Loaded | Missed) -> None:
        match result:
            case Loaded():
                self._held.add(name)  # also one that the scan has not come to
                self.counters.hits += 1
                self.counters.read_bytes += self.file_bytes
            case Missed(_, corrupt):
                self._held.discard(name)
                self.counters.corrupt += corrupt

    def _check(self, payload: Payload) -> None:
        if payload.shape != self._shape or payload.dtype != np.uint8 or not payload.flags.c_contiguous:
            raise ValueError(f"{payload.dtype}{payload.shape} is not one run of uint8{self._shape}")

    # -- in the tier's threads ------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Makes the folders, and removes what a dead process was writing."""
        self._blocks.mkdir(exist_ok=True)
        self._unfinished.mkdir(exist_ok=True)
        for path in self._unfinished.iterdir():
            path.unlink()

    def _write(
        self, name: BlockHash, payload: Payload, sums: npt.NDArray[np.uint64], victims: Sequence[_Stranger]
    ) -> Written | NotWritten:
        path = self._path(name)
        temporary = self._unfinished / f"{name.hex()}.{next(self._numbers)}{_TEMPORARY}"
        try:
            _delete(victims)
            content = self._filled(name, payload, sums)
            if isinstance(content, NotWritten):
                return content
            path.parent.mkdir(exist_ok=True)
            with self._file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
                _whole(os.pwritev, file, content)
            temporary.rename(path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            return NotWritten(f"{path.parent}: {error.strerror or error}", error.errno in _FULL)
        return Written(self.file_bytes)

    def _read(self, name: BlockHash, payload: Payload) -> Loaded | Missed:
        path = self._path(name)
        try:
            with self._file(path, os.O_RDONLY) as file:
                found = self._loaded(file, name, payload)
        except FileNotFoundError:
            return Missed("no file", corrupt=False)
        except OSError as error:
            found = Missed(str(error.strerror or error), corrupt=False)
        if isinstance(found, Missed):
            _unlink(path)
        return found

    def _loaded(self, file: int, name: BlockHash, payload: Payload) -> Loaded | Missed:
        """Reads and verifies. The buffers bound what a file can fill; its size is looked at first all the same."""
        form, buffer = self.form, self._buffer()
        size = os.fstat(file).st_size
        if size != form.file_bytes:
            return Missed(f"{size} bytes instead of {form.file_bytes}", corrupt=True)
        straight = self._straight(payload)
        front = buffer[: form.header_bytes]
        _whole(os.preadv, file, [front, _bytes(payload)] if straight else [buffer])
        header = bytes(front)
        wrong = form.wrong(name, header)
        if wrong:
            return Missed(wrong, corrupt=True)
        held = payload if straight else self._payload_of(buffer)
        if not straight:
            if bytes(buffer[form.header_bytes + form.payload_bytes :]).strip(b"\0"):
                return Missed("something follows the payload", corrupt=True)
            if self._coding is None:
                payload[:] = held
                held = payload
        sums = form.sums(header)
        if (layer := _spoilt(held, name, sums)) is not None:
            return Missed(f"layer {layer} does not verify", corrupt=True)
        if self._coding is None:
            return Loaded(sums)
        try:
            self._coding.decode(held, payload)
        except ValueError as error:
            return Missed(str(error), corrupt=True)
        return Loaded(_sums(payload, name))

    def _filled(
        self, name: BlockHash, payload: Payload, sums: npt.NDArray[np.uint64]
    ) -> list[memoryview] | NotWritten:
        """What the file is to hold, in buffers that may be written as the tier writes."""
        form, buffer = self.form, self._buffer()
        held = self._payload_of(buffer)
        if self._coding is not None:
            if refused := self._coding.encode(payload, held):
                return NotWritten(refused, refused=True)
            if (layer := _spoilt(payload, name, sums)) is not None:
                return NotWritten(f"layer {layer} does not verify in DRAM")
            sums = _sums(held, name)
        buffer[: form.header_bytes] = form.header(name, sums)
        if self._straight(payload):
            return [buffer[: form.header_bytes], _bytes(payload)]
        if self._coding is None:
            held[:] = payload
        end = form.header_bytes + form.payload_bytes
        buffer[end:] = bytes(form.file_bytes - end)
        return [buffer]

    def _payload_of(self, buffer: memoryview) -> Payload:
        """The payload's place in a buffer of a file's size."""
        form = self.form
        found = np.frombuffer(buffer, np.uint8, form.payload_bytes, form.header_bytes)
        return found.reshape(form.layers, form.segment_bytes)

    def _scan(self, folder: Path) -> _Scanned:
        names: list[BlockHash] = []
        corrupt = 0
        for entry, name in _block_files(folder):
            with suppress(FileNotFoundError):
                if entry.stat().st_size == self.file_bytes:
                    names.append(name)
                else:
                    _unlink(entry.path)
                    corrupt += 1
        return _Scanned(names, corrupt)

    def _other_folders(self) -> list[Path]:
        """The folders that other forms' blocks are fanned out in."""
        return [
            fan
            for path in sorted(self.folder.iterdir())
            if is_form_name(path.name) and path != self._blocks
            for fan in _fan(path)
        ]

    def _path(self, name: BlockHash) -> Path:
        return self._blocks / f"{name[0]:02x}" / name.hex()

    def _straight(self, payload: Payload) -> bool:
        """May the payload be moved between file and slot without a copy?"""
        return (
            self._coding is None
            and self.form.payload_bytes % PAGE_BYTES == 0
            and (not self.direct or payload.ctypes.data % PAGE_BYTES == 0)
        )

    def _buffer(self) -> memoryview:
        """This thread's page-aligned buffer of a file's size; what is not touched of it takes no memory."""
        if not hasattr(self._buffers, "view"):
            self._buffers.view = memoryview(mmap.mmap(-1, self.file_bytes))
        view: memoryview = self._buffers.view
        return view

    @contextmanager
    def _file(self, path: Path | str, flags: int) -> Iterator[int]:
        file = os.open(path, flags | (os.O_DIRECT if self.direct else 0), 0o600)
        try:
            yield file
            if not self.direct:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def _bytes(payload: Payload) -> memoryview:
    return payload.reshape(-1).data


def _sums(payload: Payload, name: BlockHash) -> npt.NDArray[np.uint64]:
    return np.array([segment_sum(row, name, layer) for layer, row in enumerate(payload)], np.uint64)


def _spoilt(payload: Payload, name: BlockHash, sums: npt.NDArray[np.uint64]) -> int | None:
    """The first layer that is not what has this checksum."""
    wanted = enumerate(sums.tolist())
    return next((layer for layer, one in wanted if segment_sum(payload[layer], name, layer) != one), None)


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


def _fan(blocks: Path) -> list[Path]:
    return [blocks / f"{number:02x}" for number in range(256)]


def _block_files(folder: Path) -> Iterator[tuple[os.DirEntry[str], BlockHash]]:
    """Files named as blocks of that folder are; nothing if there is no such folder."""
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(ValueError):
                name = BlockHash(bytes.fromhex(entry.name))
                if len(name) == HASH_BYTES and entry.name == name.hex() and entry.name[:2] == folder.name:
                    yield entry, name


def _strangers(folder: Path) -> list[_Stranger]:
    found = []
    for entry, _ in _block_files(folder):
        with suppress(FileNotFoundError):
            status = entry.stat()
            found.append(_Stranger(status.st_mtime, entry.path, status.st_size))
    return found


def _delete(strangers: Iterable[_Stranger]) -> None:
    """Deletes the files, and their folders with the last of them."""
    for stranger in strangers:
        _unlink(stranger.path)
        fan = Path(stranger.path).parent
        for folder in (fan, fan.parent):
            with suppress(OSError):
                folder.rmdir()


def _unlink(path: Path | str) -> None:
    """Deletes as far as the disk lets us; what stays is found wrong again."""
    with suppress(OSError):
        Path(path).unlink()


def _supports_direct(folder: Path) -> bool:
    """Tries: some filesystems refuse O_DIRECT when a file is opened, others when it is written."""
    probe = folder / f"direct{_TEMPORARY}"
    try:
        file = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
        try:
            os.pwritev(file, [mmap.mmap(-1, PAGE_BYTES)], 0)
        finally:
            os.close(file)
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)
    return True
