"""The whole engine over the GPU's runner against plain torch without drafts: adapters, drafts, sampling, grammars with
masks and with slow ones, log probabilities, prefix hits and preemption, all in one batch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.core.request import Adapter, Chunk, GenerateRequest, Grammar, SamplingParams, TokenLogprob
from penstock.engine.executor import AdapterWeights, LoadedExecutor, Step
from penstock.engine.limits import SchedulerLimits
from penstock.engine.loop import EngineLoop
from penstock.engine.scheduler import Scheduler
from penstock.engine.sequence import Sequence
from penstock.kernels.attention_reference import ReferenceAttention
from penstock.runner import cuda_runner, mixed_steps
from penstock.runner.forward import TorchForward
from penstock.runner.model_runner import ModelRunner
from penstock.runner.row_state import TorchRows
from penstock.runner.steps_in_flight import StepInFlight
from penstock.runner.torch_adapters import adapters_of
from tests.engine.guessing import tried_whenever_possible
from tests.engine.toy_grammar import ToyGrammars
from tests.runner.emulated_cuda import CPU, emulated_runner
from tests.runner.test_adapted_steps import some_adapter
from tests.runner.test_fused_forward import load

BLOCK, NUM_BLOCKS, SEQS, OUTPUT = 16, 6, 4, 8
LIMITS = SchedulerLimits(
    num_blocks=NUM_BLOCKS,
    block_size=BLOCK,
    max_seqs=SEQS,
    max_step_tokens=48,
    max_model_len=128,
    vocab_size=64,
    max_adapters=2,
)
ADAPTERS = [Adapter(digest, "") for digest in ("a", "b", "c")]
GREEDY = SamplingParams(temperature=0, max_tokens=OUTPUT)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, frequency_penalty=0.3, logprobs=1, max_tokens=OUTPUT)
GRAMMAR = Grammar("regex", "30")
MATCHING = SamplingParams(temperature=0, grammar=GRAMMAR, max_tokens=2 * OUTPUT)
SAMPLED_MATCHING = SamplingParams(temperature=0.8, top_p=0.9, top_k=30, grammar=GRAMMAR, max_tokens=2 * OUTPUT)


class HeldAdapters:
    def __init__(self, weights: dict[str, AdapterWeights]) -> None:
        self._weights = weights

    def get(self, adapter: Adapter) -> AdapterWeights:
        return self._weights[adapter.digest]


class KnowingDrafter:
    """Always has a draft: how the output goes on, with every fourth token wrong."""

    def __init__(self, outputs: dict[str, list[int]]) -> None:
        self._outputs = outputs

    def outlook(self, sequence: Sequence) -> float:
        return 1.0

    def behind(self, sequence: Sequence) -> float | None:
        return None

    def catch_up(self, sequence: Sequence, decodes: list[Sequence], seconds: float) -> bool:
        return True

    def seconds(self, sequences: int) -> float:
        return 0.0

    def propose(self, sequences: list[Sequence], depths: list[int]) -> list[list[int]]:
        return [self._draft(s, depth) for s, depth in zip(sequences, depths, strict=True)]

    def _draft(self, sequence: Sequence, depth: int) -> list[int]:
        rest = list(enumerate(self._outputs[sequence.request.id]))[sequence.outputs :][:depth]
        return [token if at % 4 else (token + 1) % 64 for at, token in rest]

    def forget(self, sequence: Sequence) -> None:
        pass


def some_requests(draw: np.random.Generator) -> list[GenerateRequest]:
    shared = draw.integers(1, 64, 26).tolist()
    prompts = [[*shared, 5], [*shared, 9, 9], [*shared[:20], 3], shared[3:12], [*shared, 5], shared[2:9], shared[5:20]]
    adapters = [None, ADAPTERS[0], ADAPTERS[1], ADAPTERS[2], ADAPTERS[0], None, ADAPTERS[0]]
    asked = [GREEDY, SAMPLED, GREEDY, SAMPLED, GREEDY, MATCHING, SAMPLED_MATCHING]
    return [
        GenerateRequest(str(i), prompt, params, seed=i, adapter=adapter)
        for i, (prompt, params, adapter) in enumerate(zip(prompts, asked, adapters, strict=True))
    ]


def run(
    executor: LoadedExecutor,
    weights: dict[str, AdapterWeights],
    requests: list[GenerateRequest],
    drafter: KnowingDrafter | None,
) -> tuple[dict[str, list[int]], dict[str, list[TokenLogprob]], Scheduler]:
    tokens: dict[str, list[int]] = {}
    scores: dict[str, list[TokenLogprob]] = {}

    def take(chunks: list[Chunk]) -> None:
        for chunk in chunks:
            tokens.setdefault(chunk.request_id, []).extend(chunk.token_ids)
            scores.setdefault(chunk.request_id, []).extend(chunk.logprobs or [])

    scheduler = Scheduler(LIMITS)
    if drafter is not None:
        # Deep enough that sequences wait for a draft; a clock that stands, for load must not decide who is asked.
        scheduler.speculation = tried_whenever_possible(drafter, 8)
    loop = EngineLoop(scheduler, executor, take, ToyGrammars(), HeldAdapters(weights))
    for request in requests:
        loop.submit(request)
    while loop.step():
        scheduler.check_integrity()
    return tokens, scores, scheduler


def test_same_output_as_plain_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, config = load("llama", tmp_path)
    draw = np.random.default_rng(4)
    rows = TorchRows(SEQS + 1, 128 // BLOCK, 64, CPU)
    attention = ReferenceAttention(model.attention_spec, NUM_BLOCKS, BLOCK, torch.float32, CPU)
    plain = ModelRunner(
        TorchForward(model, attention, CPU), rows, adapters_of(model, CPU), num_blocks=NUM_BLOCKS, block_size=BLOCK
    )
    weights = {
        a.digest: some_adapter(plain, a.digest, rank, draw) for a, rank in zip(ADAPTERS, (2, 16, 5), strict=True)
    }
    requests = some_requests(draw)
    expected, expected_scores, _ = run(plain, weights, requests, None)
    monkeypatch.setattr(cuda_runner, "DRAFT_BUCKETS", [6, 14, 36])
    monkeypatch.setattr(mixed_steps, "_DECODES", (2,))
    monkeypatch.setattr(mixed_steps, "_TOKENS", (24, 48))
    monkeypatch.setattr(mixed_steps, "_PROMPTS", (4,))
    runner, graphs = emulated_runner(
        model, config, monkeypatch, max_seqs=SEQS, num_blocks=NUM_BLOCKS, block_size=BLOCK, max_step_tokens=48,
        adapter_rank=16,
    )  # fmt: skip
    unmasked = Counter[str]()  # sequences that sample before their masks, in steps with drafts and without
    launch = runner.launch

    def counted(step: Step) -> StepInFlight:
        unmasked["with drafts" if max(step.samples) > 1 else "without"] += len(step.checked)
        return launch(step)

    monkeypatch.setattr(runner, "launch", counted)
    found, scores, scheduler = run(runner, weights, requests, KnowingDrafter(expected))
    assert found == expected
    for request_id, true in expected_scores.items():
        assert [score.token_id for score in scores[request_id]] == [score.token_id for score in true]
        assert [score.logprob for score in scores[request_id]] == pytest.approx([s.logprob for s in true], abs=1e-3)
    assert {kind.drafts for kind in graphs.used if kind.adapted} == {False, True}
    stats = scheduler.stats()
    assert stats.preemptions > 0
    assert stats.accepted_tokens > 0
    assert stats.drafted_tokens > stats.accepted_tokens
    assert all(unmasked[kind] for kind in ("with drafts", "without")), unmasked
