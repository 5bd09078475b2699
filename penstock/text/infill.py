"""Fill-in-the-middle (FIM): prompts that ask for the text between two others, for models with tokens for that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.core.errors import ContextTooLong
from penstock.text.tokenizer import Tokenizer


class Infill(NamedTuple):
    """The tokens that stand before the text that precedes, before the one that follows, and at the end."""

    prefix: int
    suffix: int
    middle: int | None  # None: the suffix comes first, and the model goes on where the prefix ends

    def prompt(self, tokenizer: Tokenizer, before: str, after: str, at_most: int) -> list[int]:
        """Raises ContextTooLong for more tokens than `at_most`."""
        start = [self.prefix, *tokenizer.encode(before, add_special_tokens=False, at_most=at_most)]
        end = [self.suffix, *tokenizer.encode(after, add_special_tokens=False, at_most=at_most)]
        body = [*end, *start] if self.middle is None else [*start, *end, self.middle]
        ids = [*tokenizer.encode(""), *body]
        if len(ids) > at_most:
            raise ContextTooLong(f"prompt and suffix have {len(ids)} tokens together", param=None)
        return ids


# Spellings of prefix, suffix and middle.
FORMATS: Sequence[tuple[str, str, str | None]] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("[PREFIX]", "[SUFFIX]", None),  # Codestral
)


def find_infill(tokenizer: Tokenizer) -> Infill | None:
    for before, after, between in FORMATS:
        prefix, suffix = tokenizer.token_id(before), tokenizer.token_id(after)
        middle = None if between is None else tokenizer.token_id(between)
        if prefix is not None and suffix is not None and (between is None or middle is not None):
            return Infill(prefix, suffix, middle)
    return None
