"""LoRA adapters on the GPU's runner against plain torch: several in one step, with drafts, prompts and rows without."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.core.request import SamplingParams, TokenLogprob
from penstock.engine.executor import NO_ADAPTER, AdapterWeights, Executor, RowSetup, Step
from penstock.kernels.attention_reference import ReferenceAttention
from penstock.runner import cuda_runner, mixed_steps
from penstock.runner.forward import TorchForward
from penstock.runner.model_runner import ModelRunner
from penstock.runner.row_state import TorchRows
from penstock.runner.torch_adapters import adapters_of
from tests.runner.emulated_cuda import CPU, emulated_runner
from tests.runner.test_fused_forward import load

BLOCK, BLOCKS_EACH, VOCAB, OUTPUT, SEQS = 16, 4, 64, 3, 4
GREEDY = SamplingParams(temperature=0, max_tokens=OUTPUT)
SLOTS = [1, NO_ADAPTER, 0, 1]  # of the rows


def some_adapter(executor: ModelRunner, digest: str, rank: int, draw: np.random.Generator) -> AdapterWeights:
    modules = {}
    for name, (inputs, outputs) in executor.adapter_modules.items():
        a = draw.standard_normal((rank, inputs), dtype=np.float32) * np.float32(0.3)
        modules[name] = (a, draw.standard_normal((outputs, rank), dtype=np.float32) * np.float32(0.3))
    return AdapterWeights(digest, rank, modules)


def generate(
    executor: Executor,
    prompts: list[list[int]],
    fills: list[list[tuple[int, AdapterWeights]]],
    params: SamplingParams = GREEDY,
) -> tuple[list[list[int]], list[list[TokenLogprob]]]:
    """Greedy, one token a step after all prompts at once, and at last a step with drafts; and the scores of prompts.
    `fills`: what the slots hold before each step."""
    found: list[list[int]] = [[] for _ in prompts]
    scores: list[list[TokenLogprob]] = []
    for number in range(OUTPUT + 1):
        drafts = [found[row][:2] if number == OUTPUT else [] for row in range(SEQS)]
        step = Step(
            rows=list(range(SEQS)),
            samples=[1 + len(draft) for draft in drafts],
            adapters=fills[number] if number < len(fills) else [],
        )
        for row, prompt in enumerate(prompts):
            tokens = [*(found[row][-1:] or prompt), *drafts[row]]
            step.starts.append(len(prompt) + number - 1 if number else 0)
            step.counts.append(len(tokens))
            step.tokens += tokens
            if number == 0:
                step.setups.append(RowSetup(row, params, 0, prompt, len(prompt), (), SLOTS[row]))
                step.blocks.append((row, 0, list(range(row * BLOCKS_EACH, (row + 1) * BLOCKS_EACH))))
        result = executor.collect(executor.launch(step))
        for row, tokens in enumerate(result.tokens):
            found[row] += tokens
        scores += [result.prompt_logprobs[row] for row in sorted(result.prompt_logprobs)]
    return found, scores


@pytest.mark.parametrize("family", ["llama", "qwen2-biased", "qwen3-moe"])
def test_same_tokens_as_plain_torch(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, config = load(family, tmp_path)
    draw, blocks = np.random.default_rng(len(family)), BLOCKS_EACH * (SEQS + 1)
    monkeypatch.setattr(cuda_runner, "DRAFT_BUCKETS", [13])
    monkeypatch.setattr(mixed_steps, "_DECODES", (3,))
    monkeypatch.setattr(mixed_steps, "_TOKENS", (20,))
    monkeypatch.setattr(mixed_steps, "_PROMPTS", (4,))
    runner, graphs = emulated_runner(
        model, config, monkeypatch, max_seqs=SEQS, num_blocks=blocks, block_size=BLOCK, max_step_tokens=64,
        adapter_rank=20,
    )  # fmt: skip
    attention = ReferenceAttention(model.attention_spec, blocks, BLOCK, torch.float32, CPU)
    rows = TorchRows(SEQS + 1, BLOCKS_EACH, VOCAB, CPU)
    plain = ModelRunner(
        TorchForward(model, attention, CPU), rows, adapters_of(model, CPU), num_blocks=blocks, block_size=BLOCK
    )
    assert dict(runner.adapter_modules) == dict(plain.adapter_modules)
    prompts = [draw.integers(1, VOCAB, length).tolist() for length in (5, 2, 8, 3)]
    one, two, other = (some_adapter(plain, name, rank, draw) for name, rank in (("a", 3), ("b", 17), ("c", 16)))
    fills = [[(0, one), (1, two)], [(0, other)]]  # not what an engine does: slot 0 changes while it is used
    expected, _ = generate(plain, prompts, fills)
    assert generate(runner, prompts, fills)[0] == expected
    assert {kind.drafts for kind in graphs.used if kind.adapted} == {False, True}
    if family != "llama":
        return
    # Once more with c in slot 0 from the beginning, and with scores of the prompts, which take another path.
    asked = SamplingParams(temperature=0, max_tokens=OUTPUT, prompt_logprobs=2)
    rest, scores = generate(runner, prompts, [], asked)
    expected_rest, expected_scores = generate(plain, prompts, [], asked)
    assert rest == expected_rest
    assert rest[2] != expected[2]
    assert rest[:2] == expected[:2]
    for found, true in zip(scores, expected_scores, strict=True):
        for score, true_score in zip(found, true, strict=True):
            assert score.token_id == true_score.token_id
            assert score.logprob == pytest.approx(true_score.logprob, abs=1e-3)
