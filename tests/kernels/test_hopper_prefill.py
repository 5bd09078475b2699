"""The CUDA kernel itself, emulated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.kernels.hopper import prefill, program, tensor_map
from penstock.kernels.hopper.prefill import prefill_attention_hopper
from penstock.kernels.paged_triton import paged_attention_reference
from tests.kernels.emulated_gpu import available, emulated_kernel, emulated_tensor_map

pytestmark = pytest.mark.skipif(not available, reason="needs g++")


@pytest.mark.parametrize(
    ("heads", "lengths"),
    [
        ((8, 2), [(40, 170), (0, 9), (3, 290), (16, 16)]),  # tiles that end within a block, and on the border of one
        ((7, 1), [(20, 130)]),  # rows of a tile that no query has; a tile of keys that some queries see nothing of
        ((4, 1), [(33, 1100), (1, 600)]),  # few queries with many keys, which are divided
    ],
)
def test_ragged_chunks_over_cached_prefixes(
    heads: tuple[int, int], lengths: list[tuple[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of others stay untouched, and what reused blocks hold after a sequence's end is not seen."""
    scratch = prefill.new_scratch(torch.device("cpu"))
    monkeypatch.setattr(program, "kernel", emulated_kernel(tmp_path, resident=3))
    monkeypatch.setattr(tensor_map, "tensor_map", emulated_tensor_map)
    monkeypatch.setattr(prefill, "_multiprocessors", lambda: 3)
    monkeypatch.setattr(prefill, "_scratch", lambda: scratch)
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
        prefill_attention_hopper(
            out, q, k, v, tables, torch.tensor(starts, dtype=torch.int32), torch.tensor(contexts, dtype=torch.int32),
            scale=0.09,
        )  # fmt: skip
    expected = paged_attention_reference(q, k, v, tables, starts, contexts, 0.09)
    torch.testing.assert_close(out[before:-after].float(), expected[before:-after], atol=0.01, rtol=0.01)
    assert (out[:before] == 7).all()
    assert (out[-after:] == 7).all()
