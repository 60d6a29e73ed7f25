"""The format of a block's file on the SSD.

    file     header | payload | zeros up to a full page
    header   magic, version, sizes, hash, layout, encoding, shard | XXH3 of each segment as the block's writer sealed
             it | zeros | XXH3 of all that

The header is one page, or as many as the layers need. Everything is little-endian. Another version is another format:
its files do not verify here.
"""

import re
import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from kvstore.core.blocks import BlockHash, KVLayout

PAGE_BYTES = 4096
"""What O_DIRECT asks of addresses, offsets and sizes."""

_MAGIC = b"moonpool"
_VERSION = 2
_FIXED = struct.Struct("<8sII32s16s32sHH4xQQ")
"""Magic, version, layers, hash, layout, encoding, shard, shards, segment bytes, payload bytes."""
_SUM = struct.Struct("<Q")
_FORM = re.compile(r"[0-9a-f]{16}-[a-z0-9_.-]{1,32}-\d+of\d+")


@dataclass(frozen=True, slots=True)
class FileForm:
    """What a block's file holds: `layers` segments of `segment_bytes` as `encoding` left them, of one shard of `shards`.

    A node's file has the segments of all ranks that its arena has (one shard then: the node's). `layout` is the fingerprint of the engine's layout. Raises ValueError for what cannot be part of a file's name.
    """

    layout: str
    layers: int
    segment_bytes: int
    encoding: str = "identity"
    shard: int = 0
    shards: int = 1

    def __post_init__(self) -> None:
        if min(self.layers, self.segment_bytes) < 1 or not 0 <= self.shard < self.shards < 2**16:
            raise ValueError(f"no such form: {self}")
        if not _FORM.fullmatch(self.name):
            raise ValueError(f"{self.name!r} cannot be the name of a folder of blocks")

    @classmethod
    def raw(cls, layout: KVLayout) -> "FileForm":
        """Blocks as they lie in an arena of this layout."""
        return cls(layout.fingerprint(), layout.segments, layout.segment_bytes)

    @property
    def name(self) -> str:
        return f"{self.layout}-{self.encoding}-{self.shard}of{self.shards}"

    @property
    def payload_bytes(self) -> int:
        return self.layers * self.segment_bytes

    @property
    def header_bytes(self) -> int:
        return _pages(_FIXED.size + self.layers * _SUM.size + _SUM.size)

    @property
    def file_bytes(self) -> int:
        return self.header_bytes + _pages(self.payload_bytes)

    def header(self, name: BlockHash, sums: npt.NDArray[np.uint64]) -> bytes:
        body = self._fixed(name) + sums.astype("<u8").tobytes()
        body = body.ljust(self.header_bytes - _SUM.size, b"\0")
        return body + _SUM.pack(xxh3_64_intdigest(body))

    def wrong(self, name: BlockHash, header: bytes) -> str:
        """What is wrong with a header of `header_bytes`; empty when it is that of this block."""
        body, own = header[: -_SUM.size], _SUM.unpack(header[-_SUM.size :])[0]
        if xxh3_64_intdigest(body) != own:
            return "the header does not verify"
        return "" if body.startswith(self._fixed(name)) else "the file holds another block"

    def sums(self, header: bytes) -> npt.NDArray[np.uint64]:
        """The segments' checksums, one a layer."""
        return np.frombuffer(header, "<u8", self.layers, _FIXED.size)

    def _fixed(self, name: BlockHash) -> bytes:
        return _FIXED.pack(
            _MAGIC,
            _VERSION,
            self.layers,
            name,
            self.layout.encode(),
            self.encoding.encode(),
            self.shard,
            self.shards,
            self.segment_bytes,
            self.payload_bytes,
        )


def is_form_name(text: str) -> bool:
    """Is this the name of a form, of whatever version?"""
    return _FORM.fullmatch(text) is not None


def _pages(size: int) -> int:
    """Rounded up to whole pages."""
    return -(-size // PAGE_BYTES) * PAGE_BYTES
