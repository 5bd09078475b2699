"""Sampling kernels against the plain definition, through Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tests.triton_interpreter  # noqa: F401  isort: skip

from penstock.engine.executor import NOT_A_NUMBER, UNDECIDED
from penstock.kernels.sampling_reference import philox4x32, sample_reference
from penstock.kernels.triton import sampling_row
from penstock.kernels.triton.sampling import (
    MOST_ALTERNATIVES,
    Sampled,
    SamplingInputs,
    SamplingRows,
    sample,
    sampling_scratch,
)
from penstock.kernels.triton.sampling_row import CHECKED, NO_MASK, ROW
from penstock.runner.rows import Needs

VOCAB = 4999  # three chunks, the last one ragged
WORDS = -(-VOCAB // 32)
POSITION = 77


def test_philox_known_answers() -> None:
    """From the generator's published test vectors."""
    zero = torch.tensor(0)
    assert [hex(w) for w in philox4x32(0, zero, zero).tolist()] == [
        "0x6627e8d5",
        "0xe169c58d",
        "0xbc57ac4c",
        "0x9b00dbd8",
    ]


def test_kernels_know_the_bits_of_needs() -> None:
    for need in Needs:
        if need not in (Needs.NOTHING, Needs.PROMPT_LOGPROBS):
            assert getattr(sampling_row, str(need.name)).value == need.value
    changing = Needs.BIAS | Needs.PENALTIES | Needs.MIN_TOKENS | Needs.GRAMMAR
    assert changing.value == sampling_row.ADJUST.value
    assert (sampling_row.NOT_A_NUMBER.value, sampling_row.UNDECIDED.value) == (NOT_A_NUMBER, UNDECIDED)


def run(
    logits: torch.Tensor,
    params: np.ndarray,
    greedy: int = -1,
    *,
    masks: torch.Tensor | None = None,
    mask: int = NO_MASK,
) -> Sampled:
    """All rows at one position, without tables; with the masks of [rows, V], or else all with this one."""
    count = len(params)
    rows = SamplingRows(
        params=torch.from_numpy(params.view(np.int32).reshape(count, -1)),
        seen=torch.zeros((count, VOCAB), dtype=torch.int16),
        biases=torch.zeros((count, VOCAB)),
        stops=torch.zeros((count, WORDS), dtype=torch.int32),
        last_tokens=torch.full((count,), -1),
    )
    numbers = torch.arange(count, dtype=torch.int32)
    bits = np.zeros((count, 32 * WORDS), np.uint8)
    bits[:, :VOCAB] = 1 if masks is None else masks.numpy()
    words = torch.from_numpy(np.packbits(bits, axis=-1, bitorder="little").view(np.int32))
    mask_of = torch.full((count,), mask, dtype=torch.int32) if masks is None else numbers
    positions = torch.full((count,), POSITION, dtype=torch.int32)
    out = Sampled(
        tokens=torch.full((count,), greedy),
        logprobs=torch.zeros(count),
        top_logprobs=torch.zeros((count, MOST_ALTERNATIVES)),
        top_tokens=torch.zeros((count, MOST_ALTERNATIVES), dtype=torch.int32),
    )
    inputs = SamplingInputs(logits, numbers, positions, mask_of, words)
    sample(inputs, rows, out, sampling_scratch(count, VOCAB, logits.device))
    decided = out.tokens != UNDECIDED
    assert rows.last_tokens[decided].tolist() == out.tokens[decided].clamp(min=-1).tolist()
    assert (rows.last_tokens[~decided] >= 0).all(), "the next step reads some token"
    return out


def asked(*cases: tuple[float, int, float, float]) -> np.ndarray:
    params = np.zeros(len(cases), dtype=ROW)
    for number, (temperature, top_k, top_p, min_p) in enumerate(cases):
        filters = Needs.FILTER if top_k or top_p < 1 or min_p else Needs.NOTHING
        needs = (Needs.RANDOM | filters) if temperature else Needs.LOGPROBS
        seed = (1 << 63) - 1 - number if number % 2 else number  # both words of the key
        params[number] = (needs.value, temperature, top_k, top_p, min_p, seed, 1.0, 0.0, 0.0, 0, 0)
    return params


CASES = [  # temperature, top_k, top_p, min_p
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 5, 1.0, 0.0),
    (1.5, 0, 0.6, 0.0),
    (1.3, 40, 0.8, 0.0),
    (2.0, 0, 1.0, 0.05),
    (2.0, 0, 1.0, 0.95),  # few tokens are left
    (3.0, 1, 1.0, 0.0),
    (2.0, 0, 0.01, 0.0),
    (0.1, 400, 0.999, 0.0),  # more than there are spans
    (1.0, 300, 0.9, 0.1),
    (1.0, 0, 0.9, 0.01),
]


