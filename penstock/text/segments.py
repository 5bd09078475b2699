"""Encoding chats piece by piece, so that a system prompt or a history that comes again is not tokenised again."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Mapping

import tokenizers
from tokenizers import AddedToken

MAX_CHARACTERS = 2**21  # of all pieces remembered; about 10 MB with their tokens


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
        self._pieces: OrderedDict[str, list[int]] = OrderedDict()  # least recently used first
        self._characters = 0
        self._lock = threading.Lock()  # long texts are encoded in threads

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
        with self._lock:
            if (known := self._pieces.get(piece)) is not None:
                self._pieces.move_to_end(piece)
                return known
        ids: list[int] = self._backend.encode(piece, add_special_tokens=False).ids
        with self._lock:
            if piece not in self._pieces and len(piece) <= MAX_CHARACTERS:
                self._pieces[piece] = ids
                self._characters += len(piece)
                while self._characters > MAX_CHARACTERS:
                    self._characters -= len(self._pieces.popitem(last=False)[0])
        return ids
