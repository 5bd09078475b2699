"""Sampling without a mask, and again with it where the token is refused, gives what sampling with the mask gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.core.errors import EngineFailure
from penstock.core.request import Grammar, SamplingParams
from penstock.engine.executor import UNDECIDED, Executor, RowSetup, Step, TokenMask
from penstock.kernels.attention_reference import ReferenceAttention
from penstock.kernels.native import bindings
from penstock.runner.forward import TorchForward
from penstock.runner.host_rows import HostRows
from penstock.runner.model_runner import ModelRunner
from penstock.runner.native_runner import NativeRunner
from penstock.runner.row_state import TorchRows
from tests.kernels.native.random_models import VOCAB, build, reference
from tests.runner.test_fused_forward import load

ROWS, SMALL_VOCAB = 10, 64
CPU = torch.device("cpu")
GRAMMAR = Grammar("regex", "x")
PARAMS = [
    SamplingParams(temperature=0, grammar=GRAMMAR),
    SamplingParams(temperature=1.5, grammar=GRAMMAR),
    SamplingParams(temperature=1.5),
    SamplingParams(temperature=3, grammar=GRAMMAR),
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.7, grammar=GRAMMAR),
    SamplingParams(temperature=1.5, top_k=5, grammar=GRAMMAR),
    SamplingParams(temperature=0.7, top_p=0.6, grammar=GRAMMAR),
    SamplingParams(temperature=1, min_p=0.2, grammar=GRAMMAR),
    SamplingParams(temperature=0.8, top_k=12, top_p=0.8, min_p=0.05, grammar=GRAMMAR),
]
needs_native = pytest.mark.skipif(not bindings.available(), reason=str(bindings.unavailable_reason()))


def native(folder: Path) -> tuple[Executor, int]:
    return NativeRunner(build(reference("llama", "int8"), "int8"), HostRows(ROWS, 2, VOCAB)), VOCAB


def plain_torch(folder: Path) -> tuple[Executor, int]:
    model, _ = load("llama", folder)
    attention = ReferenceAttention(model.attention_spec, 2 * ROWS, 16, torch.float32, CPU)
    rows = TorchRows(ROWS, 2, SMALL_VOCAB, CPU)
    runner = ModelRunner(TorchForward(model, attention, CPU), rows, num_blocks=2 * ROWS, block_size=16)
    return runner, SMALL_VOCAB


def prompts(draw: np.random.Generator, vocab: int) -> Step:
    """The second one computes a piece of its prompt that samples nothing."""
    step = Step(samples=[1, 0, 1, 1, 1, 1, 1, 1, 1, 1])
    for row, params in enumerate(PARAMS):
        tokens = draw.integers(0, vocab, int(draw.integers(2, 20))).tolist()
        step.rows.append(row)
        step.starts.append(0)
        step.counts.append(len(tokens))
        step.tokens += tokens
        step.setups.append(RowSetup(row, params, int(draw.integers(0, 2**62)), tokens, len(tokens), ()))
        step.blocks.append((row, 0, [2 * row, 2 * row + 1]))
    return step


def allows(mask: TokenMask, token: int) -> bool:
    return bool(mask[token // 32] >> token % 32 & 1)


@pytest.mark.parametrize("make", [pytest.param(native, marks=needs_native), plain_torch])
def test_the_same_tokens_as_with_masks(make: Callable[[Path], tuple[Executor, int]], tmp_path: Path) -> None:
    executor, vocab = make(tmp_path)
    refusals, undecided = 0, 0
    for seed in range(12):
        draw = np.random.default_rng(seed)
        step, grammars = prompts(draw, vocab), [0, 3, 5, 6, 7, 8, 9]
        words = -(-vocab // 32)
        masks: dict[int, TokenMask] = {}
        for index in grammars:
            bits = np.zeros(32 * words, np.uint8)
            bits[draw.permutation(vocab)[: vocab // 2]] = 1
            masks[index] = np.packbits(bits, bitorder="little").view(np.int32)
        step.constrained = grammars
        executor.constrain(handle := executor.launch(step), np.stack([masks[index] for index in grammars]))
        expected = executor.collect(handle).tokens
        step.constrained, step.checked = [], grammars
        found = executor.collect(handle := executor.launch(step)).tokens
        unknown = [i for i in grammars if found[i] == [UNDECIDED]]
        refused = {i: masks[i] for i in grammars if i in unknown or not allows(masks[i], found[i][0])}
        if refused:
            for index, token in zip(refused, executor.resample(handle, refused), strict=True):
                found[index] = [token]
        assert found == expected
        refusals += len(refused) - len(unknown)
        undecided += len(unknown)
        assert set(unknown) <= {6, 7, 8, 9}, "the others sample among all tokens"
    assert refusals > 5
    assert undecided > 5


@needs_native
def test_logits_that_were_not_kept(tmp_path: Path) -> None:
    runner, vocab = native(tmp_path)
    step = prompts(np.random.default_rng(1), vocab)
    runner.collect(runner.launch(step))
    with pytest.raises(EngineFailure, match="not kept"):
        runner.resample(step, {0: np.full(-(-vocab // 32), -1, np.int32)})