@pytest.mark.parametrize("scale", [0.01, 3.0, 12.0])  # from flat to peaked
def test_sample(scale: float) -> None:
    logits = torch.randn(len(CASES), VOCAB, generator=torch.Generator().manual_seed(4)) * scale
    params = asked(*CASES)
    expected = [sample_reference(logits[i], int(params["seed"][i]), POSITION, *case) for i, case in enumerate(CASES)]
    assert run(logits, params).tokens.tolist() == expected


def test_ties() -> None:
    """Of equal logits all or none are kept, and the lowest greedy token is taken."""
    logits = torch.zeros(4, VOCAB)
    logits[:, 4000:4010] = 2.0
    cases = [(0.0, 0, 1.0, 0.0), (1.0, 3, 1.0, 0.0), (1.0, 0, 0.001, 0.0), (1.0, 0, 1.0, 0.9)]
    params = asked(*cases)
    found = run(logits, params).tokens.tolist()
    assert found == [sample_reference(logits[i], int(params["seed"][i]), POSITION, *c) for i, c in enumerate(cases)]
    assert found[0] == 4000
    assert set(found) <= set(range(4000, 4010))


def test_top_p_reaches_far_below_the_maximum() -> None:
    """One token has 92% of the mass and 5,000 equal ones share the rest, each e**-11 as likely."""
    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(7)) * 1e-3
    logits[:, 5] = 11.0
    params = asked(*[(1.0, 0, 0.98, 0.0)] * 8)
    params["seed"] = np.arange(8) + 24
    expected = [sample_reference(logits[i], i + 24, POSITION, 1.0, 0, 0.98, 0.0) for i in range(8)]
    assert run(logits, params).tokens.tolist() == expected
    assert set(expected) != {5}


@pytest.mark.parametrize("scale", [0.01, 3.0, 12.0])
def test_what_is_sampled_before_the_mask_is_what_any_mask_leaves_that_allows_it(scale: float) -> None:
    params = asked(*CASES[1:], (0.6, 20, 0.95, 0.0), (0.2, 0, 0.9, 0.0))
    params["needs"] |= Needs.GRAMMAR.value
    logits = torch.randn(len(params), VOCAB, generator=torch.Generator().manual_seed(9)) * scale
    tokens = run(logits, params, mask=CHECKED).tokens
    decided = tokens != UNDECIDED
    if scale == 12.0:
        assert decided.sum() > 0.7 * len(params)
    own = logits.gather(1, tokens.clamp(min=0)[:, None])
    anything = torch.rand(logits.shape, generator=torch.Generator().manual_seed(3)) < 0.5
    for masks in (logits > own, logits >= own, logits < own, logits <= own, logits == own, anything):
        masks.scatter_(1, tokens.clamp(min=0)[:, None], True)
        assert run(logits, params, masks=masks).tokens[decided].tolist() == tokens[decided].tolist()


@pytest.mark.parametrize("case", [(1.0, 0, 1.0, 1.0), (1.0, 1, 1.0, 0.0), (1.0, 1, 0.9, 0.0)])
def test_both_zeros_are_the_same_logit(case: tuple[float, int, float, float]) -> None:
    params = asked(case)
    params["needs"] |= Needs.GRAMMAR.value
    logits = torch.full((1, VOCAB), -0.0)
    logits[0, 3] = 0.0
    only = torch.zeros((1, VOCAB))
    only[0, 2500] = 1
    assert run(logits, params, masks=only).tokens.tolist() == [2500], "a token that its mask allows"
    assert run(logits, params).tokens.tolist() == run(torch.zeros(1, VOCAB), params).tokens.tolist()


def test_rows_that_ask_for_nothing_keep_their_token() -> None:
    params = asked((1.0, 0, 1.0, 0.0))
    params["needs"] = 0
    assert run(torch.zeros(1, VOCAB), params).tokens.tolist() == [-1]


NO_NUMBERS_CASES = [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (1.0, 40, 0.9, 0.0), (1.0, 0, 0.9, 0.0), (1.0, 0, 1.0, 0.1)]


@pytest.mark.parametrize("broken", [float("nan"), float("-inf")])
def test_rows_in_which_nothing_may_be_sampled_end_in_some_token(broken: float) -> None:
    tokens = run(torch.full((5, VOCAB), broken), asked(*NO_NUMBERS_CASES)).tokens
    assert ((tokens >= 0) & (tokens < VOCAB)).all()


def test_rows_without_a_number_are_left_alone() -> None:
    found = run(torch.full((5, VOCAB), torch.nan), asked(*NO_NUMBERS_CASES), greedy=NOT_A_NUMBER)
    assert (found.tokens == NOT_A_NUMBER).all()
