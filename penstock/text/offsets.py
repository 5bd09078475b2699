"""Computes the character offsets at which tokens begin in a text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from penstock.text.detokenizer import IncrementalDetokenizer
from penstock.text.tokenizer import Tokenizer


class TextOffsets:
    """Where the tokens of an answer begin in its text, in characters; one that goes on with a character
    begins where the character does."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer, continues=True)
        self._next = 0

    def of_prompt(self, token_ids: Sequence[int], text: str | None) -> Iterator[int]:
        """`text` as the client wrote it, without the special tokens that the tokenizer added; None: it sent tokens.
        To be read to its end before the output's."""
        tokenizer = self._tokenizer
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)

        def written(token_id: int) -> bool:
            if text is None or not tokenizer.is_special(token_id):
                return True
            return text.startswith(tokenizer.token_text(token_id), self._next)

        for token_id in token_ids:
            yield self._place(detokenizer, token_id) if written(token_id) else self._next
        self._next = self._next + len(detokenizer.finish()) if text is None else len(text)

    def of_output(self, token_ids: Iterable[int]) -> Iterator[int]:
        return (self._place(self._detokenizer, token_id) for token_id in token_ids)

    def _place(self, detokenizer: IncrementalDetokenizer, token_id: int) -> int:
        begin = self._next + detokenizer.breaks(token_id)  # what stays of a broken character is one U+FFFD
        self._next += len(detokenizer.push((token_id,)))
        return begin
