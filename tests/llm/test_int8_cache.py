"""The engine with an int8 KV cache on the built-in model: reused and recomputed blocks serve what fresh ones do."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock import LLM, SamplingParams
from penstock.kernels.native import bindings
from tests.llm.test_greedy_equality import TEXTS

pytestmark = pytest.mark.skipif(not bindings.available(), reason=str(bindings.unavailable_reason()))

PROMPTS = TEXTS[::2]
NOVEL = (Path(__file__).parents[1] / "data" / "moby-dick.txt").read_text()


def outputs(llm: LLM, prompts: list[str]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    return [c.choices[0].token_ids for c in llm.generate(prompts, params, progress=False)]


def agreement(one: list[list[int]], other: list[list[int]]) -> float:
    """The share of tokens before the first difference: near ties turn with the rounding of a batch's sums, and all that
    follows is another text."""
    pairs = [next((i for i in range(len(a)) if a[i] != b[i]), len(a)) / len(a) for a, b in zip(one, other, strict=True)]
    return sum(pairs) / len(pairs)


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    with LLM("smollm2-135m", kv_dtype="int8", kv_memory_gib=0.1, prefix_caching=False) as llm:
        return [outputs(llm, [text])[0] for text in PROMPTS]


def test_it_scores_text_as_a_bf16_cache_does() -> None:
    """Each token under the true ones before it: unlike generated text, this does not turn on near ties."""
    scores = []
    for kv_dtype in ("int8", "bf16"):
        with LLM("smollm2-135m", kv_dtype=kv_dtype, kv_memory_gib=0.1, max_step_tokens=16) as llm:
            params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
            completions = llm.generate([NOVEL[:2000], NOVEL[4000:6000]], params, progress=False)
        scores.append([p.logprob for c in completions for p in c.prompt_logprobs or [] if p is not None])
    differences = [abs(a - b) for a, b in zip(*scores, strict=True)]
    assert len(differences) > 500
    assert sum(differences) / len(differences) < 0.15


def test_batched_and_with_prefix_hits(alone: list[list[int]]) -> None:
    with LLM("smollm2-135m", kv_dtype="int8", kv_memory_gib=0.1) as llm:
        assert agreement(outputs(llm, PROMPTS), alone) > 0.6
        cached = llm.engine.stats.cached_tokens
        assert agreement(outputs(llm, PROMPTS), alone) > 0.6
        assert llm.engine.stats.cached_tokens > cached


def test_with_constant_preemption(alone: list[list[int]]) -> None:
    with LLM("smollm2-135m", kv_dtype="int8", kv_memory_gib=0.00144, max_step_tokens=32) as llm:  # 8 blocks
        assert agreement(outputs(llm, PROMPTS), alone) > 0.6
        assert llm.engine.stats.preemptions >= 2
