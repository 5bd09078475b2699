"""Failover crossed with what requests can ask for: with a replica killed in the middle, each answer is what it is
without."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from penstock.bench.chaos.faults import Admin
from penstock.bench.chaos.streams import Ask, Stream, difference, take
from penstock.bench.schemas import array, record
from penstock.checkpoint.source import resolve
from penstock.client.http import HttpClient
from penstock.lora.fit import projections
from penstock.models.config import read_config
from tests.conftest import start_server
from tests.lora.peft_folder import write_adapter

MODEL = "smollm2-135m"
TOKENS = 120
MIDSTREAM = 20  # tokens after which replicas are killed; the shortest answer has 37
PROMPT = "Tell me a long story about a ship, a storm and a light on the shore. It begins like this: once upon a time"
LONG = " ".join(f"{number} ships left the harbour and {number + 1} came back." for number in range(12))
# More than may be written; forced and sampled tokens alternate.
LINES = array(record({"line of the story": {"type": "string", "minLength": 12, "maxLength": 20}}), 50, 50)

COMPLETIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "top_p": 0.9},
    "penalties": {"temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
    "n": {"temperature": 0.9, "n": 3},
    "logprobs": {"temperature": 0.7, "logprobs": 3},
    "min_tokens": {"temperature": 1.0, "ignore_eos": False, "min_tokens": 50, "stop_token_ids": [28, 30, 198, 260]},
    "deadline": {"temperature": 0, "deadline_ms": 50_000},
    "json": {"temperature": 0.9, "frequency_penalty": 0.5, "max_tokens": 150, "guided_json": LINES},
    "json logprobs": {"temperature": 0.9, "logprobs": 2, "guided_json": LINES},
}
ADAPTED: dict[str, dict[str, Any]] = {
    "adapter": {"model": "first", "temperature": 0, "max_tokens": 120},
    "adapter seeded": {"model": "second", "temperature": 0.9, "n": 2, "logprobs": 2, "max_tokens": 120},
    "adapter json": {"model": "first", "temperature": 0.9, "max_tokens": 120, "guided_json": LINES},
}
CHATS: dict[str, dict[str, Any]] = {
    "chat": {"temperature": 0, "ignore_eos": False},
    "chat logprobs": {"temperature": 0.5, "n": 2, "logprobs": True, "top_logprobs": 2},
}
Answers = list[tuple[Stream, list[dict[str, Any]]]]


@dataclass
class Running:
    url: str
    admin_key: str

    @asynccontextmanager
    async def clients(self) -> AsyncIterator[tuple[HttpClient, Admin]]:
        async with HttpClient(self.url) as http, HttpClient(self.url, api_key=self.admin_key) as admin:
            yield http, Admin(admin, MODEL)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Two replicas whose KV caches hold some 2,700 tokens each."""
    state = f"sqlite:///{tmp_path_factory.mktemp('state')}/state.db"
    command = [sys.executable, "-m", "penstock.cli.main", "keys", "create", "--admin", "--state", state]
    key = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    adapters = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("first", "second")):
        write_adapter(adapters / name, projections(read_config(resolve(MODEL))), seed, size=0.06)
    arguments = ["--replicas", "2", "--kv-memory-gib", "0.03", "--max-model-len", "1024", "--state", state]
    environ = {**os.environ, "PENSTOCK_ADAPTER_FOLDER": str(adapters)}
    running = start_server(*arguments, environ=environ)
    yield Running(running.url, key)
    running.stop()


def completion(streamed: bool = True, **fields: Any) -> Ask:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": TOKENS, "seed": 7, "ignore_eos": True, "stream": streamed}
    if streamed:
        body["stream_options"] = {"include_usage": True}
    return Ask("completion", "/v1/completions", {**body, "return_token_ids": True, **fields})


def chat(streamed: bool, **fields: Any) -> Ask:
    body = {**completion(streamed, **fields).body, "messages": [{"role": "user", "content": PROMPT}]}
    del body["prompt"]
    return Ask("chat", "/v1/chat/completions", body)


def every_kind(streamed: bool) -> dict[str, Ask]:
    asks = {name: completion(streamed, **fields) for name, fields in COMPLETIONS.items()}
    asks |= {name: chat(streamed, **fields) for name, fields in CHATS.items()}
    if not streamed:
        asks["prompt_logprobs"] = completion(False, temperature=0, prompt_logprobs=1)
    return asks


async def ask(
    http: HttpClient, what: Ask, on_event: Callable[[Stream], None] = lambda stream: None, cached: bool = False
) -> tuple[Stream, list[dict[str, Any]]]:
    """The answer, and the events that it came in. An answer that is not streamed is one event."""
    headers = {"x-penstock-ledger": "true"} | ({} if cached else {"Cache-Control": "no-store"})
    stream, events = Stream(what), list[dict[str, Any]]()
    async with http.stream("POST", what.path, what.body, headers) as response:
        if not what.body["stream"]:
            events.append(json.loads(await response.read()))
            assert response.status == 200, events
            for choice in events[0]["choices"]:
                choice.setdefault("delta", choice.get("message", {}))
            take(stream, events[0])
            return stream, events
        assert response.status == 200, await response.read()
        async for event in response.events():
            if event != "[DONE]":
                events.append(json.loads(event))
                take(stream, events[-1])
                on_event(stream)
    assert stream.error is None
    return stream, events


