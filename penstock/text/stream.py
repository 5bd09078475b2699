"""The one place where an engine's tokens become text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.core.request import Chunk, FinishReason, SamplingParams, TokenLogprob
from penstock.text.detokenizer import IncrementalDetokenizer
from penstock.text.stop import StopStrings
from penstock.text.tokenizer import Tokenizer


@dataclass(slots=True)
class TextDelta:
    """What one chunk adds to an answer. Text may lag behind the tokens: parts of characters and possible stop
    strings are held back."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprob] | None = None
    stop_matched: str | int | None = None  # the stop string or stop token id; None for the model's own end token


class TextStream:
    """Text of one request. After a delta with a finish reason the caller closes the engine's iterator; chunks that
    still arrive add nothing."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._detokenizer = IncrementalDetokenizer(tokenizer, continues=True)
        self._stops = StopStrings(params.stop)
        self._parts: list[str] = []
        self.output_tokens = 0  # as billed: with the end token, without what came after a stop string
        self.finish_reason: FinishReason | None = None

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def push(self, chunk: Chunk) -> TextDelta:
        if self.finish_reason is not None:
            return TextDelta("", [], self.finish_reason)
        delta = TextDelta("", [], chunk.finish_reason)
        hidden = self._ends_with_stop_token(chunk)
        parts: list[str] = []
        if not self._params.stop:  # nothing ends the text before the tokens end
            self.output_tokens += len(chunk.token_ids)
            delta.token_ids += chunk.token_ids
            parts.append(self._detokenizer.push(chunk.token_ids[:-1] if hidden else chunk.token_ids))
        else:
            parts += self._until_stop(chunk, delta, hidden)
        if chunk.finish_reason is not None and self._stops.matched is None:
            parts += [self._show(self._detokenizer.finish()), self._stops.finish()]
        if self._stops.matched is not None:
            delta.finish_reason, delta.stop_matched = "stop", self._stops.matched
        elif hidden and chunk.token_ids[-1] in self._params.stop_token_ids:
            delta.stop_matched = chunk.token_ids[-1]
        if chunk.logprobs is not None:
            delta.logprobs = chunk.logprobs[: len(delta.token_ids)]
        delta.text = "".join(parts)
        self._parts.append(delta.text)
        self.finish_reason = delta.finish_reason
        return delta

    def _until_stop(self, chunk: Chunk, delta: TextDelta, hidden: bool) -> Iterator[str]:
        for position, token_id in enumerate(chunk.token_ids, start=1):
            self.output_tokens += 1
            delta.token_ids.append(token_id)
            if not (hidden and position == len(chunk.token_ids)):
                yield self._show(self._detokenizer.push((token_id,)))
            if self._stops.matched is not None:
                return

    def _show(self, text: str) -> str:
        """Stop strings count only where they begin after the first `min_tokens` tokens."""
        return text if self.output_tokens <= self._params.min_tokens else self._stops.push(text)[0]

    def _ends_with_stop_token(self, chunk: Chunk) -> bool:
        if chunk.finish_reason != "stop" or not chunk.token_ids:
            return False
        last = chunk.token_ids[-1]
        return last in self._params.stop_token_ids or last in self._tokenizer.eos_ids
