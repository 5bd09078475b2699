"""Steps with drafts on the GPU's runner against the same requests decoded token by token in plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.core.request import Grammar, SamplingParams, TokenLogprob
from penstock.engine.executor import SAMPLED, Executor, RowSetup, Step, StepResult, TokenMask
from penstock.kernels.attention_reference import ReferenceAttention
from penstock.runner import cuda_runner, mixed_steps
from penstock.runner.forward import TorchForward
from penstock.runner.model_runner import ModelRunner
from penstock.runner.row_state import TorchRows
from penstock.runner.verification import accepted_entries, first_entries, kept_masks, without_excess
from tests.runner.emulated_cuda import CPU, emulated_runner
from tests.runner.test_fused_forward import load

BLOCK, BLOCKS_EACH, VOCAB, OUTPUT = 16, 8, 64, 7
GRAMMAR = Grammar("regex", "x")
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4}
PARAMS = [
    SamplingParams(temperature=0, max_tokens=OUTPUT),
    SamplingParams(temperature=0, logprobs=3, max_tokens=OUTPUT, **PENALTIES),
    SamplingParams(temperature=1.5, max_tokens=OUTPUT, logprobs=0),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_tokens=4, max_tokens=OUTPUT, **PENALTIES),
    SamplingParams(temperature=0.8, logit_bias={5: 3.0, 9: -2.0}, max_tokens=OUTPUT),
    SamplingParams(temperature=0, grammar=GRAMMAR, max_tokens=OUTPUT),
]


@dataclass
class Request:
    row: int
    prompt: list[int]
    params: SamplingParams
    seed: int

    @property
    def setup(self) -> RowSetup:
        return RowSetup(self.row, self.params, self.seed, self.prompt, len(self.prompt), [3, 17, 40])

    @property
    def blocks(self) -> tuple[int, int, list[int]]:
        return (self.row, 0, list(range(self.row * BLOCKS_EACH, (self.row + 1) * BLOCKS_EACH)))

    def mask(self, position: int) -> TokenMask:
        bits = np.random.default_rng([self.row, position]).random(VOCAB) < 0.5
        bits[position % VOCAB] = True
        return np.packbits(bits, bitorder="little").view(np.int32)


def some_requests(draw: np.random.Generator, asked: list[SamplingParams]) -> list[Request]:
    lengths = draw.integers(1, 30, len(asked)).tolist()
    return [
        Request(row, draw.integers(0, VOCAB, lengths[row]).tolist(), params, int(draw.integers(0, 2**63)))
        for row, params in enumerate(asked)
    ]


def add(step: Step, request: Request, start: int, tokens: list[int], samples: int) -> None:
    if request.params.grammar and samples:
        step.constrained.append(len(step.rows))
    step.rows.append(request.row)
    step.starts.append(start)
    step.counts.append(len(tokens))
    step.samples.append(samples)
    step.tokens += tokens


def run(executor: Executor, step: Step, requests: list[Request]) -> StepResult:
    handle = executor.launch(step)
    if step.constrained:
        rows: list[TokenMask] = []
        for index in step.constrained:
            request, samples = requests[step.rows[index]], step.samples[index]
            next_position = step.starts[index] + step.counts[index]
            rows += [request.mask(next_position - behind) for behind in reversed(range(samples))]
        masks = np.stack(rows)
        if executor.mask_memory is not None and len(masks) <= len(executor.mask_memory):
            executor.mask_memory[: len(masks)] = masks
        executor.constrain(handle, masks)
    return executor.collect(handle)


def decoded(executor: Executor, requests: list[Request]) -> list[tuple[list[int], list[TokenLogprob]]]:
    """One token a step."""
    found: list[tuple[list[int], list[TokenLogprob]]] = [([], []) for _ in requests]
    for number in range(OUTPUT):
        step = Step()
        for request, (tokens, _) in zip(requests, found, strict=True):
            if number == 0:
                step.setups.append(request.setup)
                step.blocks.append(request.blocks)
                add(step, request, 0, request.prompt, 1)
            else:
                add(step, request, len(request.prompt) + number - 1, [tokens[-1]], 1)
        result = run(executor, step, requests)
        for index, (tokens, scores) in enumerate(found):
            tokens += result.tokens[index]
            scores += result.logprobs.get(index, [])
    return found


def drafted(
    executor: Executor, requests: list[Request], expected: list[list[int]], draw: np.random.Generator
) -> list[tuple[list[int], list[TokenLogprob]]]:
    """With drafts that are right for a while. The last request comes late, and its prompt is computed in two steps."""
    found: list[tuple[list[int], list[TokenLogprob]]] = [([], []) for _ in requests]
    late, computed, number = requests[-1], 0, 0
    while any(len(tokens) < OUTPUT for tokens, _ in found):
        step = Step()
        if number == 0:
            step.setups = [request.setup for request in requests]
            step.blocks = [request.blocks for request in requests]
        chunks: list[tuple[Request, int, list[int], int]] = []
        for request, (tokens, _), truth in zip(requests, found, expected, strict=True):
            if not tokens and request is late:
                take = len(late.prompt) if number else len(late.prompt) // 2
                if take > computed:
                    chunks.append((late, computed, late.prompt[computed:take], int(take == len(late.prompt))))
                    computed = take
            elif not tokens:
                chunks.append((request, 0, request.prompt, 1))
            elif len(tokens) < OUTPUT:
                drafts = truth[len(tokens) : len(tokens) + int(draw.integers(0, 6))]
                drafts = [t if draw.random() < 0.8 else int(draw.integers(0, VOCAB)) for t in drafts]
                last = SAMPLED if draw.random() < 0.5 else tokens[-1]
                chunks.append((request, len(request.prompt) + len(tokens) - 1, [last, *drafts], 1 + len(drafts)))
        for request, start, chunk, samples in sorted(chunks, key=lambda chunk: len(chunk[2]) > 1):
            add(step, request, start, chunk, samples)
        result = run(executor, step, requests)
        for index, row in enumerate(step.rows):
            assert (len(result.tokens[index]) > 0) == (step.samples[index] > 0)
            found[row][0].extend(result.tokens[index])
            found[row][1].extend(result.logprobs.get(index, []))
        number += 1
    return found


@pytest.mark.parametrize(("family", "asked"), [("llama", PARAMS), ("mistral-window", PARAMS[:2])])
def test_drafts_change_no_token(
    family: str, asked: list[SamplingParams], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, config = load(family, tmp_path)
    draw = np.random.default_rng(len(asked))
    requests = some_requests(draw, asked)
    blocks = BLOCKS_EACH * (len(requests) + 1)
    attention = ReferenceAttention(model.attention_spec, blocks, BLOCK, torch.float32, CPU)
    rows = TorchRows(len(requests) + 1, BLOCKS_EACH, VOCAB, CPU)
    plain = ModelRunner(TorchForward(model, attention, CPU), rows, num_blocks=blocks, block_size=BLOCK)
    expected = decoded(plain, requests)
    monkeypatch.setattr(cuda_runner, "DRAFT_BUCKETS", [3, 7, 11, 15, 20, 30])
    monkeypatch.setattr(mixed_steps, "_DECODES", (3,))
    monkeypatch.setattr(mixed_steps, "_TOKENS", (40, 80))
    monkeypatch.setattr(mixed_steps, "_PROMPTS", (8,))
    runner, graphs = emulated_runner(
        model, config, monkeypatch, max_seqs=len(requests), num_blocks=blocks, block_size=BLOCK, max_step_tokens=256
    )
    found = drafted(runner, requests, [tokens for tokens, _ in expected], draw)
    for (tokens, scores), (true_tokens, true_scores), request in zip(found, expected, requests, strict=True):
        assert tokens[:OUTPUT] == true_tokens, request
        for one, other in zip(scores, true_scores, strict=False):
            assert one.token_id == other.token_id
            assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]
        assert len(scores) == (len(tokens) if true_scores else 0)
    assert any(kind.drafts for kind in graphs.used)
    counted = (runner._state.sampling.seen[1] & 0x3FFF).sum()  # what was rejected is not counted
    assert counted == len(found[1][0])
    if len(requests) == 2:  # tokens that the host knows, one a step, need no drafts' graph unless they fill a block
        graphs.used.clear()
        assert [tokens for tokens, _ in decoded(runner, requests)] == [tokens for tokens, _ in expected]
        assert sum(not kind.drafts for kind in graphs.used) >= OUTPUT - 1 - len(requests)


def test_drafts_beyond_the_limit_are_left_out() -> None:
    step = Step(rows=[0, 1, 2], starts=[5, 6, 0], counts=[4, 3, 6], samples=[4, 3, 0], tokens=list(range(13)))
    assert without_excess(step, 7) is step
    fitted = without_excess(step, 4)
    assert fitted.counts == [3, 1, 6]
    assert fitted.samples == [3, 1, 0]
    assert fitted.tokens == [0, 1, 2, 4, 7, 8, 9, 10, 11, 12]


def test_masks_of_drafts_beyond_the_limit_are_left_out() -> None:
    step = Step(rows=[0, 1, 2], starts=[5, 6, 9], counts=[4, 3, 2], samples=[4, 3, 2], tokens=list(range(9)))
    step.constrained = [0, 2]  # which have the masks 0 to 3, and 4 and 5
    assert kept_masks(step, without_excess(step, 9)) == [0, 1, 2, 3, 4, 5]
    assert kept_masks(step, without_excess(step, 5)) == [0, 1, 2, 4]


def test_accepted_entries() -> None:
    """Of sequences 0 (third draft wrong), 2 (no draft) and 3 (first draft wrong, the second one right by chance)."""
    sequences = [0, 0, 0, 0, 2, 3, 3, 3]
    drafts, sampled = [9, 1, 2, 3, 9, 9, 5, 6], [1, 2, 7, 8, 4, 4, 6, 1]
    assert accepted_entries(sequences, drafts, sampled) == [0, 1, 2, 4, 5]
    assert first_entries(np.array(sequences, dtype=np.int32)).tolist() == [0, 0, 0, 0, 4, 5, 5, 5]
