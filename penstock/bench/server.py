"""A client of an OpenAI-compatible server for the load generator: it sends one streamed completion and times it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.bench.measure import Timeline
from penstock.bench.prompts import PROBE_WORDS, Calibration, probe_prompt
from penstock.bench.workloads import Job
from penstock.client.http import HttpClient, error_message, failure, first_model
from penstock.core.errors import Unavailable
from penstock.core.ledger import Ledger, PrefillChunk, Stall
from penstock.core.request import Objective

Prompt = str | list[int] | list[dict[str, Any]]  # text, token ids, or the messages of a chat

LEDGER_HEADER = {"x-penstock-ledger": "true"}  # asks where the time went; servers that do not know it ignore it


@dataclass(frozen=True, slots=True)
class Call:
    """A job ready to be sent."""

    prompt: Prompt
    job: Job
    headers: dict[str, str] = field(default_factory=dict)
    http: HttpClient | None = None  # with its tenant's key; None: the server's own


def is_chat(prompt: Prompt) -> bool:
    return isinstance(prompt, list) and isinstance(prompt[0], dict)


@dataclass(frozen=True, slots=True)
class Server:
    http: HttpClient
    model: str
    chat: bool = False
    ignore_eos: bool = True  # an extension; refused by strict servers
    counts_tokens: bool = True  # it reports usage; otherwise each chunk counts as one token
    calibration: Calibration = field(default_factory=Calibration)

    def path(self, prompt: Prompt) -> str:
        return "/v1/chat/completions" if self.chat or is_chat(prompt) else "/v1/completions"

    def payload(self, prompt: Prompt, output_len: int) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": output_len,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if is_chat(prompt):
            body["messages"] = prompt
        elif self.chat:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if self.ignore_eos:
            body["ignore_eos"] = True
        return body

    async def complete(self, call: Call) -> Timeline:
        """Stream one completion. Failures are recorded in the timeline, not raised."""
        job = call.job
        body = self.payload(call.prompt, job.output_len)
        timeline = Timeline(sent=time.perf_counter(), prompt_tokens=len(job.prompt), kind=job.kind)
        headers = {**LEDGER_HEADER, **call.headers}
        try:
            async with (call.http or self.http).stream("POST", self.path(call.prompt), body, headers) as response:
                if response.status == 200:
                    async for event in response.events():
                        _take_event(timeline, event)
                else:
                    message = await response.read_error()
                    _take_failure(timeline, response.status, response.headers, message)
        except Unavailable as error:
            timeline.error, timeline.message = error.code, error.message
        timeline.finished = time.perf_counter()
        if not timeline.failed and not timeline.token_times:
            timeline.error = "no tokens"
        if not timeline.output_tokens:
            timeline.output_tokens = len(timeline.token_times)
        return timeline


def _take_failure(timeline: Timeline, status: int, headers: Mapping[str, str], message: str) -> None:
    """429 is an answer: come back later."""
    if status != 429:
        timeline.error, timeline.message = f"http {status}", message
        return
    timeline.refused = True
    with suppress(ValueError):  # it may also be a date, or absent
        timeline.retry_after = float(headers.get("retry-after", ""))


def _take_event(timeline: Timeline, event: str) -> None:
    if event == "[DONE]":
        return
    try:
        chunk = json.loads(event)
    except ValueError:
        timeline.error = "bad event"
        return
    if "error" in chunk:
        timeline.error, timeline.message = "in stream", error_message(event.encode())
    elif carries_text(chunk):
        timeline.token_times.append(time.perf_counter())
    if usage := chunk.get("usage"):
        timeline.prompt_tokens = usage["prompt_tokens"]
        timeline.output_tokens = usage["completion_tokens"]
        timeline.ledger = _ledger(usage.get("ledger"))


def _ledger(account: Any) -> Ledger | None:
    """The engine's own account of a request, from a server that gives one; None also for one of another version."""
    try:
        engine = account["choices"][0]["engine"]
        prefill = [PrefillChunk(**chunk) for chunk in engine["prefill"]]
        stalls = [Stall(**stall) for stall in engine["stalls"]]
        return Ledger(**{**engine, "prefill": prefill, "stalls": stalls})
    except (TypeError, LookupError):
        return None


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
    probes = [await server.complete(Call(probe_prompt(words, seed), Job([], 2))) for words in PROBE_WORDS]
    if failed := [probe for probe in probes if probe.failed]:
        raise Unavailable(f"{http.url} fails to stream a short completion: {failed[0].error or 'refused (429)'}")
    if not all(probe.prompt_tokens for probe in probes):
        return replace(server, counts_tokens=False)
    return replace(server, calibration=Calibration.from_counts([probe.prompt_tokens for probe in probes]))


async def promised_objectives(http: HttpClient) -> dict[str, Objective]:
    """What the server says its classes are promised; nothing from servers that have none."""
    try:
        cards = (await http.get("/v1/models")).json()["data"][0]["classes"]
        return {
            name: Objective(name, _seconds(card["ttft_ms"]), _seconds(card["itl_ms"])) for name, card in cards.items()
        }
    except (LookupError, TypeError, AttributeError):
        return {}


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


async def _without_refused_fields(server: Server, seed: int) -> Server:
    prompt = probe_prompt(8, seed)
    response = await server.http.post(server.path(prompt), server.payload(prompt, 1))
    if response.status in (400, 422) and server.ignore_eos:
        return await _without_refused_fields(replace(server, ignore_eos=False), seed)
    if response.status != 200:
        raise failure(server.http.url, response.status, response.error_message)
    return server
