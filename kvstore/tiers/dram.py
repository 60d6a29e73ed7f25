"""The DRAM tier's memory: a file in /dev/shm that the node creates and local engines map.

One file holds a header row per slot, then the slots' payloads:

    header   epoch u64 | stopped u64[shards] | hash 32 bytes | segment_epoch, segment_sum u64[segments] | segment_at f64[segments]
    payload  [slot][segment][piece][page bytes], 4096-aligned

A segment is one layer of one rank's shard: number `shard * layers + layer`.

Who writes what: the node writes `epoch` and `hash` (a new use of the slot, or the end of one); the slot's one
writer, each rank in its own shard, writes payload, then `segment_sum` and `segment_at` (CLOCK_MONOTONIC seconds), then
`segment_epoch` of each segment that it has finished, and `stopped` when it will write no more; readers write nothing. A
segment is complete when `segment_epoch` equals `epoch`; the writer has stopped when all its ranks have.

A checksum is XXH3-64 seeded with the block's name and the segment, so right bytes in a wrong place do not verify.
The reader's order is: epoch, segment_epoch, copy, checksum, epoch again. Anything odd is a failed segment, and a
failed segment is recomputed. (`multiprocessing.SharedMemory` is not used: its resource tracker may unlink memory
under other processes that still map it.)
"""

import fcntl
import mmap
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from kvstore.core.blocks import HASH_BYTES, BlockHash, KVLayout

