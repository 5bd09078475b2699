from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.text.offsets import TextOffsets
from penstock.text.tokenizer import Tokenizer
from tests.text.tiny_vocabulary import seeded, spellable


def begins(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """How many characters are complete before each token."""
    before = [b"".join(tokenizer.token_bytes(i) for i in ids[:count]) for count in range(len(ids))]
    return [len(data.decode(errors="ignore")) for data in before]


@seeded
@given(prompt=st.text(spellable, max_size=6), answer=st.text(spellable, max_size=6))
def test_characters_are_counted_not_bytes(tokenizer: Tokenizer, prompt: str, answer: str) -> None:
    ids, output = tokenizer.encode(prompt), tokenizer.encode(answer)
    for text in (prompt, None):
        offsets = TextOffsets(tokenizer)
        assert list(offsets.of_prompt(ids, text)) == begins(tokenizer, ids)
        assert list(offsets.of_output(output[:2])) + list(offsets.of_output(output[2:])) == [
            len(prompt) + offset for offset in begins(tokenizer, output)
        ]


def test_half_characters_are_shown_and_counted_where_tokens_were_sent(tokenizer: Tokenizer) -> None:
    first, *_ = tokenizer.encode("🌍")
    offsets = TextOffsets(tokenizer)
    assert list(offsets.of_prompt([first, *tokenizer.encode("a"), first], None)) == [0, 1, 2]
    assert list(offsets.of_output(tokenizer.encode("b"))) == [3], "the prompt's last character will never be complete"


def test_special_tokens_count_where_the_client_wrote_them(tokenizer: Tokenizer) -> None:
    text = "a<|im_end|>b"
    a, end, b = ids = tokenizer.encode(text)
    assert list(TextOffsets(tokenizer).of_prompt(ids, text)) == [0, 1, 11]
    assert list(TextOffsets(tokenizer).of_prompt([a, end, b], None)) == [0, 1, 11]
    assert list(TextOffsets(tokenizer).of_output([a, end, b])) == [0, 1, 1], "of an answer they are not part"


def test_what_sentencepiece_adds_is_not_counted(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("hello world")
    assert [sentencepiece.token_text(i) for i in ids] == ["<s>", " hello", " world"]
    assert list(TextOffsets(sentencepiece).of_prompt(ids, "hello world")) == [0, 0, 5]
    assert list(TextOffsets(sentencepiece).of_prompt(ids[1:], None)) == [0, 5]
