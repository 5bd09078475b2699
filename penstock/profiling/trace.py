"""Traces in Chrome's Trace Event Format, which ui.perfetto.dev and chrome://tracing open.

Each process makes JSON of its own events; whoever merges them only puts one behind the other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from penstock.profiling.recorder import Event

_ENCODED_AT_ONCE = 1000  # events: other threads run between


def fragment(process: str, number: int, events: Sequence[Event], offset: int = 0) -> bytes:
    """The events of a process as elements of a JSON array. `number` tells processes apart in the trace; `offset`
    nanoseconds are added to every time."""
    tracks: dict[str, int] = {}
    parts = []
    for start in range(0, len(events), _ENCODED_AT_ONCE):
        some = events[start : start + _ENCODED_AT_ONCE]
        parts.append(_elements([entry for event in some for entry in _entries(event, number, tracks, offset)]))
    named = [_name("process_name", number, 0, process)]
    named += [_name("thread_name", number, thread, track) for track, thread in tracks.items()]
    return ",".join([_elements(named), *parts]).encode()


def merged(summary: bytes, fragments: Iterable[bytes]) -> Iterator[bytes]:
    """The parts of a trace file. Beside the events it holds a summary, which is JSON and which viewers skip."""
    yield b'{"summary":%b,\n"displayTimeUnit":"ms",\n"traceEvents":[' % summary
    for number, each in enumerate(fragments):
        if number:
            yield b",\n"
        yield each
    yield b"]}\n"


def _entries(event: Event, number: int, tracks: dict[str, int], offset: int) -> Iterator[dict[str, Any]]:
    began, ended = (event.began + offset) / 1e3, (event.ended + offset) / 1e3
    entry = {"name": event.name, "cat": event.category, "pid": number}
    if event.overlaps is None:
        thread = tracks.setdefault(event.track, len(tracks) + 1)
        entry |= {"ph": "X", "tid": thread, "ts": began, "dur": round(ended - began, 3)}
        yield entry | ({"args": event.args} if event.args else {})
    else:
        # Perfetto has one track for all events of a category and a name, and rows in it for those that overlap.
        entry |= {"id2": {"local": event.overlaps}, "tid": 0}
        yield entry | {"ph": "b", "ts": began, "args": event.args or {}}
        yield entry | {"ph": "e", "ts": ended}


def _name(what: str, number: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": number, "tid": thread, "args": {"name": name}}


def _elements(values: list[dict[str, Any]]) -> str:
    return json.dumps(values, separators=(",", ":"))[1:-1]
