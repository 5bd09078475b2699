"""Requests that this process sends itself: they pass through everything that those of clients pass through."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from penstock.core.errors import PenstockError
from penstock.gateway.errors import OPENAI_ERRORS, ErrorFormat
from penstock.gateway.http.request import Header, Request, Upgraded
from penstock.gateway.http.response import Response


class _Nobody:
    """In place of a connection. What is sent goes to the `LocalResponse` instead."""

    paused = False
    draining = False

    async def resumed(self) -> None:
        pass

    def write(self, data: bytes) -> None:
        pass

    def write_soon(self, data: bytes) -> None:
        pass

    def steer_reading(self) -> None:
        pass

    def finish(self, response: Response) -> None:
        pass

    def take_over(self, upgraded: Upgraded) -> None:
        upgraded.shut_down()  # requests of this process have no connection to take


def local_request(path: str, body: bytes, *headers: Header) -> Request:
    """A POST of JSON, to be answered by the task that makes it."""
    request = Request(_Nobody(), "POST", path, b"", [(b"content-type", b"application/json"), *headers])
    request.receive(body)
    request.receive_end()
    request.task = asyncio.current_task()
    return request


OnEvents = Callable[[bytes], Awaitable[None]]


class LocalResponse(Response):
    """Keeps an answer that is sent whole, and the error where it is one. Of a stream `on_events` gets the events."""

    __slots__ = ("_on_events", "body", "error")

    def __init__(self, request: Request, on_events: OnEvents | None = None) -> None:
        super().__init__(_Nobody(), request, keep_alive=False)
        self.body = b""
        self.error: PenstockError | None = None
        self._on_events = on_events

    async def send(self, status: int, body: bytes, *headers: Header) -> None:
        self._begin(status)
        self.body = body
        self._finished = time.monotonic()

    async def send_events(self, events: bytes) -> None:
        self._begin(200)
        self.streaming = True
        if self._on_events is not None:
            await self._on_events(events)

    async def end_events(self, events: bytes) -> None:
        await self.send_events(events)
        self._finished = time.monotonic()

    async def send_error(self, error: PenstockError, format: ErrorFormat = OPENAI_ERRORS) -> None:
        self.error = error
        await super().send_error(error, format)

    def _begin(self, status: int) -> None:
        self.status = status
        self.request.answered = True
