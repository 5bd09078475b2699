"""Versions, cascades and a shadow over real models: one checkpoint in int8 and in int4, and an adapter of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.checkpoint.source import resolve
from penstock.lora.fit import projections
from penstock.models.config import read_config
from tests.conftest import Server, start_server
from tests.lora.peft_folder import write_adapter

SETTINGS = """
models:
  int8:
    {{model: smollm2-135m, engine: {{quantization: int8}}, adapters: [{{name: tuned, path: {adapter}}}]}}
  int4: {{model: smollm2-135m, engine: {{quantization: int4}}}}
  chat: {{versions: {{int8: 0.5, int4: 0.5}}, shadow: {{model: int4, fraction: 1}}}}
  sure: {{cascade: {{small: int4, large: int8, min_logprob: -20, confidence_tokens: 4}}}}
  unsure: {{cascade: {{small: int4, large: int8, min_logprob: 0, confidence_tokens: 4}}}}
  tuned-first: {{cascade: {{small: tuned, large: int8, min_logprob: 0, confidence_tokens: 4}}}}
engine: {{kv_memory_gib: 0.1, max_model_len: 1024}}
server: {{port: 0}}
cache: {{enabled: false}}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = Path(tmp_path_factory.mktemp("settings"))
    adapter = write_adapter(folder / "tuned", projections(read_config(resolve("smollm2-135m"))), size=0.02)
    file = folder / "penstock.yaml"
    file.write_text(SETTINGS.format(adapter=adapter))
    server = start_server("--config", str(file))
    yield server
    server.stop()


def ask(server: Server, model: str, **more: Any) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "Name three colours."}], "temperature": 0}
    answer = httpx.post(f"{server.base_url}/chat/completions", json={**body, "max_tokens": 12, **more}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


def text(answer: httpx.Response) -> str:
    if answer.headers["content-type"] == "application/json":
        content: str = answer.json()["choices"][0]["message"]["content"]
        return content
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return "".join(json.loads(line)["choices"][0]["delta"].get("content", "") for line in lines)


def test_versions_and_cascades_say_what_their_model_says(server: Server) -> None:
    own = {model: text(ask(server, model)) for model in ("int8", "int4")}
    assert all(own.values())
    versions = {}
    for user in "abcdefgh":
        answer = ask(server, "chat", user=user)
        versions[user] = answer.headers["x-penstock-model"]
        assert text(answer) == own[versions[user]]
    assert set(versions.values()) == {"int8", "int4"}
    assert ask(server, "chat", user="a", stream=True).headers["x-penstock-model"] == versions["a"]
    for model, answers in (("sure", "int4"), ("unsure", "int8")):
        for stream in (False, True):
            answer = ask(server, model, stream=stream)
            assert (answer.headers["x-penstock-model"], text(answer)) == (answers, own[answers])
            assert answer.headers["x-penstock-replica"].startswith(f"{answers}-")
            account = httpx.get(f"{server.base_url}/requests/{answer.headers['x-request-id']}").json()
            assert (account["asked"], account["model"]) == (model, answers)
            assert [attempt["model"] for attempt in account["attempts"]] == (["int4"] if model == "unsure" else [])
    for stream in (False, True):
        answer = ask(server, "tuned-first", stream=stream)
        assert (answer.headers["x-penstock-model"], text(answer)) == ("int8", own["int8"])
    metrics = httpx.get(f"{server.url}/metrics").text
    assert 'penstock_cascades_total{model="unsure",outcome="unsure"} 2.0' in metrics
    assert 'penstock_shadows_total{model="int4",outcome="' in metrics
