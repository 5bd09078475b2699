"""Encoding texts piece by piece: a system prompt or a history that comes again is not tokenised again, new words are
all that costs something in a new message, and a text that is too long is given up before all of it was encoded."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping
from itertools import chain
from typing import Any

import tokenizers
from tokenizers import AddedToken

MAX_CHARACTERS = 2**21  # of all pieces remembered; about 10 MB with their tokens
MAX_WORDS = 2**15  # remembered; about as much
MAX_WORD_CHARACTERS = 24
BY_WORDS = 1024  # characters of a piece up to which looking up its words is worth while
WINDOW = 16_384  # characters of a piece that are encoded at once
MIN_MARGIN = 64  # characters at the end of a window that are encoded again with the next one
UNBOUNDED = 2**62  # tokens

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
        self._pieces: OrderedDict[str, list[int]] = OrderedDict()  # oldest first
        self._characters = 0
        self._lock = threading.Lock()  # for those who add: long texts are encoded in threads
        self._words: dict[str, list[int]] = {}
        self._has_words = self._cuts_before_words() and not any(" " in token.content for token in added.values())
        self._windows = _Windows(backend, added) if _Windows.apply(backend) else None

    @staticmethod
    def applies(added: Mapping[int, AddedToken]) -> bool:
        """Tokens that swallow spaces or mind their neighbours would tie pieces together."""
        return any(not token.normalized for token in added.values()) and not any(
            token.lstrip or token.rstrip or token.single_word for token in added.values()
        )

    def encode(self, text: str, at_most: int = UNBOUNDED) -> list[int]:
        """Where there are more tokens than `at_most`: only the first of them, but more than that."""
        ids: list[int] = []
        known = self._pieces.get
        first, *rest = self._split(text)  # a piece, then a token and a piece, and so on
        if first:
            ids += known(first) or self._piece(first, at_most)
        parts = iter(rest)
        for token, piece in zip(parts, parts, strict=True):
            if len(ids) > at_most:
                break
            ids.append(self._ids[token])
            if piece:
                ids += known(piece) or self._piece(piece, at_most - len(ids))
        return ids

    def _piece(self, piece: str, at_most: int) -> list[int]:
        if self._windows is not None and len(piece) > WINDOW:
            ids = self._windows.encode(piece, at_most)
            if len(ids) > at_most:
                return ids
        else:
            ids = self._by_words(piece) if self._has_words and len(piece) <= BY_WORDS else self._encode(piece)
        with self._lock:
            if piece not in self._pieces and len(piece) <= MAX_CHARACTERS:
                self._pieces[piece] = ids
                self._characters += len(piece)
                while self._characters > MAX_CHARACTERS:
                    oldest, _ = self._pieces.popitem(last=False)
                    self._characters -= len(oldest)
        return ids

    def _by_words(self, piece: str) -> list[int]:
        words, found = self._words, _before_words(piece)
        try:
            return [*chain.from_iterable(map(words.__getitem__, found))]
        except KeyError:  # the first time that a word comes
            pass
        ids: list[int] = []
        for word in found:
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


class _Windows:
    """Equal to encoding all of a long text at once, where the pre-tokenizer reads forwards only.

    Such a pre-tokenizer finds one word after another and looks but a little beyond the end of each. So the words of a
    window are those of the whole text, except for the last ones, and the next window begins with the first of these.
    """

    def __init__(self, backend: tokenizers.Tokenizer, added: Mapping[int, AddedToken]) -> None:
        self._backend = tokenizers.Tokenizer(backend.model)  # without a post-processor, which would move offsets
        self._backend.pre_tokenizer = backend.pre_tokenizer
        if backend.normalizer is not None:
            self._backend.normalizer = backend.normalizer
        self._composes = backend.normalizer is not None
        self._backend.add_tokens([added[token_id] for token_id in sorted(added)])
        longest = max((len(token.content) for token in added.values()), default=0)
        self._margin = max(MIN_MARGIN, 2 * longest)

    @staticmethod
    def apply(backend: tokenizers.Tokenizer) -> bool:
        if backend.normalizer is not None and _state(backend.normalizer)["type"] != "NFC":
            return False
        return backend.pre_tokenizer is not None and _reads_forwards(_state(backend.pre_tokenizer))

    def encode(self, text: str, at_most: int) -> list[int]:
        """Encode as `SegmentEncoder.encode` does."""
        ids: list[int] = []
        start, size = 0, WINDOW
        while len(ids) <= at_most:
            window = text[start : start + size]
            encoding = self._backend.encode(window, add_special_tokens=False)
            if start + size >= len(text):
                return ids + encoding.ids
            tokens, characters = self._sure(window, encoding)
            if characters:
                ids += encoding.ids[:tokens]
                start, size = start + characters, WINDOW
            else:  # one word, so far
                size *= 2
        return ids

    def _sure(self, window: str, encoding: tokenizers.Encoding) -> tuple[int, int]:
        """How many tokens and characters of a window belong to words that what follows it cannot change."""
        for position in range(len(window) - self._margin, len(window) // 2, -1):
            word = encoding.char_to_word(position)
            if word is None:
                continue
            characters, tokens = encoding.word_to_chars(word), encoding.word_to_tokens(word)
            if characters is None or tokens is None:
                continue
            if not self._composes or _stays_apart(window[characters[0]]):
                return tokens[0], characters[0]
        return 0, 0


def _state(part: Any) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(part.__getstate__())
    return state


def _reads_forwards(rules: Mapping[str, Any]) -> bool:
    kind = rules["type"]
    if kind == "Sequence":
        return all(map(_reads_forwards, rules["pretokenizers"]))
    if kind == "ByteLevel":
        return not rules["add_prefix_space"]
    if kind == "Split":
        pattern = rules["pattern"].get("Regex")
        return bool(rules["behavior"] == "Isolated" and pattern is not None and not _looks_back(pattern))
    return bool(kind == "Digits")


def _looks_back(pattern: str) -> bool:
    """Whether a regular expression asks what comes before a match, or where the text ends."""
    plain = re.sub(r"\[[^\]]*\]", "", pattern)  # without sets of characters, where ^ means another thing
    return re.search(r"\(\?<[=!]|\^|\$|\\[AbBGKzZ]", plain) is not None


def _stays_apart(character: str) -> bool:
    """ASCII and the ideographs are never composed with what comes before them. Others may be."""
    return character <= "\x7f" or "\u4e00" <= character <= "\u9fff"
