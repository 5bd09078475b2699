"""Sampling on the host against sampling in torch: the same request draws the same tokens wherever it runs."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch

from penstock.core.errors import EngineFailure, StartupError
from penstock.core.request import SamplingParams
from penstock.engine.executor import RowSetup, Step
from penstock.kernels.native import bindings
from penstock.kernels.native.model import NativeModel
from penstock.runner import host_sampler, sampler, scoring
from penstock.runner.model_runner import score as torch_score
from penstock.runner.row_state import TorchRows
from penstock.runner.rows import HostRows

pytestmark = pytest.mark.skipif(not bindings.available(), reason=str(bindings.unavailable_reason()))

VOCAB = 3001  # no multiple of a vector
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 16,
    "norm_eps": 1e-5,
    "tie_embeddings": True,
    "attention_bias": False,
    "output_bias": False,
    "mlp_bias": False,
    "qk_norm": False,
    "windows": (0,),
    "moe": None,
}
PARAMS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.3, top_k=5),
    SamplingParams(top_k=1),
    SamplingParams(top_p=0.6),
    SamplingParams(temperature=2.0, top_p=0.999),
    SamplingParams(top_k=20, top_p=0.8),
    SamplingParams(min_p=0.2),
    SamplingParams(min_p=0.01, top_k=50, top_p=0.9),
    SamplingParams(top_k=2500, top_p=0.9999),
    SamplingParams(temperature=0, repetition_penalty=1.7, presence_penalty=0.4, frequency_penalty=0.3),
    SamplingParams(temperature=0.8, frequency_penalty=1.0, top_p=0.9),
    SamplingParams(temperature=0.5, logit_bias={4: 3.0, 17: -5.0, VOCAB + 9: 1.0}),
    SamplingParams(temperature=0, min_tokens=9),
    SamplingParams(temperature=1, min_tokens=9, logit_bias={50: 100.0}),
]


@pytest.fixture(params=get_args(bindings.Isa))
def model(request: pytest.FixtureRequest) -> Iterator[NativeModel]:
    best = bindings.isa()
    try:
        bindings.set_isa(request.param)
    except StartupError:
        pytest.skip(f"no {request.param} here")
    yield make_model()
    bindings.set_isa(best)


def make_model() -> NativeModel:
    config: Any = SimpleNamespace(vocab_size=VOCAB, **SHAPE)
    frequencies = np.ones(8, dtype=np.float32)
    return NativeModel(config, frequencies, scheme="int8", block_size=16, num_blocks=2, threads=2)


def setups() -> Step:
    """A prompt and some output for each row; 50 and 60 end it."""
    tokens = (1, 2, 3, 3, 8, 8)
    return Step(setups=[RowSetup(i, params, 2**40 * i - 7, tokens, 3, (50, 60)) for i, params in enumerate(PARAMS)])


def test_the_same_tokens_as_torch(model: NativeModel) -> None:
    """Over steps that count their own output; logits are peaked in one half of the steps and flat in the other."""
    rows = np.arange(len(PARAMS), dtype=np.int32)
    host, device = HostRows(len(PARAMS), 1, VOCAB), TorchRows(len(PARAMS), 1, VOCAB, torch.device("cpu"))
    host.apply(setups())
    device.apply(setups())
    rng = np.random.default_rng(1)
    for number in range(40):
        logits = rng.standard_normal((len(PARAMS), VOCAB), dtype=np.float32) * np.float32(6 if number % 2 else 0.7)
        logits[:, 50] += 5
        positions = np.full(len(PARAMS), 6 + number, dtype=np.int32)
        given = torch.from_numpy(logits.copy())
        expected = sampler.sample(given, given.argmax(-1), device, rows, positions).tolist()
        greedy = logits.argmax(axis=1).astype(np.int32)
        assert host_sampler.sample(model.sample, logits, greedy, host, rows, positions, {}).tolist() == expected


def test_a_row_taken_over_forgets_what_was_counted() -> None:
    model, rows = make_model(), HostRows(1, 1, VOCAB)
    params = SamplingParams(temperature=0, presence_penalty=1.5)
    rows.apply(Step(setups=[RowSetup(0, params, 0, (1, 7), 1, ())]))
    logits = np.zeros((1, VOCAB), dtype=np.float32)
    logits[0, 7], logits[0, 9] = 2, 1
    index, position = np.zeros(1, dtype=np.int32), np.full(1, 2, dtype=np.int32)

    def greedy() -> int:
        return int(host_sampler.sample(model.sample, logits.copy(), np.array([7]), rows, index, position, {})[0])

    assert greedy() == 9
    rows.apply(Step(setups=[RowSetup(0, params, 0, (1,), 1, ())]))
    assert greedy() == 7


def test_scores_match_torch() -> None:
    logits = np.random.default_rng(2).standard_normal((4, VOCAB), dtype=np.float32) * 5
    tokens, widths = np.array([3, 0, VOCAB - 1, 77], dtype=np.int32), [0, 1, 5, 20]
    found = scoring.score(logits, tokens, widths)
    expected = torch_score(torch.from_numpy(logits), torch.from_numpy(tokens).long(), widths)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.token_id == theirs.token_id
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
        assert [value for _, value in ours.top] == pytest.approx([value for _, value in theirs.top], abs=1e-4)


def test_draws_outside_the_logits_are_refused() -> None:
    draws = np.zeros(1, dtype=bindings.DRAW)
    draws["row"] = 2
    with pytest.raises(EngineFailure, match="names a row that does not exist"):
        make_model().sample(np.zeros((2, VOCAB), dtype=np.float32), draws)
