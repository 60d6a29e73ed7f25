"""Where each element of K and V lies in an engine's page: what a codec needs to see KV in opaque bytes.

An engine page holds one layer of `tokens` tokens, K and V, in an order that only the engine's cache-write operator
knows. `kvstore/engine/layout.py` learns that order from the operator; a `Permutation` is what it learned, plain numbers
that travel to processes without an engine, with a fingerprint to compare.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from blake3 import blake3

Bytes = npt.NDArray[np.uint8]
Elements = npt.NDArray[np.unsignedinteger]
"""Elements as raw bits, since numpy has no bfloat16: uint32 for float32, uint16 for the 16-bit floats."""

_RAW: dict[str, type[np.unsignedinteger]] = {
    "float32": np.uint32,
    "bfloat16": np.uint16,
    "float16": np.uint16,
}


@dataclass(frozen=True, slots=True)
class PageShape:
    """What one page holds: K and V of `tokens` tokens, `heads` KV heads of `head_dim` elements. `dtype` as torch's."""

    tokens: int
    heads: int
    head_dim: int
    dtype: str

    def __post_init__(self) -> None:
        if min(self.tokens, self.heads, self.head_dim) < 1:
            raise ValueError(f"every size of a page is at least 1: {self}")
        if self.dtype not in _RAW:
            raise ValueError(f"KV of dtype {self.dtype!r} is not known, only {', '.join(_RAW)}")

    @property
    def logical(self) -> tuple[int, int, int, int]:
        """K, then V: [2, tokens, heads, head_dim]."""
        return 2, self.tokens, self.heads, self.head_dim

    @property
    def elements(self) -> int:
        return 2 * self.tokens * self.heads * self.head_dim

    @property
    def raw(self) -> np.dtype[np.unsignedinteger]:
        return np.dtype(_RAW[self.dtype])

    @property
    def page_bytes(self) -> int:
        return self.elements * self.raw.itemsize


class Permutation:
    """`index[kv, token, head, dim]` is the element's position in the page. Both ways are exact, bit by bit.

    Raises ValueError when `index` is no bijection between the page and K and V.
    """

    def __init__(self, shape: PageShape, index: npt.ArrayLike) -> None:
        positions = np.asarray(index, np.int64)
        if positions.shape != shape.logical:
            raise ValueError(f"a permutation of {positions.shape} positions for K and V of {shape.logical}")
        flat = positions.ravel()
        if flat.min() < 0 or flat.max() >= shape.elements:
            raise ValueError(f"positions {flat.min()}..{flat.max()} in a page of {shape.elements} elements")
        used = np.bincount(flat, minlength=shape.elements)
        if (used != 1).any():
            raise ValueError(
                f"no bijection: {np.count_nonzero(used == 0)} of {shape.elements} positions in the page belong to "
                f"no element, position {int(used.argmax())} to {used.max()}"
            )
        self.shape = shape
        self.index: npt.NDArray[np.int64] = positions
        self._gather = positions.transpose(0, 3, 1, 2).ravel()
        self._scatter = np.empty_like(flat)
        self._scatter[self._gather] = np.arange(shape.elements)

    def fingerprint(self) -> str:
        """Equal only for the same order of the same shape and dtype."""
        shape = self.shape
        text = f"{shape.tokens}/{shape.heads}/{shape.head_dim}/{shape.dtype}/"
        return blake3(b"moonpool-packing-1" + text.encode() + self.index.astype("<u4").tobytes()).hexdigest()[
            :16
        ]

    def channels(self, pages: Bytes) -> Elements:
        """[pages, page_bytes] as engine bytes -> [pages, 2, head_dim, tokens, heads] as raw bits; a copy.

        Channels first: what is done to each token and head runs over long rows then (int8 encodes a tenth faster).
        """
        self._check(pages)
        elements = np.ascontiguousarray(pages).view(self.shape.raw)
        found: Elements = elements.take(self._gather, axis=1)
        return found.reshape(len(pages), 2, self.shape.head_dim, self.shape.tokens, self.shape.heads)

    def put_channels(self, kv: Elements, out: Bytes) -> None:
        """[pages, 2, head_dim, tokens, heads] as raw bits into `out` [pages, page_bytes]."""
        self._check(out)
        wanted = (len(out), 2, self.shape.head_dim, self.shape.tokens, self.shape.heads)
        if kv.shape != wanted or kv.dtype != self.shape.raw:
            raise ValueError(f"KV is {kv.dtype}{kv.shape}, the pages hold {self.shape.raw}{wanted}")
        out[:] = kv.reshape(len(out), -1).take(self._scatter, axis=1).view(np.uint8)

    def to_logical(self, pages: Bytes) -> tuple[Elements, Elements]:
        """[pieces, page_bytes] -> K and V, each [pieces * tokens, heads, head_dim] as raw bits."""
        kv = np.moveaxis(self.channels(pages), 2, -1)
        rows = (-1, self.shape.heads, self.shape.head_dim)
        return kv[:, 0].reshape(rows), kv[:, 1].reshape(rows)

    def to_pages(self, keys: Elements, values: Elements, out: Bytes) -> None:
        """The way back: K and V as `to_logical` gives them, into `out` [pieces, page_bytes]."""
        self._check(out)
        wanted = (len(out) * self.shape.tokens, self.shape.heads, self.shape.head_dim)
        for name, given in (("K", keys), ("V", values)):
            if given.shape != wanted or given.dtype != self.shape.raw:
                raise ValueError(
                    f"{name} is {given.dtype}{given.shape}, the pages hold {self.shape.raw}{wanted}"
                )
        tokens = (len(out), *self.shape.logical[1:])
        kv = np.stack((keys.reshape(tokens), values.reshape(tokens)), axis=1)
        self.put_channels(np.moveaxis(kv, -1, 2), out)

    def _check(self, pages: Bytes) -> None:
        if pages.ndim != 2 or pages.shape[1] != self.shape.page_bytes or pages.dtype != np.uint8:
            raise ValueError(
                f"pages are {pages.dtype}{pages.shape}, not uint8 [pages, {self.shape.page_bytes}] for {self.shape}"
            )
