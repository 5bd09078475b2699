"""Paged attention kernels against the gathered reference, through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

import tests.triton_interpreter  # noqa: F401  isort: skip

from penstock.kernels.triton.decode import DecodeConfig, Rope, decode_attention, decode_scratch
from penstock.kernels.triton.decode_plan import MOST_PARTS, decode_parts, plan_decode
from penstock.kernels.triton.paged import paged_attention_reference
from penstock.kernels.triton.prefill import PrefillConfig, prefill_attention
from penstock.kernels.triton.prefix import SharedPrefix
from penstock.kernels.triton.rope import rope_and_cache

BLOCK = 16


def make_cache(
    generator: torch.Generator, contexts: list[int], heads: tuple[int, int], dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys, values and tables, with NaN wherever no sequence has a token."""
    columns = max(1, max(-(-c // BLOCK) for c in contexts))
    blocks = torch.randperm(len(contexts) * columns, generator=generator) + 1
    tables = blocks.view(len(contexts), columns).to(torch.int32)
    k, v = (torch.full((len(blocks) + 1, heads[1], BLOCK, dim), torch.nan, dtype=dtype) for _ in range(2))
    for s, context in enumerate(contexts):
        for t in range(context):
            for cache in (k, v):
                cache[tables[s, t // BLOCK], :, t % BLOCK] = torch.randn(heads[1], dim, generator=generator).to(dtype)
    for s, context in enumerate(contexts):
        tables[s, -(-context // BLOCK) :] = 0
    return k, v, tables


def tolerance(dtype: torch.dtype) -> float:
    return 1e-5 if dtype == torch.float32 else 2e-3


def queries(dtype: torch.dtype) -> torch.dtype:
    """Over a cache of this dtype."""
    return torch.float32 if dtype == torch.float8_e4m3fn else dtype


@pytest.mark.parametrize(
    ("contexts", "num_parts", "window"),
    [
        ([1, 37, 0, 130], 5, 0),
        ([900, 31, 32, 33, 2000, 0, 7], 14, 0),
        ([3000], 33, 0),
        ([3000, 20], 33, 100),
        ([5000, 1], 64, 0),  # more parts than one sequence may have
    ],
)
def test_plan_covers_every_token_once_and_starts_with_the_longest(
    contexts: list[int], num_parts: int, window: int
) -> None:
    tile = 32
    plan = plan_decode(torch.tensor(contexts, dtype=torch.int32), num_parts, tile, window=window).tolist()
    used = [entry for entry in plan if entry[0] >= 0]
    assert plan[: len(used)] == used
    lengths = [stop - start for _, start, stop, *_ in used]
    tiles = [max(1, -(-(stop - start) // tile)) for _, start, stop, _, number, *_ in used if number == 0]
    assert tiles == sorted(tiles, reverse=True)
    for seq, context in enumerate(contexts):
        mine = [entry for entry in used if entry[0] == seq]
        assert [entry[4] for entry in mine] == list(range(len(mine)))
        assert {entry[3] for entry in mine} == {context}
        assert {entry[6] for entry in mine} == {len(mine)}
        assert {entry[5] for entry in mine} == {plan.index(mine[0])}
        edges = [mine[0][1], *(entry[2] for entry in mine)]
        assert edges[0] == (max(context - window, 0) if window else 0)
        assert edges[-1] == context
        assert [entry[1] for entry in mine[1:]] == edges[1:-1]
        assert len(mine) <= MOST_PARTS.value
    fair = -(-sum(lengths) // (num_parts - len(contexts)))
    assert max(lengths) <= max(fair + tile, -(-max(contexts) // MOST_PARTS.value) + tile)


def test_parts_fill_the_device_and_leave_room_to_divide() -> None:
    assert decode_parts(1, 8) * 8 >= 2 * 132
    assert decode_parts(512, 8) == 641
    assert decode_parts(2, 256) > 2
    with pytest.raises(ValueError, match="decode_parts"):
        plan_decode(torch.ones(4, dtype=torch.int32), 4, 32)


@pytest.mark.parametrize(
    ("heads", "dim", "dtype", "parts", "window"),
    [
        ((4, 1), 64, torch.float32, 5, 0),
        ((6, 2), 48, torch.float32, 9, 0),  # odd group, head size that is no power of two
        ((4, 2), 64, torch.float16, 8, 0),
        ((4, 2), 32, torch.float8_e4m3fn, 8, 0),
        ((2, 2), 32, torch.float32, 8, 20),
    ],
)
def test_decode(heads: tuple[int, int], dim: int, dtype: torch.dtype, parts: int, window: int) -> None:
    generator = torch.Generator().manual_seed(1)
    contexts = [1, 37, 0, 130]  # a first token, a partial block, padding, several tiles
    k, v, tables = make_cache(generator, contexts, heads, dim, dtype)
    q = torch.randn(len(contexts), heads[0], dim, generator=generator).to(queries(dtype))
    scratch = decode_scratch(len(contexts), *heads, dim, parts, q.device)
    plan = plan_decode(torch.tensor(contexts, dtype=torch.int32), parts, 32, window=window)
    for _ in range(2):  # the arrival counters must be back at zero after a launch
        out = torch.full_like(q, torch.nan)
        decode_attention(out, q, k, v, tables, plan, scale=0.2, scratch=scratch, config=DecodeConfig(32, 1))
        expected = paged_attention_reference(q, k, v, tables, list(range(len(contexts) + 1)), contexts, 0.2, window)
        torch.testing.assert_close(out.float(), expected, atol=tolerance(dtype), rtol=tolerance(dtype))


@pytest.mark.parametrize(
    ("heads", "dim", "rotary", "normed", "window"),
    [((4, 2), 32, 32, True, 0), ((6, 2), 48, 24, False, 0), ((4, 4), 32, 32, False, 40)],
)
def test_decode_rotates_and_stores_what_is_new(
    heads: tuple[int, int], dim: int, rotary: int, normed: bool, window: int
) -> None:
    """The same as rotating and storing first, down to what is in the cache."""
    generator = torch.Generator().manual_seed(4)
    contexts, (h, kv) = [1, 33, 0, 130, 64], heads
    k, v, tables = make_cache(generator, contexts, heads, dim, torch.float32)
    lengths = torch.tensor(contexts, dtype=torch.int32)
    positions = (lengths - 1).clamp_min(0)
    blocks = tables[torch.arange(len(contexts)), positions // BLOCK]
    slots = torch.where(lengths > 0, blocks * BLOCK + positions % BLOCK, -1)
    for cache in (k, v):  # the new token is not there yet
        for slot in slots[slots >= 0].tolist():
            cache[slot // BLOCK, :, slot % BLOCK] = torch.nan
    qkv = torch.randn(len(contexts), (h + 2 * kv) * dim, generator=generator)
    cos_sin = torch.randn(256, rotary, generator=generator)
    gains = tuple(torch.randn(2, dim, generator=generator)) if normed else None
    plan = plan_decode(lengths, 12, 32, window=window)
    scratch = decode_scratch(len(contexts), *heads, dim, 12, qkv.device)

    expected, k_expected, v_expected = torch.empty(len(contexts), h, dim), k.clone(), v.clone()
    q = rope_and_cache(qkv.clone(), cos_sin, positions, slots, k_expected, v_expected, h, norm_weights=gains, eps=1e-6)
    config = DecodeConfig(32, 2)
    decode_attention(expected, q, k_expected, v_expected, tables, plan, scale=0.2, scratch=scratch, config=config)
    out = torch.full_like(expected, torch.nan)
    decode_attention(
        out, qkv, k, v, tables, plan, scale=0.2, scratch=scratch, config=config, rope=Rope(cos_sin, gains, 1e-6)
    )
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(k, k_expected, atol=1e-6, rtol=1e-6, equal_nan=True)
    torch.testing.assert_close(v, v_expected, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("parts", "prefix_splits", "shared", "dtype"),
    [(5, 1, 48, torch.float32), (8, 3, 112, torch.float8_e4m3fn), (8, 4, 16, torch.float32)],
)
def test_decode_over_shared_prefix(parts: int, prefix_splits: int, shared: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    heads, dim = (4, 2), 32
    contexts = [shared + 1, shared + 70, 90, shared + 33]  # the third sequence shares nothing
    k, v, tables = make_cache(generator, contexts, heads, dim, dtype)
    for member in (1, 3):
        tables[member, : shared // BLOCK] = tables[0, : shared // BLOCK]
    q = torch.randn(len(contexts), heads[0], dim, generator=generator)
    out = torch.full_like(q, torch.nan)
    prefix = SharedPrefix(
        table_M=tables[0],
        length=torch.tensor([shared], dtype=torch.int32),
        lengths_S=torch.tensor([shared, shared, 0, shared], dtype=torch.int32),
        splits=prefix_splits,
    )
    plan = plan_decode(torch.tensor(contexts, dtype=torch.int32), parts, 32, shared_S=prefix.lengths_S)
    scratch = decode_scratch(len(contexts), *heads, dim, parts + len(contexts) * prefix_splits, q.device)
    for _ in range(2):
        out.fill_(torch.nan)
        decode_attention(out, q, k, v, tables, plan, scale=0.2, scratch=scratch, prefix=prefix, config=DecodeConfig(32))
        expected = paged_attention_reference(q, k, v, tables, list(range(5)), contexts, 0.2)
        torch.testing.assert_close(out, expected, atol=tolerance(dtype), rtol=tolerance(dtype))


@pytest.mark.parametrize(
    ("heads", "dim", "dtype", "window"),
    [
        ((4, 2), 64, torch.float32, 0),
        ((6, 2), 48, torch.float32, 0),
        ((4, 1), 32, torch.float16, 0),
        ((4, 2), 32, torch.float8_e4m3fn, 0),
        ((2, 2), 32, torch.float32, 24),
    ],
)
def test_prefill(heads: tuple[int, int], dim: int, dtype: torch.dtype, window: int) -> None:
    """A slice of a mixed batch: rows before the first sequence belong to decodes and must stay untouched."""
    generator = torch.Generator().manual_seed(3)
    starts, contexts = [2, 3, 42, 42, 59], [40, 39, 7, 100]  # a short chunk late in its prompt, a whole one, none
    k, v, tables = make_cache(generator, contexts, heads, dim, dtype)
    q = torch.randn(starts[-1], heads[0], dim, generator=generator).to(queries(dtype))
    out = torch.full_like(q, 7.0)
    prefill_attention(
        out, q, k, v, tables, torch.tensor(starts, dtype=torch.int32), torch.tensor(contexts, dtype=torch.int32),
        num_queries=starts[-1] - starts[0], scale=0.2, window=window, config=PrefillConfig(32, 32, 4, 2),
    )  # fmt: skip
    expected = paged_attention_reference(q, k, v, tables, starts, contexts, 0.2, window)
    torch.testing.assert_close(out[2:].float(), expected[2:], atol=tolerance(dtype), rtol=tolerance(dtype))
    assert (out[:2] == 7).all()
