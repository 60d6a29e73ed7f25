"""What is learnt from the engine's own cache-write operator, bit by bit, and what is refused."""

import sys
import types
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.codecs.pages import PageShape, Permutation
from kvstore.engine.layout import LayoutError, cpu_write, cuda_write, learn, raw

DTYPES = ("float32", "bfloat16", "float16")
SMOL = PageShape(tokens=32, heads=3, head_dim=64, dtype="float32")


def runs_here(isa: str, dtype: str) -> bool:
    if isa == "amx":
        return torch.cpu._is_amx_tile_supported() and dtype == "bfloat16"
    return True


def random_kv(shape: PageShape, pieces: int) -> torch.Tensor:
    """Any bits: NaNs, infinities and subnormals too. [pieces, 2, tokens, heads, head_dim]."""
    bits = torch.randint(0, 256, (pieces, shape.page_bytes), generator=torch.Generator().manual_seed(3))
    return bits.to(torch.uint8).view(getattr(torch, shape.dtype)).view(pieces, *shape.logical)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim", "isa"),
    [
        (32, 3, 64, None),
        (32, 1, 80, None),
        (64, 2, 96, None),
        (16, 2, 128, None),
        (48, 1, 64, "vec16"),
        (32, 2, 64, "vec16"),
        (32, 2, 64, "amx"),
    ],
)
def test_what_the_engine_writes_token_by_token_is_read_back_bit_by_bit(
    tokens: int, heads: int, head_dim: int, isa: str | None, dtype: str
) -> None:
    """Decode writes one token at a time, in any page: not the way in which the layout was learnt."""
    if isa is not None and not runs_here(isa, dtype):
        pytest.skip(f"no {isa} for {dtype} on this CPU")
    shape = PageShape(tokens, heads, head_dim, dtype)
    write = cpu_write(shape, isa)
    permutation = learn(shape, write=write)
    kv = random_kv(shape, pieces=2)
    pages = torch.zeros((4, heads, tokens, 2 * head_dim), dtype=kv.dtype)
    for piece, page in enumerate((3, 1)):
        for token in np.random.default_rng(0).permutation(tokens):
            write(
                kv[piece, 0, token : token + 1],
                kv[piece, 1, token : token + 1],
                pages,
                torch.tensor([page * tokens + int(token)]),
            )
    engine = pages[[3, 1]].view(2, -1).view(torch.uint8).numpy()
    keys, values = permutation.to_logical(engine)
    assert np.array_equal(keys, raw(kv[:, 0].reshape(-1, heads, head_dim), shape))
    assert np.array_equal(values, raw(kv[:, 1].reshape(-1, heads, head_dim), shape))
    back = np.zeros_like(engine)
    permutation.to_pages(keys, values, back)
    assert np.array_equal(back, engine)


def test_the_engines_order_is_not_the_plain_one() -> None:
    """Else none of this would be tested: vLLM's CPU build interleaves keys by token."""
    index = learn(SMOL).index
    assert not np.array_equal(index.ravel(), np.arange(SMOL.elements))


def test_fingerprints_tell_orders_and_dtypes_apart() -> None:
    plain = np.arange(SMOL.elements).reshape(SMOL.logical)
    swapped = plain.copy()
    swapped.flat[[5, 6]] = swapped.flat[[6, 5]]
    half = PageShape(SMOL.tokens, SMOL.heads, SMOL.head_dim, "float16")
    other = PageShape(SMOL.tokens, SMOL.head_dim, SMOL.heads, "float32")
    permutations = [
        learn(SMOL),
        Permutation(SMOL, plain),
        Permutation(SMOL, swapped),
        Permutation(half, plain),
        Permutation(other, plain.reshape(other.logical)),
    ]
    assert len({each.fingerprint() for each in permutations}) == len(permutations)
    assert learn(SMOL).fingerprint() == permutations[0].fingerprint()


def test_the_fingerprint_is_a_contract_between_nodes() -> None:
    shape = PageShape(tokens=2, heads=1, head_dim=2, dtype="bfloat16")
    assert Permutation(shape, np.arange(8).reshape(shape.logical)).fingerprint() == "74cde9f4f3e3ee03"


