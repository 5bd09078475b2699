"""Structured output on the CPU: whether all that comes out is valid, what masks take, and what it costs or gains.

    python benchmarks/structured.py valid [--count 1000]   # the built-in model at temperature 1 as a fuzzer
    python benchmarks/structured.py speed [--rounds 15]    # tokens per second, kinds interleaved, at temperature 1 or
                                      # --temperature 0.2 --top-p 0.9, the default sampling of the model
    python benchmarks/structured.py suite --folder json/tests/draft2020-12   # the official JSON Schema test suite, from
                                      # the source distribution: pip download --no-binary jsonschema jsonschema

`valid`: batches of 32 constrained requests beside 8 free ones, in a KV cache too small for them, so that sequences are
preempted, with prompts that share prefixes. Outputs that ended by themselves must be valid; those cut off by
`max_tokens` are counted apart. `speed`: `text` is free, `string` is as long but inside a JSON string, where nothing is
forced, `contact` short texts with a `maxLength`, whose masks are slow, `json` is an invoice, most of which is forced,
and `mixture` has instances of all schemas, in another order for each sequence. `suite`: instances that the suite calls
invalid must be refused; valid ones may be, where the grammar has one way to write a thing (the order of properties, 1
and not 1.0).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import numpy.typing as npt

from penstock import LLM, SamplingParams
from penstock.bench.schemas import CONTACT, INVOICE, SCHEMAS, mixture
from penstock.checkpoint.source import DEFAULT_MODEL, resolve
from penstock.core.errors import InvalidRequest
from penstock.core.request import Grammar
from penstock.grammar.compiler import LLGuidance
from penstock.grammar.matcher import LLGuidanceMatcher
from penstock.llm import Completion
from penstock.text.tokenizer import load_tokenizer

BATCH, FREE = 32, 8
Validator = jsonschema.Draft202012Validator


def grammar(schema: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(schema))


class TimedGrammars(LLGuidance):
    """Writes down how much CPU time each mask took, one by one."""

    def __init__(self, llm: LLM) -> None:
        info = llm.engine.info
        super().__init__(lambda: llm.tokenizer, info.vocab_size, llm.tokenizer.eos_ids)
        self.seconds: list[float] = []

    def fill(self, matchers: Mapping[int, Any], masks: npt.NDArray[np.int32]) -> list[int]:
        failed = []
        for row, matcher in matchers.items():
            began = time.thread_time()
            failed += super().fill({row: matcher}, masks)
            self.seconds.append(time.thread_time() - began)
        return failed


def percentiles(seconds: list[float]) -> str:
    return ", ".join(f"p{p} {np.percentile(seconds, p) * 1e6:,.0f} µs" for p in (50, 90, 99))


def valid(count: int, max_tokens: int) -> None:
    llm = LLM(kv_memory_gib=0.006, max_model_len=256, max_seqs=BATCH + FREE)
    loop = llm.engine._loop
    timed = loop.grammars = TimedGrammars(llm)
    assert loop._masks is not None
    loop._masks._grammars = timed
    firsts = list[float]()
    for schema in SCHEMAS.values():
        timed._compiled.clear()
        began = time.perf_counter()
        timed.compile(grammar(schema))
        firsts.append(time.perf_counter() - began)
    print(f"first mask of {len(SCHEMAS)} schemas, compiling included: {percentiles(firsts[1:])}")
    draw, done, outcomes = random.Random(0), 0, Counter[str]()
    intro = "A list of records in JSON, one on each line, as the machine wrote them down.\n"
    while done < count:
        names = [draw.choice(list(SCHEMAS)) for _ in range(BATCH)]
        prompts = [f"{intro}{name}: " for name in names] + [f"{intro}And then" for _ in range(FREE)]
        params = [
            SamplingParams(
                temperature=1, max_tokens=max_tokens, seed=draw.getrandbits(40), grammar=grammar(SCHEMAS[name])
            )
            for name in names
        ]
        free = SamplingParams(temperature=1, max_tokens=max_tokens, ignore_eos=True)
        for name, completion in zip(names, llm.generate(prompts, params + [free] * FREE, progress=False), strict=False):
            outcomes[completion.choices[0].finish_reason or ""] += 1
            if completion.choices[0].finish_reason == "stop":
                schema = SCHEMAS[name]
                Validator(schema, format_checker=Validator.FORMAT_CHECKER).validate(json.loads(completion.text))
                done += 1
    stats = llm.engine.stats
    print(f"{done} outputs, all valid; {outcomes['length']} were cut off by max_tokens {max_tokens}")
    print(f"{stats.preemptions} preemptions, {stats.cached_tokens} of {stats.prompt_tokens} prompt tokens cached")
    print(f"{len(timed.seconds):,} masks: {percentiles(timed.seconds)}")


def suite(folder: Path) -> None:
    tokenizer = load_tokenizer(resolve(DEFAULT_MODEL))
    grammars = LLGuidance(lambda: tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
    schemas, found = Counter[str](), Counter[tuple[str, str]]()
    for file in sorted(folder.rglob("*.json")):
        for group in json.loads(file.read_text()):
            constraint = grammar(group["schema"])
            try:
                grammars.compile(constraint)
            except InvalidRequest:
                schemas["refused"] += 1
                continue
            schemas["enforced"] += 1
            for test in group["tests"]:
                text = json.dumps(test["data"], separators=(",", ":"), ensure_ascii=False)
                accepted = accepts(grammars.matcher(constraint), tokenizer.encode(text))
                found["valid" if test["valid"] else "invalid", "accepted" if accepted else "refused"] += 1
                if accepted != test["valid"]:
                    print(f"{'accepted' if accepted else 'refused'}:", file.stem, text[:80])
    print(dict(schemas), {" ".join(kind): count for kind, count in found.items()})


def accepts(matcher: LLGuidanceMatcher, tokens: list[int]) -> bool:
    """Whether these tokens are a whole output."""
    try:
        matcher.consume(tokens)
    except InvalidRequest:
        return False
    return bool(matcher.state.is_accepting())


def speed(rounds: int, sequences: int, sampling: dict[str, float]) -> None:
    llm = LLM(kv_memory_gib=0.5, max_model_len=512, max_seqs=sequences, prefix_caching=False)
    common: dict[str, Any] = {**sampling, "ignore_eos": True}
    string, invoice = grammar({"type": "string", "minLength": 4000}), grammar(INVOICE)
    requests = 4 * sequences  # so that others take the places of those that are complete
    mixtures = [grammar(mixture(number)) for number in range(sequences)]
    kinds = {
        "text": [SamplingParams(**common, max_tokens=48)] * requests,
        "string": [SamplingParams(**common, max_tokens=48, grammar=string)] * requests,
        "contact": [SamplingParams(**common, max_tokens=200, grammar=grammar(CONTACT))] * requests,
        "json": [SamplingParams(**common, max_tokens=200, grammar=invoice)] * requests,
        "mixture": [SamplingParams(**common, max_tokens=200, grammar=own) for own in 4 * mixtures],
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    for number in range(rounds + 1):
        for name, params in kinds.items():
            began, used = time.perf_counter(), time.process_time()
            answers: list[Completion] = llm.generate(["An invoice: "] * requests, params, progress=False)
            seconds, used = time.perf_counter() - began, time.process_time() - used
            if number:  # the first round is a warm-up
                tokens = sum(len(answer.choices[0].token_ids) for answer in answers)
                found[name].append((tokens / seconds, tokens / used))
    for name, rates in found.items():
        by_clock, by_cpu = (
            statistics.median(own[by] / text[by] for own, text in zip(rates, found["text"], strict=True))
            for by in (0, 1)
        )
        rate = statistics.median(rate for rate, _ in rates)
        print(f"{sequences} sequences, {name}: {rate:,.0f} tok/s, {by_clock:.3f} of text; by CPU time {by_cpu:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["valid", "speed", "suite"])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--max-tokens", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=1)
    parser.add_argument("--top-p", type=float, default=1)
    parser.add_argument("--repetition-penalty", type=float, default=1)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.what == "valid":
        valid(options.count, options.max_tokens)
    elif options.what == "suite":
        suite(options.folder)
    else:
        sampling = {name: getattr(options, name) for name in ("temperature", "top_p", "repetition_penalty")}
        speed(options.rounds, options.sequences, sampling)


if __name__ == "__main__":
    main()
