"""Learns how the engine packs K and V into a page, from the engine's own cache-write code.

Every element of one page gets a number; the numbers are written as values, one base-256 digit a pass, by the very
method that vLLM calls for each layer of each step; the raw page then says where each element went. Digits are written
as 1..256: integers that every KV dtype holds exactly, and none is the 0 of a place never written.

Nothing here knows the order, so nothing can go stale silently: where vLLM moves the method, or it stops being a plain
copy, learning fails by name. CUDA is *untested* (written without a GPU at hand).
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvstore.codecs.pages import Elements, PageShape, Permutation

if TYPE_CHECKING:
    import numpy.typing as npt

CacheWrite = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Key and value [tokens, heads, head_dim], cache [pages, heads, page_tokens, 2 * head_dim], slots [tokens]."""

_PAGES, _PAGE = 3, 1  # a page between two others, which must stay as they are
_BASE = 256


class LayoutError(Exception):
    """The engine's cache cannot be read element by element; the message says why."""


def learn(shape: PageShape, device: str = "cpu", write: CacheWrite | None = None) -> Permutation:
    """The order of K and V in a page of that shape, on that device.

    `write` is the engine's own cache-write by default. Raises LayoutError where the engine has none for this shape,
    or where what it writes is no bijection, changes values, or reaches into another page.
    """
    write = write or (cpu_write(shape) if device == "cpu" else cuda_write(shape))
    numbers = np.arange(shape.elements).reshape(shape.logical)
    found: npt.NDArray[np.int64] = np.zeros(shape.elements, np.int64)  # page position -> element
    unit = 1
    while unit < shape.elements:
        digits = numbers // unit % _BASE
        values = torch.from_numpy(digits + 1).to(getattr(torch, shape.dtype))
        read = _written(shape, device, write, values).to(torch.float64).numpy()
        if unit == 1 and not read.all():
            raise LayoutError(
                f"{np.count_nonzero(read == 0)} of {shape.elements} elements were never written"
            )
        if not np.isin(read, np.arange(1, _BASE + 1)).all():
            raise LayoutError("no bijection: the engine's cache does not hold the values that were written")
        found += (read.astype(np.int64) - 1) * unit
        unit *= _BASE
    distinct = len(np.unique(found))
    if distinct != shape.elements or found.max() >= shape.elements:
        raise LayoutError(f"no bijection: the engine's cache holds {distinct} of {shape.elements} elements")
    permutation = Permutation(shape, np.argsort(found).reshape(shape.logical))
    _prove(permutation, device, write)
    return permutation


def cpu_write(shape: PageShape, isa: str | None = None) -> CacheWrite:
    """VLLM's CPU backend, with the instruction set that it would choose itself, or with another.

    Raises LayoutError when this version of vLLM has no such method.
    """
    try:
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, _get_attn_isa
    except ImportError as error:
        raise LayoutError(f"vLLM's CPU attention backend is not where it was: {error}") from error
    chosen = isa or _get_attn_isa(getattr(torch, shape.dtype), shape.tokens, shape.head_dim)
    layer = SimpleNamespace(isa=chosen, _k_scale_float=1.0, _v_scale_float=1.0)
    return _method(CPUAttentionBackendImpl, shape, layer)


def cuda_write(shape: PageShape) -> CacheWrite:
    """VLLM's FlashAttention backend, which writes by `reshape_and_cache_flash`. Untested.

    Raises LayoutError without a CUDA device or such a method.
    """
    if not torch.cuda.is_available():
        raise LayoutError("there is no CUDA device to learn the layout on")
    try:
        from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl
    except ImportError as error:
        raise LayoutError(f"vLLM's FlashAttention backend is not where it was: {error}") from error
    one = torch.ones((), device="cuda")
    return _method(FlashAttentionImpl, shape, SimpleNamespace(_k_scale=one, _v_scale=one))


def _method(backend: Any, shape: PageShape, layer: SimpleNamespace) -> CacheWrite:
    """The backend's method on a stand-in for its instance, which could only be made inside an engine."""
    update = getattr(backend, "do_kv_cache_update", None)
    if update is None:
        raise LayoutError(f"vLLM's {backend.__name__} has no do_kv_cache_update any more")
    instance = SimpleNamespace(attn_type="decoder", kv_cache_dtype="auto", head_size=shape.head_dim)

    def write(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        try:
            update(instance, layer, key, value, cache, slots)
        except (AttributeError, TypeError, RuntimeError) as error:
            raise LayoutError(
                f"{backend.__name__}.do_kv_cache_update cannot write {shape}: {error}"
            ) from error

    return write


def _written(shape: PageShape, device: str, write: CacheWrite, kv: torch.Tensor) -> torch.Tensor:
    """The elements of the page, in the engine's order, after `kv` [2, tokens, heads, head_dim] was written to it."""
    cache = torch.zeros(
        (_PAGES, shape.heads, shape.tokens, 2 * shape.head_dim), dtype=kv.dtype, device=device
    )
    slots = torch.arange(_PAGE * shape.tokens, (_PAGE + 1) * shape.tokens, device=device)
    key, value = kv.to(device).unbind(0)
    write(key.contiguous(), value.contiguous(), cache, slots)
    pages = cache.cpu().view(_PAGES, -1)
    if pages[[page for page in range(_PAGES) if page != _PAGE]].count_nonzero():
        raise LayoutError("the engine writes outside the page that the slots are in")
    return pages[_PAGE]


def _prove(permutation: Permutation, device: str, write: CacheWrite) -> None:
    """Random values, written by the engine and read through the permutation, come back bit by bit."""
    shape = permutation.shape
    random = torch.randn(shape.logical, generator=torch.Generator().manual_seed(0))
    kv = random.to(getattr(torch, shape.dtype))
    page = _written(shape, device, write, kv).view(torch.uint8).numpy()
    if not np.array_equal(np.stack(permutation.to_logical(page[None])), raw(kv, shape)):
        raise LayoutError("the engine's cache does not hold the bits that were written")


def raw(tensor: torch.Tensor, shape: PageShape) -> Elements:
    """The tensor's elements as raw bits, as `Permutation` has them."""
    bits: Elements = tensor.contiguous().view(torch.uint8).numpy().view(shape.raw)
    return bits
