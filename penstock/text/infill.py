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
    separator: int | None = None  # begins a file, in models that have read several at a time

    def prompt(
        self,
        tokenizer: Tokenizer,
        before: str,
        after: str,
        at_most: int,
        others: Sequence[tuple[str, str]] = (),
        keep_free: int = 0,
    ) -> list[int]:
        """Raises ContextTooLong for more tokens than `at_most`. `others`: names and pieces of other files, of which the
        last tokens are used that fit beside `keep_free` more."""
        start = [self.prefix, *tokenizer.encode(before, add_special_tokens=False, at_most=at_most)]
        end = [self.suffix, *tokenizer.encode(after, add_special_tokens=False, at_most=at_most)]
        body = [*end, *start] if self.middle is None else [*start, *end, self.middle]
        begin = tokenizer.encode("")
        count = len(begin) + len(body)
        if count > at_most:
            raise ContextTooLong(f"prompt and suffix have {count} tokens together", param=None)
        room = at_most - count - keep_free
        return [*begin, *self._other_files(tokenizer, others, room), *body]

    def _other_files(self, tokenizer: Tokenizer, others: Sequence[tuple[str, str]], room: int) -> list[int]:
        """As llama.cpp writes them. The last file is the one to fill in."""
        if not others or room <= 0:
            return []
        ids: list[int] = []
        for name, piece in others:
            text = f"\n\n--- snippet ---\n\n{piece}" if self.separator is None else f"{name}\n{piece}"
            ids += [] if self.separator is None else [self.separator]
            ids += tokenizer.encode(text, add_special_tokens=False)
        if self.separator is not None:
            ids += [self.separator, *tokenizer.encode("filename\n", add_special_tokens=False)]
        return ids[-room:]


# Spellings of prefix, suffix and middle.
FORMATS: Sequence[tuple[str, str, str | None]] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("[PREFIX]", "[SUFFIX]", None),  # Codestral
)


SEPARATORS = ("<|file_sep|>", "<file_sep>")  # Qwen2.5-Coder, StarCoder2


def find_infill(tokenizer: Tokenizer) -> Infill | None:
    for before, after, between in FORMATS:
        prefix, suffix = tokenizer.token_id(before), tokenizer.token_id(after)
        middle = None if between is None else tokenizer.token_id(between)
        if prefix is not None and suffix is not None and (between is None or middle is not None):
            separator = next(filter(None, map(tokenizer.token_id, SEPARATORS)), None)
            return Infill(prefix, suffix, middle, separator)
    return None
