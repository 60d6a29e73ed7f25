"""Codecs against a plain copy of the same bytes: what a codec costs, and from which link on it is bypassed.

Blocks of the default model in both of its dtypes, in vLLM's own order of bytes. One core. A copy is one `np.copyto` of
the raw block; samples of it and of the codec alternate, and so does which of the two comes first.
"""

import statistics
import time
from collections.abc import Callable

import numpy as np

from benchmarks.report import Row
from kvstore.codecs.choice import CODECS
from kvstore.codecs.codec import BlockForm, Codec
from kvstore.codecs.int8 import from_float32
from kvstore.codecs.pages import Bytes, PageShape
from kvstore.core.blocks import KVLayout
from kvstore.engine.layout import learn

_LAYERS, _PAGE_TOKENS, _HEADS, _HEAD_DIM = 30, 32, 3, 64  # SmolLM2-135M
_BLOCK_TOKENS = 64
_SAMPLES = 9
# Parts of a copy's speed, which is about 20 GB/s for a block that the cache holds. identity is a copy. int8 makes about
# ten passes over the elements, one of them a gather of single elements; timed apart they add up to 3.5 ns an element,
# which is the bound. Whole, on a busy machine, it reached 0.14 to 0.6 GB/s; the bar is set below the worst of that, so
# it only guards against getting slower.
_BARS = {"identity": 0.7, "int8-token-head-1": 0.005}
_BOUNDS = {"identity": 1.0, "int8-token-head-1": 0.05}
_WHY = {
    "identity": "a copy is a copy",
    "int8-token-head-1": "numpy makes ten passes (gather, widen, max, min, scale, round, narrow, ...) where a copy makes one",
}


def rows(seed: int) -> list[Row]:
    found = []
    for dtype in ("float32", "bfloat16"):
        form = _form(dtype)
        block = _block(form, seed)
        for codec in CODECS.values():
            found += _codec_rows(form, codec, block)
    return found


def _form(dtype: str) -> BlockForm:
    shape = PageShape(_PAGE_TOKENS, _HEADS, _HEAD_DIM, dtype)
    layout = KVLayout(_LAYERS, _BLOCK_TOKENS, _PAGE_TOKENS, shape.page_bytes, dtype, "benchmark")
    return BlockForm(layout, learn(shape))


def _block(form: BlockForm, seed: int) -> Bytes:
    elements = form.layout.block_bytes // form.permutation.shape.raw.itemsize
    values = np.random.default_rng(seed).standard_normal(elements, np.float32)
    raw = np.ascontiguousarray(from_float32(values, form.layout.dtype))
    return raw.view(np.uint8).reshape(form.layout.layers, -1)


def _codec_rows(form: BlockForm, codec: Codec, block: Bytes) -> list[Row]:
    encoded = np.empty((form.layout.layers, codec.segment_bytes(form)), np.uint8)
    decoded, copy = np.empty_like(block), np.empty_like(block)
    work: dict[str, Callable[[], object]] = {
        "encode": lambda: codec.encode(form, block, encoded),
        "decode": lambda: codec.decode(form, encoded, decoded),
    }
    found = []
    for name, run in work.items():
        run()
        samples = []
        for number in range(_SAMPLES):
            pair = {"codec_gb_per_s": run, "copy_gb_per_s": lambda: np.copyto(copy, block)}
            order = list(pair) if number % 2 else list(reversed(pair))
            speeds = {each: block.nbytes / 1e9 / _seconds(pair[each]) for each in order}
            samples.append({**speeds, "ratio": block.nbytes / encoded.nbytes})
        found.append(
            Row(
                name=f"{codec.name} {name}, {form.layout.dtype} ÷ memory copy",
                value=statistics.median(each["codec_gb_per_s"] / each["copy_gb_per_s"] for each in samples),
                unit="x",
                op=">=",
                bar=_BARS[codec.name],
                bound=_BOUNDS[codec.name],
                why=f"{_WHY[codec.name]}; at {statistics.median(each['codec_gb_per_s'] for each in samples):.2f} GB/s "
                f"of raw KV it is bypassed on faster links",
                samples=tuple(samples),
            )
        )
    return found


def _seconds(run: Callable[[], object]) -> float:
    """The best of three: what else the machine does is not the codec's cost."""
    taken_s = []
    for _ in range(3):
        began_s = time.perf_counter()
        run()
        taken_s.append(time.perf_counter() - began_s)
    return min(taken_s)
