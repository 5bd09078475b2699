"""An OpenAI-compatible server as a load generator sees it: what it accepts, and one streamed completion timed."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.bench.measure import Timeline
from penstock.bench.prompts import PROBE_WORDS, Calibration, probe_prompt
from penstock.core.errors import Unavailable
from penstock.http_client import HttpClient, first_model

Prompt = str | list[int]


@dataclass(frozen=True, slots=True)
class Server:
    http: HttpClient
    model: str
    chat: bool = False
    ignore_eos: bool = True  # an extension; refused by strict servers
    counts_tokens: bool = True  # it reports usage; otherwise each chunk counts as one token
    calibration: Calibration = field(default_factory=Calibration)

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def payload(self, prompt: Prompt, output_len: int) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": output_len,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body |= {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        if self.ignore_eos:
            body["ignore_eos"] = True
        return body

    async def complete(self, prompt: Prompt, output_len: int, kind: str = "") -> Timeline:
        """Stream one completion. Failures are recorded in the timeline, not raised."""
        body = self.payload(prompt, output_len)
        timeline = Timeline(sent=time.perf_counter(), kind=kind)
        try:
            async with self.http.stream("POST", self.path, body) as response:
                if response.status != 200:
                    await response.read()
                    timeline.error = f"http {response.status}"
                else:
                    async for event in response.events():
                        _take_event(timeline, event)
        except Unavailable as error:
            timeline.error = error.code
        timeline.finished = time.perf_counter()
        if timeline.error is None and not timeline.token_times:
            timeline.error = "no tokens"
        if not timeline.output_tokens:
            timeline.output_tokens = len(timeline.token_times)
        return timeline


def _take_event(timeline: Timeline, event: str) -> None:
    if event == "[DONE]":
        return
    try:
        chunk = json.loads(event)
    except ValueError:
        timeline.error = "bad event"
        return
    if "error" in chunk:
        timeline.error = "in stream"
    elif carries_text(chunk):
        timeline.token_times.append(time.perf_counter())
    if usage := chunk.get("usage"):
        timeline.prompt_tokens = usage["prompt_tokens"]
        timeline.output_tokens = usage["completion_tokens"]


def carries_text(chunk: dict[str, Any]) -> bool:
    """Whether a chunk holds output, not just a role, a finish reason or usage."""
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or choice
        if any(delta.get(name) for name in ("text", "content", "reasoning_content", "reasoning", "tool_calls")):
            return True
    return False


async def connect(http: HttpClient, model: str | None, *, chat: bool, seed: int) -> Server:
    """Find the model's name, learn what the server accepts and how it counts. Serves as a warm-up as well."""
    server = await _without_refused_fields(Server(http, model or await first_model(http), chat), seed)
    probes = [await server.complete(probe_prompt(words, seed), 2) for words in PROBE_WORDS]
    if failed := [probe.error for probe in probes if probe.error is not None]:
        raise Unavailable(f"{http.url} fails to stream a short completion: {failed[0]}")
    if not all(probe.prompt_tokens for probe in probes):
        return replace(server, counts_tokens=False)
    return replace(server, calibration=Calibration.from_counts([probe.prompt_tokens for probe in probes]))


async def _without_refused_fields(server: Server, seed: int) -> Server:
    body = server.payload(probe_prompt(8, seed), 1)
    response = await server.http.post(server.path, body)
    if response.status in (400, 422) and server.ignore_eos:
        return await _without_refused_fields(replace(server, ignore_eos=False), seed)
    if response.status != 200:
        raise Unavailable(f"{server.http.url} answers {response.status}: {response.error_message}")
    return server
