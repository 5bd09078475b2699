"""What grammars allow, token by token, of the built-in model's vocabulary."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np

from penstock.core.errors import InvalidRequest
from penstock.core.request import Grammar
from penstock.grammar.compiler import LLGuidance
from penstock.grammar.matcher import LLGuidanceMatcher
from penstock.text.tokenizer import Tokenizer

Validator = jsonschema.Draft202012Validator


def schema(source: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(source))


def allowed(grammars: LLGuidance, matcher: LLGuidanceMatcher, vocab_size: int) -> list[int]:
    masks = np.zeros((1, -(-vocab_size // 32)), np.int32)
    grammars.fill({0: matcher}, masks)
    return np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little")).tolist()


def accepts(grammars: LLGuidance, grammar: Grammar, tokenizer: Tokenizer, text: str) -> bool:
    matcher = grammars.matcher(grammar)
    try:
        matcher.consume(tokenizer.encode(text, add_special_tokens=False))
    except InvalidRequest:
        return False
    return matcher.ended or tokenizer.eos_ids[0] in allowed(grammars, matcher, tokenizer.vocab_size)


def assert_enforced(grammars: LLGuidance, tokenizer: Tokenizer, source: Any, yes: list[str], no: list[str]) -> None:
    """As a schema and within a Lark grammar."""
    for wanted in (schema(source), Grammar("lark", f"start: %json {json.dumps(source)}")):
        refused = [text for text in yes if not accepts(grammars, wanted, tokenizer, text)]
        assert not refused, refused
        allowed_anyway = [text for text in no if accepts(grammars, wanted, tokenizer, text)]
        assert not allowed_anyway, allowed_anyway


def walk(grammars: LLGuidance, grammar: Grammar, tokenizer: Tokenizer, draw: random.Random) -> str | None:
    """The text of random choices among the allowed tokens; None for one that became too long."""
    matcher, tokens = grammars.matcher(grammar), list[int]()
    quote = tokenizer.encode('"', add_special_tokens=False)[0]
    while len(tokens) < 200:
        tokens += matcher.take_forced()
        if matcher.ended:
            return tokenizer.decode(tokens)
        choices = allowed(grammars, matcher, tokenizer.vocab_size)
        token = quote if quote in choices and draw.random() < 0.4 else draw.choice(choices)
        if token in tokenizer.eos_ids:
            return tokenizer.decode(tokens)
        tokens.append(token)
        matcher.consume([token])
    return None
