"""Sampling kernels against the plain definition, through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

import tests.triton_interpreter  # noqa: F401  isort: skip

from penstock.kernels.sampling_reference import philox4x32, sample_reference
from penstock.kernels.triton.sampling import SamplingRows, argmax, sample, sampling_scratch

VOCAB = 9001  # two chunks, the second ragged


def test_philox_known_answers() -> None:
    """From the generator's published test vectors."""
    zero = torch.tensor(0)
    assert [hex(w) for w in philox4x32(0, zero, zero).tolist()] == [
        "0x6627e8d5",
        "0xe169c58d",
        "0xbc57ac4c",
        "0x9b00dbd8",
    ]


def test_argmax_takes_the_lowest_of_tied_tokens() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    logits[0, [8999, 8500, 4100, 4096]] = 50.0
    logits[1, 9000] = 50.0
    logits[2] = float("-inf")
    out = argmax(logits, torch.empty(3, dtype=torch.int64), sampling_scratch(3, VOCAB, logits.device))
    assert out.tolist() == [4096, 9000, 0]


def test_argmax_feeds_tokens_back_to_their_rows() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    last_tokens, rows = torch.full((6,), -1), torch.tensor([4, 0, 5], dtype=torch.int32)
    scratch = sampling_scratch(3, VOCAB, logits.device)
    out = argmax(logits, torch.empty(3, dtype=torch.int64), scratch, feed=(last_tokens, rows))
    assert out.tolist() == logits.argmax(-1).tolist()
    assert last_tokens.tolist() == [out[1], -1, -1, -1, out[0], out[2]]


CASES = [  # temperature, top_k, top_p, min_p
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 5, 1.0, 0.0),
    (1.5, 0, 0.6, 0.0),
    (1.3, 40, 0.8, 0.0),
    (2.0, 0, 1.0, 0.05),
    (3.0, 1, 1.0, 0.0),
    (2.0, 0, 0.01, 0.0),
    (0.1, 400, 0.999, 0.0),  # the 400th is far below the maximum
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sample(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    logits = (torch.randn(len(CASES), VOCAB, generator=generator) * 3).to(dtype)
    columns = list(zip(*CASES, strict=True))
    seeds = [(1 << 63) - 1 - i if i % 2 == 0 else i for i in range(len(CASES))]  # both words of the key
    scratch = sampling_scratch(len(CASES), VOCAB, logits.device)
    position = 77
    rows = SamplingRows(
        temperature=torch.tensor(columns[0]),
        seed=torch.tensor(seeds),
        position=torch.full((len(CASES),), position),
        top_k=torch.tensor(columns[1], dtype=torch.int32),
        top_p=torch.tensor(columns[2]),
        min_p=torch.tensor(columns[3]),
    )
    out = torch.empty(len(CASES), dtype=torch.int64)
    sample(logits, out, rows, scratch, any_top_k=True, any_top_p=True, any_min_p=True)
    expected = [sample_reference(logits[i].float(), int(rows.seed[i]), position, *CASES[i]) for i in range(len(CASES))]
    assert out.tolist() == expected


def test_top_p_reaches_far_below_the_maximum() -> None:
    """One token has 87% of the mass and 9,000 equal ones share the rest, each e**-11 as likely."""
    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(7)) * 1e-3
    logits[:, 5] = 11.0
    rows = SamplingRows(
        temperature=torch.ones(8),
        seed=torch.arange(8) + 24,
        position=torch.arange(8),
        top_k=torch.zeros(8, dtype=torch.int32),
        top_p=torch.full((8,), 0.98),
        min_p=torch.zeros(8),
    )
    out = torch.empty(8, dtype=torch.int64)
    scratch = sampling_scratch(8, VOCAB, logits.device)
    sample(logits, out, rows, scratch, any_top_k=False, any_top_p=True, any_min_p=False)
    expected = [sample_reference(logits[i], i + 24, i, 1.0, 0, 0.98, 0.0) for i in range(8)]
    assert out.tolist() == expected
    assert set(expected) != {5}


def test_flags_skip_only_filters_that_are_off() -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(6))
    rows = SamplingRows(
        temperature=torch.tensor([1.0, 1.0]),
        seed=torch.tensor([1, 2]),
        position=torch.tensor([3, 4]),
        top_k=torch.tensor([3, 0], dtype=torch.int32),
        top_p=torch.ones(2),
        min_p=torch.zeros(2),
    )
    scratch = sampling_scratch(2, VOCAB, logits.device)
    flags = {"any_top_k": True, "any_top_p": False, "any_min_p": False}
    out = sample(logits, torch.empty(2, dtype=torch.int64), rows, scratch, **flags)
    assert out.tolist() == [
        sample_reference(logits[0], 1, 3, 1.0, 3, 1.0, 0.0),
        sample_reference(logits[1], 2, 4, 1.0, 0, 1.0, 0.0),
    ]
