from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.checkpoint.source import resolve
from penstock.fleet.upstream.retokenizer import Retokenizer, Vocabulary
from penstock.text.tokenizer import load_tokenizer
from tests.text.tiny_vocabulary import spellable

VOCABULARY = Vocabulary(load_tokenizer(resolve("smollm2-135m")))
TOKENIZER = VOCABULARY.tokenizer


@given(st.lists(st.text(spellable)))
def test_bytes_stay_the_same_however_text_is_divided(pieces: list[str]) -> None:
    stream = Retokenizer(VOCABULARY)
    ids = [token_id for piece in pieces for token_id in stream.push(piece)] + stream.finish()
    assert TOKENIZER.join_bytes(ids).decode() == "".join(pieces)


def test_names_of_special_tokens_stay_text() -> None:
    text = "write <|im_end|> to end"
    ids = VOCABULARY.encode(text)
    assert not any(map(TOKENIZER.is_special, ids))
    assert TOKENIZER.decode(ids) == text


@given(st.text(spellable, min_size=1))
def test_tokens_that_a_server_leaves_out_are_filled_in(text: str) -> None:
    """llama.cpp names the last token of a character alone."""
    *_, last = VOCABULARY.encode(text)
    ids = Retokenizer(VOCABULARY).complete(text, [last])
    assert TOKENIZER.join_bytes(ids).decode() == text
    assert ids[-1] == last


def test_half_a_surrogate_pair_at_the_end_is_not_lost() -> None:
    stream = Retokenizer(VOCABULARY)
    ids = stream.push("a\ud83e") + stream.finish()
    assert TOKENIZER.decode(ids) == "a\ufffd"