@given(seed=st.integers(0, 2**32 - 1), dtype=st.sampled_from(DTYPES), pieces=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_any_bijection_is_exact_both_ways(seed: int, dtype: str, pieces: int) -> None:
    shape = PageShape(tokens=3, heads=2, head_dim=5, dtype=dtype)
    chance = np.random.default_rng(seed)
    permutation = Permutation(shape, chance.permutation(shape.elements).reshape(shape.logical))
    pages = chance.integers(0, 256, (pieces, shape.page_bytes), np.uint8)
    keys, values = permutation.to_logical(pages)
    for _ in range(5):
        piece, token, head, dim = (int(chance.integers(n)) for n in (pieces, 3, 2, 5))
        at = permutation.index[1, token, head, dim]
        assert values[piece * 3 + token, head, dim] == pages[piece].view(shape.raw)[at]
    back = np.zeros_like(pages)
    permutation.to_pages(keys, values, back)
    assert np.array_equal(back, pages)


@pytest.mark.parametrize("problem", ["twice", "outside", "shape"])
def test_a_permutation_that_is_none_is_refused(problem: str) -> None:
    index = np.arange(SMOL.elements).reshape(SMOL.logical)
    if problem == "twice":
        index.flat[0] = 1
    elif problem == "outside":
        index.flat[0] = SMOL.elements
    else:
        index = index[0]
    message = {"twice": "no bijection: 1 of", "outside": "positions", "shape": "for K and V of"}[problem]
    with pytest.raises(ValueError, match=message):
        Permutation(SMOL, index)


def test_pages_and_kv_of_another_shape_are_refused() -> None:
    permutation = Permutation(SMOL, np.arange(SMOL.elements).reshape(SMOL.logical))
    pages = np.zeros((2, SMOL.page_bytes), np.uint8)
    keys, values = permutation.to_logical(pages)
    wrongs: list[Any] = [pages[:, :-1], pages[0], pages.view(np.int8)]
    for wrong in wrongs:
        with pytest.raises(ValueError, match="not uint8"):
            permutation.to_logical(wrong)
    with pytest.raises(ValueError, match="K is uint32"):
        permutation.to_pages(keys[:-1], values, pages)
    with pytest.raises(ValueError, match="V is uint16"):
        permutation.to_pages(keys, values.astype(np.uint16), pages)


@pytest.mark.parametrize(
    ("fields", "message"),
    [((0, 3, 64, "float32"), "at least 1"), ((32, 3, 64, "float8_e4m3fn"), "not known")],
)
def test_unknown_pages_are_refused(fields: tuple[int, int, int, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PageShape(*fields)


# -- operators that cannot be learnt from ----------------------------------------------------------------------------


def plain(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """A cache in plain order, as some engine might have it: K then V of each token and head."""
    tokens, heads, head_dim = key.shape
    page, at = int(slots[0]) // tokens, slots % tokens
    cache[page].view(heads, tokens, 2 * head_dim)[:, at] = torch.cat((key, value), dim=-1).transpose(0, 1)


def test_a_plain_cache_is_learnt() -> None:
    index = learn(SMOL, write=plain).index
    assert index[1, 5, 2, 7] == (2 * 32 + 5) * 128 + 64 + 7


def skips_a_token(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    plain(key, value, cache, slots)
    cache[1, :, 4] = 0


def loses_values(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    plain(key, key, cache, slots)


def halves(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    plain(key / 2, value, cache, slots)


def reaches_out(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    plain(key, value, cache, slots)
    cache[2, 0, 0, 0] = 1


def keeps_8_bits(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    plain(key.bfloat16().to(key.dtype), value, cache, slots)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (skips_a_token, "384 of 12288 elements were never written"),
        (loses_values, "no bijection: the engine's cache holds 6144 of 12288 elements"),
        (halves, "does not hold the values"),
        (reaches_out, "outside the page"),
        (keeps_8_bits, "does not hold the bits"),
    ],
)
def test_an_operator_that_does_more_or_less_than_place_values_is_refused(write: object, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        learn(SMOL, write=write)  # type: ignore[arg-type]  # five functions of one signature, named for their fault


def test_an_instruction_set_that_this_build_lacks_is_refused_by_name() -> None:
    with pytest.raises(LayoutError, match="cannot write PageShape"):
        learn(SMOL, write=cpu_write(SMOL, "neon"))  # builds for x86-64 have only their own


# -- vLLM's own names, which may move with any version ---------------------------------------------------------------


def test_vllm_still_has_the_operator_where_it_was() -> None:
    """Fails by name when vLLM moves it; then `kvstore/engine/layout.py` follows."""
    from vllm import _custom_ops
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

    assert callable(_custom_ops.cpu_attn_reshape_and_cache)
    assert CPUAttentionBackend.get_impl_cls() is CPUAttentionBackendImpl
    assert callable(CPUAttentionBackendImpl.do_kv_cache_update)
    assert [layout.name for layout in CPUAttentionBackend.supported_kv_cache_layouts()] == ["LBHNC"]


@pytest.mark.parametrize("missing", ["module", "method"])
def test_a_vllm_that_moved_it_is_told_by_name(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "vllm.v1.attention.backends.cpu_attn"
    moved = types.ModuleType(name)
    if missing == "method":
        moved.CPUAttentionBackendImpl = type("CPUAttentionBackendImpl", (), {})  # type: ignore[attr-defined]
        moved._get_attn_isa = lambda *_: "vec"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, moved)
    with pytest.raises(LayoutError, match="not where it was" if missing == "module" else "any more"):
        cpu_write(SMOL)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_cuda_device_nothing_is_learnt_there() -> None:
    with pytest.raises(LayoutError, match="no CUDA device"):
        cuda_write(SMOL)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: this path is untested here")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_cuda_cache_is_learnt(dtype: str) -> None:
    learn(PageShape(tokens=16, heads=8, head_dim=128, dtype=dtype), device="cuda")
