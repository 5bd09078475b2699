"""Grammars whose masks take long: how that is known, and that masks computed at once are those computed one by one."""

from __future__ import annotations

import math

import numpy as np
import pytest

from penstock.core.errors import InvalidRequest
from penstock.core.request import Grammar
from penstock.grammar import compiler
from penstock.grammar.compiler import LLGuidance
from penstock.grammar.matcher import LLGuidanceMatcher, MaskTimes
from penstock.text.tokenizer import Tokenizer
from tests.grammar.masks import schema

SHORT = schema({"type": "string", "maxLength": 20})


def test_one_slow_mask_is_an_accident_and_several_are_not() -> None:
    times = MaskTimes()
    times.observe(0.1)
    assert times.mean < 50e-6
    for _ in range(20):
        times.observe(1e-3)
    assert times.mean > 500e-6
    for _ in range(200):
        times.observe(3e-6)
    assert times.mean == 0


@pytest.fixture
def own(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> LLGuidance:
    monkeypatch.setattr(compiler, "usable_cpus", lambda: 4)
    monkeypatch.setattr(compiler, "SHORT_SECONDS", math.inf)  # however slow this machine is just now
    return LLGuidance(lambda: tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)


def test_masks_computed_at_once_are_those_computed_one_by_one(own: LLGuidance, tokenizer: Tokenizer) -> None:
    """Beside one that is free, one that cannot go on, and one of another grammar."""

    def matchers() -> dict[int, LLGuidanceMatcher]:
        made = {row: own.matcher(SHORT) for row in range(5)}
        for row, matcher in made.items():
            matcher.consume(tokenizer.encode('"' + "rain " * row, add_special_tokens=False))
        made[5] = own.matcher(Grammar(SHORT.kind, SHORT.source, after=(28,)))
        made[6] = own.matcher(SHORT)
        with pytest.raises(InvalidRequest):
            made[6].consume(tokenizer.encode("rain", add_special_tokens=False))
        made[7] = own.matcher(Grammar("regex", "yes|no"))
        return made

    rows, words = 8, -(-tokenizer.vocab_size // 32)
    one_by_one, at_once = np.zeros((rows, words), np.int32), np.zeros((rows, words), np.int32)
    assert own.fill(matchers(), one_by_one) == [6]
    own.matcher(SHORT).times.mean = 1.0
    several = matchers()
    assert len(own._compiled_of(SHORT).prototypes) == 4
    assert own.fill(several, at_once) == [6]
    assert own._executor is not None
    kept = [row for row in range(rows) if row != 6]
    assert np.array_equal(at_once[kept], one_by_one[kept])


def test_a_grammar_with_fast_masks_has_one_prototype(own: LLGuidance) -> None:
    for _ in range(5):
        own.matcher(SHORT)
    assert len(own._compiled_of(SHORT).prototypes) == 1
