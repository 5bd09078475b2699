from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.request import Chunk, FinishReason, SamplingParams, TokenLogprob
from penstock.text.stream import TextDelta, TextStream
from penstock.text.tokenizer import Tokenizer
from tests.text.tiny_vocabulary import seeded

EOS = 2


def chunk(ids: list[int], finish: FinishReason | None = None) -> Chunk:
    return Chunk("r", ids, finish, logprobs=[TokenLogprob(i, -1.0) for i in ids])


def test_a_stop_string_across_tokens_ends_the_stream(tokenizer: Tokenizer) -> None:
    one, two, three, four = tokenizer.encode("one two three four")
    stream = TextStream(tokenizer, SamplingParams(stop=("o thr",)))
    assert stream.push(chunk([one])).text == "one"
    held = stream.push(chunk([two]))
    assert held == TextDelta(" tw", [two], None, [TokenLogprob(two, -1.0)])
    last = stream.push(chunk([three, four, EOS], "stop"))
    assert last == TextDelta("", [three], "stop", [], "o thr"), "nothing of three is shown"
    assert (stream.text, stream.output_tokens) == ("one tw", 3)
    late = stream.push(chunk([four], "abort"))
    assert (late.text, late.token_ids, late.finish_reason) == ("", [], "stop")
    assert stream.output_tokens == 3


def test_held_text_is_shown_when_the_stream_ends_otherwise(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, SamplingParams(stop=(" two three",)))
    one, two = tokenizer.encode("one two")
    held = stream.push(chunk([one, two]))
    assert (held.text, held.logprobs) == ("one", [TokenLogprob(one, -1.0)])
    last = stream.push(chunk([EOS], "stop"))
    assert (last.text, last.finish_reason, last.stop_matched) == (" two", "stop", None)
    assert last.logprobs == [TokenLogprob(two, -1.0), TokenLogprob(EOS, -1.0)]
    assert (stream.text, stream.output_tokens) == ("one two", 3)


def test_stop_token_that_is_an_ordinary_word_is_not_shown(tokenizer: Tokenizer) -> None:
    one, two = tokenizer.encode("one two")
    stream = TextStream(tokenizer, SamplingParams(stop_token_ids=(two,)))
    last = stream.push(chunk([one, two], "stop"))
    assert (last.text, last.token_ids, last.finish_reason, last.stop_matched) == ("one", [one, two], "stop", two)


def test_the_last_token_is_shown_when_length_ends_the_stream(tokenizer: Tokenizer) -> None:
    one, two = tokenizer.encode("one two")
    stream = TextStream(tokenizer, SamplingParams(stop_token_ids=(two,), min_tokens=2, max_tokens=2))
    last = stream.push(chunk([one, two], "length"))
    assert (last.text, last.finish_reason, last.stop_matched) == ("one two", "length", None)


def test_stop_strings_do_not_count_within_min_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(" a a a a")
    stream = TextStream(tokenizer, SamplingParams(stop=("a",), min_tokens=2))
    last = stream.push(chunk(ids))
    assert (stream.text, stream.output_tokens, last.stop_matched) == (" a a ", 3, "a")


def test_an_unfinished_character_appears_only_at_the_end(tokenizer: Tokenizer) -> None:
    first, _ = tokenizer.encode("你")
    stream = TextStream(tokenizer, SamplingParams())
    assert stream.push(chunk([first])).text == ""
    assert stream.push(Chunk("r", [], "length")).text == "\ufffd"


def test_a_continuation_joins_its_prompt(sentencepiece: Tokenizer) -> None:
    hello, world = sentencepiece.encode("hello world", add_special_tokens=False)
    stream = TextStream(sentencepiece, SamplingParams())
    stream.push(Chunk("r", [world], "length"))
    assert sentencepiece.decode([hello]) + stream.text == sentencepiece.decode([hello, world])


@seeded
@given(
    seeds=st.lists(st.integers(17, 2000), min_size=1),
    stops=st.lists(st.text("aeiou thn", min_size=1, max_size=3), max_size=3),
    sizes=st.lists(st.integers(1, 7), min_size=1),
)
def test_text_and_count_do_not_depend_on_chunks(
    tokenizer: Tokenizer, seeds: list[int], stops: list[str], sizes: list[int]
) -> None:
    ids = [*seeds, EOS]
    params = SamplingParams(stop=tuple(stops))
    alone = TextStream(tokenizer, params)
    deltas = [alone.push(chunk([i], "stop" if i == EOS else None)) for i in ids]
    chunked = TextStream(tokenizer, params)
    rest = ids
    scored: list[TokenLogprob] = []
    for step in range(len(ids)):
        size = sizes[step % len(sizes)]
        scored += chunked.push(chunk(rest[:size], "stop" if len(rest) <= size else None)).logprobs or []
        rest = rest[size:]
    assert scored == [entry for delta in deltas for entry in delta.logprobs or []]
    assert [entry.token_id for entry in scored] == ids[: len(scored)]
    if alone.output_tokens < len(ids):  # a stop string ended it: the tokens that are scored cover the text, no fewer do
        assert len(tokenizer.decode(ids[: len(scored)])) >= len(alone.text)
        assert not scored or len(tokenizer.decode(ids[: len(scored) - 1])) <= len(alone.text)
    assert "".join(delta.text for delta in deltas) == alone.text == chunked.text
    assert alone.output_tokens == chunked.output_tokens == sum(len(delta.token_ids) for delta in deltas)
    ends = [tokenizer.decode(seeds).find(stop) + len(stop) for stop in stops if stop in tokenizer.decode(seeds)]
    assert tokenizer.decode(seeds).startswith(alone.text)
    assert (alone.output_tokens == len(ids)) == (not ends)
