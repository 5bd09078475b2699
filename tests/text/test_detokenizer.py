from __future__ import annotations

from itertools import cycle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.text.detokenizer import IncrementalDetokenizer
from penstock.text.tokenizer import Tokenizer
from tests.text.tiny_vocabulary import seeded, spellable


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece"])
def any_tokenizer(request: pytest.FixtureRequest, tokenizer: Tokenizer, sentencepiece: Tokenizer) -> Tokenizer:
    return tokenizer if request.param == "byte_level" else sentencepiece


sizes_of_chunks = st.lists(st.integers(1, 9), min_size=1, max_size=5)
characters = st.characters(
    codec="utf-8", max_codepoint=0x1FFFF
)  # the byte-level vocabulary lacks bytes of those beyond


def stream(tokenizer: Tokenizer, ids: list[int], sizes: list[int], *, skip_special_tokens: bool) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    parts: list[str] = []
    for size in cycle(sizes):
        if not ids:
            return [*parts, detokenizer.finish()]
        parts.append(detokenizer.push(ids[:size]))
        ids = ids[size:]
    raise AssertionError


@seeded
@given(text=st.text(spellable), skip=st.booleans(), sizes=sizes_of_chunks)
def test_text_comes_back_whole_and_no_character_is_split(
    any_tokenizer: Tokenizer, text: str, skip: bool, sizes: list[int]
) -> None:
    ids = any_tokenizer.encode(text, add_special_tokens=False)
    parts = stream(any_tokenizer, ids, sizes, skip_special_tokens=skip)
    assert "".join(parts) == any_tokenizer.decode(ids, skip_special_tokens=skip)
    assert parts[-1] == ""
    assert "\ufffd" in text or "\ufffd" not in "".join(parts)


@seeded
@given(seeds=st.lists(st.integers(0, 2**20)), skip=st.booleans(), sizes=sizes_of_chunks)
def test_any_ids_come_out_as_decode_has_them(
    any_tokenizer: Tokenizer, seeds: list[int], skip: bool, sizes: list[int]
) -> None:
    ids = [seed % any_tokenizer.vocab_size for seed in seeds]
    parts = stream(any_tokenizer, ids, sizes, skip_special_tokens=skip)
    assert "".join(parts) == any_tokenizer.decode(ids, skip_special_tokens=skip)


@seeded
@given(octets=st.binary(), sizes=sizes_of_chunks)
def test_any_bytes_come_out_as_decode_has_them(sentencepiece: Tokenizer, octets: bytes, sizes: list[int]) -> None:
    ids = [3 + octet for octet in octets]
    parts = stream(sentencepiece, ids, sizes, skip_special_tokens=True)
    assert "".join(parts) == sentencepiece.decode(ids) == octets.removeprefix(b" ").decode(errors="replace")


def test_text_is_shown_as_soon_as_it_is_certain(tokenizer: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer)
    first, second = tokenizer.encode("你")
    assert [detokenizer.push([i]) for i in (19556, first, second, 19556)] == ["Hello", "", "你", "Hello"]


def test_a_continuation_keeps_its_first_space(sentencepiece: Tokenizer) -> None:
    hello, world = sentencepiece.encode("hello world", add_special_tokens=False)
    continuation = IncrementalDetokenizer(sentencepiece, continues=True)
    assert sentencepiece.decode([hello]) + continuation.push([world]) == "hello world"
