from __future__ import annotations

import pytest

from penstock.checkpoint.source import resolve
from penstock.grammar.compiler import LLGuidance
from penstock.text.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve("smollm2-135m"))


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> LLGuidance:
    return LLGuidance(lambda: tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
