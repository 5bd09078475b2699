"""The built-in model at temperature 1 as a fuzzer: whatever it writes under a schema is valid. Constrained and free
requests share batches and prefixes, in a KV cache that does not hold them all. `benchmarks/structured.py valid` does
the same a thousand times."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from penstock import LLM, SamplingParams
from penstock.bench import schemas
from penstock.core.request import Grammar
from penstock.runner import drafting
from tests.engine.guessing import tried_whenever_possible

SCHEMAS = dict(list(schemas.SCHEMAS.items())[::2])
Validator = jsonschema.Draft202012Validator
SAID = "<|im_start|>user\nSay yes.<|im_end|>\n<|im_start|>assistant\nYes."
INTRO = "Records in JSON, one on each line, as the machine that counts them wrote them down.\n"


def test_all_outputs_are_valid() -> None:
    with LLM("smollm2-135m", kv_memory_gib=0.006, max_model_len=256, max_seqs=40) as llm:
        prompts = [f"{INTRO}{name}: " for name in SCHEMAS] + [f"{INTRO}And then"] * 8
        params = [
            SamplingParams(temperature=1, max_tokens=80, seed=7, grammar=Grammar("json_schema", json.dumps(schema)))
            for schema in SCHEMAS.values()
        ]
        free = SamplingParams(temperature=1, max_tokens=60, seed=7, ignore_eos=True)
        answers = llm.generate(prompts, params + [free] * 8, progress=False)
        stats = llm.engine.stats
    assert stats.preemptions > 0
    assert stats.cached_tokens > 0
    complete = 0
    for schema, answer in zip(SCHEMAS.values(), answers, strict=False):
        if answer.choices[0].finish_reason == "stop":
            Validator(schema, format_checker=Validator.FORMAT_CHECKER).validate(json.loads(answer.text))
            complete += 1
    assert complete > len(SCHEMAS) / 2


def test_an_end_that_is_ignored_comes_where_nothing_else_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampled with masks and without, and after drafts. Without a grammar the model would end at once."""
    monkeypatch.setattr(drafting, "Speculation", lambda drafter, _, most: tried_whenever_possible(drafter, most))
    ways: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1},
        {"temperature": 1, "top_p": 0.9},
        {"temperature": 0, "logprobs": 1},
        {"temperature": 1, "presence_penalty": 0.5, "min_tokens": 5},
    ]
    texts = {"[ab]*": 40, "[0-9]{0,3}": 3, "(The sun rises in the east|The sun sets)?": 12, "x": 1}
    with LLM("smollm2-135m", kv_memory_gib=0.05, max_model_len=256) as llm:
        ends = set(llm.tokenizer.eos_ids)
        for way in ways:
            params = [
                SamplingParams(max_tokens=40, seed=3, ignore_eos=True, grammar=Grammar("regex", text), **way)
                for text in texts
            ]
            answers = llm.generate([SAID] * len(texts), params, progress=False)
            for (text, length), answer in zip(texts.items(), answers, strict=True):
                (choice,) = answer.choices
                assert re.fullmatch(text, choice.text), (way, choice)
                assert len(choice.text) >= length, (way, choice)
                assert not ends & set(choice.token_ids)
                assert choice.finish_reason == ("length" if text == "[ab]*" else "stop")
        assert llm.engine.stats.accepted_tokens > 0
