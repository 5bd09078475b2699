"""POST /admin/profile: everything that this gateway and its replicas do for some seconds, as a trace."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Iterable
from time import monotonic_ns
from typing import Any, Protocol
from urllib.parse import parse_qs

import msgspec

from penstock.core.errors import Conflict, NotFound
from penstock.gateway.api.reading import LongRequests
from penstock.gateway.api.serving import Serving, encode_json
from penstock.gateway.errors import require
from penstock.gateway.http.connection import Connection
from penstock.gateway.http.request import Request
from penstock.gateway.http.response import Response
from penstock.gateway.http.traffic import Traffic
from penstock.gateway.tenancy.keys import redacted
from penstock.gateway.tenancy.tenants import Tenant
from penstock.profiling.event_loop import recording_stalls
from penstock.profiling.recorder import Event, Recorder
from penstock.profiling.summary import StepSummary
from penstock.profiling.trace import fragment, merged
from penstock.text.chat_template import ChatTemplate
from penstock.text.detokenizer import IncrementalDetokenizer
from penstock.text.tokenizer import Tokenizer

DEFAULT_SECONDS = 5.0
MAX_SECONDS = 60.0
MIN_SECONDS = 0.1
_PIECE = 1 << 18  # bytes that are sent at once
_NUMBER = 1  # of this process in the trace


class Profiler(Protocol):
    """Takes profiles of the replicas behind a gateway."""

    def watch(self, recorder: Recorder, /) -> None:
        """Record what this process does to reach them."""
        ...

    def take(self, seconds: float, /) -> Awaitable[tuple[list[StepSummary], list[bytes], list[str]]]:
        """What their steps did, their events as JSON, and what is missing."""
        ...


class NoReplicas:
    def watch(self, recorder: Recorder) -> None:
        pass

    async def take(self, seconds: float) -> tuple[list[StepSummary], list[bytes], list[str]]:
        raise NotFound("this gateway has no replicas of its own", code="no_fleet")


class ProfileSummary(msgspec.Struct):
    """What the trace says of steps. Beside it lie `traceEvents`."""

    seconds: float
    replicas: list[StepSummary]
    notes: list[str]


class Trace(msgspec.Struct, rename="camel"):
    """In Chrome's Trace Event Format."""

    summary: ProfileSummary
    display_time_unit: str
    trace_events: list[dict[str, Any]]


class ProfileEndpoint:
    def __init__(self, serving: Serving, profiler: Profiler) -> None:
        self.serving = serving
        self.profiler = profiler
        self._busy = False

    async def take(self, request: Request, response: Response, tenant: Tenant) -> None:
        seconds = _seconds(request)
        if self._busy:
            raise Conflict("a profile is being taken already; try again when it is done", code="profile_running")
        recorder, requests = Recorder(), _RequestSpans(self.serving.traffic)
        self._busy = True
        try:
            requests.watch(recorder)
            self.profiler.watch(recorder)
            _watch_gateway(recorder)
            try:
                async with recording_stalls(recorder):
                    replicas, events, notes = await self.profiler.take(seconds)
            finally:
                recorder.restore()
                requests.end(recorder)
            if recorder.dropped:
                notes.append(f"the trace lacks {recorder.dropped} events of the gateway")
            own = await asyncio.to_thread(fragment, f"gateway ({os.getpid()})", _NUMBER, recorder.events)
        finally:
            self._busy = False
        parts = list(merged(encode_json(ProfileSummary(seconds, replicas, notes)), [own, *events]))
        await response.send_parts(sum(map(len, parts)), _pieces(parts), (b"content-type", b"application/json"))


async def _pieces(parts: Iterable[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        for start in range(0, len(part), _PIECE):
            yield part[start : start + _PIECE]


def _seconds(request: Request) -> float:
    given = parse_qs(request.query.decode("latin-1"), keep_blank_values=True).get("seconds")
    try:
        seconds = DEFAULT_SECONDS if given is None else float(given[-1])
    except ValueError:
        seconds = 0.0
    require(MIN_SECONDS <= seconds <= MAX_SECONDS, "seconds", f"must be between {MIN_SECONDS} and {MAX_SECONDS:.0f}")
    return seconds


class _RequestSpans:
    """From the arrival of each request to the end of its answer, as far as that lies in the profile."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._began = monotonic_ns()

    def watch(self, recorder: Recorder) -> None:
        leave = self._traffic.leave

        def left(request: Request) -> None:
            leave(request)
            self._add(recorder, request)

        recorder.replace(self._traffic, "leave", left)

    def end(self, recorder: Recorder) -> None:
        for request in self._traffic.requests:
            self._add(recorder, request)

    def _add(self, recorder: Recorder, request: Request) -> None:
        began = max(self._began, int(request.arrived * 1e9))
        name = redacted(f"{request.method} {request.path}")
        shown = {"id": redacted(request.id)}
        recorder.add(Event(name, "requests", began, monotonic_ns(), "requests", shown, overlaps=request.unique))


def _watch_gateway(recorder: Recorder) -> None:
    recorder.watch(Connection, "_parse", "parse HTTP", "gateway")
    recorder.watch_async(Serving, "_read", "read body", "gateway")
    recorder.watch_async(LongRequests, "read", "read body in another process", "gateway")
    recorder.watch(ChatTemplate, "render", "chat template", "gateway")
    recorder.watch(Tokenizer, "encode", "tokenize", "gateway", lambda tokens, *_: {"tokens": len(tokens)})
    recorder.watch(IncrementalDetokenizer, "push", "detokenize", "gateway")
    recorder.watch(Connection, "write", "write to client", "socket", lambda _, __, data: {"bytes": len(data)})
