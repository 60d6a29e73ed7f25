"""Which codec: by name, by what a chain's precision admits, and by whether it is faster than what it feeds."""

import time
from dataclasses import dataclass, replace

import numpy as np

from kvstore.codecs.codec import BlockForm, Codec, Refusal
from kvstore.codecs.identity import Identity
from kvstore.codecs.int8 import Int8
from kvstore.codecs.pages import Bytes
from kvstore.core.blocks import ChainRoot

CODECS: dict[str, Codec] = {codec.name: codec for codec in (Identity(), Int8())}
LOSSLESS = CODECS["identity"]


def codec_named(name: str) -> Codec:
    """The codec of a stored encoding. Raises ValueError for one that this version does not know."""
    if name not in CODECS:
        raise ValueError(f"no codec {name!r}; this version knows {', '.join(CODECS)}")
    return CODECS[name]


def chain_root(root: ChainRoot, codec: Codec) -> ChainRoot:
    """The root of chains whose blocks may be encoded by `codec`.

    A lossy codec makes chains of its own: not one block of theirs has the name of an exact block, or of a block of
    another lossy codec. So no reader can get a precision that it did not ask for by name.
    """
    return replace(root, precision=codec.precision)


def admitted(precision: str, codec: Codec) -> str:
    """The encoding under which a block of that family is stored by that codec.

    A family admits its own lossy codec and every lossless one: a block that its codec refuses is kept as it is.
    Raises ValueError for any other: it would give back other values than the block's name promises.
    """
    if codec.lossy and codec.precision != precision:
        raise ValueError(f"codec {codec.name} (family {codec.precision}) for a block of family {precision}")
    return codec.name


def encode_block(form: BlockForm, codec: Codec, block: Bytes, out: Bytes) -> tuple[str, int]:
    """Encodes [layers, segment_bytes] into the front of `out`; what the codec refuses is kept lossless.

    Returns the encoding and its size. `out` is one run of bytes, as large as the raw block.
    """
    layers = form.layout.layers
    for each in (codec, LOSSLESS):
        size = each.encoded_bytes(form)
        if not isinstance(each.encode(form, block, out[:size].reshape(layers, -1)), Refusal):
            return each.name, size
    raise AssertionError("the lossless codec refuses nothing")


def worth(codec_bytes_per_s: float, link_bytes_per_s: float, ratio: float) -> bool:
    """Does encoding bring a block over the link sooner? A codec slower than the link it feeds is bypassed.

    Both rates are raw KV bytes per second: that of the slower of encoder and decoder, and that of the link without a
    codec. Encoder, link and decoder work on different segments at the same time, so the slowest sets the pace:
    min(codec, link * ratio), where `ratio` is raw bytes ÷ encoded bytes.
    """
    return min(codec_bytes_per_s, link_bytes_per_s * ratio) > link_bytes_per_s


@dataclass(frozen=True, slots=True)
class CodecSpeed:
    """Measured rates in raw KV bytes per second, and raw ÷ encoded bytes."""

    encode_bytes_per_s: float
    decode_bytes_per_s: float
    ratio: float

    def worth_on(self, link_bytes_per_s: float) -> bool:
        return worth(min(self.encode_bytes_per_s, self.decode_bytes_per_s), link_bytes_per_s, self.ratio)


def measure(form: BlockForm, codec: Codec, block: Bytes, repeats: int = 3) -> CodecSpeed:
    """The codec's speed on this block, [layers, segment_bytes] of finite KV: the best of `repeats`.

    Raises ValueError when the codec refuses the block.
    """
    size = codec.encoded_bytes(form)
    encoded = np.empty((form.layout.layers, size // form.layout.layers), np.uint8)
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
    return CodecSpeed(block.nbytes / min(encode_s), block.nbytes / min(decode_s), block.nbytes / size)
