"""Tokenizers that llguidance cannot read, and those that do not quite fit their model."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

import llguidance
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models

from penstock.core.errors import InvalidRequest
from penstock.core.request import Grammar
from penstock.grammar.compiler import LLGuidance
from penstock.text.tokenizer import Tokenizer
from tests.grammar.masks import allowed

BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}
END, NAME = 256, "<image_soft_token>"


def _sentencepiece(*merged: str, added: tuple[AddedToken, ...] = ()) -> tokenizers.Tokenizer:
    """A character each for what `merged` consists of, which is made of its first character and the rest."""
    letters = sorted(set("".join(merged)) | {"▁"})
    vocabulary = {token: i for i, token in enumerate((*BYTES, "</s>", *letters, *merged))}
    merges = [(token[:-1], token[-1]) for token in merged]
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    backend.add_tokens(list(added))
    return backend


def _metaspace() -> Tokenizer:
    backend = _sentencepiece("ye", "yes")
    backend.decoder = decoders.Metaspace()
    return Tokenizer(backend, eos_ids=(END,))


def _word_pieces() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2, "</s>": 3}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    return Tokenizer(backend, eos_ids=(3,))


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (_metaspace, "can't determine decoder type"),
        (_word_pieces, "can't determine decoder type"),
        (lambda: Tokenizer(_sentencepiece("ye"), eos_ids=()), "no token that ends an output"),
        (lambda: Tokenizer(_sentencepiece("ye"), eos_ids=(10**6,)), "no token that ends an output"),
    ],
)
def test_a_tokenizer_that_cannot_be_read_costs_structured_output_alone(
    make: Callable[[], Tokenizer], problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever prepares goes on and reads why, once. It is not read again for every request."""
    tokenizer, loads = make(), list[int]()

    def load() -> Tokenizer:
        loads.append(1)
        return tokenizer

    grammars = LLGuidance(load, tokenizer.vocab_size, tokenizer.eos_ids)
    with caplog.at_level(logging.WARNING):
        grammars.prepare()
        grammars.prepare()
    (record,) = caplog.records
    assert problem in record.getMessage()
    assert "all others are answered as usual" in record.getMessage()
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=problem) as refused:
            grammars.compile(Grammar("regex", "yes", param="response_format"))
        assert refused.value.message.startswith("response_format cannot be compiled here: llguidance cannot read")
        assert refused.value.param == "response_format"
    assert loads == [1]


def test_a_panic_costs_structured_output_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tokenizer: Tokenizer
) -> None:
    class Panic(BaseException):
        """As those of pyo3 are none of `Exception` either."""

    def panic(*_: object, **__: object) -> None:
        raise Panic("index out of bounds")

    monkeypatch.setattr(llguidance, "LLTokenizer", panic)
    grammars = LLGuidance(lambda: tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
    grammars.prepare()
    assert "index out of bounds" in caplog.text
    with pytest.raises(InvalidRequest, match="index out of bounds"):
        grammars.compile(Grammar("regex", "yes"))


def test_end_tokens_that_the_model_does_not_have_are_left_out(tokenizer: Tokenizer) -> None:
    """As a generation_config.json of another model of the family names them."""
    beyond = tokenizer.vocab_size + 100
    grammars = LLGuidance(lambda: tokenizer, tokenizer.vocab_size, (*tokenizer.eos_ids, beyond))
    matcher = grammars.matcher(Grammar("regex", "a*"))
    assert set(tokenizer.eos_ids) <= set(allowed(grammars, matcher, tokenizer.vocab_size))
    free = grammars.matcher(Grammar("regex", "a*", after=(5,)))
    assert not set(tokenizer.eos_ids) & set(allowed(grammars, free, tokenizer.vocab_size))


@pytest.mark.parametrize("special", [False, True])
def test_added_tokens_without_logits_neither_come_nor_are_forced(special: bool) -> None:
    """Gemma 3 of 1B: the tokenizer has a token for images, the model has none."""
    backend = _sentencepiece("ye", "yes", added=(AddedToken(NAME, special=special),))
    tokenizer = Tokenizer(backend, eos_ids=(END,))
    vocab_size = tokenizer.vocab_size - 1
    assert tokenizer.token_id(NAME) == vocab_size
    grammars = LLGuidance(lambda: tokenizer, vocab_size, tokenizer.eos_ids)
    forced = grammars.matcher(Grammar("regex", f"yes{NAME}yes")).take_forced()
    assert tokenizer.decode(forced) == f"yes{NAME}yes"
    assert max(forced) < vocab_size
    matcher, output = grammars.matcher(Grammar("regex", f"(yes|{NAME})[a-z]")), list[int]()
    while not matcher.ended:
        choices = allowed(grammars, matcher, vocab_size)  # of whole words: beyond it, too
        assert choices
        assert max(choices) < vocab_size
        output += [choices[0], *matcher.follow(choices[0])]
    assert re.fullmatch(f"(yes|{NAME})[a-z]", tokenizer.decode(output))
    with pytest.raises(InvalidRequest):
        grammars.compile(Grammar("lark", f"start: {NAME}"))


@pytest.mark.parametrize("missing", [1, 1000])
def test_a_model_with_a_part_of_the_vocabulary(tokenizer: Tokenizer, missing: int) -> None:
    vocab_size = tokenizer.vocab_size - missing
    grammars = LLGuidance(lambda: tokenizer, vocab_size, tokenizer.eos_ids)
    whole = LLGuidance(lambda: tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
    text = Grammar("regex", "[ -~]{4,}")
    wanted = allowed(whole, whole.matcher(text), tokenizer.vocab_size)
    beyond = [token for token in wanted if token >= vocab_size]
    assert allowed(grammars, grammars.matcher(text), vocab_size) == wanted[: len(wanted) - len(beyond)]
    assert beyond or missing == 1
    for token in beyond[:20]:  # what one of them would stand for is forced in parts
        word = tokenizer.decode([token])
        forced = grammars.matcher(Grammar("regex", re.escape(word) + "[0-9]")).take_forced()
        assert tokenizer.decode(forced) == word
        assert max(forced) < vocab_size
