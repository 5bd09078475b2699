"""An OpenAI-compatible server that tells a story, with the shape, the errors and the silences that a test wants."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from penstock.fleet.upstream.probing import TRIAL_PROMPT
from tests.client.web_server import serving

STORY = (
    TRIAL_PROMPT + " lived a naïve 🦊, whose name was 水. Nobody knew: it could count to 10000000, backwards. The end."
)


@dataclass
class StoryServer:
    """Text alone. It goes on with the story where a prompt leaves off."""

    owner: str = "somebody"
    characters: int = 3  # in one event
    template: str = "{}"  # around prompts
    refusal: tuple[int, Mapping[str, str]] | None = None  # status and headers of the next answers
    chokes_on: str | None = None  # fails with 500 where a prompt has this
    events: list[str] = field(default_factory=list)  # sent instead of the story, if there are any
    hangs_after: int | None = None  # events
    healthy: bool = True
    bodies: list[dict[str, Any]] = field(default_factory=list)
    authorization: str = ""
    left: threading.Event = field(default_factory=threading.Event)  # a client hung up

    @contextmanager
    def running(self, port: int = 0) -> Iterator[str]:
        routes = [
            Route("/v1/models", self._models),
            Route("/v1/completions", self._complete, methods=["POST"]),
            Route("/health", lambda request: Response(status_code=200 if self.healthy else 503)),
        ]
        with serving(Starlette(routes=routes), port) as url:
            yield url

    async def _models(self, request: Request) -> Response:
        self.authorization = request.headers.get("authorization", "")
        return JSONResponse({"data": [{"id": "story", "owned_by": self.owner, "max_model_len": 512}]})

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        if self.refusal is not None:
            status, headers = self.refusal
            return JSONResponse({"error": {"message": "so it is"}}, status, headers=dict(headers))
        if not isinstance(body["prompt"], str):
            return JSONResponse({"error": {"message": "prompt must be text"}}, 422)
        if self.chokes_on is not None and self.chokes_on in body["prompt"]:
            return JSONResponse({"error": {"message": "it choked"}}, 500)
        return StreamingResponse(self._stream(body), media_type="text/event-stream")

    async def _stream(self, body: dict[str, Any]) -> AsyncIterator[str]:
        events = self.events or list(self._story(body))
        try:
            for number, event in enumerate(events):
                if number == self.hangs_after:
                    while True:
                        yield ": still here\n\n"
                        await asyncio.sleep(0.01)
                yield f"data: {event}\n\n"
        except asyncio.CancelledError:
            self.left.set()
            raise

    def _story(self, body: dict[str, Any]) -> Iterator[str]:
        rest = STORY.removeprefix(self.template.format(body["prompt"]))
        size = self.characters
        for at in range(0, len(rest), size):
            yield completion(rest[at : at + size])
        yield completion("", "stop")
        yield json.dumps({"choices": [], "usage": {"prompt_tokens": 16, "completion_tokens": 1}})
        yield "[DONE]"


def completion(text: str, finish_reason: str | None = None, **fields: Any) -> str:
    """One event."""
    return json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": finish_reason, **fields}]})
