"""Sampling against plain reimplementations, and the properties that streams rely on."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from penstock.core.request import SamplingParams
from penstock.engine.executor import NOT_A_NUMBER, RowSetup, Step
from penstock.runner.row_state import TorchRows
from penstock.runner.sampler import gumbel, gumbel_of, philox, sample

VOCAB = 3001  # odd, and over the number of candidates looked at first


def state_with(*rows: SamplingParams, tokens: tuple[int, ...] = (), prompt_len: int = 0, seed: int = 5) -> TorchRows:
    state = TorchRows(len(rows), 1, VOCAB, torch.device("cpu"))
    setups = [RowSetup(i, params, seed + i, tokens, prompt_len, ()) for i, params in enumerate(rows)]
    state.apply(Step(setups=setups))
    return state


def draw(state: TorchRows, logits: torch.Tensor, positions: list[int]) -> list[int]:
    """One token for each row of logits; all from row 0 of the state if it has only one."""
    rows = np.arange(len(logits), dtype=np.int32) % len(state.needs)
    return sample(logits, logits.argmax(-1), state, rows, np.array(positions, dtype=np.int32)).tolist()


def test_philox_known_answer() -> None:
    """From the generator's published test vectors: counter 0, key 0."""
    zero = torch.zeros(1, dtype=torch.int64)
    words = [int(word) for word in philox(zero, zero, torch.zeros(1, 1, dtype=torch.int64))]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_noise_is_the_same_for_some_tokens_as_for_all() -> None:
    seeds, positions = torch.tensor([3, 2**62 + 1, -7]), torch.tensor([0, 17, 100_000])
    tokens = torch.randint(VOCAB, (3, 50), generator=torch.Generator().manual_seed(0))
    everything = gumbel(seeds, positions, VOCAB)
    assert torch.equal(gumbel_of(seeds, positions, tokens), everything.gather(1, tokens))
    assert everything.isfinite().all()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.3, top_k=5),
        SamplingParams(top_p=0.6),
        SamplingParams(top_k=20, top_p=0.8),
        SamplingParams(min_p=0.2),
        SamplingParams(top_p=0.9999, top_k=2500),
    ],
)
def test_frequencies_match_the_filtered_distribution(params: SamplingParams) -> None:
    draws = 4000
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 4
    expected = reference_distribution(logits, params)
    rows = [params] * 1
    state = state_with(*rows)
    batch = logits.repeat(500, 1)
    counts = np.zeros(VOCAB)
    for start in range(0, draws, 500):
        for token in draw(state, batch.clone(), list(range(start, start + 500))):
            counts[token] += 1
    assert counts[expected == 0].sum() == 0
    likely = expected * draws >= 20
    error = (counts[likely] - expected[likely] * draws) / np.sqrt(
        draws * expected[likely] * (1 - expected[likely]) + 1e-9
    )
    assert np.abs(error[expected[likely] < 1]).max(initial=0) < 5


def reference_distribution(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    probabilities = np.exp((logits.double() / params.temperature).log_softmax(-1).numpy())
    order = np.argsort(-probabilities)
    kept = order[: params.top_k or VOCAB]
    mass = np.cumsum(probabilities[kept]) / probabilities[kept].sum()
    kept = kept[: int(np.searchsorted(mass, params.top_p)) + 1]
    kept = kept[probabilities[kept] >= params.min_p * probabilities.max()]
    result = np.zeros(VOCAB)
    result[kept] = probabilities[kept] / probabilities[kept].sum()
    return result


def test_the_same_request_draws_the_same_whatever_it_is_batched_with() -> None:
    generator = torch.Generator().manual_seed(2)
    mixed = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.9),
        SamplingParams(top_p=0.9),
        SamplingParams(frequency_penalty=0.5),
        SamplingParams(temperature=0.5, logit_bias={4: 3.0}),
    ]
    logits = torch.randn(len(mixed), VOCAB, generator=generator) * 3
    together = draw(state_with(*mixed), logits.clone(), [9] * len(mixed))
    alone = []
    for i, params in enumerate(mixed):
        alone += draw(state_with(params, seed=5 + i), logits[i : i + 1].clone(), [9])
    assert together == alone


def test_penalties_and_bias() -> None:
    """Compared with the definitions, spelled out token by token, over three steps that count their own output."""
    params = SamplingParams(
        temperature=0, repetition_penalty=1.7, presence_penalty=0.4, frequency_penalty=0.3, logit_bias={11: 2.5}
    )
    prompt, output = [1, 2, 3], [3, 8, 8]
    state = state_with(params, tokens=(*prompt, *output), prompt_len=len(prompt))
    generator = torch.Generator().manual_seed(3)
    for step in range(3):
        logits = torch.randn(1, VOCAB, generator=generator)
        expected = logits[0].clone()
        expected[11] += 2.5
        for token in set(prompt) | set(output):
            expected[token] = expected[token] / 1.7 if expected[token] > 0 else expected[token] * 1.7
        for token in set(output):
            expected[token] -= 0.4 + 0.3 * output.count(token)
        token = draw(state, logits, [6 + step])[0]
        assert token == int(expected.argmax())
        output.append(token)


def test_min_tokens_forbids_stop_ids_until_reached() -> None:
    state = TorchRows(1, 1, VOCAB, torch.device("cpu"))
    state.apply(Step(setups=[RowSetup(0, SamplingParams(temperature=0, min_tokens=2), 0, (1, 2), 2, (50, 60))]))
    logits = torch.zeros(1, VOCAB)
    logits[0, 50], logits[0, 60], logits[0, 70] = 9, 8, 7
    assert [draw(state, logits.clone(), [position])[0] for position in (2, 3, 4)] == [70, 70, 50]


def test_a_row_without_numbers_has_no_token() -> None:
    asked = [SamplingParams(temperature=0), SamplingParams(temperature=1, top_k=5), SamplingParams(presence_penalty=1)]
    state, logits = state_with(*asked, SamplingParams(temperature=0)), torch.zeros(4, VOCAB)
    logits[:3], logits[3, 7] = torch.nan, 1
    assert draw(state, logits, [0] * 4) == [NOT_A_NUMBER] * 3 + [7]
    assert (state.last_token_R >= 0).all()


def test_greedy_does_not_touch_logits() -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(4))
    before = logits.clone()
    assert draw(state_with(*[SamplingParams(temperature=0)] * 2), logits, [0, 0]) == before.argmax(-1).tolist()
    assert torch.equal(logits, before)
    assert math.isfinite(float(logits.sum()))
