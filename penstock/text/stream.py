"""Turns the token chunks of an engine into text that can be sent: detokenized, cut at stop strings, and divided into
reasoning, content and tool calls."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from penstock.core.request import Chunk, FinishReason, SamplingParams, TokenLogprob
from penstock.text.detokenizer import IncrementalDetokenizer
from penstock.text.output import OutputForm
from penstock.text.reasoning import ReasoningParser
from penstock.text.stop import StopStrings
from penstock.text.tokenizer import Tokenizer
from penstock.text.tool_calls.parser import CallDelta, Piece

IN_REASONING = -1  # in place of where a token begins in the answer


@dataclass(slots=True)
class TextDelta:
    """What one chunk adds to an answer. Text may lag behind the tokens: parts of characters and possible stop
    strings are held back. Where there are stop strings, log-probabilities wait for the text of their token, and those
    of tokens that lie wholly in or after the stop string never come."""

    text: str  # content
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprob] | None = None
    stop_matched: str | int | None = None  # the stop string or stop token id; None for the model's own end token
    reasoning: str = ""
    calls: Sequence[CallDelta] = ()
    pieces: Sequence[Piece] = ()  # text and calls in their order, where calls are looked for


@dataclass(slots=True)
class ToolCall:
    """A call as far as it has come."""

    id: str
    name: str
    pieces: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)


class TextStream:
    """Text of one request. After a delta with a finish reason the caller closes the engine's iterator; chunks that
    still arrive add nothing. Stop strings are not looked for in the reasoning, which is no part of the answer."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, form: OutputForm | None = None) -> None:
        if form is None and params.reasoning is not None:
            form = OutputForm(reasoning=params.reasoning)
        self._tokenizer = tokenizer
        self._params = params
        shown = form.markers(tokenizer) if form is not None else frozenset()
        self._detokenizer = IncrementalDetokenizer(tokenizer, continues=True, keep=shown)
        self._stops = StopStrings(params.stop) if params.stop else None
        self._reasoning = None if params.reasoning is None else ReasoningParser(params.reasoning)
        self._tools = form.tool_parser() if form is not None else None
        self._only_calls = form is not None and form.choice == "forced"
        self._plain = self._stops is None and self._reasoning is None and self._tools is None
        self._parts: list[str] = []
        self._thoughts: list[str] = []
        self._new_thoughts = ""  # for the delta in the making
        self._held: deque[tuple[int, TokenLogprob]] = deque()  # where its token begins in the text, before any cut
        self._decoded = self._shown = 0  # characters of the answer, before calls are taken out
        self.calls: list[ToolCall] = []
        self.output_tokens = 0  # as billed: with the end token, without what came after a stop string
        self.reasoning_tokens = 0  # of these
        self.finish_reason: FinishReason | None = None
        self._cut = False  # by a stop string

    @property
    def text(self) -> str:
        return "".join(self._parts)

    @property
    def reasoning(self) -> str:
        return "".join(self._thoughts)

    @property
    def called(self) -> bool:
        """Whether the client is to make calls: not where a stop string has cut the last one off."""
        if not self.calls or not self._cut:
            return bool(self.calls)
        try:
            json.loads(self.calls[-1].arguments)
        except ValueError:
            return False
        return True

    @property
    def reasons(self) -> bool:
        """Whether reasoning is looked for."""
        return self._reasoning is not None

    def push(self, chunk: Chunk) -> TextDelta:
        if self.finish_reason is not None:
            return TextDelta("", [], self.finish_reason)
        if chunk.finish_reason is None and self._plain:  # by far most chunks
            text = self._detokenizer.push(chunk.token_ids)
            self.output_tokens += len(chunk.token_ids)
            self._parts.append(text)
            return TextDelta(text, chunk.token_ids, None, chunk.logprobs)
        hidden = chunk.finish_reason is not None and self._ends_with_stop_token(chunk)
        if self._stops is not None:
            delta = self._until_stop(chunk, self._stops, hidden)
        else:  # nothing ends the text before the tokens end
            shown = chunk.token_ids[:-1] if hidden else chunk.token_ids
            delta = TextDelta(self._answer(shown), chunk.token_ids, chunk.finish_reason)
            self.output_tokens += len(chunk.token_ids)
            if chunk.finish_reason is not None:
                delta.text += self._rest_of_answer()
        if hidden and delta.stop_matched is None and chunk.token_ids[-1] in self._params.stop_token_ids:
            delta.stop_matched = chunk.token_ids[-1]
        if chunk.logprobs is not None:
            delta.logprobs = chunk.logprobs if self._stops is None else self._release(delta)
        self._divide(delta)
        self._parts.append(delta.text)
        self.finish_reason, self._cut = delta.finish_reason, isinstance(delta.stop_matched, str)
        return delta

    def _until_stop(self, chunk: Chunk, stops: StopStrings, hidden: bool) -> TextDelta:
        def show(text: str) -> str:
            """Stop strings count only where they begin after the first `min_tokens` tokens."""
            return text if self.output_tokens <= self._params.min_tokens else stops.push(text)[0]

        parts: list[str] = []
        for taken, token_id in enumerate(chunk.token_ids, start=1):
            self.output_tokens += 1
            if chunk.logprobs is not None:
                answers = self._reasoning is None or self._reasoning.over
                self._held.append((self._decoded if answers else IN_REASONING, chunk.logprobs[taken - 1]))
            if not (hidden and taken == len(chunk.token_ids)):
                text = self._answer((token_id,))
                self._decoded += len(text)
                parts.append(show(text))
            if stops.matched is not None:
                return TextDelta("".join(parts), chunk.token_ids[:taken], "stop", stop_matched=stops.matched)
        if chunk.finish_reason is not None:
            parts.append(show(self._rest_of_answer()))
            if stops.matched is None:
                parts.append(stops.finish())
        reason = "stop" if stops.matched is not None else chunk.finish_reason
        return TextDelta("".join(parts), chunk.token_ids, reason, stop_matched=stops.matched)

    def _answer(self, token_ids: Iterable[int]) -> str:
        """The text of these tokens without the reasoning, which is put aside."""
        parser = self._reasoning
        if parser is None or parser.over:
            return self._detokenizer.push(token_ids)
        answer = ""
        for token_id in token_ids:
            thinks = parser.thinks
            thought, text = parser.feed(self._detokenizer.push((token_id,)))
            self.reasoning_tokens += thinks or parser.thinks
            self._new_thoughts += thought
            answer += text
        return answer

    def _rest_of_answer(self) -> str:
        text = self._detokenizer.finish()
        if self._reasoning is None:
            return text
        (thought, more), (last_thought, last) = self._reasoning.feed(text), self._reasoning.finish()
        self._new_thoughts += thought + last_thought
        return more + last

    def _divide(self, delta: TextDelta) -> None:
        """Put the reasoning into the delta, and the tool calls in its text where they belong."""
        delta.reasoning, self._new_thoughts = self._new_thoughts, ""
        self._thoughts.append(delta.reasoning)
        if self._tools is None:
            return
        pieces = self._tools.feed(delta.text)
        if self._tools.full:  # before whatever ends the chunk
            delta.finish_reason, delta.stop_matched = "stop", None
        if delta.finish_reason is not None:
            rest = self._tools.finish()
            # Where there are only calls, text is one that was cut off before its name.
            pieces += [piece for piece in rest if not (self._only_calls and isinstance(piece, str))]
        delta.pieces = pieces
        delta.text = "".join(piece for piece in pieces if isinstance(piece, str))
        delta.calls = [piece for piece in pieces if isinstance(piece, CallDelta)]
        for call in delta.calls:
            if call.id:
                self.calls.append(ToolCall(call.id, call.name))
            self.calls[-1].pieces.append(call.arguments)

    def _release(self, delta: TextDelta) -> list[TokenLogprob]:
        """Those of tokens whose first character is shown; at the end all, unless a stop string cut the rest off."""
        self._shown += len(delta.text)
        whole = delta.finish_reason is not None and not isinstance(delta.stop_matched, str)
        released = []
        while self._held and (whole or self._held[0][0] < self._shown):
            released.append(self._held.popleft()[1])
        return released

    def _ends_with_stop_token(self, chunk: Chunk) -> bool:
        if chunk.finish_reason != "stop" or not chunk.token_ids:
            return False
        last = chunk.token_ids[-1]
        return last in self._params.stop_token_ids or last in self._tokenizer.eos_ids
