"""One signed byte an element, one scale for each token and head, for K and V apart.

    segment   scale f32 [2, block_tokens, heads] | q i8 [2, head_dim, block_tokens, heads]      (little-endian)
    scale     absmax / 127            q = round_half_even(x * (127 / absmax))         x' = q * scale

in float32, each step correctly rounded, so equal input gives equal bytes everywhere. The encoded form is in an
order of its own: it does not depend on how an engine packs its pages.

Error of an element: half a step, absmax / 254, and the rounding to the engine's dtype (`error_bound`). A row whose
absmax is below 127 * 2^-126 would need a scale that float32 cannot hold to full precision; it becomes zeros. A row with
NaN, inf or more than 2^127 is refused.
"""

import numpy as np
import numpy.typing as npt

from kvstore.codecs.codec import BlockForm, Refusal, check_segments
from kvstore.codecs.pages import Bytes, Elements

Floats = npt.NDArray[np.float32]

_STEPS = np.float32(127)
_ABSMAX_MIN = np.float32(127 * 2.0**-126)
_ABSMAX_MAX = np.float32(2.0**127)
_SCALE = np.dtype("<f4")
# Half a unit in the last place, relative; and half of the smallest subnormal, absolute.
_MAGNITUDE = {"float32": 0x7FFFFFFF, "bfloat16": 0x7FFF, "float16": 0x7FFF}
_ROUNDING = {
    "float32": (2.0**-24, 2.0**-150),
    "bfloat16": (2.0**-8, 2.0**-134),
    "float16": (2.0**-11, 2.0**-25),
}


class Int8:
    """Symmetric absmax, per token and head. The number in the name changes with the format or the rounding."""

    name = "int8-token-head-1"
    lossy = True
    precision = "int8-token-head-1"

    def segment_bytes(self, form: BlockForm) -> int:
        shape = form.permutation.shape
        return 2 * form.layout.block_tokens * shape.heads * (_SCALE.itemsize + shape.head_dim)

    def encode(self, form: BlockForm, segments: Bytes, out: Bytes) -> Refusal | None:
        check_segments("segments", segments, form.layout.segment_bytes)
        check_segments("encoded", out, self.segment_bytes(form), len(segments))
        dtype = form.layout.dtype
        for layer, (segment, target) in enumerate(zip(segments, out, strict=True)):  # a layer fits the cache
            elements = form.permutation.channels(segment.reshape(form.layout.pieces, -1))
            # Without the sign, floats are ordered as their bits are, and a NaN is the largest.
            magnitude = (elements & elements.dtype.type(_MAGNITUDE[dtype])).max(axis=2, keepdims=True)
            absmax = to_float32(magnitude, dtype)
            if not (absmax <= _ABSMAX_MAX).all():
                return Refusal(f"segment {layer}: an absmax of {absmax.max():g} has no int8 scale")
            values = to_float32(elements, dtype)
            values *= np.where(absmax < _ABSMAX_MIN, np.float32(0), _STEPS / np.maximum(absmax, _ABSMAX_MIN))
            np.rint(values, out=values)
            scales, quantised = _parts(form, target)
            scales[:] = np.where(absmax < _ABSMAX_MIN, np.float32(0), absmax / _STEPS)
            quantised[:] = values
        return None

    def decode(self, form: BlockForm, encoded: Bytes, out: Bytes) -> None:
        check_segments("encoded", encoded, self.segment_bytes(form))
        check_segments("segments", out, form.layout.segment_bytes, len(encoded))
        for layer, (source, segment) in enumerate(zip(encoded, out, strict=True)):
            scales, quantised = _parts(form, source)
            if not ((scales >= 0) & (scales <= _ABSMAX_MAX / _STEPS)).all():
                raise ValueError(f"segment {layer}: a scale is negative, too large or no number")
            values = np.multiply(quantised, scales, dtype=np.float32, order="C")
            elements = from_float32(values, form.layout.dtype)
            form.permutation.put_channels(elements, segment.reshape(form.layout.pieces, -1))


def error_bound(absmax: Floats, dtype: str) -> npt.NDArray[np.float64]:
    """The largest |x' - x| in a row of that absmax: half a step, float32's own rounding, and the dtype's."""
    relative, absolute = _ROUNDING[dtype]
    rows = absmax.astype(np.float64)
    step = np.maximum(rows / 254 * (1 + 2.0**-14), np.where(absmax < _ABSMAX_MIN, rows, 0))
    bound: npt.NDArray[np.float64] = step + rows * relative + absolute
    return bound


def to_float32(elements: Elements, dtype: str) -> Floats:
    """Exact: every value of the 16-bit floats is one of float32. Always a copy that may be changed."""
    if dtype == "bfloat16":
        bits = elements.astype(np.uint32)
        bits <<= np.uint32(16)
        return bits.view(np.float32)
    return elements.view(dtype).astype(np.float32)


def from_float32(values: Floats, dtype: str) -> Elements:
    """Rounds to nearest, ties to even. Values are finite."""
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        rounded = bits >> np.uint32(16)
        rounded &= np.uint32(1)
        rounded += np.uint32(0x7FFF)
        rounded += bits
        rounded >>= np.uint32(16)
        return rounded.astype(np.uint16)
    if dtype == "float16":
        return values.astype(np.float16).view(np.uint16)
    return values.view(np.uint32)


def _parts(form: BlockForm, encoded: Bytes) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int8]]:
    """Views of one encoded segment as [pieces, 2, 1, tokens, heads] and [pieces, 2, head_dim, tokens, heads]."""
    shape, pieces = form.permutation.shape, form.layout.pieces
    scale_bytes = 2 * form.layout.block_tokens * shape.heads * _SCALE.itemsize
    scales: npt.NDArray[np.float32] = encoded[:scale_bytes].view(_SCALE)
    quantised = encoded[scale_bytes:].view(np.int8)
    rows = (pieces, shape.tokens, shape.heads)
    return (
        np.moveaxis(scales.reshape(2, 1, *rows), 2, 0),
        np.moveaxis(quantised.reshape(2, shape.head_dim, *rows), 2, 0),
    )
