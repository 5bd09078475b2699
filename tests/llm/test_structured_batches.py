"""The built-in model at temperature 1 as a fuzzer: whatever it writes under a schema is valid. Constrained and free
requests share batches and prefixes, in a KV cache that does not hold them all. `benchmarks/structured.py valid` does
the same a thousand times."""

from __future__ import annotations

import json

import jsonschema

from penstock import LLM, SamplingParams
from penstock.bench import schemas
from penstock.core.request import Grammar

SCHEMAS = dict(list(schemas.SCHEMAS.items())[::2])
Validator = jsonschema.Draft202012Validator
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
