"""What a codec is: how blocks are encoded at rest and on the wire.

A codec works on segments (one layer of one block), so that what is followed, checksummed and loaded layer by layer can
be encoded and decoded layer by layer too. The size of an encoded segment follows from the block's form alone.

A lossy codec is part of a block's name: its `precision` is the family in the chain's root, so that neither its blocks
nor what was computed on top of them ever meet an exact chain, or one of another lossy codec.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvstore.codecs.pages import Bytes, Permutation
from kvstore.core.blocks import KVLayout


@dataclass(frozen=True, slots=True)
class BlockForm:
    """A block's layout, and where K and V are in its pages. Raises ValueError when the two disagree."""

    layout: KVLayout
    permutation: Permutation

    def __post_init__(self) -> None:
        layout, shape = self.layout, self.permutation.shape
        mine = (layout.page_tokens, layout.page_bytes, layout.dtype)
        if mine != (shape.tokens, shape.page_bytes, shape.dtype):
            raise ValueError(f"layout {layout} has other pages than {shape} of {shape.page_bytes} bytes")


@dataclass(frozen=True, slots=True)
class Refusal:
    """These values are beyond the codec's promise: the block is not stored."""

    reason: str


class Codec(Protocol):
    """Encodes segments. Equal input gives equal bytes, on every machine."""

    @property
    def name(self) -> str:
        """The encoding in a stored key; another one whenever the bytes would be others."""

    @property
    def lossy(self) -> bool: ...

    @property
    def precision(self) -> str:
        """The family of chains that may hold what this codec gives back; `exact` for a lossless one."""

    def segment_bytes(self, form: BlockForm) -> int:
        """The size of an encoded segment."""

    def encode(self, form: BlockForm, segments: Bytes, out: Bytes) -> Refusal | None:
        """[n, segment_bytes] into `out` [n, encoded segment bytes]; after a refusal `out` means nothing.

        Raises ValueError for arrays of another shape.
        """

    def decode(self, form: BlockForm, encoded: Bytes, out: Bytes) -> None:
        """The way back, into `out` [n, segment_bytes].

        Raises ValueError, naming what is wrong, for arrays of another shape and for bytes that no encoder wrote.
        """


def check_segments(what: str, array: Bytes, segment_bytes: int, segments: int | None = None) -> None:
    """Raises ValueError unless `array` is uint8 [segments (or any number), segment_bytes]."""
    if array.dtype != np.uint8 or array.ndim != 2:
        raise ValueError(f"{what}: {array.dtype}{array.shape} is not uint8 [segments, bytes]")
    if array.shape[1] != segment_bytes:
        raise ValueError(f"{what}: {array.shape[1]} bytes a segment, not {segment_bytes}")
    if segments is not None and len(array) != segments:
        raise ValueError(f"{what}: {len(array)} segments, not {segments}")
