"""Ollama's API through its real client, against an engine that says what models say."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from penstock.core.errors import EngineFailure, InvalidRequest
from penstock.gateway.api.ollama import OllamaErrors
from penstock.settings import Settings
from penstock.simulation.scripted_engine import MAX_MODEL_LEN, MODEL
from penstock.text.tokenizer import Tokenizer
from tests.families import family
from tests.gateway.api.test_completions import FIM, with_tokens
from tests.gateway.conftest import Gateway, serving

HI: list[Any] = [{"role": "user", "content": "Hi"}]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": SCHEMA}}
CALLED = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'


def client_of(gateway: Gateway) -> Any:
    return pytest.importorskip("ollama").Client(host=gateway.url, timeout=20)


def prompt_of(gateway: Gateway) -> str:
    return gateway.tokenizer.decode(gateway.engine.requests[-1].prompt, skip_special_tokens=False)


def post(gateway: Gateway, path: str, **fields: Any) -> httpx.Response:
    with gateway.http() as http:
        return http.post(path, json={"model": MODEL, **fields})


def test_chats_whole_and_streamed(gateway: Gateway) -> None:
    client = client_of(gateway)
    options = {"num_predict": 50, "temperature": 0.3, "top_k": 7, "num_ctx": 4096, "repeat_penalty": 1.1}
    whole = client.chat(model=MODEL, messages=HI, options=options)
    params = gateway.engine.requests[-1].params
    assert (params.temperature, params.top_k, params.max_tokens, params.repetition_penalty) == (0.3, 7, 50, 1.1)
    chunks = list(client.chat(model=MODEL, messages=HI, stream=True))
    assert whole.message.content == "".join(chunk.message.content for chunk in chunks) == "Hello there, friend!"
    assert [chunk.done for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    for last in (whole, chunks[-1]):
        assert (last.done_reason, last.prompt_eval_count) == ("stop", len(gateway.engine.requests[-1].prompt))
        assert last.eval_count == len(gateway.tokenizer.encode("Hello there, friend!")) + 1
        assert last.total_duration >= last.prompt_eval_duration + last.eval_duration > 0
    assert client.chat(model=MODEL, messages=HI, options={"num_predict": 2}).done_reason == "length"
    streamed = post(gateway, "/api/chat", messages=HI)  # without being asked for
    assert streamed.headers["content-type"] == "application/x-ndjson"
    assert [json.loads(line)["model"] for line in streamed.text.splitlines()] == [MODEL] * len(chunks)


def test_the_asynchronous_client(gateway: Gateway) -> None:
    ollama = pytest.importorskip("ollama")

    async def ask() -> tuple[str, str]:
        client = ollama.AsyncClient(host=gateway.url, timeout=20)
        whole = await client.generate(model=MODEL, prompt="Hi")
        pieces = [chunk.message.content async for chunk in await client.chat(model=MODEL, messages=HI, stream=True)]
        return whole.response, "".join(pieces)

    assert asyncio.run(ask()) == ("Hello there, friend!",) * 2


def test_calls_and_their_results(gateway: Gateway) -> None:
    client = client_of(gateway)
    gateway.answers("Sure.\n" + CALLED)
    whole = client.chat(model=MODEL, messages=HI, tools=[WEATHER])
    chunks = list(client.chat(model=MODEL, messages=HI, tools=[WEATHER], stream=True))
    (streamed,) = [chunk.message for chunk in chunks if chunk.message.tool_calls]
    for message in (whole.message, streamed):
        (call,) = message.tool_calls
        assert (call.function.name, call.function.arguments) == ("weather", {"city": "Bonn"})
    gateway.answers("It rains.")
    result = {"role": "tool", "tool_name": "weather", "content": "rain"}
    answer = client.chat(model=MODEL, messages=[*HI, whole.message, result], tools=[WEATHER])
    assert answer.message.content == "It rains."
    assert prompt_of(gateway).index("<tool_call>") < prompt_of(gateway).index("rain")


def test_prompts(gateway: Gateway) -> None:
    client = client_of(gateway)
    assert client.generate(model=MODEL, prompt="Hi", system="Be kind.").response == "Hello there, friend!"
    assert "Be kind." in prompt_of(gateway)
    client.generate(model=MODEL, prompt="Once upon", raw=True)
    assert gateway.engine.requests[-1].prompt == gateway.tokenizer.encode("Once upon")
    gateway.answers('{"city": "Bonn"}')
    for format in ("json", SCHEMA):
        client.generate(model=MODEL, prompt="Where?", format=format)
        assert gateway.engine.requests[-1].params.grammar is not None
    count = len(gateway.engine.requests)
    assert client.generate(model=MODEL, prompt="").done_reason == "load"
    assert client.chat(model=MODEL, messages=[], keep_alive=0).done_reason == "unload"
    assert len(gateway.engine.requests) == count


def test_thinking(tokenizer: Tokenizer) -> None:
    with serving(family(tokenizer, "hermes")) as gateway:
        client = client_of(gateway)
        gateway.answers("<think>\nThey greet me.\n</think>\n\nHello!")
        whole = client.chat(model=MODEL, messages=HI, think=True)
        assert (whole.message.thinking, whole.message.content) == ("They greet me.", "Hello!")
        chunks = list(client.generate(model=MODEL, prompt="Hi", stream=True))
        assert "".join(chunk.thinking or "" for chunk in chunks) == "They greet me."
        gateway.answers("Hello!")
        client.chat(model=MODEL, messages=HI, think=False)
        assert prompt_of(gateway).rstrip().endswith("</think>"), "the template closes it"


def test_models(tokenizer: Tokenizer) -> None:
    with serving(with_tokens(tokenizer, *FIM)) as gateway:
        client = client_of(gateway)
        assert [model.model for model in client.list().models] == [MODEL, "org/alias"]
        assert [model.context_length for model in client.ps().models] == [MAX_MODEL_LEN] * 2
        shown = client.show(MODEL)
        assert "insert" in shown.capabilities
        assert shown.modelinfo["penstock.context_length"] == MAX_MODEL_LEN
        client.generate(model=MODEL, prompt="before", suffix="after")
        assert prompt_of(gateway) == f"{FIM[0]}before{FIM[1]}after{FIM[2]}"
        with gateway.http() as http:
            assert http.get("/api/version").json()["version"]


def test_json_is_read_whatever_its_type_unless_a_page_sends_it(gateway: Gateway) -> None:
    asked = json.dumps({"model": MODEL, "prompt": "Hi", "stream": False}).encode()
    for headers in ({}, {"content-type": "application/x-www-form-urlencoded"}):
        assert httpx.post(f"{gateway.url}/api/generate", content=asked, headers=headers, timeout=20).status_code == 200
        page = {**headers, "origin": gateway.url}
        assert httpx.post(f"{gateway.url}/api/generate", content=asked, headers=page, timeout=20).status_code == 415
        assert httpx.post(f"{gateway.url}/api/show", content=asked, headers=headers, timeout=20).status_code == 200


def test_errors_have_the_shape_of_ollama(gateway: Gateway) -> None:
    ollama = pytest.importorskip("ollama")
    client = client_of(gateway)
    with pytest.raises(ollama.ResponseError, match="is not served") as caught:
        client.chat(model="gpt", messages=HI)
    assert caught.value.status_code == 404
    bad: list[tuple[str, dict[str, Any], str]] = [
        ("/api/chat", {"messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role"),
        ("/api/chat", {"messages": [{"role": "user", "images": ["x"]}]}, "messages[0].images"),
        ("/api/generate", {"prompt": "x", "images": ["x"]}, "images"),
        ("/api/generate", {"prompt": "x", "format": "xml"}, "format"),
        ("/api/generate", {"prompt": "x", "suffix": "y"}, "suffix"),
        ("/api/generate", {"prompt": "x", "options": {"repeat_penalty": -1}}, "options.repeat_penalty"),
        ("/api/generate", {"prompt": "x " * 2 * MAX_MODEL_LEN}, "messages"),
        ("/api/show", {"model": "gpt"}, "gpt"),
    ]
    for path, fields, named in bad:
        response = post(gateway, path, **fields)
        assert response.status_code == (404 if "show" in path else 400)
        assert named in response.json()["error"], response.text
    with pytest.raises(ollama.ResponseError, match=r"^unknown path: POST /api/pull"):
        client.pull("gpt")
    schema = "response_format.json_schema.schema"
    body = OllamaErrors().body(InvalidRequest(f"{schema} cannot be enforced: not", param=schema), "1")
    assert json.loads(body) == {"error": "format cannot be enforced: not"}
    token = gateway.tokenizer.encode("Hi")[0]
    gateway.runs(lambda request: [[token], EngineFailure("the step failed")])
    *_, last = post(gateway, "/api/chat", messages=HI).text.splitlines()
    assert json.loads(last) == {"error": "the step failed"}


def test_a_long_request_is_read_in_another_process(tokenizer: Tokenizer) -> None:
    with serving(tokenizer, Settings()) as gateway:
        padding = {"template": "x" * 4000, "stream": False}
        assert post(gateway, "/api/chat", messages=HI, **padding).json()["message"]["content"] == "Hello there, friend!"
        assert post(gateway, "/api/generate", prompt="Hi", **padding).json()["response"] == "Hello there, friend!"
        assert gateway.engine.requests[0].prompt == gateway.engine.requests[1].prompt