async def kill_when_busy(admin: Admin, streams: int, replicas: int) -> None:
    """As soon as so many streams are in flight, kill so many replicas, the busiest first."""
    found = await admin.replicas()
    while sum(replica["streams"] for replica in found) < streams:
        await asyncio.sleep(0.005)  # asking without a pause keeps the cores from the worker that is starting
        found = await admin.replicas()
    for replica in sorted(found, key=lambda replica: -replica["streams"])[:replicas]:
        await admin.inject("kill", replica["id"], 0)


async def disturbed(
    http: HttpClient, admin: Admin, asks: Sequence[Ask], replicas: int, cached: bool = False
) -> Answers:
    """The answers where replicas are killed; streamed ones in the middle of the stream, which is counted in tokens: an
    event brings all that have come since the one before. On a replica that reads its vocabulary for a grammar they may
    not have begun then: those of the other one would end before they do."""
    await admin.until_ready()
    midstream = asyncio.Event()

    async def answer(what: Ask) -> tuple[Stream, list[dict[str, Any]]]:
        def on_event(stream: Stream) -> None:
            if any(len(choice.token_ids) >= MIDSTREAM for choice in stream.choices.values()):
                midstream.set()

        return await ask(http, what, on_event, cached)

    async def kill() -> None:
        if asks[0].body["stream"]:
            await midstream.wait()
            await kill_when_busy(admin, 1, replicas)
        else:
            await kill_when_busy(admin, sum(what.body.get("n", 1) for what in asks), replicas)

    killing = asyncio.create_task(kill())
    answers = await asyncio.gather(*map(answer, asks))
    await killing
    return answers


def choices_with(part: str, events: list[dict[str, Any]]) -> list[Any]:
    return [choice[part] for event in events for choice in event["choices"] if part in choice]


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
async def test_every_kind_of_request(server: Running, streamed: bool) -> None:
    """All at once, so that they share batches, and with all replicas killed."""
    asks = every_kind(streamed) | {name: completion(streamed, **fields) for name, fields in ADAPTED.items()}
    async with server.clients() as (http, admin):
        (greedy, _) = await ask(http, asks["greedy"])
        text = greedy.choices[0].text
        asks["stop"] = completion(streamed, temperature=0, stop=[text[len(text) * 3 // 4 :][:6]])
        rights = await asyncio.gather(*(ask(http, what) for what in asks.values()))
        answers = await disturbed(http, admin, list(asks.values()), replicas=2)
    assert rights[-1][0].choices[0].finish_reason == "stop"
    streams = dict(zip(asks, (stream for stream, _ in rights), strict=True))
    assert difference(streams["greedy"], streams["adapter"])
    for name, (right, right_events), (found, events) in zip(asks, rights, answers, strict=True):
        assert not difference(right, found), name
        assert all(ledger["failovers"] for ledger in found.ledgers.values()), name
        assert choices_with("prompt_logprobs", events) == choices_with("prompt_logprobs", right_events)


async def test_prefix_cache_hits(server: Running) -> None:
    async with server.clients() as (http, admin):
        what = completion(prompt=LONG, temperature=0)
        right, _ = await ask(http, what)
        ((found, events),) = await disturbed(http, admin, [what], replicas=1)
    assert found.ledgers[0]["failovers"]
    assert events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert not difference(right, found)


async def test_speculation(server: Running) -> None:
    """Text that repeats itself is drafted where that pays, on the replica that is killed and on the next one."""
    what = completion(prompt=LONG + LONG, temperature=0, max_tokens=150)
    async with server.clients() as (http, admin):
        right, _ = await ask(http, what)
        ((found, _),) = await disturbed(http, admin, [what], replicas=1)
    assert found.ledgers[0]["failovers"]
    assert not difference(right, found)


async def test_preemption(server: Running) -> None:
    """Of all streams together, which after the kill are in one KV cache that does not hold them."""
    # Twice what the cache holds.
    asks = [completion(prompt=f"{number}. {LONG}", temperature=0.8, max_tokens=180) for number in range(14)]
    async with server.clients() as (http, admin):
        rights = await asyncio.gather(*(ask(http, what) for what in asks))
        answers = await disturbed(http, admin, asks, replicas=1)
    ledgers = [found.ledgers[0] for found, _ in answers]
    assert sum(bool(ledger["failovers"]) for ledger in ledgers)
    assert sum(ledger["preemptions"] for ledger in ledgers)
    for (right, _), (found, _) in zip(rights, answers, strict=True):
        assert not difference(right, found)


async def test_two_clients_that_share_one_computation(server: Running) -> None:
    what = completion(prompt=f"Two of us ask the same. {PROMPT}", temperature=0)
    async with server.clients() as (http, admin):
        right, _ = await ask(http, what)
        answers = await disturbed(http, admin, [what, what], replicas=1, cached=True)
    accounts = [events[-1]["usage"]["ledger"]["choices"][0] for _, events in answers]
    assert sorted(account["cache"] for account in accounts) == ["miss", "shared"]
    assert any(account["engine"] and account["engine"]["failovers"] for account in accounts)
    for found, _ in answers:
        assert not difference(right, found)
