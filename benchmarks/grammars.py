"""Compare grammar libraries on the same schemas: mask times, compile times, and what they get wrong.

    python -m venv /tmp/grammars && /tmp/grammars/bin/pip install llguidance xgrammar 'penstock[serve]' jsonschema
    /tmp/grammars/bin/python benchmarks/grammars.py [--vocabulary 151936]

Each schema is compiled, then walked by seeded random choices among the allowed tokens. Finished walks must be valid,
and changed copies of them must be refused exactly where `jsonschema` refuses them.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from typing import Any, Protocol

import jsonschema
import numpy as np
import tokenizers

from penstock.bench.schemas import SCHEMAS, Schema, compact, instances_with_faults
from penstock.checkpoint.source import resolve
from penstock.text.tokenizer import Tokenizer, load_tokenizer

Validator = jsonschema.Draft202012Validator
WALKS, MOST_TOKENS = 5, 150


class Walk(Protocol):
    """One output in progress."""

    def mask(self, out: np.ndarray[Any, Any]) -> None: ...
    def take(self, token: int) -> bool: ...
    def ended(self) -> bool: ...


Library = Callable[[Schema], Callable[[], Walk]]  # raises ValueError for a schema that it cannot do


def llguidance(tokenizer: Tokenizer) -> Library:
    from llguidance import LLMatcher, LLTokenizer

    table = LLTokenizer(tokenizer._backend.to_str(), n_vocab=tokenizer.vocab_size, eos_token=list(tokenizer.eos_ids))

    class Guidance:
        def __init__(self, matcher: Any) -> None:
            self._matcher = matcher
            self.take = matcher.consume_token

        def mask(self, out: np.ndarray[Any, Any]) -> None:
            self._matcher.unsafe_compute_mask_ptr(out.ctypes.data, out.nbytes)

        def ended(self) -> bool:
            return bool(self._matcher.is_stopped())

    def compile_schema(schema: Schema) -> Callable[[], Walk]:
        options: Any = {"whitespace_flexible": False, "lenient": False}
        matcher = LLMatcher(
            table, LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options), log_level=0
        )
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return lambda: Guidance(matcher.deep_copy())

    return compile_schema


def xgrammar(tokenizer: Tokenizer) -> Library:
    import torch
    import xgrammar as xgr

    spelled = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    info = xgr.TokenizerInfo(
        [b"" if tokenizer.is_special(i) else token for i, token in enumerate(spelled)],
        vocab_type=xgr.VocabType.RAW,
        vocab_size=tokenizer.vocab_size,
        stop_token_ids=list(tokenizer.eos_ids),
    )
    compiler = xgr.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    class Xgrammar:
        def __init__(self, matcher: Any) -> None:
            self._matcher = matcher
            self.take = matcher.accept_token
            self.ended = matcher.is_terminated

        def mask(self, out: np.ndarray[Any, Any]) -> None:
            self._matcher.fill_next_token_bitmask(torch.from_numpy(out[None]), 0)

    def compile_schema(schema: Schema) -> Callable[[], Walk]:
        try:
            compiled = compiler.compile_json_schema(json.dumps(schema), any_whitespace=False, separators=(",", ":"))
        except Exception as error:
            raise ValueError(str(error)) from error
        return lambda: Xgrammar(xgr.GrammarMatcher(compiled, terminate_without_stop_token=True))

    return compile_schema


def enlarged(tokenizer: Tokenizer, size: int) -> Tokenizer:
    """The same vocabulary with random words of its letters added, up to this size."""
    model = json.loads(tokenizer._backend.to_str())
    vocabulary, draw = model["model"]["vocab"], random.Random(0)
    plain = [token for token in vocabulary if len(token) < 8]
    while len(vocabulary) < size:
        vocabulary.setdefault(draw.choice(plain) + draw.choice(plain), len(vocabulary))
    backend = tokenizers.Tokenizer.from_str(json.dumps(model))
    return Tokenizer(backend, bos_id=tokenizer.bos_id, eos_ids=tokenizer.eos_ids)


def walk(state: Walk, tokenizer: Tokenizer, draw: random.Random, times: list[float]) -> list[int] | None:
    """Tokens of a finished output, or None for one that became too long."""
    out, tokens = np.zeros(-(-tokenizer.vocab_size // 32), np.int32), list[int]()
    quote = tokenizer.encode('"', add_special_tokens=False)[0]
    for _ in range(MOST_TOKENS):
        began = time.perf_counter()
        state.mask(out)
        times.append(time.perf_counter() - began)
        allowed = np.flatnonzero(np.unpackbits(out.view(np.uint8), bitorder="little"))
        token = quote if quote in allowed and draw.random() < 0.3 else int(draw.choice(allowed))
        if token in tokenizer.eos_ids:
            return tokens
        tokens.append(token)
        if not state.take(token):
            raise AssertionError("an allowed token was refused")
        if state.ended():
            return tokens
    return None


def accepts(state: Walk, tokenizer: Tokenizer, text: str) -> bool:
    """Whether the whole text is a possible output: every token is allowed and an end is possible after it."""
    if not all(state.take(token) for token in tokenizer.encode(text, add_special_tokens=False)):
        return False
    return state.ended() or bool(state.take(tokenizer.eos_ids[0]))


def measure(name: str, library: Library, tokenizer: Tokenizer) -> None:
    firsts, masks = list[float](), list[float]()
    refused, finished, invalid, passed, lost, judged = list[str](), 0, list[str](), list[str](), list[str](), 0
    for title, schema in SCHEMAS.items():
        draw, valid = random.Random(title), Validator(schema, format_checker=Validator.FORMAT_CHECKER)
        try:
            began, times = time.perf_counter(), list[float]()
            states = library(schema)
            compiled = time.perf_counter() - began
        except ValueError:
            refused.append(title)
            continue
        seen = set()
        for number in range(WALKS):
            tokens = walk(states(), tokenizer, draw, times)
            if number == 0:
                firsts.append(compiled + times[0])
            if tokens is None:
                continue
            finished += 1
            try:
                instance = json.loads(tokenizer.decode(tokens))
            except ValueError:
                invalid.append(title)
                continue
            if not valid.is_valid(instance):
                invalid.append(title)
                continue
            for other in {compact(fault) for fault in instances_with_faults(instance)} | {compact(instance)}:
                if other in seen:
                    continue
                seen.add(other)
                judged += 1
                right, found = valid.is_valid(json.loads(other)), accepts(states(), tokenizer, other)
                if found and not right:
                    passed.append(f"{title}: {other[:60]}")
                if right and not found:
                    lost.append(f"{title}: {other[:60]}")
        masks += times[1:]

    def shown(seconds: list[float]) -> str:
        return " / ".join(f"{np.percentile(seconds, p) * 1e6:,.0f}" for p in (50, 99))

    print(f"{name}, {tokenizer.vocab_size:,} tokens: first mask {shown(firsts)} µs (p50 / p99), mask {shown(masks)} µs")
    print(f"  schemas refused: {len(refused)} {refused}")
    print(f"  invalid outputs: {len(invalid)} of {finished} {sorted(set(invalid))}")
    print(f"  invalid instances accepted: {len(passed)} of {judged}: {passed[:5]}")
    print(f"  valid instances refused: {len(lost)}: {lost[:8]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--vocabulary", type=int, default=0, help="enlarge the tokenizer to so many tokens")
    parser.add_argument("libraries", nargs="*", default=["llguidance", "xgrammar"])
    options = parser.parse_args()
    tokenizer = load_tokenizer(resolve(options.model))
    if options.vocabulary:
        tokenizer = enlarged(tokenizer, options.vocabulary)
    for name in options.libraries:
        measure(name, {"llguidance": llguidance, "xgrammar": xgrammar}[name](tokenizer), tokenizer)


if __name__ == "__main__":
    main()
