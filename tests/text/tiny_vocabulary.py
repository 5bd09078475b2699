"""What the tests of this folder share and fixtures cannot carry."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st

from penstock.text.tokenizer import Tokenizer

WriteGGUF = Callable[..., Tokenizer]

# In the order of falling scores; the first one has id 259, after three special tokens and 256 bytes.
SENTENCEPIECE_WORDS = ["▁", *"helowrd", "he", "ll", "hell", "hello", "▁hello", "▁w", "or", "▁wor", "ld", "▁world", "lo"]

seeded = settings(derandomize=True, deadline=None, max_examples=200)

# The built-in model's vocabulary lacks 21 bytes, so that it loses six control characters and the planes from 4 on.
spellable = st.characters(codec="utf-8", max_codepoint=0x3FFFF, exclude_characters="\x04\x06\x13\x14\x16\x1d")
