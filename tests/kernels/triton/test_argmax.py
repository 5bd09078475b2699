"""The argmax kernel, through Triton's interpreter."""

from __future__ import annotations

import torch

import tests.triton_interpreter  # noqa: F401  isort: skip

from penstock.kernels.triton.argmax import argmax, argmax_scratch

VOCAB = 9001  # two chunks, the second ragged


def test_takes_the_lowest_of_tied_tokens() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    logits[0, [8999, 8500, 4100, 4096]] = 50.0
    logits[1, 9000] = 50.0
    logits[2] = float("-inf")
    out = argmax(logits, torch.empty(3, dtype=torch.int64), argmax_scratch(3, VOCAB, logits.device))
    assert out.tolist() == [4096, 9000, 0]


def test_feeds_tokens_back_to_their_rows() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    last_tokens, rows = torch.full((6,), -1), torch.tensor([4, 0, 5], dtype=torch.int32)
    scratch = argmax_scratch(3, VOCAB, logits.device)
    out = argmax(logits, torch.empty(3, dtype=torch.int64), scratch, feed=(last_tokens, rows))
    assert out.tolist() == logits.argmax(-1).tolist()
    assert last_tokens.tolist() == [out[1], -1, -1, -1, out[0], out[2]]
