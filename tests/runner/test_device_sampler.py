"""Sampling as the GPU does it, through Triton's interpreter, against the sampler in plain torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given

import tests.triton_interpreter  # noqa: F401  isort: skip

from penstock.core.request import Grammar, SamplingParams
from penstock.engine.executor import RowSetup, Step, TokenMask
from penstock.kernels.triton.drafts import Drafts
from penstock.runner.device_rows import DeviceRows
from penstock.runner.device_sampler import DeviceSampler
from penstock.runner.device_stream import Pinned
from penstock.runner.model_runner import score
from penstock.runner.row_state import TorchRows
from penstock.runner.sampler import sample
from penstock.runner.scoring import scored_rows
from tests.runner.emulated_cuda import CPU, HostStream
from tests.runner.test_any_params import LIMITS, PROMPT, accepted, asked, request_of

VOCAB = 2111
SEQS = 12
GRAMMAR = Grammar("regex", "x")


def some_params(draw: np.random.Generator) -> SamplingParams:
    def maybe(share: float, value: float, otherwise: float) -> float:
        return float(value if draw.random() < share else otherwise)

    bias = {int(t): float(draw.uniform(-5, 5)) for t in draw.integers(0, VOCAB, 4)} if draw.random() < 0.3 else {}
    return SamplingParams(
        temperature=maybe(0.7, draw.choice([0.3, 1.0, 2.0]), 0.0),
        top_k=int(maybe(0.3, draw.choice([1, 5, 40, 900]), 0)),
        top_p=maybe(0.4, draw.choice([0.95, 0.5, 0.01]), 1.0),
        min_p=maybe(0.2, draw.choice([0.02, 0.9]), 0.0),
        repetition_penalty=maybe(0.3, draw.uniform(0.5, 2.0), 1.0),
        presence_penalty=maybe(0.3, draw.uniform(-2.0, 2.0), 0.0),
        frequency_penalty=maybe(0.3, draw.uniform(-2.0, 2.0), 0.0),
        logit_bias=bias,
        min_tokens=int(maybe(0.3, 6, 0)),
        logprobs=int(draw.integers(0, 21)) if draw.random() < 0.4 else None,
        grammar=GRAMMAR if draw.random() < 0.4 else None,
        max_tokens=20,
    )


def some_mask(draw: np.random.Generator) -> TokenMask:
    bits = np.zeros(-(-VOCAB // 32) * 32, dtype=np.uint8)
    bits[:VOCAB] = draw.random(VOCAB) < draw.choice([0.01, 0.5, 1.0])
    bits[draw.integers(VOCAB)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


@pytest.mark.parametrize("seed", range(3))
def test_the_same_tokens_and_scores_as_plain_torch(seed: int) -> None:
    """Over steps that count their own output, with rows taken over by other requests and tokens that were forced."""
    draw, cpu = np.random.default_rng(seed), torch.device("cpu")
    expected_rows, rows = TorchRows(SEQS + 1, 1, VOCAB, cpu), DeviceRows(SEQS + 1, 1, VOCAB, HostStream(cpu))
    staged = Pinned((rows.size,), torch.int32, cpu)
    logits, tokens = torch.empty((SEQS, VOCAB)), torch.empty(SEQS, dtype=torch.int64)
    inputs = torch.zeros((3, SEQS), dtype=torch.int32)
    drafts = Drafts(*torch.zeros((2, SEQS), dtype=torch.int32))
    sampler = DeviceSampler(rows, logits, tokens, inputs, drafts, HostStream(cpu))
    for number in range(4):
        taken = range(SEQS) if number == 0 else draw.integers(0, SEQS, 3).tolist()
        setups = []
        for row in dict.fromkeys(taken):
            context = draw.integers(0, VOCAB, 30).tolist()
            stops = draw.integers(0, VOCAB, 3).tolist()
            setups.append(RowSetup(row, some_params(draw), int(draw.integers(0, 2**63)), context, 20, stops))
        forced = [(row, draw.integers(0, VOCAB, 3).tolist()) for row in range(SEQS) if row not in taken]
        step = Step(setups=setups, forced=forced)
        expected_rows.apply(step)
        rows.apply(step)
        rows.send(step, staged)
        order = draw.permutation(SEQS).astype(np.int32)
        positions = draw.integers(20, 32, SEQS).astype(np.int32)
        constrained = [i for i in range(SEQS) if rows.params(int(order[i])).grammar]
        masks = {i: some_mask(draw) for i in constrained}
        logits[:] = torch.from_numpy(draw.standard_normal((SEQS, VOCAB), dtype=np.float32)) * (0.5, 3, 8, 3)[number]
        greedy = logits.argmax(-1)
        tokens[:] = greedy
        expected = sample(logits.clone(), greedy, expected_rows, order, positions, masks)
        inputs[0], inputs[1], inputs[2] = torch.from_numpy(order), torch.from_numpy(positions), -1
        for mask, index in enumerate(constrained):
            inputs[2, index] = mask
        if masks:
            sampler.send_masks(len(sampler.stage_masks(np.stack(list(masks.values())))))
        sampler.run(SEQS)
        assert tokens.tolist() == expected.tolist()
        changed = torch.from_numpy(order[rows.needs[order] != 0]).long()
        assert rows.last_token_R[changed].tolist() == expected_rows.last_token_R[changed].tolist()
        asked, widths = scored_rows(rows, order)
        found = sampler.scores(SEQS).read(tokens.tolist(), asked, widths)
        for one, other in zip(found, score(logits[asked], expected[asked], widths), strict=True):
            assert one.token_id == other.token_id
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]
            assert [value for _, value in one.top] == pytest.approx([value for _, value in other.top], abs=1e-4)


@given(asked)
@example({"min_tokens": 2**31 - 1})
def test_rows_hold_whatever_is_accepted(fields: dict[str, Any]) -> None:
    vocab = LIMITS.vocab_size
    rows, plain = DeviceRows(1, 1, vocab, HostStream(CPU)), TorchRows(1, 1, vocab, CPU)

    def take_row(params: SamplingParams) -> None:
        request = request_of(params)
        LIMITS.check(request)
        step = Step(setups=[RowSetup(0, params, request.seed, PROMPT, len(PROMPT), params.stop_token_ids)])
        plain.apply(step)
        rows.apply(step)
        rows.send(step, Pinned((rows.size,), torch.int32, CPU))

    accepted(fields, take_row)
