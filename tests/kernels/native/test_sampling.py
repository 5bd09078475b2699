"""Native sampling against the reference: the same request draws the same tokens wherever it runs."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.core.errors import EngineFailure, StartupError
from penstock.core.request import SamplingParams
from penstock.engine.executor import UNDECIDED, RowSetup, Step
from penstock.kernels.native import bindings
from penstock.kernels.native.model import NativeModel, NativeRows, NativeStep, SampledLogits
from penstock.kernels.native.sampling import NativeSampling
from penstock.kernels.sampling_reference import sample_reference
from penstock.runner import sampler
from penstock.runner.host_rows import HostRows
from penstock.runner.model_runner import score as torch_score
from penstock.runner.row_state import TorchRows
from tests.kernels.native.random_models import VOCAB as MODEL_VOCAB
from tests.kernels.native.random_models import build, reference, step

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
TOKENS, PROMPT_LEN, STOP_IDS = (1, 2, 3, 3, 8, 8), 3, (50, 60)


def make_model() -> NativeModel:
    config: Any = SimpleNamespace(vocab_size=VOCAB, **SHAPE)
    frequencies = np.ones(8, dtype=np.float32)
    return NativeModel(config, frequencies, scheme="int8", block_size=16, num_blocks=2, threads=2)


@pytest.fixture(scope="module")
def models() -> list[NativeModel]:
    """One for each instruction set that this machine has."""
    best, found = bindings.isa(), []
    for isa in get_args(bindings.Isa):
        try:
            bindings.set_isa(isa)
        except StartupError:
            continue
        found.append(make_model())
    bindings.set_isa(best)
    return found


def test_the_same_tokens_as_torch(isa: str) -> None:
    """Over steps that count their own output; logits are peaked in one half of the steps and flat in the other."""
    model, rows = make_model(), np.arange(len(PARAMS), dtype=np.int32)
    host, device = HostRows(len(PARAMS), 1, VOCAB), TorchRows(len(PARAMS), 1, VOCAB, torch.device("cpu"))
    setups = [RowSetup(i, p, 2**40 * i - 7, TOKENS, PROMPT_LEN, STOP_IDS) for i, p in enumerate(PARAMS)]
    host.apply(Step(setups=setups))
    device.apply(Step(setups=setups))
    rng = np.random.default_rng(1)
    for number in range(40):
        logits = rng.standard_normal((len(PARAMS), VOCAB), dtype=np.float32) * np.float32(6 if number % 2 else 0.7)
        logits[:, 50] += 5
        positions = np.full(len(PARAMS), 6 + number, dtype=np.int32)
        torch_logits = torch.from_numpy(logits.copy())
        expected = sampler.sample(torch_logits, torch_logits.argmax(-1), device, rows, positions).tolist()
        assert model.sample(logits, host.sampling, SampledLogits(rows.tolist(), positions.tolist())) == expected


def expected_token(
    logits: np.ndarray, params: SamplingParams, seed: int, position: int, tokens: Sequence[int], mask: np.ndarray | None
) -> int:
    """In plain torch, from the definitions."""
    values = torch.from_numpy(logits.copy())
    for token, bias in params.logit_bias.items():
        if token < VOCAB:
            values[token] += bias
    counts = torch.bincount(torch.tensor(tokens[PROMPT_LEN:], dtype=torch.int64), minlength=VOCAB).float()
    seen = counts > 0
    seen[list(tokens[:PROMPT_LEN])] = True
    repeated = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    values = torch.where(seen, repeated, values)
    values = values - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
    if position - PROMPT_LEN < params.min_tokens:
        values[list(STOP_IDS)] = -torch.inf
    if mask is not None:
        values[~torch.from_numpy(mask)] = -torch.inf
    temperature = 0.0 if params.greedy else params.temperature
    return sample_reference(values, seed, position, temperature, params.top_k, params.top_p, params.min_p)


def packed(mask: np.ndarray) -> np.ndarray:
    """One bit per token, in words of 32."""
    return np.packbits(np.pad(mask, (0, -len(mask) % 32)), bitorder="little").view(np.int32)


def make_logits(seed: int, scale: float, step: float) -> np.ndarray:
    """Normal logits, rounded to a multiple of the step, so that many are equal, if it is not 0."""
    logits = np.random.default_rng(seed).standard_normal(VOCAB) * scale
    return (np.round(logits / step) * step if step else logits).astype(np.float32)


def mask_of(seed: int, allowed: float | None) -> np.ndarray | None:
    """A share of the tokens; all but one are forbidden where that leaves none."""
    if allowed is None:
        return None
    rng = np.random.default_rng(seed + 1)
    mask = rng.random(VOCAB) < allowed
    mask[rng.integers(VOCAB)] = True
    return mask


requests = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.01, 0.3, 1.0, 1.0, 1.0, 2.5, 100.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 40, 1000, VOCAB, 10**6]),
    top_p=st.one_of(st.just(1.0), st.floats(1e-9, 1.0)),
    min_p=st.one_of(st.just(0.0), st.just(1.0), st.floats(1e-9, 1.0)),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.5, 1.2]),
    presence_penalty=st.sampled_from([0.0, 0.0, -2.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.3, 2.0]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB + 5), st.sampled_from([-100.0, 0.5, 100.0]), max_size=3),
    min_tokens=st.sampled_from([0, 5]),
)


@settings(max_examples=300)
@given(
    params=requests,
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(PROMPT_LEN, 10_000),
    scale=st.sampled_from([0.0, 0.01, 1.0, 3.0, 10.0, 80.0]),
    rounding=st.sampled_from([0.0, 0.0, 0.5]),
    allowed=st.sampled_from([None, None, 0.0, 0.01, 0.9]),
    output=st.lists(st.integers(0, VOCAB - 1), max_size=6),
)
@example(SamplingParams(top_p=1e-9), 3, 9, 0.01, 0.0, None, [])  # flat, and next to nothing is kept
@example(SamplingParams(top_k=1), 3, 9, 0.01, 0.0, None, [])
@example(SamplingParams(min_p=1.0), 3, 9, 3.0, 0.5, None, [])  # all that equal the largest
@example(SamplingParams(top_k=3, top_p=0.5), 3, 9, 0.0, 0.0, None, [])  # all are equal
@example(SamplingParams(temperature=0.0), 3, 9, 0.0, 0.0, 0.0, [])  # all but one are forbidden
@example(SamplingParams(logit_bias={7: 100.0}), 3, 9, 1.0, 0.0, None, [])
def test_the_reference_draws_the_same(
    models: list[NativeModel],
    params: SamplingParams,
    seed: int,
    position: int,
    scale: float,
    rounding: float,
    allowed: float | None,
    output: list[int],
) -> None:
    logits = make_logits(seed % 1000, scale, rounding)
    tokens, mask = [*TOKENS[:PROMPT_LEN], *output], mask_of(seed % 1000, allowed)
    expected = expected_token(logits, params, seed, position, tokens, mask)
    masks = {} if mask is None else {0: packed(mask)}
    for model in models:
        sampling = NativeSampling(1, VOCAB)
        sampling.set(0, params, seed=seed, prompt_len=PROMPT_LEN, tokens=tokens, stop_ids=STOP_IDS)
        assert model.sample(logits[None].copy(), sampling, SampledLogits([0], [position], masks=masks)) == [expected]


truncations = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.01, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 0, 1, 2, 40, VOCAB]),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 1.0)),
    min_p=st.one_of(st.just(0.0), st.floats(1e-6, 1.0)),
)


@settings(max_examples=300)
@given(
    params=truncations,
    seed=st.integers(0, 2**63 - 1),
    scale=st.sampled_from([0.0, 1.0, 3.0, 10.0, 80.0]),
    rounding=st.sampled_from([0.0, 0.0, 0.5]),
)
def test_what_is_sampled_before_the_mask_is_what_any_mask_leaves_that_allows_it(
    models: list[NativeModel], params: SamplingParams, seed: int, scale: float, rounding: float
) -> None:
    logits, rng = make_logits(seed % 1000, scale, rounding), np.random.default_rng(seed)
    for model in models:
        sampling = NativeSampling(1, VOCAB)
        sampling.set(0, params, seed=seed, prompt_len=PROMPT_LEN, tokens=(), stop_ids=())
        [token] = model.sample(logits[None].copy(), sampling, SampledLogits([0], [9], targets=[UNDECIDED]))
        if token == UNDECIDED:
            continue
        own, anything = logits[token], rng.random(VOCAB)
        for mask in (logits > own, logits >= own, logits < own, logits <= own, logits == own, anything < 0.5):
            mask[token] = True
            masked = SampledLogits([0], [9], masks={0: packed(mask)})
            assert model.sample(logits[None].copy(), sampling, masked) == [token]


def test_few_samples_wait_for_their_mask(isa: str) -> None:
    params = [SamplingParams(temperature=0.2, top_p=0.9), SamplingParams(temperature=0.6, top_k=20, top_p=0.95)] * 100
    sampling, rows = NativeSampling(len(params), VOCAB), list(range(len(params)))
    for row, own in enumerate(params):
        sampling.set(row, own, seed=row, prompt_len=PROMPT_LEN, tokens=(), stop_ids=())
    logits = np.random.default_rng(4).standard_normal((len(params), VOCAB), dtype=np.float32) * 4
    found = make_model().sample(logits, sampling, SampledLogits(rows, [9] * len(rows), targets=[UNDECIDED] * len(rows)))
    assert 0 < found.count(UNDECIDED) < 0.2 * len(params)


def test_output_counts_wherever_it_came_from(isa: str) -> None:
    """Sampled, forced, or before a preemption: what is penalised is the same."""
    model, params = make_model(), SamplingParams(temperature=0, presence_penalty=1.5, frequency_penalty=0.2)
    prompt, output = (1, 7), (7, 9, 9)
    logits = np.zeros((1, VOCAB), dtype=np.float32)
    logits[0, [7, 9, 11]] = 2, 2.1, 1

    def sample(rows: HostRows) -> int:
        return model.sample(logits.copy(), rows.sampling, SampledLogits([0], [6]))[0]

    preempted, forced, sampled = (HostRows(1, 1, VOCAB) for _ in range(3))
    preempted.apply(Step(setups=[RowSetup(0, params, 0, prompt + output, 2, ())]))
    forced.apply(Step(setups=[RowSetup(0, params, 0, prompt, 2, ())], forced=[(0, list(output))]))
    sampled.apply(Step(setups=[RowSetup(0, params, 0, prompt, 2, ())]))
    assert [sample(sampled) for _ in range(3)] == [9, 7, 11]
    assert sample(preempted) == sample(forced) == 11
    preempted.apply(Step(setups=[RowSetup(0, params, 0, prompt, 2, ())]))
    assert sample(preempted) == 9  # another sequence has taken the row
    preempted.apply(Step(setups=[RowSetup(0, SamplingParams(temperature=0), 0, prompt, 2, ())]))
    assert [sample(preempted) for _ in range(2)] == [9, 9]


def test_a_row_keeps_nothing_of_the_sequences_before(isa: str) -> None:
    """One that wants nothing but the argmax may end where those before it had their prompts."""
    rows, ends = HostRows(1, 1, VOCAB), STOP_IDS[0]
    logits = np.zeros((1, VOCAB), dtype=np.float32)
    logits[0, ends], logits[0, 7] = 2, 1
    before = (SamplingParams(temperature=0.7, min_tokens=5), 90), (SamplingParams(temperature=0), 90)
    for params, prompt_len in (*before, (SamplingParams(temperature=0), 10)):
        rows.apply(Step(setups=[RowSetup(0, params, 0, (1,) * prompt_len, prompt_len, STOP_IDS)]))
    assert make_model().sample(logits, rows.sampling, SampledLogits([0], [20])) == [ends]


def test_scores_are_of_the_unmodified_logits(isa: str) -> None:
    widths = [0, 1, 5, 20]
    logits = np.random.default_rng(2).standard_normal((8, VOCAB), dtype=np.float32) * 5
    sampling = NativeSampling(4, VOCAB)
    for row, width in enumerate(widths):
        bias = {77: 100.0, 5: -100.0}
        sampling.set(row, SamplingParams(temperature=0, logprobs=width, prompt_logprobs=width, logit_bias=bias))
    model, prompt = make_model(), [3, 0, VOCAB - 1, 77]
    call = SampledLogits([0, 1, 2, 3] * 2, [9] * 8, targets=[-1] * 4 + prompt)
    tokens = model.sample(logits.copy(), sampling, call)
    assert tokens == [77] * 4 + prompt
    expected = torch_score(torch.from_numpy(logits), torch.tensor(tokens), widths * 2)
    for i, theirs in enumerate(expected):
        ours = model.scores.read(i, tokens[i], widths[i % 4])
        assert ours.token_id == theirs.token_id
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
        assert [value for _, value in ours.top] == pytest.approx([value for _, value in theirs.top], abs=1e-4)


def test_a_step_samples_from_its_own_logits(isa: str) -> None:
    """Rows of every kind in one step, a mask for one of them, and a prompt that is scored beside them."""
    runner, tokens = build(reference("llama")), np.random.default_rng(6).integers(0, MODEL_VOCAB, (4, 20))
    plain, rows = step([(row, 0, [2 * i, 2 * i + 1]) for i, row in enumerate(tokens)], last_only=True)
    logits = runner.forward(plain, rows)[0].copy()
    sampling = NativeSampling(4, MODEL_VOCAB)
    kinds = [SamplingParams(temperature=0), SamplingParams(top_p=0.9, logprobs=3), SamplingParams(prompt_logprobs=2)]
    for row, params in enumerate(kinds, 1):
        sampling.set(row, params, seed=row)
    allowed = np.arange(MODEL_VOCAB) % 7 == 3
    wanted = [*plain.logit_rows, 60, 61]  # the first two tokens of the last prompt
    given = NativeStep(
        plain.tokens,
        plain.rows,
        plain.starts,
        plain.counts,
        wanted,
        targets=[-1] * 4 + tokens[3, 1:3].tolist(),
        masks={0: packed(allowed)},
    )
    sampled_rows = NativeRows(rows.tables_RM, rows.last_token_R, sampling)
    _, found = runner.forward(given, sampled_rows, logits=False)
    expected = [
        int(np.where(allowed, logits[0], -np.inf).argmax()),
        int(logits[1].argmax()),
        sample_reference(torch.from_numpy(logits[2]), 2, 20, 1.0, 0, 0.9, 0.0),
        sample_reference(torch.from_numpy(logits[3]), 3, 20, 1.0, 0, 1.0, 0.0),
    ]
    assert found[:4] == expected == rows.last_token_R.tolist()
    whole = runner.forward(*step([(tokens[3], 0, [6, 7])]))[0].copy()
    scores = torch_score(torch.from_numpy(logits[2:3]), torch.tensor(found[2:3]), [3])
    scores += torch_score(torch.from_numpy(whole[:2]), torch.from_numpy(tokens[3, 1:3]), [2, 2])
    _, found = runner.forward(given, sampled_rows, logits=False)
    for index, width, theirs in zip((2, 4, 5), (3, 2, 2), scores, strict=True):
        ours = runner.scores.read(index, found[index], width)
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]


def test_calls_that_would_leave_their_memory_are_refused() -> None:
    model, sampling, logits = make_model(), NativeSampling(2, VOCAB), np.zeros((1, VOCAB), dtype=np.float32)
    with pytest.raises(IndexError):
        sampling.set(2, SamplingParams())
    with pytest.raises(EngineFailure, match="rows of the sampling state"):
        model.sample(logits, sampling, SampledLogits([2], [1]))
    with pytest.raises(EngineFailure, match="one row, position and target"):
        model.sample(logits, sampling, SampledLogits([0, 1], [1, 2]))
    with pytest.raises(EngineFailure, match="a bit for every token"):
        model.sample(logits, sampling, SampledLogits([0], [1], masks={0: np.zeros(VOCAB // 32, dtype=np.int32)}))
