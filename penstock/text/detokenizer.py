"""Decodes token ids to text incrementally, while they arrive."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from penstock.text.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """What `push` and `finish` return adds up to `tokenizer.decode` of all ids, however these are divided.

    The bytes of a character that is not complete are held back, at most three. A stream that `continues` another text
    keeps a first space that `decode` would take for the one sentencepiece puts before a text.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, continues: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._strip_next = tokenizer.strips_first_space and not continues
        self._utf8 = _Utf8Decoder("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        data = self._tokenizer.join_bytes(token_ids, skip_special_tokens=self._skip_special_tokens)
        if self._strip_next and data:
            data = data.removeprefix(b" ")
            self._strip_next = False
        return self._utf8.decode(data)

    def breaks(self, token_id: int) -> bool:
        """Whether the character held back, if any, can no longer be completed once this token follows."""
        held = self._utf8.getstate()[0]
        follows = self._tokenizer.join_bytes((token_id,), skip_special_tokens=self._skip_special_tokens)[:1]
        try:
            codecs.utf_8_decode(held + follows, "strict", False)
        except UnicodeDecodeError:
            return bool(held)
        return False

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)
