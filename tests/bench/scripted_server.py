"""A small OpenAI-style server on a real port. Its answers are a function of the request, so tests can foresee them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

TEMPLATE_TOKENS = 3  # what the server counts beside the words of a prompt


@dataclass
class ScriptedServer:
    url: str = ""
    card: dict[str, Any] = field(default_factory=dict)  # what /v1/models says beside the name
    refuses_ignore_eos: bool = False
    reports_usage: bool = True
    tokens_per_chunk: int = 1
    fail_with: int | None = None  # status of every completion
    unknown_class: str = ""  # requests of it are refused
    error_event: bool = False  # every stream ends in an error after its first words
    hold_until: int = 0  # no stream ends before so many were open at once
    headers: dict[str, str] = field(default_factory=dict)  # of a failure
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers_seen: list[dict[str, str]] = field(default_factory=list)  # of completions
    in_flight: int = 0
    most_in_flight: int = 0
    enough_in_flight: asyncio.Event = field(default_factory=asyncio.Event)
    release: threading.Event = field(default_factory=threading.Event)  # answers to "wait" go on when set
    dropped: threading.Event = field(default_factory=threading.Event)  # a client left before its answer ended

    async def models(self, request: Request) -> Response:
        if self.fail_with:
            return JSONResponse({"error": {"message": "scripted failure"}}, self.fail_with)
        return JSONResponse({"data": [{"id": "scripted", **self.card}]})

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.headers_seen.append(dict(request.headers))
        if self.fail_with:
            return JSONResponse({"error": {"message": "scripted failure"}}, self.fail_with, self.headers)
        if self.refuses_ignore_eos and "ignore_eos" in body:
            return JSONResponse({"error": {"message": "ignore_eos is unknown"}}, 400)
        if self.unknown_class and request.headers.get("x-penstock-class") == self.unknown_class:
            message = f"x-penstock-class cannot be {self.unknown_class!r}"
            return JSONResponse({"error": {"message": message}}, 400)
        if not body["stream"]:
            return JSONResponse({"choices": []})
        return StreamingResponse(self.events(body), media_type="text/event-stream")

    async def events(self, body: dict[str, Any]) -> AsyncIterator[str]:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        if self.most_in_flight >= self.hold_until:
            self.enough_in_flight.set()
        ended = False
        try:
            words = self.answer(body)
            if "messages" in body:
                yield event(choices=[{"delta": {"role": "assistant", "content": ""}}])
            for start in range(0, len(words), self.tokens_per_chunk):
                text = "".join(words[start : start + self.tokens_per_chunk])
                yield event(choices=[{"delta": {"content": text}} if "messages" in body else {"text": text}])
                if self.most_in_flight < self.hold_until:
                    await self.enough_in_flight.wait()
                if text == "waiting ":
                    await asyncio.to_thread(self.release.wait)
                if self.error_event:
                    yield event(error={"message": "the engine tripped"})
                    return
            if self.reports_usage:
                yield event(choices=[], usage={"prompt_tokens": self.count(body), "completion_tokens": len(words)})
            yield "data: [DONE]\n\n"
            ended = True
        finally:
            self.in_flight -= 1
            if not ended:
                self.dropped.set()

    def count(self, body: dict[str, Any]) -> int:
        prompt = body.get("prompt") or body["messages"][-1]["content"]
        return len(prompt) if isinstance(prompt, list) else 2 * len(prompt.split()) + TEMPLATE_TOKENS

    def answer(self, body: dict[str, Any]) -> list[str]:
        if "messages" not in body:
            return ["word "] * body["max_tokens"]
        said = [f"{m['role']}={m['content']}" for m in body["messages"]]
        if said[-1] == "user=wait":
            return ["waiting ", *["more "] * 50]
        if said[-1] == "user=markdown":
            return ["Some **bold", "** text\n", "\n```python\nx = 1\n\ny", " = 2\n```\n\n", "- one\n- two\n"]
        if said[-1] == "user=attack":
            return ["\x1b]0;owned\x07", "harmless é", "\x9b2J"]
        return [f"turn {len(self.bodies)}: ", " | ".join(said)]


def event(**chunk: Any) -> str:
    return f"data: {json.dumps(chunk)}\n\n"
