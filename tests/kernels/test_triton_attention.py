"""Paged attention kernels against the gathered reference, through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

import tests.triton_interpreter  # noqa: F401  isort: skip

from penstock.kernels.attention_triton import (
    DecodeConfig,
    SharedPrefix,
    decode_attention,
    decode_scratch,
    decode_splits,
    paged_attention_reference,
)
from penstock.kernels.prefill_triton import PrefillConfig, prefill_attention

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


@pytest.mark.parametrize(
    ("heads", "dim", "dtype", "splits", "window"),
    [
        ((4, 1), 64, torch.float32, 1, 0),
        ((6, 2), 48, torch.float32, 4, 0),  # odd group, head size that is no power of two
        ((4, 2), 64, torch.float16, 3, 0),
        ((2, 2), 32, torch.float32, 3, 20),
    ],
)
def test_decode(heads: tuple[int, int], dim: int, dtype: torch.dtype, splits: int, window: int) -> None:
    generator = torch.Generator().manual_seed(1)
    contexts = [1, 37, 0, 130]  # a first token, a partial block, padding, several tiles
    k, v, tables = make_cache(generator, contexts, heads, dim, dtype)
    q = torch.randn(len(contexts), heads[0], dim, generator=generator).to(dtype)
    scratch = decode_scratch(len(contexts), *heads, dim, splits, q.device)
    for _ in range(2):  # the arrival counters must be back at zero after a launch
        out = torch.full_like(q, torch.nan)
        decode_attention(
            out, q, k, v, tables, torch.tensor(contexts, dtype=torch.int32), scale=0.2, splits=splits, scratch=scratch,
            window=window, config=DecodeConfig(32),
        )  # fmt: skip
        expected = paged_attention_reference(q, k, v, tables, list(range(len(contexts) + 1)), contexts, 0.2, window)
        torch.testing.assert_close(out.float(), expected, atol=tolerance(dtype), rtol=tolerance(dtype))


@pytest.mark.parametrize(("splits", "prefix_splits", "shared"), [(1, 1, 48), (2, 3, 112), (2, 4, 16)])
def test_decode_over_shared_prefix(splits: int, prefix_splits: int, shared: int) -> None:
    generator = torch.Generator().manual_seed(2)
    heads, dim = (4, 2), 32
    contexts = [shared + 1, shared + 70, 90, shared + 33]  # the third sequence shares nothing
    k, v, tables = make_cache(generator, contexts, heads, dim, torch.float32)
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
    decode_attention(
        out, q, k, v, tables, torch.tensor(contexts, dtype=torch.int32), scale=0.2, splits=splits,
        scratch=decode_scratch(len(contexts), *heads, dim, splits + prefix_splits, q.device),
        prefix=prefix, config=DecodeConfig(32),
    )  # fmt: skip
    expected = paged_attention_reference(q, k, v, tables, list(range(5)), contexts, 0.2)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("heads", "dim", "dtype", "window"),
    [
        ((4, 2), 64, torch.float32, 0),
        ((6, 2), 48, torch.float32, 0),
        ((4, 1), 32, torch.float16, 0),
        ((2, 2), 32, torch.float32, 24),
    ],
)
def test_prefill(heads: tuple[int, int], dim: int, dtype: torch.dtype, window: int) -> None:
    """A slice of a mixed batch: rows before the first sequence belong to decodes and must stay untouched."""
    generator = torch.Generator().manual_seed(3)
    starts, contexts = [2, 3, 42, 42, 59], [40, 39, 7, 100]  # a short chunk late in its prompt, a whole one, none
    k, v, tables = make_cache(generator, contexts, heads, dim, dtype)
    q = torch.randn(starts[-1], heads[0], dim, generator=generator).to(dtype)
    out = torch.full_like(q, 7.0)
    prefill_attention(
        out, q, k, v, tables, torch.tensor(starts, dtype=torch.int32), torch.tensor(contexts, dtype=torch.int32),
        num_queries=starts[-1] - starts[0], scale=0.2, window=window, config=PrefillConfig(32, 32, 4, 2),
    )  # fmt: skip
    expected = paged_attention_reference(q, k, v, tables, starts, contexts, 0.2, window)
    torch.testing.assert_close(out[2:].float(), expected[2:], atol=tolerance(dtype), rtol=tolerance(dtype))
    assert (out[:2] == 7).all()


def test_splits_fill_the_device_without_empty_programs() -> None:
    assert decode_splits(1, 8, 16384) * 8 >= 132
    assert decode_splits(512, 8, 16384) == 1
    assert decode_splits(1, 8, 64) == 1
