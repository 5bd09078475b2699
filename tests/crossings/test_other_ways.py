"""Versions, cascades and hedging crossed with what requests can ask for: by whichever way a request reaches a replica,
each answer is what the model itself gives."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.bench.chaos.streams import difference
from penstock.client.http import HttpClient
from tests.conftest import start_server
from tests.crossings.test_failover import CHATS, COMPLETIONS, ask, chat, completion

SETTINGS = """
models:
  plain: {model: smollm2-135m}
  hedged: {model: smollm2-135m, replicas: 2, failover: {hedge_ms: 1}}
  versions: {versions: {plain: 1, hedged: 1}}
  sure: {cascade: {small: hedged, large: plain, min_logprob: -1000}}
  unsure: {cascade: {small: hedged, large: plain, min_logprob: 0}}
engine: {kv_memory_gib: 0.05, max_model_len: 1024}
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    config = tmp_path_factory.mktemp("ways") / "settings.yaml"
    config.write_text(SETTINGS)
    running = start_server("--config", str(config))
    yield running.url
    running.stop()


def account(events: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = events[-1]["usage"]["ledger"]
    return found


@pytest.mark.parametrize(
    ("model", "streamed"), [("hedged", True), ("versions", False), ("sure", True), ("unsure", True)]
)
async def test_every_kind_of_request(url: str, model: str, streamed: bool) -> None:
    fields = {"model": model}
    asks = {name: completion(streamed, **each, **fields) for name, each in COMPLETIONS.items()}
    asks |= {name: chat(streamed, **each, **fields) for name, each in CHATS.items()}
    async with HttpClient(url) as http:
        greedy, _ = await ask(http, completion(temperature=0, model="plain"))
        text = greedy.choices[0].text
        asks["stop"] = completion(streamed, temperature=0, stop=[text[len(text) * 3 // 4 :][:6]], **fields)
        plain = [type(what)(what.kind, what.path, {**what.body, "model": "plain"}) for what in asks.values()]
        rights = await asyncio.gather(*(ask(http, what) for what in plain))
        answers = await asyncio.gather(*(ask(http, what) for what in asks.values()))
    for name, (right, _), (found, events) in zip(asks, rights, answers, strict=True):
        assert not difference(right, found), name
        if model != "hedged":
            assert account(events)["asked"] == model
    if model == "hedged":
        async with HttpClient(url) as http:
            metrics = (await http.get("/metrics")).body.decode()
        hedged = re.findall(r'^penstock_hedges_total\{.*model="hedged".*\} (\S+)', metrics, re.MULTILINE)
        assert sum(map(float, hedged)) > 0
    if model == "unsure":  # but for requests whose log-probabilities a cascade does not decide by
        assert any(account(events)["model"] == "plain" and account(events)["attempts"] for _, events in answers)
    if model == "sure":
        assert all(account(events)["model"] == "hedged" for _, events in answers)