_PAGE = 4096
_SEED_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class ArenaShape:
    """What a process must know to map an arena: its layout and the number of slots."""

    layout: KVLayout
    slots: int

    @property
    def header_dtype(self) -> np.dtype[np.void]:
        segments = self.layout.segments
        return np.dtype(
            [
                ("epoch", "<u8"),
                ("stopped", "<u8", (self.layout.shards,)),
                ("hash", "u1", (HASH_BYTES,)),
                ("segment_epoch", "<u8", (segments,)),
                ("segment_sum", "<u8", (segments,)),
                ("segment_at", "<f8", (segments,)),
            ]
        )

    @property
    def payload_offset(self) -> int:
        return -(-self.slots * self.header_dtype.itemsize // _PAGE) * _PAGE

    @property
    def file_bytes(self) -> int:
        return self.payload_offset + self.slots * self.layout.block_bytes

    @classmethod
    def fitting(cls, layout: KVLayout, dram_bytes: int) -> "ArenaShape":
        """As many slots as fit into `dram_bytes`. Raises ValueError if none does."""
        slots = dram_bytes // (layout.block_bytes + cls(layout, 1).header_dtype.itemsize)
        if slots < 1:
            raise ValueError(f"dram_bytes {dram_bytes} holds no block of {layout.block_bytes} bytes")
        return cls(layout, slots)


@dataclass(frozen=True, slots=True)
class Writing:
    """How a finished use was written: when its last segment was sealed (CLOCK_MONOTONIC seconds, 0 for no slots), and
    how many of its bytes were sealed already when the last chunk's last layer began, that is, when its last layer but
    one was sealed.
    """

    last_sealed_at: float
    early_bytes: int


class Arena:
    """One mapping of the arena file. The node creates it (`create`), engines attach (`attach`).

    `payload` has shape [slots, segments, segment_bytes] (uint8), `header` shape [slots].
    """

    def __init__(self, path: Path, shape: ArenaShape, memory: mmap.mmap) -> None:
        self.path = path
        self.shape = shape
        self._memory = memory
        self.header: npt.NDArray[np.void] = np.frombuffer(memory, shape.header_dtype, count=shape.slots)
        self.payload: npt.NDArray[np.uint8] = np.frombuffer(
            memory, np.uint8, count=shape.slots * shape.layout.block_bytes, offset=shape.payload_offset
        ).reshape(shape.slots, shape.layout.segments, shape.layout.segment_bytes)
        # Field views, taken once: indexing a structured array by name costs more than the word it reads.
        self.epoch: npt.NDArray[np.uint64] = self.header["epoch"]
        self._stopped: npt.NDArray[np.uint64] = self.header["stopped"]
        self.hash: npt.NDArray[np.uint8] = self.header["hash"]
        self.segment_epoch: npt.NDArray[np.uint64] = self.header["segment_epoch"]
        self.segment_sum: npt.NDArray[np.uint64] = self.header["segment_sum"]
        self.segment_at: npt.NDArray[np.float64] = self.header["segment_at"]

    @classmethod
    def create(cls, path: Path, shape: ArenaShape) -> "Arena":
        """A new arena file, readable by this user only. Raises OSError naming the size if it does not fit.

        The file is locked for as long as this process maps it (see `remove_dead`).
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(descriptor, 0, shape.file_bytes)
            memory = mmap.mmap(descriptor, shape.file_bytes)
        except OSError as error:
            path.unlink()
            raise OSError(
                error.errno,
                f"cannot reserve {shape.file_bytes / 2**20:.0f} MiB for the KV arena in {path.parent}: "
                f"{error.strerror}",
            ) from error
        finally:
            os.close(descriptor)
        return cls(path, shape, memory)

    @classmethod
    def attach(cls, path: Path, shape: ArenaShape) -> "Arena":
        """Maps an arena that the node made. Raises ValueError if its size is not that of `shape`."""
        descriptor = os.open(path, os.O_RDWR)
        try:
            size = os.fstat(descriptor).st_size
            if size != shape.file_bytes:
                raise ValueError(f"arena {path} is {size} bytes, its shape says {shape.file_bytes}")
            return cls(path, shape, mmap.mmap(descriptor, size))
        finally:
            os.close(descriptor)

    @staticmethod
    def remove_dead(folder: Path, prefix: str) -> None:
        """Removes the arenas in `folder` whose node was killed: their memory is lost to the machine until then."""
        for path in [path for path in folder.iterdir() if path.name.startswith(prefix)]:
            with suppress(OSError), path.open("rb") as file:  # locked by its living node, or another user's
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()

    def unlink(self) -> None:
        """Removes the name; mappings stay valid until their processes end."""
        self.path.unlink(missing_ok=True)

    # -- the node's words -----------------------------------------------------------------------------------

    def begin(self, slot: int, epoch: int, name: BlockHash) -> None:
        """A new use of the slot: nothing of it is complete."""
        self.epoch[slot] = 0
        self.segment_epoch[slot] = 0
        self.hash[slot] = np.frombuffer(name, np.uint8)
        self.epoch[slot] = epoch

    def end(self, slot: int) -> None:
        """The use is over: late readers and writers see that they are late."""
        self.epoch[slot] = 0

    def complete(self, slot: int, epoch: int) -> bool:
        """Has each segment of this use been written?"""
        return bool(self.epoch[slot] == epoch and (self.segment_epoch[slot] == epoch).all())

    def has_stopped(self, slot: int, epoch: int) -> bool:
        """Have all ranks of this use's writer said that they write no more?"""
        return bool((self._stopped[slot] == epoch).all())

    def segments_complete(self, slots: list[int], epochs: list[int]) -> int:
        """How many segments of these uses are complete: the progress of a hand-off."""
        wanted = np.asarray(epochs, np.uint64)[:, None]
        return int((self.segment_epoch[slots] == wanted).sum())

    def all_held(self, slots: list[int], epochs: list[int]) -> bool:
        """Are all these uses still on?"""
        return bool((self.epoch[slots] == np.asarray(epochs, np.uint64)).all())

    # -- the writer's words ---------------------------------------------------------------------------------

    def seal(self, slot: int, segment: int, epoch: int, name: BlockHash, checksum: int | None = None) -> None:
        """The segment's bytes are in the slot: publish their checksum (computed here unless it has been just now) and
        the time, then the fact.
        """
        if checksum is None:
            checksum = segment_sum(self.payload[slot, segment], name, segment)
        self.segment_sum[slot, segment] = checksum
        self.segment_at[slot, segment] = time.monotonic()
        self.segment_epoch[slot, segment] = epoch

    def seal_all(
        self, slot: int, layers: npt.NDArray[np.int64], epoch: int, sums: npt.NDArray[np.uint64]
    ) -> None:
        """Seals several layers at once, whose checksums have been found right just now."""
        self.segment_sum[slot, layers] = sums
        self.segment_at[slot, layers] = time.monotonic()
        self.segment_epoch[slot, layers] = epoch

    def writing(self, slots: list[int]) -> Writing:
        """How the writing of these slots went; all of them must be complete."""
        layout = self.shape.layout
        times_s = self.segment_at[slots].reshape(-1, layout.layers)  # a row a shard
        last_layer_began_s = times_s[:, :-1].max(initial=0.0)
        early = int((times_s <= last_layer_began_s).sum())
        return Writing(float(times_s.max(initial=0.0)), early * layout.segment_bytes)

    def stop(self, slot: int, epoch: int, shard: int = 0) -> None:
        """This rank of the use's writer will write no more. A late word about an old use never hides a newer one's."""
        if self._stopped[slot, shard] < epoch:  # noqa: PLR1730  # `max` would write an old word over a newer one
            self._stopped[slot, shard] = epoch

    # -- the reader's words ---------------------------------------------------------------------------------

    def verify(
        self, slot: int, segment: int, epoch: int, name: BlockHash, copy: npt.NDArray[np.uint8]
    ) -> bool:
        """Is `copy` ([segment_bytes], or the slot's own bytes) what the writer of this use sealed for `name`?"""
        return bool(
            self.segment_sum[slot, segment] == segment_sum(copy, name, segment)
            and self.segment_epoch[slot, segment] == epoch
            and self.epoch[slot] == epoch
        )

    def verify_block(self, slot: int, epoch: int, name: BlockHash) -> bool:
        """Do all of the slot's own segments verify?"""
        return all(
            self.verify(slot, segment, epoch, name, self.payload[slot, segment])
            for segment in range(self.shape.layout.segments)
        )


def segment_sum(payload: npt.NDArray[np.uint8], name: BlockHash, segment: int) -> int:
    """XXH3-64 of one segment of one block, bound to the block's name and the segment's number."""
    return xxh3_64_intdigest(payload.data, segment_seed(name, segment))


def segment_seed(name: BlockHash, segment: int) -> int:
    """What binds the checksum of a segment to its block and number."""
    return (int.from_bytes(name[:8], "little") + segment) & _SEED_MASK
