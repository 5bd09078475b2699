"""Each native kernel against its plain reference, at every instruction set this CPU has."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.core.errors import StartupError
from penstock.kernels.native import bindings
from penstock.kernels.native.bindings import Floats, KVFormat, Scheme
from penstock.quantization import rotation, scheme

pytestmark = pytest.mark.skipif(not bindings.available(), reason=str(bindings.unavailable_reason()))


def test_an_unknown_isa_is_refused() -> None:
    with pytest.raises(StartupError, match="no avx1024 kernels"):
        bindings.set_isa("avx1024")  # type: ignore[arg-type]


WEIGHTS = {"none": scheme.round_bfloat16, "int8": scheme.int8_affine_round_trip, "int4": scheme.int4_round_trip}
INPUTS = {"none": lambda x: x, "int8": scheme.int8_affine_round_trip, "int4": scheme.int8_group_round_trip}


def matmul_reference(x: Floats, w: Floats, kind: Scheme, isa: str) -> tuple[np.ndarray, float]:
    """x wᵀ with both rounded as the kernels round them, and how far a sum may be from it."""
    bfloat16 = kind == "none" and isa in ("avx512bf16", "amx")
    inputs, weights = scheme.round_bfloat16(x) if bfloat16 else INPUTS[kind](x), WEIGHTS[kind](w)
    tolerance = 2e-5 * float(np.abs(x).max() * np.sqrt(x.shape[1]))
    return inputs.astype(np.float64) @ weights.astype(np.float64).T, tolerance


@pytest.mark.parametrize("kind", ["none", "int8", "int4"])
@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [
        (1, 32, 32),
        (1, 33, 100),
        (2, 96, 64),
        (3, 7, 577),
        (5, 64, 36),
        (13, 40, 160),
        (25, 100, 96),
        (16, 32, 64),
        (47, 70, 577),
    ],
)
def test_matmul(isa: str, kind: Scheme, rows: int, n: int, k: int) -> None:
    rng = np.random.default_rng(rows * 1000 + n + k)
    x = rng.standard_normal((rows, k), dtype=np.float32) * rng.uniform(0.1, 30, (rows, 1)).astype(np.float32)
    w = rng.standard_normal((n, k), dtype=np.float32)
    bias = rng.standard_normal(n, dtype=np.float32)
    x[rows // 2, :16] = 0
    expected, tolerance = matmul_reference(x, w, kind, isa)
    np.testing.assert_allclose(bindings.matmul(x, w, kind), expected, rtol=1e-5, atol=tolerance)
    np.testing.assert_allclose(bindings.matmul(x, w, kind, bias), expected + bias, rtol=1e-5, atol=tolerance)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_extreme_inputs_neither_saturate_nor_overflow(isa: str, kind: Scheme) -> None:
    """All inputs at their largest: 16-bit intermediate sums would saturate here."""
    x = np.full((5, 4096), 127, dtype=np.float32)
    x[1] = -127
    w = np.ones((34, 4096), dtype=np.float32)
    w[1] = -1
    np.testing.assert_allclose(bindings.matmul(x, w, kind), x @ w.T, rtol=1e-6)
    w[2:, ::32] = 0  # the smallest of a group of int4: all the others are 15
    np.testing.assert_allclose(bindings.matmul(x, w, kind), matmul_reference(x, w, kind, isa)[0], rtol=1e-5)


def test_a_row_of_zeros_gives_zeros(isa: str) -> None:
    w = np.ones((5, 40), dtype=np.float32)
    for kind in ("int8", "int4"):
        assert not bindings.matmul(np.zeros((2, 40), dtype=np.float32), w, kind).any()


CACHED = {"bf16": scheme.round_bfloat16, "int8": scheme.int8_cache_round_trip}
ASKED = {"bf16": lambda q: q, "int8": scheme.int8_round_trip}


def attention_reference(q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int) -> np.ndarray:
    group = q.shape[1] // k.shape[1]
    keys, values = (np.repeat(x, group, axis=1).astype(np.float64) for x in (k, v))
    scores = np.einsum("thd,chd->htc", q, keys)
    age = np.arange(len(k) - len(q), len(k))[:, None] - np.arange(len(k))
    scores[:, (age < 0) | ((window > 0) & (age >= window))] = -np.inf
    weights = np.exp2(scores - scores.max(axis=-1, keepdims=True))
    mixed: np.ndarray = np.einsum("htc,chd->thd", weights / weights.sum(axis=-1, keepdims=True), values)
    return mixed


@pytest.mark.parametrize("kv", ["bf16", "int8"])
@pytest.mark.parametrize(
    ("tokens", "context", "heads", "kv_heads", "dim", "block", "window"),
    [
        (1, 1, 1, 1, 16, 16, 0),
        (1, 70, 3, 1, 64, 16, 0),
        (1, 333, 8, 2, 80, 32, 0),
        (1, 200, 5, 1, 48, 16, 37),
        (7, 7, 4, 4, 32, 16, 0),
        (33, 130, 6, 2, 64, 16, 0),
        (70, 95, 9, 3, 112, 64, 50),
        (3, 66, 64, 1, 128, 16, 0),
    ],
)
def test_attention(
    isa: str,
    kv: KVFormat,
    tokens: int,
    context: int,
    heads: int,
    kv_heads: int,
    dim: int,
    block: int,
    window: int,
) -> None:
    rng = np.random.default_rng(tokens + context + dim)
    q = rng.standard_normal((tokens, heads, dim), dtype=np.float32) * np.float32(3 / np.sqrt(dim))
    k, v = (rng.standard_normal((context, kv_heads, dim), dtype=np.float32) for _ in range(2))
    v *= rng.uniform(0.01, 30, (context, kv_heads, 1)).astype(np.float32)  # tokens differ in scale
    k[0], v[context // 2] = 0, 0
    rounded = kv == "bf16" and isa == "avx512bf16"
    asked = scheme.round_bfloat16(q) if rounded else ASKED[kv](q)
    expected = attention_reference(asked, CACHED[kv](k), CACHED[kv](v), window)
    # Softmax weights are rounded too: by 1/512 of each, or in int8 by 1/65,535 of the largest a chunk could have.
    tolerance = (1e-3 if rounded else 1e-4) * np.abs(v).max()
    np.testing.assert_allclose(bindings.attention(q, k, v, kv, block, window), expected, rtol=1e-3, atol=tolerance)


@pytest.mark.parametrize("kv", ["bf16", "int8"])
def test_keys_that_a_row_may_not_see_change_nothing(isa: str, kv: KVFormat) -> None:
    """Not even how its sums are rounded: int8 layers above would make another answer of that."""
    rng = np.random.default_rng(9)
    q = rng.standard_normal((90, 6, 64), dtype=np.float32)
    k, v = (rng.standard_normal((90, 2, 64), dtype=np.float32) for _ in range(2))
    v *= np.linspace(0.1, 30, 90, dtype=np.float32)[:, None, None]
    together = bindings.attention(q, k, v, kv)
    for t in range(0, 90, 11):
        np.testing.assert_array_equal(bindings.attention(q[t : t + 1], k[: t + 1], v[: t + 1], kv)[0], together[t])


def test_one_dominant_key_leaves_the_others_their_share(isa: str) -> None:
    """A thousand keys of a thousandth each beside one of weight 1: in 8 bits of the largest they would all vanish."""
    rng = np.random.default_rng(8)
    q = np.ones((1, 1, 64), dtype=np.float32)
    k = np.zeros((1000, 1, 64), dtype=np.float32)
    k[0] = 10 / 64
    v = rng.standard_normal((1000, 1, 64), dtype=np.float32) + 5
    expected = attention_reference(q, scheme.int8_cache_round_trip(k), scheme.int8_cache_round_trip(v), 0)
    np.testing.assert_allclose(bindings.attention(q, k, v, "int8"), expected, rtol=1e-3)


@pytest.mark.parametrize(("size", "block"), [(16, 16), (96, 32), (1536, 512)])
def test_transform_blocks(isa: str, size: int, block: int) -> None:
    x = np.random.default_rng(size).standard_normal((3, size), dtype=np.float32)
    once = bindings.transform_blocks(x.copy(), block)
    np.testing.assert_allclose(once, rotation.transform_blocks(x, block), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(bindings.transform_blocks(once, block), x, rtol=1e-4, atol=1e-5)
