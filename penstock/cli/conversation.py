"""A conversation with a server: the messages so far, how answers are sampled, and one streamed answer at a time."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.client.http import HttpClient, failure
from penstock.core.errors import InvalidRequest, Unavailable
from penstock.core.request import SamplingParams
from penstock.core.suggest import did_you_mean

# What a conversation may set; where nothing is set, the server decides.
PARAMETERS: dict[str, type[float] | type[int] | type[str]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "max_tokens": int,
    "seed": int,
    "stop": str,
}
_KINDS = {float: "a number", int: "a whole number"}

END_OF_REASONING = "\n\n---\n\n"

# A model's output must not move the cursor, set the title or ring the bell.
_CONTROL = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def parse_parameter(name: str, text: str) -> Any:
    """The value to send; raises InvalidRequest for what no request may have."""
    kind = PARAMETERS.get(name)
    if kind is None:
        raise InvalidRequest(
            f"{name} is not a parameter{did_you_mean(name, PARAMETERS)}; known: {', '.join(PARAMETERS)}", param=name
        )
    try:
        value: Any = kind(text)
    except ValueError:
        raise InvalidRequest(f"{name} must be {_KINDS[kind]}, not {text!r}", param=name) from None
    checked: dict[str, Any] = {name: (value,) if kind is str else value}
    SamplingParams(**checked)  # valid by construction
    return value


@dataclass(slots=True)
class Turn:
    """One streamed answer and how fast it came."""

    shows_reasoning: bool = False  # before the answer, of which it is no part
    text: str = ""
    thinks: bool = False  # reasoning was shown, and nothing of the answer yet
    asked: float = field(default_factory=time.perf_counter)
    first: float | None = None
    last: float = 0.0
    chunks: int = 0
    output_tokens: int | None = None  # as the server counts

    def take(self, event: str) -> str:
        """Note an event of the stream and return what to show of it."""
        if event == "[DONE]":
            return ""
        try:
            chunk = json.loads(event)
        except ValueError as error:
            raise Unavailable(f"the server streams what is not JSON: {event[:80]!r}") from error
        if fault := chunk.get("error"):
            raise Unavailable(str(fault.get("message", fault) if isinstance(fault, dict) else fault))
        if usage := chunk.get("usage"):
            self.output_tokens = usage.get("completion_tokens")
        deltas = [choice["delta"] for choice in chunk.get("choices") or ()]
        text, thought = (
            "".join(delta.get(name) or "" for delta in deltas) for name in ("content", "reasoning_content")
        )
        if text or thought:
            self.last = time.perf_counter()
            self.first = self.first or self.last
            self.chunks += 1
            self.text += text
        shown = thought if self.shows_reasoning else ""
        self.thinks = self.thinks or bool(shown)
        if text and self.thinks:
            shown, self.thinks = f"{shown}{END_OF_REASONING}", False
        return shown + text

    def speed(self) -> str:
        if self.first is None:
            return "no answer"
        tokens = self.output_tokens or self.chunks
        parts = ["1 token" if tokens == 1 else f"{tokens} tokens"]
        if tokens > 1 and self.last > self.first:
            parts.append(f"{(tokens - 1) / (self.last - self.first):.1f} tok/s")
        parts.append(f"first after {(self.first - self.asked) * 1e3:.0f} ms")
        return " · ".join(parts)


class Conversation:
    """The messages so far. A turn without an answer leaves them as they were."""

    def __init__(self, http: HttpClient, model: str, parameters: dict[str, Any], system: str | None) -> None:
        self.model = model
        self.system = system
        self._http = http
        self.parameters = parameters
        self._messages: list[dict[str, str]] = []
        self._last_question: str | None = None
        self._answered = False

    def clear(self) -> None:
        self._messages.clear()
        self._last_question, self._answered = None, False

    def take_back(self) -> str | None:
        """Forget the last answer; returns the question that led to it."""
        if self._answered:
            del self._messages[-2:]
            self._answered = False
        return self._last_question

    async def ask(self, question: str, turn: Turn, write: Callable[[str], None]) -> None:
        """Stream the answer. What has come when this is cancelled counts as the answer."""
        messages = [*self._messages, {"role": "user", "content": question}]
        self._last_question, self._answered = question, False
        try:
            await self._stream(messages, turn, write)
        finally:
            if turn.text:
                self._messages = [*messages, {"role": "assistant", "content": turn.text}]
                self._answered = True

    async def _stream(self, messages: list[dict[str, str]], turn: Turn, write: Callable[[str], None]) -> None:
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {
            "model": self.model,
            "messages": system + messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.parameters,
        }
        async with self._http.stream("POST", "/v1/chat/completions", body) as response:
            if response.status != 200:
                raise failure(self._http.url, response.status, await response.read_error())
            async for event in response.events():
                if text := turn.take(event):
                    write(text.translate(_CONTROL))
