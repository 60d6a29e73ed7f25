"""Which codecs there are, and how fast each is here: one that is slower than the link it would feed is bypassed."""

import time
from dataclasses import dataclass

import numpy as np

from kvstore.codecs.codec import BlockForm, Codec
from kvstore.codecs.identity import Identity
from kvstore.codecs.int8 import Int8
from kvstore.codecs.pages import Bytes

CODECS: dict[str, Codec] = {codec.name: codec for codec in (Identity(), Int8())}
LOSSLESS = CODECS["identity"]


def codec_named(name: str) -> Codec:
    """The codec of a stored encoding. Raises ValueError for one that this version does not know."""
    if name not in CODECS:
        raise ValueError(f"no codec {name!r}; this version knows {', '.join(CODECS)}")
    return CODECS[name]


@dataclass(frozen=True, slots=True)
class CodecSpeed:
    """Measured rates in raw KV bytes per second, and raw ÷ encoded bytes."""

    encode_bytes_per_s: float
    decode_bytes_per_s: float
    ratio: float

    @property
    def pays_below_bytes_per_s(self) -> float:
        """A link that carries less than this without the codec brings a block sooner with it; 0 where none does.

        Encoder, link and decoder work on different segments at the same time, so the slowest sets the pace, in raw KV:
        min(encoder, decoder, link * ratio), which is to be more than the link's own.
        """
        return min(self.encode_bytes_per_s, self.decode_bytes_per_s) if self.ratio > 1 else 0.0


def measure(form: BlockForm, codec: Codec, block: Bytes, repeats: int = 3) -> CodecSpeed:
    """The codec's speed on this block, [segments, segment_bytes] of finite KV: the best of `repeats`.

    Raises ValueError when the codec refuses the block.
    """
    encoded = np.empty((len(block), codec.segment_bytes(form)), np.uint8)
    decoded = np.empty_like(block)
    encode_s, decode_s = [], []
    for _ in range(repeats):
        began_s = time.perf_counter()
        refusal = codec.encode(form, block, encoded)
        encoded_s = time.perf_counter()
        if refusal is not None:
            raise ValueError(f"{codec.name} cannot be measured: {refusal.reason}")
        codec.decode(form, encoded, decoded)
        encode_s.append(encoded_s - began_s)
        decode_s.append(time.perf_counter() - encoded_s)
    return CodecSpeed(
        block.nbytes / min(encode_s), block.nbytes / min(decode_s), block.nbytes / encoded.nbytes
    )
