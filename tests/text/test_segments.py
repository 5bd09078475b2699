"""Piece by piece must be the same as all at once."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tiny_vocabulary import seeded
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from penstock.text import segments
from penstock.text.tokenizer import Tokenizer

CORPUS = ["the rain falls mainly on the plain", "it's we'll don't 1234", "naïve café é ñ <tool> and <tool>"]


@pytest.fixture(scope="module")
def backend() -> tokenizers.Tokenizer:
    """As Qwen's: text is brought into a normal form, and some added tokens are looked for in that form."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet))
    backend.add_special_tokens([AddedToken("<|a|>", normalized=False), AddedToken("<|a|>b", normalized=False)])
    backend.add_tokens([AddedToken("<tool>", normalized=True), AddedToken("é!", normalized=True)])
    return backend


pieces = st.sampled_from([*CORPUS, "<|a|>", "<|a|>b", "<|a|>bc", "<tool>", "e\u0301!", "e", "\u0301", " ", "\n", "<|a"])


@seeded
@given(texts=st.lists(st.lists(st.one_of(pieces, st.text(max_size=5))).map("".join), min_size=1, max_size=4))
def test_ids_are_those_of_the_whole_text(backend: tokenizers.Tokenizer, texts: list[str]) -> None:
    tokenizer = Tokenizer(backend)
    for text in (*texts, *texts):
        assert tokenizer.encode(text, add_special_tokens=False) == backend.encode(text, add_special_tokens=False).ids


def test_a_token_that_swallows_spaces_turns_pieces_off(backend: tokenizers.Tokenizer) -> None:
    copy = tokenizers.Tokenizer.from_str(backend.to_str())
    copy.add_special_tokens([AddedToken("<|strip|>", normalized=False, lstrip=True)])
    text = "rain  <|strip|> falls"
    ids = Tokenizer(copy).encode(text, add_special_tokens=False)
    assert ids == copy.encode(text, add_special_tokens=False).ids


def test_a_token_across_words_is_found(backend: tokenizers.Tokenizer) -> None:
    copy = tokenizers.Tokenizer.from_str(backend.to_str())
    copy.add_tokens([AddedToken("n f", normalized=True)])
    ids = Tokenizer(copy).encode("the rain falls", add_special_tokens=False)
    assert ids == copy.encode("the rain falls", add_special_tokens=False).ids


def test_merges_across_words_are_found() -> None:
    """As superword vocabularies have them: nothing cuts a text before its words."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(CORPUS * 9, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet))
    backend.add_special_tokens([AddedToken("<|a|>", normalized=False)])
    ids = backend.encode(CORPUS[0], add_special_tokens=False).ids
    assert len(ids) < len(CORPUS[0].split()), "the case is what it says"
    assert Tokenizer(backend).encode(CORPUS[0], add_special_tokens=False) == ids


def test_words_are_forgotten_before_they_are_too_many(
    backend: tokenizers.Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "MAX_WORDS", 3)
    encoder = segments.SegmentEncoder(backend, backend.get_added_tokens_decoder())
    text = "one two three four five six " + "x" * 50
    assert encoder.encode(text) == backend.encode(text, add_special_tokens=False).ids
    assert 0 < len(encoder._words) <= 3


def test_memory_is_bounded(backend: tokenizers.Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "MAX_CHARACTERS", 10)
    encoder = segments.SegmentEncoder(backend, backend.get_added_tokens_decoder())
    for text in ("12345", "67890", "abcde", "x" * 11):
        encoder.encode(text)
    assert list(encoder._pieces) == ["67890", "abcde"], "the oldest went"
