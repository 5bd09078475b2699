"""Prompts by their meaning: the encoder, the guards, and the walls between buckets."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cache.encoder import SentenceEncoder, encoder_folder
from penstock.cache.engine import CachedEngine
from penstock.cache.settings import CacheConfig
from penstock.cache.similar import Array, SimilarPrompts, may_mean_the_same
from penstock.core.errors import StartupError
from penstock.core.request import CacheControl, GenerateRequest, SamplingParams
from penstock.gateway.api.openai_types import ChatRequest
from penstock.gateway.api.semantic import similar_chat
from penstock.simulation.scripted_engine import ScriptedEngine, says
from penstock.text.tokenizer import Tokenizer
from tests.cache.conftest import answer, request, state, text_of

THRESHOLD = CacheConfig().semantic.threshold


@pytest.fixture(scope="module")
def encoder() -> SentenceEncoder:
    return SentenceEncoder(encoder_folder(None))


def test_the_encoder_computes_what_transformers_does(encoder: SentenceEncoder) -> None:
    import torch
    from transformers import AutoTokenizer, BertModel

    reference = BertModel.from_pretrained(encoder_folder(None)).eval()
    tokenizer = AutoTokenizer.from_pretrained(encoder_folder(None))
    for text in ("What is the capital of France?", "Größe: 3 × 4\n\tとても", "word " * 200):
        with torch.no_grad():
            hidden = reference(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
        expected = (hidden / hidden.norm()).numpy()
        found = encoder.encode(text)
        assert found is not None
        np.testing.assert_allclose(found, expected, atol=2e-6)


def test_a_text_whose_end_the_encoder_would_not_see_is_not_judged(encoder: SentenceEncoder) -> None:
    assert encoder.encode("word " * 254) is not None  # and two special tokens
    assert encoder.encode("word " * 255) is None


def test_a_folder_without_an_encoder_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="does not hold a BERT sentence encoder"):
        SentenceEncoder(tmp_path)


SAME = [
    ("What is the capital of France?", "What's the capital of France?"),
    ("How do I reset my password?", "How can I reset my password?"),
    ("How do I install Python on Ubuntu?", "How to install Python in Ubuntu?"),
]
DIFFERENT = [  # by meaning, by a number, by a "not", by who does what to whom
    ("What is the capital of France?", "What is the capital of Spain?"),
    ("Is aspirin good for headaches?", "Is aspirin bad for headaches?"),
    ("Who won the world cup in 1990?", "Who won the world cup in 1998?"),
    ("Is it safe to mix bleach and ammonia?", "Is it not safe to mix bleach and ammonia?"),
    ("Convert Celsius to Fahrenheit", "Convert Fahrenheit to Celsius"),
    ("Does the dog bite the man?", "Does the man bite the dog?"),
]


@pytest.mark.parametrize(("one", "other", "same"), [*((*p, True) for p in SAME), *((*p, False) for p in DIFFERENT)])
async def test_rewordings_are_found_and_other_questions_are_not(
    encoder: SentenceEncoder, one: str, other: str, same: bool
) -> None:
    prompts = SimilarPrompts(encoder, THRESHOLD, 10)
    place = await prompts.place(b"bucket", one)
    assert place is not None
    assert place.nearest is None
    prompts.remember(place, b"key")
    found = await prompts.place(b"bucket", other)
    assert found is not None
    assert (found.nearest == b"key") == same
    elsewhere = await prompts.place(b"another bucket", one)
    assert elsewhere is not None
    assert elsewhere.nearest is None
    prompts.close()


@given(st.text(max_size=30))
def test_a_text_may_always_mean_itself(text: str) -> None:
    assert may_mean_the_same(text, text.upper().lower() if text.isascii() else text)


class Apart:
    """Encodes w0, w1, ... so that no two of them are near each other."""

    def encode(self, text: str) -> Array | None:
        vector: Array = np.eye(13, dtype=np.float32)[int(text[1:])]
        return vector


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12), st.booleans()), max_size=60), st.integers(1, 8))
@settings(max_examples=50)
def test_the_index_is_bounded_and_finds_only_what_it_holds(
    steps: list[tuple[int, int, bool]], max_prompts: int
) -> None:
    """Against a plain model: buckets by recent use, in each the oldest prompt goes first."""
    index = SimilarPrompts(Apart(), 0.99, max_prompts)
    model: dict[bytes, dict[str, bytes]] = {}
    keys = count()
    for number, word, forgets in steps:
        bucket, text = bytes([number]), f"w{word}"
        place = index._place(bucket, text)
        assert place is not None
        known = model.get(bucket, {}).get(text)
        if bucket in model:
            model[bucket] = model.pop(bucket)
        assert place.nearest == known
        if known is not None:
            if forgets:
                index._forget(place)
                del model[bucket][text]
                if not model[bucket]:
                    del model[bucket]
            continue
        key = next(keys).to_bytes(4, "big")
        index._remember(place, key)
        model[bucket] = {**model.pop(bucket, {}), text: key}
        while sum(map(len, model.values())) > max_prompts:
            oldest = next(iter(model))
            del model[oldest][next(iter(model[oldest]))]
            if not model[oldest]:
                del model[oldest]
        assert len(index) == sum(map(len, model.values())) <= max_prompts


# ---------------------------------------------------------------- through the engine


class Same:
    """The worst encoder there could be: everything means the same."""

    def encode(self, text: str) -> Array | None:
        return np.ones(1, np.float32)


def chat(text: str, **fields: Any) -> tuple[ChatRequest, CacheControl]:
    body = {"model": "m", "messages": [{"role": "user", "content": text}], "temperature": 0, **fields}
    decoded = msgspec.convert(body, ChatRequest)
    return decoded, CacheControl(similar=similar_chat(decoded))


def similar_request(text: str, prompt: list[int], **changes: Any) -> GenerateRequest:
    return request(prompt=prompt, cache=chat(text)[1], **changes)


turns = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"]), "content": st.sampled_from("abc")}
    ),
    max_size=2,
)
cases = st.fixed_dictionaries(
    {
        "tenant": st.sampled_from(["", "one", "two"]),
        "model": st.sampled_from(["m", "n"]),
        "revision": st.sampled_from(["r", "s"]),
        "salt": st.sampled_from(["", "s"]),
        "turns": turns,
        "temperature": st.sampled_from([0.0, 0.5]),
        "tools": st.sampled_from([None, [{"type": "function"}]]),
    }
)


@given(st.lists(cases, min_size=2, max_size=6), st.sampled_from(["tenant", "shared"]))
@settings(max_examples=60, deadline=None)
def test_a_similar_answer_never_crosses_tenants_models_or_system_prompts(
    tokenizer: Tokenizer, asked: list[dict[str, Any]], scope: Any
) -> None:
    async def run() -> None:
        (script,) = says(tokenizer, "yes")
        engine = ScriptedEngine(tokenizer, lambda _: [script])
        similar = SimilarPrompts(Same(), 0.9, 100)
        cached = CachedEngine(engine, tokenizer, CacheConfig(scope=scope), similar=similar)
        answered: list[dict[str, Any]] = []
        for number, case in enumerate(asked):
            engine.info = replace(engine.info, model=case["model"], revision=case["revision"])
            words = {"role": "user", "content": f"w{chr(97 + number)}"}
            _, control = chat(
                "", messages=[*case["turns"], words], temperature=case["temperature"], tools=case["tools"], seed=1
            )
            params = SamplingParams(temperature=case["temperature"], seed=1, max_tokens=9)
            one = request(
                prompt=[number], params=params, tenant=case["tenant"], cache_salt=case["salt"], cache=control, seed=5
            )
            assert (state(await answer(cached, one)) == "similar") == (case in answered)
            answered.append(case)
        await cached.close()

    asyncio.run(run())


async def test_a_similar_prompt_gets_the_stored_answer_and_says_so(
    engine: ScriptedEngine, tokenizer: Tokenizer, encoder: SentenceEncoder
) -> None:
    cached = CachedEngine(engine, tokenizer, CacheConfig(), similar=SimilarPrompts(encoder, THRESHOLD, 10))
    await answer(cached, similar_request("How do I reset my password?", [1, 2, 3]))
    asked = similar_request("How can I reset my password?", [1, 2, 4, 5])
    chunks = await answer(cached, asked)
    status = chunks[0].cache
    assert status is not None
    assert (status.state, round(status.score, 2), status.computed) == ("similar", 0.99, False)
    assert text_of(tokenizer, asked, chunks) == "The answer is forty-two, friend."
    assert chunks[0].cached_tokens == 4
    # It is not taken for its own answer: asked again it is similar again, and a stricter client gets the real one.
    assert state(await answer(cached, replace(asked, id="again"))) == "similar"
    assert state(await answer(cached, replace(asked, id="exact", cache=None))) == "miss"
    assert len(engine.requests) == 2
    await cached.close()


async def test_an_answer_that_would_not_fit_the_other_prompt_is_not_given(
    engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    """By its length, which depends on the prompt's; or because it holds log-probabilities of the prompt itself."""
    cached = CachedEngine(engine, tokenizer, CacheConfig(), similar=SimilarPrompts(Same(), 0.9, 10))
    greedy = SamplingParams(temperature=0, max_tokens=64)
    await answer(cached, similar_request("one", [1], params=greedy))
    assert state(await answer(cached, similar_request("two", [2], params=replace(greedy, max_tokens=3)))) == "miss"
    assert (
        state(await answer(cached, similar_request("three", [3], params=replace(greedy, max_tokens=50)))) == "similar"
    )
    scored = replace(greedy, prompt_logprobs=1)
    for text, prompt in (("four", [4, 4]), ("five", [5, 5])):
        assert state(await answer(cached, similar_request(text, prompt, params=scored))) == "miss"
    await cached.close()


async def test_an_answer_that_is_gone_is_computed_and_remembered_anew(
    engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    cached = CachedEngine(engine, tokenizer, CacheConfig(), similar=SimilarPrompts(Same(), 0.9, 10))
    await answer(cached, similar_request("one", [1]))
    (key,) = cached._memory._values
    cached._memory.discard(key)
    states = [state(await answer(cached, similar_request(text, [i]))) for i, text in enumerate(("two", "three"), 2)]
    assert states == ["miss", "similar"]
    await cached.close()


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}],
        [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        [{"role": "user", "content": "  "}],
    ],
)
def test_only_words_of_the_user_are_matched(messages: list[dict[str, Any]]) -> None:
    assert chat("", messages=messages)[1].similar is None
