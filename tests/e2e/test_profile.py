"""A profile of a running server: one trace of all its processes, on one clock, and what its steps come to."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from penstock.cli.main import main
from penstock.cli.profile import heading, step_table
from tests.conftest import Server

ASK = {"model": "smollm2-135m", "max_tokens": 8, "ignore_eos": True, "cache_salt": "profile", "stream": True}
GATEWAY, WORKER = 1, 2


async def keep_asking(http: httpx.AsyncClient, name: str) -> None:
    for number in range(10_000):
        message = {"role": "user", "content": f"{name} {number}: tell me of rivers."}
        await http.post("/v1/chat/completions", json={**ASK, "messages": [message]})


def of(events: list[dict[str, Any]], process: int, category: str, name: str = "") -> list[dict[str, Any]]:
    found = [e for e in events if e["pid"] == process and e.get("cat") == category and name in e["name"]]
    return sorted(found, key=lambda event: event["ts"])


def end(event: dict[str, Any]) -> float:
    return float(event["ts"] + event["dur"])


def frames(events: list[dict[str, Any]], process: int, way: str, message: str) -> list[dict[str, Any]]:
    return [event for event in of(events, process, "socket", way) if event["args"]["message"] == message]


async def test_a_trace_holds_steps_kernels_gateway_and_sockets_on_one_clock(server: Server) -> None:
    began = time.monotonic()
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
        load = [asyncio.create_task(keep_asking(http, name)) for name in ("a", "b")]
        taken = await asyncio.gather(*(http.post("/admin/profile", params={"seconds": 2}) for _ in range(2)))
        for task in load:
            task.cancel()
        await asyncio.gather(*load, return_exceptions=True)
    assert sorted(answer.status_code for answer in taken) == [200, 409]
    refused, answered = sorted(taken, key=lambda answer: -answer.status_code)
    assert refused.json()["error"]["code"] == "profile_running"
    trace = answered.json()
    events = trace["traceEvents"]

    times = [event["ts"] / 1e6 for event in events if "ts" in event]
    assert began <= min(times)
    assert max(times) <= time.monotonic()

    assert of(events, GATEWAY, "requests", "POST /v1/chat/completions")
    for name in ("parse HTTP", "chat template", "tokenize", "route", "detokenize", "read body"):
        assert of(events, GATEWAY, "gateway", name), name
    assert of(events, GATEWAY, "socket", "write to client")
    check_sockets(events)
    check_kernels(events)
    check_steps(events, trace["summary"])


def check_sockets(events: list[dict[str, Any]]) -> None:
    """What the worker receives was sent before, by the same clock. The gateway records for longer than the worker."""
    sent = [end(event) for event in frames(events, GATEWAY, "frame out", "Submit")]
    received = [event["ts"] for event in frames(events, WORKER, "frame in", "Submit")]
    assert received
    for number, at in enumerate(received, start=1):
        assert sum(moment <= at for moment in sent) >= number
    sent = [event["ts"] for event in frames(events, WORKER, "frame out", "Chunks")]
    received = [end(event) for event in frames(events, GATEWAY, "frame in", "Chunks")]
    assert sent
    for number, at in enumerate(reversed(sent), start=1):
        assert sum(moment >= at for moment in received) >= number


def check_kernels(events: list[dict[str, Any]]) -> None:
    """All lie in steps of the engine, one after the other, and make up most of what these take."""
    kernels, calls = of(events, WORKER, "kernels"), of(events, WORKER, "engine", "collect")
    assert {kernel["name"] for kernel in kernels} > {"qkv 0", "attention 0", "down 29", "lm_head", "sampling"}
    at = 0
    for kernel in kernels:
        while end(calls[at]) <= kernel["ts"]:
            at += 1
        assert calls[at]["ts"] <= kernel["ts"]
        assert end(kernel) <= end(calls[at]) + 0.001
    assert all(end(one) <= other["ts"] + 0.001 for one, other in itertools.pairwise(kernels))
    assert sum(kernel["dur"] for kernel in kernels) > 0.5 * sum(call["dur"] for call in calls)


def check_steps(events: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    steps = [event["args"] for event in of(events, WORKER, "steps") if event["ph"] == "b"]
    assert any(step["prefill_tokens"] for step in steps)
    assert all(step["rows"] and step["decode_tokens"] + step["prefill_tokens"] for step in steps)
    (replica,) = summary["replicas"]
    assert replica["steps"] == len(steps)
    assert replica["rows"] == pytest.approx(sum(step["rows"] for step in steps) / len(steps))
    parts = {part["name"]: part for part in replica["kernels"]}
    assert parts["lm_head"]["bytes"] > 0
    assert parts["gate_up"]["limit_seconds"] > 0
    spent = parts["all kernels"]["share"] + sum(part["share"] for part in replica["engine"])
    assert spent == pytest.approx(1.0, abs=0.01)
    written = io.StringIO()
    console = Console(file=written, width=200)
    console.print(heading(replica))
    console.print(step_table(replica))
    for word in ("smollm2-135m", "GB/s", "gate_up", "all kernels", "schedule"):
        assert word in written.getvalue()


def test_the_command_writes_the_trace(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    assert main(["profile", "--url", server.url, "--seconds", "0.2", "--output", str(path)]) == 0
    assert str(path) in capsys.readouterr().out.replace("\n", "")
    trace = json.loads(path.read_text())
    assert trace["summary"]["replicas"][0]["steps"] == 0
    assert any(event["name"] == "POST /admin/profile" for event in trace["traceEvents"])


@pytest.mark.parametrize("seconds", ["0", "61", "nan", "soon", ""])
def test_seconds_have_bounds(server: Server, seconds: str) -> None:
    answer = httpx.post(f"{server.url}/admin/profile", params={"seconds": seconds})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "seconds"
