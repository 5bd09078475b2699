"""Greedy output of the built-in model equals transformers' token for token in float32, however it is scheduled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock import LLM, SamplingParams
from penstock.checkpoint.source import resolve

OUTPUT = 24
TEXTS = [
    "Rain falls because",
    "The quick brown fox",
    "def fibonacci(n):\n",
    "In the year 1969, the first human",
    "Once upon a time there was a little girl who",
    "The three primary colours are",
    "Water boils at",
    "SELECT name FROM users WHERE",
    "Dear Sir or Madam,\n\nI am writing to",
    "1, 1, 2, 3, 5, 8,",
    "The mitochondria is",
    "Les enfants jouent dans",
    "Photosynthesis is the process by which plants turn light into chemical energy. It takes place in the leaves, "
    "where chlorophyll absorbs mostly blue and red light, and",
    "To make bread you need flour, water, salt and yeast. First, mix the flour with the water and let it rest for half "
    "an hour. Then add the salt and the yeast and knead until the dough is smooth. After that,",
]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    from penstock.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(resolve("smollm2-135m"))
    return [tokenizer.encode(text) for text in TEXTS]


@pytest.fixture(scope="module")
def reference(prompts: list[list[int]]) -> list[list[int]]:
    """What transformers generates. One pass over an output proves it: if every token is the likeliest after those
    before it, greedy generation would have chosen them all."""
    with engine() as llm:
        outputs = [tokens(llm, [prompt])[0] for prompt in prompts]
    path = resolve("smollm2-135m").path
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output[:-1]])).logits[0]
        assert output == logits[len(prompt) - 1 :].argmax(-1).tolist()
    return outputs


@contextmanager
def engine(**config: Any) -> Iterator[LLM]:
    with LLM("smollm2-135m", dtype="float32", **config) as llm:
        yield llm


def tokens(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
    return [c.choices[0].token_ids for c in llm.generate(prompts, params, progress=False)]


def test_batched_and_with_prefix_hits(prompts: list[list[int]], reference: list[list[int]]) -> None:
    with engine() as llm:
        assert tokens(llm, prompts) == reference
        cached = llm.engine.stats.cached_tokens
        assert tokens(llm, prompts) == reference
        assert llm.engine.stats.cached_tokens > cached
        # The next turn of a conversation: prompt and answer come back as a prompt and are hit in the cache.
        turn = [p + r[:12] for p, r in zip(prompts, reference, strict=True)]
        continued = [t[: OUTPUT - 12] for t in tokens(llm, turn)]
        assert continued == [r[12:] for r in reference]


def test_without_prefix_caching_in_small_chunks(prompts: list[list[int]], reference: list[list[int]]) -> None:
    with engine(prefix_caching=False, max_step_tokens=7) as llm:
        assert tokens(llm, prompts) == reference
        assert llm.engine.stats.cached_tokens == 0


def test_with_constant_preemption(prompts: list[list[int]], reference: list[list[int]]) -> None:
    with engine(kv_memory_gib=0.0056, max_step_tokens=32) as llm:  # 8 blocks; a sequence grows to between 2 and 5
        assert tokens(llm, prompts) == reference
        assert llm.engine.stats.preemptions >= 5
