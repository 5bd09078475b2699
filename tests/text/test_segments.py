"""Piece by piece must be the same as all at once."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from penstock.core.errors import ContextTooLong
from penstock.text import segments
from penstock.text.gguf_vocabulary import DIGITS_IN_THREES, SINGLE_DIGITS
from penstock.text.tokenizer import Tokenizer
from tests.text.tiny_vocabulary import seeded

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


def trained(*rules: pre_tokenizers.PreTokenizer, nfc: bool = False) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(list(rules))
    if nfc:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        [*CORPUS, " " * 40, "123456"], trainers.BpeTrainer(vocab_size=350, initial_alphabet=alphabet)
    )
    backend.post_processor = processors.ByteLevel(trim_offsets=True)  # as Llama's: offsets without the space
    backend.add_special_tokens([AddedToken("<|a|>", normalized=False)])
    backend.add_tokens([AddedToken("<|two words|>", normalized=True)])
    return backend


TO_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
WORDS_TO_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
RULES = {
    "gpt-2": lambda: trained(WORDS_TO_BYTES),
    "smollm": lambda: trained(pre_tokenizers.Digits(individual_digits=True), WORDS_TO_BYTES),
    "llama 3": lambda: trained(pre_tokenizers.Split(Regex(DIGITS_IN_THREES), "isolated"), TO_BYTES),
    "qwen 2": lambda: trained(pre_tokenizers.Split(Regex(SINGLE_DIGITS), "isolated"), TO_BYTES, nfc=True),
}
runs = st.tuples(
    st.sampled_from(
        ["1", "a", " ", "\n", "\u0301", "\u0316\u0301", "e\u0301", "中", "한", "ᄒ", "ᅡ", "'s", ", ", "<|two"]
    ),
    st.integers(1, 300),
).map(lambda run: run[0] * run[1])
marks = st.text("e\u0301\u0316\u0323한か\u3099q1 中", min_size=60, max_size=160)  # that a normal form composes
some_text = st.one_of(runs, pieces, marks, marks, st.just("<|two words|>"), st.text(max_size=9))
long_texts = st.lists(some_text, min_size=5, max_size=40)


@pytest.fixture(scope="module", params=RULES)
def windowed(request: pytest.FixtureRequest) -> tokenizers.Tokenizer:
    return RULES[request.param]()


@settings(seeded, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(text=long_texts.map("".join), window=st.integers(150, 400))
def test_windows_change_no_token(
    windowed: tokenizers.Tokenizer, monkeypatch: pytest.MonkeyPatch, text: str, window: int
) -> None:
    monkeypatch.setattr(segments, "WINDOW", window)
    tokenizer = Tokenizer(windowed)
    ids = windowed.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text, add_special_tokens=False, at_most=len(ids)) == ids
    if ids:
        with pytest.raises(ContextTooLong):
            tokenizer.encode(text, add_special_tokens=False, at_most=len(ids) - 1)


def test_a_long_text_is_given_up_after_a_few_windows(windowed: tokenizers.Tokenizer) -> None:
    """Both by its size and, where that would do, by its first tokens: all of it would take minutes and gigabytes."""
    tokenizer = Tokenizer(windowed)
    for text in ("rain falls 12 " * 2_000_000, "rain falls 12 " * 100 * 200):
        with pytest.raises(ContextTooLong):
            tokenizer.encode(text, at_most=20_000)
    windows = tokenizer._segments._windows  # type: ignore[union-attr]
    assert windows is not None
    assert len(windows.encode("rain falls 12 " * 2_000_000, 1000)) < 1000 + segments.WINDOW


@pytest.mark.parametrize("pattern", [r"(?<=a)\w+", r"\bx", r"^\w+", r"\w+$"])
def test_rules_that_look_back_turn_windows_off(pattern: str) -> None:
    backend = trained(pre_tokenizers.Split(Regex(pattern), "isolated"), TO_BYTES)
    tokenizer = Tokenizer(backend)
    assert tokenizer._segments is not None
    assert tokenizer._segments._windows is None
    text = "rain a falls " * 3000
    assert tokenizer.encode(text) == backend.encode(text).ids


def test_framing_tokens_are_kept(windowed: tokenizers.Tokenizer) -> None:
    copy = tokenizers.Tokenizer.from_str(windowed.to_str())
    token = ("<|a|>", copy.token_to_id("<|a|>"))
    copy.post_processor = processors.TemplateProcessing(single=["<|a|>", "$A", "<|a|>"], special_tokens=[token])
    for text in ("", "a", "rain <|a|> falls"):
        assert Tokenizer(copy).encode(text) == copy.encode(text).ids
