"""Token ids for text that came without them: other ids than were sampled perhaps, but of exactly the same bytes."""

from __future__ import annotations

from functools import cached_property

from penstock.core.errors import Unavailable
from penstock.text.tokenizer import Tokenizer

_HIGH_SURROGATES = range(0xD800, 0xDC00)
_SURROGATES = range(0xD800, 0xE000)


class Vocabulary:
    """The tokenizer of a model, and its tokens by their bytes. One serves all streams."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """Tokens whose bytes are those of the text. The tokenizer's own where they are: a normalizer, the names of
        special tokens in the text and the space that sentencepiece puts before a text would change it."""
        data = text.encode()
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return ids if self.tokenizer.join_bytes(ids) == data else self.encode_bytes(data)

    def encode_bytes(self, data: bytes) -> list[int]:
        """The longest token first, and so on. Bytes that no token stands for are left out; vocabularies with byte
        fallback have none."""
        by_bytes, longest = self._by_bytes
        ids: list[int] = []
        at = 0
        while at < len(data):
            for end in range(min(len(data), at + longest), at, -1):
                if (token_id := by_bytes.get(data[at:end])) is not None:
                    ids.append(token_id)
                    break
            else:
                end = at + 1
            at = end
        return ids

    def prompt_text(self, token_ids: list[int]) -> str:
        """What a server must be sent to make these tokens of it. It puts the same token before a text as the tokenizer
        here does."""
        first = self.tokenizer.bos_id
        if token_ids[:1] == [first] and self.tokenizer.encode("")[:1] == [first]:
            token_ids = token_ids[1:]
        try:
            text = self.tokenizer.join_bytes(token_ids, skip_special_tokens=False).decode()
        except UnicodeDecodeError:
            raise Unavailable("this upstream takes text alone and cannot go on in mid-character") from None
        return text.removeprefix(" ") if self.tokenizer.strips_first_space else text

    def token_of(self, text: str) -> int | None:
        """The token that log-probabilities name by its text. None: there is none, or it is half a character."""
        if text.startswith("token_id:"):
            return int(text[9:])
        return None if "\ufffd" in text else self._by_bytes[0].get(text.encode(errors="replace"))

    @cached_property
    def _by_bytes(self) -> tuple[dict[bytes, int], int]:
        """For 130,000 tokens it takes a tenth of a second, when it is first needed."""
        tokenizer = self.tokenizer
        ids = (i for i in range(tokenizer.vocab_size - 1, -1, -1) if not tokenizer.is_special(i))
        by_bytes = {data: i for i in ids if (data := tokenizer.token_bytes(i))}
        return by_bytes, max(map(len, by_bytes), default=1)


class Retokenizer:
    """One answer's text to tokens, as it arrives. Servers that cut text into UTF-16 units can divide a character
    between two events: its first half waits for the second."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._held = ""

    def push(self, text: str, likely: list[int] | None = None) -> list[int]:
        """`likely` are its tokens if they spell it."""
        text, self._held = self._held + text, ""
        if likely and self._vocabulary.tokenizer.join_bytes(likely) == text.encode(errors="replace"):
            return likely
        if text and ord(text[-1]) in _HIGH_SURROGATES:
            text, self._held = text[:-1], text[-1]
        return self._vocabulary.encode(_joined(text)) if text else []

    def complete(self, text: str, token_ids: list[int]) -> list[int]:
        """For servers that name only the last token of a character: the others, too."""
        data = text.encode(errors="replace")
        named = self._vocabulary.tokenizer.join_bytes(token_ids)
        if named == data:
            return token_ids
        if data.endswith(named):
            return self._vocabulary.encode_bytes(data[: len(data) - len(named)]) + token_ids
        return self._vocabulary.encode(text)

    def finish(self) -> list[int]:
        held, self._held = self._held, ""
        return self._vocabulary.encode(_joined(held)) if held else []


def _joined(text: str) -> str:
    """Surrogate pairs as characters, and lone ones as U+FFFD."""
    if text.isascii() or not any(ord(character) in _SURROGATES for character in text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
