"""Structured output through a real server: OpenAI's client as it is, vLLM's fields, and refusals."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from penstock.bench.schemas import INVOICE, SCHEMAS
from tests.conftest import Server

MODEL = "smollm2-135m"
CHAT = "/v1/chat/completions"


class Person(BaseModel):
    name: str
    age: int
    mood: Literal["glad", "sad"]
    friends: list[Literal["Ann", "Ben"]]


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0)


def ask(server: Server, path: str = CHAT, **fields: Any) -> httpx.Response:
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "Answer."}]} if path == CHAT else {"prompt": "A"}
    body = {"model": MODEL, "max_tokens": 200, "temperature": 1, "seed": 5, **prompt, **fields}
    return httpx.post(server.url + path, json=body, timeout=120)


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text


def test_parse(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "Invent a person."}],
        response_format=Person,
        temperature=0,
        max_tokens=200,
    )
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Person)
    assert answer.choices[0].finish_reason == "stop"


def test_streamed_parse(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL,
        messages=[{"role": "user", "content": "Invent a person."}],
        response_format=Person,
        temperature=0.7,
        seed=3,
        max_tokens=200,
        stream_options={"include_usage": True},
    ) as stream:
        kinds = [event.type for event in stream]
        answer = stream.get_final_completion()
    assert isinstance(answer.choices[0].message.parsed, Person)
    assert "content.done" in kinds
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 10


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_vllms_fields(server: Server, path: str) -> None:
    assert text_of(ask(server, path, guided_choice=["yes", "no"])) in ("yes", "no")
    assert re.fullmatch("[a-f]{3}-[0-9]{2}", text_of(ask(server, path, guided_regex="[a-f]{3}-[0-9]{2}")))
    assert text_of(ask(server, path, guided_json={"enum": [17, "x"]})) in ("17", '"x"')
    assert text_of(ask(server, path, guided_json='{"const": [1, 2]}')) == "[1,2]"
    code = json.loads(text_of(ask(server, path, guided_json=SCHEMAS["large_enum"])))["code"]  # a body of some KiB
    assert code.startswith("CODE_0")
    assert text_of(ask(server, path, guided_grammar='root ::= "a" | "b"')) in ("a", "b")
    structured = {"structured_outputs": {"grammar": 'start: "c" | "d"'}}
    assert text_of(ask(server, path, **structured)) in ("c", "d")
    assert text_of(ask(server, path, structured_outputs={"choice": ["one. (two)", "three|four"]})) != ""
    fmt = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "boolean"}}}}
    assert text_of(ask(server, path, **fmt)) in ("true", "false")


@pytest.mark.parametrize("field", ["schema", "value"])  # llama.cpp's, and TGI's, which huggingface_hub sends
def test_a_schema_of_a_json_object(server: Server, field: str) -> None:
    response = ask(server, response_format={"type": "json_object", field: {"const": {"a": 1}}})
    assert json.loads(text_of(response)) == {"a": 1}


def test_any_object(server: Server) -> None:
    response = ask(server, response_format={"type": "json_object"}, temperature=0, max_tokens=400)
    if response.json()["choices"][0]["finish_reason"] == "stop":
        assert isinstance(json.loads(text_of(response)), dict)
    else:
        assert response.json()["choices"][0]["message"]["content"].startswith("{")


def test_forced_tokens_are_output_and_accounted_for(server: Server) -> None:
    headers = {"x-penstock-ledger": "true", "cache-control": "no-store"}
    body = {"model": MODEL, "prompt": "A", "temperature": 0, "max_tokens": 300, "guided_json": INVOICE}
    with httpx.Client(base_url=server.url, headers=headers, timeout=120) as http:
        plain = http.post("/v1/completions", json={**body, "return_token_ids": True}).json()
        scored = http.post("/v1/completions", json={**body, "return_token_ids": True, "logprobs": 1}).json()
    usage = plain["usage"]
    assert usage["completion_tokens"] == len(plain["choices"][0]["token_ids"])
    assert usage["ledger"]["choices"][0]["engine"]["forced_tokens"] > usage["completion_tokens"] / 3
    assert scored["usage"]["ledger"]["choices"][0]["engine"]["forced_tokens"] == 0
    assert scored["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]
    assert len(scored["choices"][0]["logprobs"]["tokens"]) == usage["completion_tokens"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json", "uniqueItems"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "response_format.json_schema.schema",
            "not",
        ),
        ({"guided_regex": "("}, "guided_regex", "regex"),
        ({"structured_outputs": {"grammar": "nonsense"}}, "structured_outputs.grammar", "Expected"),
    ],
)
def test_what_cannot_be_enforced(server: Server, fields: dict[str, Any], param: str, word: str, stream: bool) -> None:
    response = ask(server, **fields, stream=stream)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert word in error["message"]


def test_text_is_no_constraint(server: Server) -> None:
    assert ask(server, response_format={"type": "text"}, max_tokens=5).status_code == 200


def test_grammars_that_take_forever_stop_nobody(server: Server, client: openai.OpenAI) -> None:
    """More of them than the worker has threads for, each of which would take all its memory."""
    patterns = {"type": "string", "allOf": [{"pattern": f".*a{number}.*"} for number in range(40)]}
    story = client.completions.create(
        model=MODEL, prompt="Once", max_tokens=150, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(story))
    with ThreadPoolExecutor(8) as pool:
        bombs = [pool.submit(ask, server, guided_json={**patterns, "title": str(number)}) for number in range(8)]
        pieces = len(list(story))
        assert not all(bomb.done() for bomb in bombs)
        assert text_of(ask(server, guided_choice=["in between"])) == "in between"
        for bomb in bombs:
            error = bomb.result().json()["error"]
            assert error["param"] == "guided_json"
            assert "too complex" in error["message"]
            assert bomb.result().status_code == 400
    assert pieces > 100
