"""One codec on blocks of one form: what an SSD tier needs to keep them encoded (`kvstore.tiers.ssd.Coding`)."""

from dataclasses import dataclass

import numpy as np

from kvstore.codecs.choice import CodecSpeed, measure
from kvstore.codecs.codec import BlockForm, Codec
from kvstore.codecs.int8 import from_float32
from kvstore.codecs.pages import Bytes

_SEGMENTS_MEASURED = 8


@dataclass(frozen=True, slots=True)
class AtRest:
    form: BlockForm
    codec: Codec

    @property
    def segment_bytes(self) -> int:
        """Of a segment as it lies in a slot."""
        return self.form.layout.segment_bytes

    @property
    def encoded_segment_bytes(self) -> int:
        return self.codec.segment_bytes(self.form)

    def encode(self, block: Bytes, out: Bytes) -> str:
        """Returns why the codec refuses the block; empty when it is in `out`."""
        refusal = self.codec.encode(self.form, block, out)
        return f"{self.codec.name} refuses it: {refusal.reason}" if refusal is not None else ""

    def decode(self, encoded: Bytes, out: Bytes) -> None:
        """Raises ValueError for bytes that no encoder wrote."""
        self.codec.decode(self.form, encoded, out)

    def speed(self) -> CodecSpeed:
        """Measured on this machine, on a few segments of normally distributed values; takes some hundredths of a second."""
        layout = self.form.layout
        elements = _SEGMENTS_MEASURED * layout.segment_bytes // self.form.permutation.shape.raw.itemsize
        values = np.random.default_rng(0).standard_normal(elements, np.float32)
        raw = np.ascontiguousarray(from_float32(values, layout.dtype)).view(np.uint8)
        return measure(self.form, self.codec, raw.reshape(_SEGMENTS_MEASURED, -1))
