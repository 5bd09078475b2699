"""The engine with an int8 KV cache on the built-in model: reused and recomputed blocks serve what fresh ones do."""

from __future__ import annotations

import pytest

from penstock import LLM, SamplingParams
from penstock.kernels import native
from tests.e2e.test_greedy_equality import TEXTS

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.unavailable_reason()))

PROMPTS = TEXTS[::2]


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


def test_it_starts_as_with_a_bf16_cache(alone: list[list[int]]) -> None:
    with LLM("smollm2-135m", kv_dtype="bf16", kv_memory_gib=0.1) as llm:
        assert agreement(alone, outputs(llm, PROMPTS)) > 0.4


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
