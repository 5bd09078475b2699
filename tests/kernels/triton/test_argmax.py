"""The argmax kernel, through Triton's interpreter."""

from __future__ import annotations

import torch

import tests.triton_interpreter  # noqa: F401  isort: skip

from penstock.engine.executor import NOT_A_NUMBER
from penstock.kernels.triton.argmax import argmax, argmax_scratch

VOCAB = 9001  # two chunks, the second ragged


def test_takes_the_lowest_of_tied_tokens() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    logits[0, [8999, 8500, 4100, 4096]] = 50.0
    logits[1, 9000] = 50.0
    logits[2] = 0.0
    out = argmax(logits, torch.empty(3, dtype=torch.int64), argmax_scratch(3, VOCAB, logits.device))
    assert out.tolist() == [4096, 9000, 0]


def test_says_where_no_logit_is_a_number() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2))
    logits[0], logits[2] = torch.nan, -torch.inf
    last_tokens, rows = torch.full((3,), -1), torch.arange(3, dtype=torch.int32)
    scratch = argmax_scratch(3, VOCAB, logits.device)
    out = argmax(logits, torch.empty(3, dtype=torch.int64), scratch, feed=(last_tokens, rows))
    assert out.tolist() == [NOT_A_NUMBER, logits[1].argmax(), NOT_A_NUMBER]
    assert ((last_tokens >= 0) & (last_tokens < VOCAB)).all(), "the next step, which is under way, reads them"


def test_feeds_tokens_back_to_their_rows() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    last_tokens, rows = torch.full((6,), -1), torch.tensor([4, 0, 5], dtype=torch.int32)
    scratch = argmax_scratch(3, VOCAB, logits.device)
    out = argmax(logits, torch.empty(3, dtype=torch.int64), scratch, feed=(last_tokens, rows))
    assert out.tolist() == logits.argmax(-1).tolist()
    assert last_tokens.tolist() == [out[1], -1, -1, -1, out[0], out[2]]
