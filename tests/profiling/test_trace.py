"""Fragments of several processes become one file that holds every event once, with its times."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock.profiling.recorder import Event
from penstock.profiling.trace import fragment, merged

NAMES = st.text(max_size=8)
TIMES = st.integers(0, 10**15)
ARGS = st.none() | st.dictionaries(NAMES, st.integers() | NAMES, max_size=2)


@st.composite
def events(draw: st.DrawFn) -> list[Event]:
    found = []
    for number in range(draw(st.integers(0, 8))):
        began, overlaps = draw(TIMES), draw(st.sampled_from([None, str(number)]))
        ended, track = began + draw(st.integers(0, 10**10)), draw(st.sampled_from("ab"))
        found.append(Event(draw(NAMES), draw(NAMES), began, ended, track, draw(ARGS), overlaps))
    return found


def spans(trace: dict[str, Any], process: int) -> list[tuple[str, str, int, int]]:
    """Name, category, beginning and end in nanoseconds of all events of a process."""
    open_spans, found = {}, []
    for entry in trace["traceEvents"]:
        if entry["ph"] == "M" or entry["pid"] != process:
            continue
        at, name = round(entry["ts"] * 1e3), (entry["name"], entry["cat"])
        if entry["ph"] == "X":
            found.append((*name, at, at + round(entry["dur"] * 1e3)))
        elif entry["ph"] == "b":
            open_spans[entry["id2"]["local"]] = at
        else:
            found.append((*name, open_spans.pop(entry["id2"]["local"]), at))
    assert not open_spans
    return sorted(found)


@given(st.lists(events(), min_size=1, max_size=3), st.integers(-(10**9), 10**9))
def test_every_event_is_in_the_trace_once(processes: list[list[Event]], offset: int) -> None:
    parts = [fragment(f"process {i}", i, each, offset) for i, each in enumerate(processes)]
    trace = json.loads(b"".join(merged(b'{"seconds":1}', parts)))
    assert trace["summary"] == {"seconds": 1}
    for number, each in enumerate(processes):
        expected = sorted((e.name, e.category, e.began + offset, e.ended + offset) for e in each)
        assert spans(trace, number) == expected


def test_processes_and_tracks_have_names() -> None:
    parts = [fragment("worker a", 2, [Event("x", "c", 5, 6, "kernels"), Event("y", "c", 5, 6, "engine")])]
    entries = json.loads(b"".join(merged(b"{}", parts)))["traceEvents"]
    named = {(e["name"], e["tid"]): e["args"]["name"] for e in entries if e["ph"] == "M"}
    tracks = {e["name"]: named["thread_name", e["tid"]] for e in entries if e["ph"] == "X"}
    assert named["process_name", 0] == "worker a"
    assert tracks == {"x": "kernels", "y": "engine"}
