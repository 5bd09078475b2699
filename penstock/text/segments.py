"""Encoding chats piece by piece, so that a system prompt or a history that comes again is not tokenised again, and new
words are all that costs something in a new message."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping

import tokenizers
from tokenizers import AddedToken

MAX_CHARACTERS = 2**21  # of all pieces remembered; about 10 MB with their tokens
MAX_WORDS = 2**15  # remembered; about as much
MAX_WORD_CHARACTERS = 24
BY_WORDS = 1024  # characters of a piece up to which looking up its words is worth while; the backend needs no GIL

# Where a space stands between two of these letters, every tokenizer that cuts a text into words cuts before the space.
_before_words = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])").split
_SAMPLE = "We can't say THAT everyone's fooBar likes it a I\tx, or do we say so"


class SegmentEncoder:
    """Equal to `backend.encode(text, add_special_tokens=False).ids`.

    A byte-level tokenizer cuts a text at its added tokens before it looks at anything else, so the pieces between them
    never influence each other.
    """

    def __init__(self, backend: tokenizers.Tokenizer, added: Mapping[int, AddedToken]) -> None:
        self._backend = backend
        # Those matched in normalised text are found inside a piece, by the backend.
        self._ids = {token.content: token_id for token_id, token in added.items() if not token.normalized}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, longest_first))})").split
        self._pieces: dict[str, list[int]] = {}  # oldest first
        self._characters = 0
        self._lock = threading.Lock()  # for those who add: long texts are encoded in threads
        self._words: dict[str, list[int]] = {}
        self._has_words = self._cuts_before_words() and not any(" " in token.content for token in added.values())

    @staticmethod
    def applies(added: Mapping[int, AddedToken]) -> bool:
        """Tokens that swallow spaces or mind their neighbours would tie pieces together."""
        return any(not token.normalized for token in added.values()) and not any(
            token.lstrip or token.rstrip or token.single_word for token in added.values()
        )

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for position, piece in enumerate(self._split(text)):
            if position % 2:
                ids.append(self._ids[piece])
            elif piece:
                ids += self._piece(piece)
        return ids

    def _piece(self, piece: str) -> list[int]:
        known = self._pieces.get(piece)
        if known is not None:
            return known
        ids = self._by_words(piece) if self._has_words and len(piece) <= BY_WORDS else self._encode(piece)
        with self._lock:
            if piece not in self._pieces and len(piece) <= MAX_CHARACTERS:
                self._pieces[piece] = ids
                self._characters += len(piece)
                while self._characters > MAX_CHARACTERS:
                    oldest = next(iter(self._pieces))
                    del self._pieces[oldest]
                    self._characters -= len(oldest)
        return ids

    def _by_words(self, piece: str) -> list[int]:
        ids: list[int] = []
        words = self._words
        for word in _before_words(piece):
            known = words.get(word)
            if known is None:
                known = self._encode(word)
                if len(word) <= MAX_WORD_CHARACTERS:
                    if len(words) >= MAX_WORDS:
                        words.clear()
                    words[word] = known
            ids += known
        return ids

    def _cuts_before_words(self) -> bool:
        """Whether the backend's rules, which are the same for all letters, cut a sample there and change no space."""
        rules = self._backend.pre_tokenizer
        if rules is None:
            return False
        starts = {start for _, (start, _) in rules.pre_tokenize_str(_SAMPLE)}
        words = _before_words(_SAMPLE)
        cuts = all(sum(map(len, words[:count])) in starts for count in range(len(words)))
        return cuts and self._encode(_SAMPLE) == [id for word in words for id in self._encode(word)]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids
