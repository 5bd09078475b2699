"""Prefill and shared-prefix attention by the CUDA kernels for Hopper, on the emulated GPU, against their reference."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from penstock.kernels.hopper import attention, program, tensor_map
from penstock.kernels.triton.paged import paged_attention_reference
from tests.kernels.hopper.emulated_gpu import available, emulated_kernel, emulated_tensor_map

pytestmark = pytest.mark.skipif(not available, reason="needs g++")


@pytest.fixture(autouse=True)
def emulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = attention.new_scratch(torch.device("cpu"))
    monkeypatch.setattr(program, "kernel", emulated_kernel(tmp_path, resident=3))
    monkeypatch.setattr(tensor_map, "tensor_map", emulated_tensor_map)
    monkeypatch.setattr(attention, "_sm_count", lambda: 3)
    monkeypatch.setattr(attention, "_scratch", lambda: scratch)


@pytest.mark.parametrize(
    ("heads", "lengths"),
    [
        ((8, 2), [(40, 170), (0, 9), (3, 290), (16, 16)]),  # tiles that end within a block, and on the border of one
        ((7, 1), [(20, 130)]),  # rows of a tile that no query has; a tile of keys that some queries see nothing of
        ((4, 1), [(33, 1100), (1, 600)]),  # few queries with many keys, which are divided
        ((4, 1), [(40, 40), (5, 700), (0, 0), (32, 2600), (9, 20)]),  # each sequence into pieces of its own number
    ],
)
def test_ragged_chunks_over_cached_prefixes(heads: tuple[int, int], lengths: list[tuple[int, int]]) -> None:
    """Rows of others stay untouched, and what reused blocks hold after a sequence's end is not seen."""
    torch.manual_seed(len(lengths))
    before, after = 3, 5
    contexts = [context for _, context in lengths]
    starts = [before + sum(count for count, _ in lengths[:s]) for s in range(len(lengths) + 1)]
    sizes = [-(-context // 16) for context in contexts]
    k, v = (torch.full((sum(sizes), heads[1], 16, 128), torch.nan, dtype=torch.bfloat16) for _ in range(2))
    tables = torch.zeros((len(lengths), max(sizes)), dtype=torch.int32)
    free = torch.randperm(sum(sizes)).to(torch.int32)
    for s, (size, context) in enumerate(zip(sizes, contexts, strict=True)):
        tables[s, :size], free = free[:size], free[size:]
        for cache in (k, v):
            tokens = torch.randn(size * 16, heads[1], 128)
            tokens[context:] = torch.nan
            cache[tables[s, :size].long()] = tokens.view(size, 16, heads[1], 128).transpose(1, 2).bfloat16()
    q = torch.randn(starts[-1] + after, heads[0] + 2 * heads[1], 128).bfloat16()[:, : heads[0]]
    out = torch.full((len(q), heads[0], 128), 7.0).bfloat16()
    for _ in range(2):
        attention.prefill_on_hopper(
            out, q, k, v, tables, torch.tensor(starts, dtype=torch.int32), torch.tensor(contexts, dtype=torch.int32),
            scale=0.09,
        )  # fmt: skip
    expected = paged_attention_reference(q, k, v, tables, starts, contexts, 0.09)
    torch.testing.assert_close(out[before:-after].float(), expected[before:-after], atol=0.01, rtol=0.01)
    assert (out[:before] == 7).all()
    assert (out[-after:] == 7).all()


@pytest.mark.parametrize("shared", [300, 16, 0])
def test_queries_over_a_shared_prefix(shared: int) -> None:
    """Pieces, some of them empty, joined as decode attention joins them."""
    torch.manual_seed(shared)
    sequences, heads, splits = 35, (8, 2), 3
    k, v = (torch.randn(20, heads[1], 16, 128).bfloat16() for _ in range(2))
    table = torch.randperm(20).to(torch.int32)
    for cache in (k, v):
        cache[table[shared // 16].long(), :, shared % 16 :] = torch.nan
    q = torch.randn(sequences, heads[0], 128).bfloat16()
    out, lse = torch.full((splits, sequences, heads[0], 128), torch.nan), torch.full((splits, sequences, heads[0]), 7.0)
    attention.prefix_on_hopper(
        out, lse, q, k, v, table, torch.tensor([shared], dtype=torch.int32), splits=splits, scale=0.09, pdl=False
    )
    if shared == 0:
        assert (lse == -torch.inf).all()
        assert (out == 0).all()
        return
    starts = list(range(sequences + 1))
    expected = paged_attention_reference(q, k, v, table.expand(sequences, -1), starts, [shared] * sequences, 0.09)
    joined = ((lse * math.log(2)).softmax(0)[..., None] * out).sum(0)
    torch.testing.assert_close(joined, expected, atol=0.01, rtol=0.01)


@pytest.mark.parametrize("slots", [512, 20], ids=["pieces apart", "pieces in turn"])
def test_a_query_has_the_same_bits_in_any_batch(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt at once, in chunks beside others, and token by token; pieces of keys are computed apart or in turn."""
    torch.manual_seed(slots)
    heads, scale, context, others = (4, 2), 0.09, 400, (130, 300)
    blocks = -(-context // 16)
    k, v = (torch.randn(3 * blocks, heads[1], 16, 128).bfloat16() for _ in range(2))
    tables = torch.randperm(3 * blocks).to(torch.int32).view(3, blocks)
    q = torch.randn(context, heads[0], 128).bfloat16()

    def attend(chunks: list[tuple[int, int, int]]) -> list[torch.Tensor]:
        """Of (row of the table, first query, end) each."""
        starts = torch.tensor([0, *(end - first for _, first, end in chunks)]).cumsum(0).to(torch.int32)
        queries = torch.cat([q[first:end] for _, first, end in chunks])
        out, ends = torch.empty_like(queries), torch.tensor([end for _, _, end in chunks], dtype=torch.int32)
        attention.prefill_on_hopper(
            out, queries, k, v, tables[[row for row, _, _ in chunks]], starts, ends, scale=scale, key_range=1
        )
        return list(out.split([end - first for _, first, end in chunks]))

    whole = attend([(0, 0, context)])[0]
    expected = paged_attention_reference(q, k, v, tables[:1], [0, context], [context], scale)
    torch.testing.assert_close(whole.float(), expected, atol=0.01, rtol=0.01)
    monkeypatch.setattr(attention, "_SLOTS", slots)
    for first, end in ((0, 70), (70, 129), (129, 300), (300, 400), (255, 256), (256, 257), (399, 400)):
        beside = [(row + 1, others[row] - row - 1, others[row]) for row in range(2)]
        found = attend([beside[0], (0, first, end), beside[1]])[1]
        assert torch.equal(found, whole[first:end]), (first, end)
