"""Decodes token ids to text incrementally, while they arrive."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from penstock.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """What `push` and `finish` return adds up to `tokenizer.decode` of all ids, however these are divided.

    The bytes of a character that is not complete are held back, at most three. A stream that `continues` another text
    keeps a first space that `decode` would take for the one sentencepiece puts before a text. Special tokens are left
    out, but for those to be kept.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        continues: bool = False,
        keep: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._hidden = hidden - keep if keep else hidden
        self._strip_next = tokenizer.strips_first_space and not continues
        self._held = b""  # of a character that is not complete

    def push(self, token_ids: Iterable[int]) -> str:
        data = self._tokenizer.join_all_but(self._hidden, token_ids)
        if self._strip_next and data:
            data = data.removeprefix(b" ")
            self._strip_next = False
        if self._held:
            data = self._held + data
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._held = data[used:]
        return text

    def breaks(self, token_id: int) -> bool:
        """Whether the character held back, if any, can no longer be completed once this token follows."""
        follows = self._tokenizer.join_all_but(self._hidden, (token_id,))[:1]
        try:
            codecs.utf_8_decode(self._held + follows, "strict", False)
        except UnicodeDecodeError:
            return bool(self._held)
        return False

    def finish(self) -> str:
        held, self._held = self._held, b""
        return held.decode(errors="replace")
