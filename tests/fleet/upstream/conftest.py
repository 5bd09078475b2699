from __future__ import annotations

import pytest

from penstock.checkpoint.source import resolve
from penstock.text.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """Of the built-in model."""
    return load_tokenizer(resolve("smollm2-135m"))
