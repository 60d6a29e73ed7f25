"""What goes over a bulk socket.

The reader opens the connection and sends the 16 bytes of its token. The source answers with frames, each a header of
40 bytes (little-endian), and for SEGMENTS the checksums and then the bytes of consecutive layers of one block:

    read u64 | block u32 | layer u16 | layers u16 | length u64 | kind u16 | reason u16 | 0 u32 | check u64
    checksums u64[layers] | payload [layers][segment_bytes]

`read` is the token's first half; `check` is the XXH3-64 of the 32 bytes before it, seeded with the second half, so a
changed header, or one of another read, ends the read before a byte of it is believed. `length` is that of the payload.
The last frame is END: a stream without it was cut short.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum

from xxhash import xxh3_64_intdigest

TOKEN_BYTES = 16
_HEADER = struct.Struct("<QIHHQHHI")
_CHECK = struct.Struct("<Q")
HEADER_BYTES = _HEADER.size + _CHECK.size


class Kind(IntEnum):
    SEGMENTS = 1
    VOID = 2
    """What has not come of the block will not come."""
    END = 3


class Reason(IntEnum):
    NONE = 0
    ABSENT = 1
    OVER = 2
    INCOMPLETE = 3
    LATE = 4

    @property
    def words(self) -> str:
        return _WORDS[self]


_WORDS = {
    Reason.NONE: "no reason given",
    Reason.ABSENT: "the source does not have it",
    Reason.OVER: "its use at the source is over: given up, or the slot was reused while it was sent",
    Reason.INCOMPLETE: "it is not complete at the source",
    Reason.LATE: "it was not complete at the source in time",
}


@dataclass(frozen=True, slots=True)
class Frame:
    kind: Kind
    block: int = 0
    layer: int = 0
    layers: int = 0
    length: int = 0
    reason: Reason = Reason.NONE

    def pack(self, token: bytes) -> bytes:
        read, seed = struct.unpack("<QQ", token)
        body = _HEADER.pack(read, self.block, self.layer, self.layers, self.length, self.kind, self.reason, 0)
        return body + _CHECK.pack(xxh3_64_intdigest(body, seed))

    @classmethod
    def unpack(cls, header: bytes, token: bytes) -> "Frame":
        """Raises ValueError for what is no frame of this read."""
        own_read, seed = struct.unpack("<QQ", token)
        body, (check,) = header[: _HEADER.size], _CHECK.unpack(header[_HEADER.size :])
        if xxh3_64_intdigest(body, seed) != check:
            raise ValueError("a frame's header does not verify")
        read, block, layer, layers, length, kind, reason, zero = _HEADER.unpack(body)
        if read != own_read or zero:
            raise ValueError("a frame of another read")
        return cls(Kind(kind), block, layer, layers, length, Reason(reason))
