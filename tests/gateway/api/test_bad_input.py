"""What is wrong is refused with 4xx, in OpenAI's shape, naming the field; the engine never sees it."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.gateway.api.openai_types import ChatRequest, CompletionRequest
from penstock.simulation.scripted_engine import MAX_MODEL_LEN, MODEL
from penstock.text.tokenizer import Tokenizer
from tests.gateway.conftest import Gateway, serving
from tests.gateway.wire import CHAT as RAW_CHAT

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]


def check_error(response: Any, status: int, param: str | None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert set(response.json()) == {"error"}
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["param"] == param, error
    assert "Traceback" not in response.text
    return error


BAD_CHAT: list[tuple[str, dict[str, Any], str]] = [
    ("no messages", {"messages": []}, "messages"),
    ("messages null", {"messages": None}, "messages"),
    ("messages a string", {"messages": "Hi"}, "messages"),
    ("message not an object", {"messages": ["Hi"]}, "messages[0]"),
    ("role missing", {"messages": [{"content": "Hi"}]}, "messages[0].role"),
    ("role unknown", {"messages": [{"role": "king", "content": "Hi"}]}, "messages[0].role"),
    ("content a number", {"messages": [*HI, {"role": "user", "content": 5}]}, "messages[1].content"),
    ("content null for the user", {"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ("image part", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    ("part without type", {"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
    (
        "tool arguments a number",
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    ("prompt too long", {"messages": [{"role": "user", "content": "x " * 2 * MAX_MODEL_LEN}]}, "messages"),
    ("max_tokens too large", {"max_tokens": MAX_MODEL_LEN}, "max_tokens"),
    ("max_tokens zero", {"max_tokens": 0}, "max_tokens"),
    ("max_tokens negative", {"max_completion_tokens": -1}, "max_completion_tokens"),
    ("max_tokens a fraction", {"max_tokens": 1.5}, "max_tokens"),
    ("max_tokens a bool", {"max_tokens": True}, "max_tokens"),
    ("max_tokens 2**70", {"max_tokens": 2**70}, "max_tokens"),
    ("model missing", {"model": None}, "model"),
    ("temperature negative", {"temperature": -0.1}, "temperature"),
    ("temperature huge", {"temperature": 2**70}, "temperature"),
    ("temperature a string", {"temperature": "hot"}, "temperature"),
    ("top_p zero", {"top_p": 0}, "top_p"),
    ("top_k -2", {"top_k": -2}, "top_k"),
    ("min_p 2", {"min_p": 2}, "min_p"),
    ("penalty 3", {"presence_penalty": 3}, "presence_penalty"),
    ("penalty -3", {"frequency_penalty": -3}, "frequency_penalty"),
    ("repetition_penalty 0", {"repetition_penalty": 0}, "repetition_penalty"),
    ("n zero", {"n": 0}, "n"),
    ("n huge", {"n": 2**70}, "n"),
    ("seed over 64 bits", {"seed": 2**64}, "seed"),
    ("stop a number", {"stop": 5}, "stop"),
    ("stop holds a number", {"stop": ["a", 5]}, "stop[1]"),
    ("stop empty", {"stop": ""}, "stop"),
    ("too many stops", {"stop": list("abcdefghijklmnopq")}, "stop"),
    ("stop_token_ids out of range", {"stop_token_ids": [3, 10**9]}, "stop_token_ids[1]"),
    ("too many stop_token_ids", {"stop_token_ids": [7] * 1025}, "stop_token_ids"),
    ("stop endless", {"stop": "x" * 1025}, "stop"),
    ("one stop endless", {"stop": ["a", "x" * 1025]}, "stop[1]"),
    ("too many in logit_bias", {"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
    ("stream_options alone", {"stream_options": {"include_usage": True}}, "stream_options"),
    ("refusal of the user", {"messages": [{**HI[0], "content": [{"type": "refusal"}]}]}, "messages[0].content"),
    ("moderation", {"moderation": {}}, "moderation"),
    ("special tokens shown", {"skip_special_tokens": False}, "skip_special_tokens"),
    ("logit_bias by word", {"logit_bias": {"hello": 1}}, "logit_bias"),
    ("logit_bias out of range", {"logit_bias": {"99999999": 1}}, "logit_bias"),
    ("logit_bias negative id", {"logit_bias": {"-1": 1}}, "logit_bias"),
    ("logit_bias superscript digit", {"logit_bias": {"²": 1}}, "logit_bias"),
    ("logit_bias endless digits", {"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ("logit_bias too strong", {"logit_bias": {"1": 101}}, "logit_bias"),
    ("logit_bias a list", {"logit_bias": [1]}, "logit_bias"),
    ("top_logprobs alone", {"top_logprobs": 3}, "top_logprobs"),
    ("top_logprobs 21", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ("logprobs a number", {"logprobs": 3}, "logprobs"),
    ("prompt_logprobs 21", {"prompt_logprobs": 21}, "prompt_logprobs"),
    ("prompt_logprobs streamed", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ("min_tokens over max_tokens", {"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ("min_tokens negative", {"min_tokens": -1}, "min_tokens"),
    ("priority a bool", {"priority": True}, "priority"),
    ("priority 2**40", {"priority": 2**40}, "priority"),
    ("cache_salt endless", {"cache_salt": "x" * 257}, "cache_salt"),
    ("stream a string", {"stream": "yes"}, "stream"),
    ("no schema", {"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema"),
    ("schema of a text", {"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
    ("two schemas", {"response_format": {"type": "json_object", "schema": {}, "value": {}}}, "response_format.value"),
    ("unknown format", {"response_format": {"type": "yaml"}}, "response_format.type"),
    ("two grammars", {"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ("two structures", {"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ("no structure", {"structured_outputs": {"json_object": False}}, "structured_outputs"),
    ("no choice", {"guided_choice": []}, "guided_choice"),
    ("endless grammar", {"guided_regex": "a" * 200_000}, "guided_regex"),
    ("tool_choice required", {"tools": [], "tool_choice": "required"}, "tool_choice"),
    ("tool_choice named", {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ("functions", {"functions": [{"name": "f"}]}, "functions"),
    ("function_call", {"function_call": "auto"}, "function_call"),
    ("audio", {"audio": {"voice": "alloy"}}, "audio"),
    ("audio modality", {"modalities": ["text", "audio"]}, "modalities"),
    ("length penalty", {"length_penalty": 1.2}, "length_penalty"),
    ("no reasoning", {"include_reasoning": False}, "include_reasoning"),
    ("web search", {"web_search_options": {}}, "web_search_options"),
    ("template variable reserved", {"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs"),
    ("messages as template variable", {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ("continuing a user", {"continue_final_message": True}, "continue_final_message"),
    ("both prompts", {"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
]

BAD_TEXT: list[tuple[str, dict[str, Any], str]] = [
    ("prompt missing", {"prompt": None}, "prompt"),
    ("prompt empty", {"prompt": ""}, "prompt"),
    ("prompts empty", {"prompt": []}, "prompt"),
    ("one prompt empty", {"prompt": ["a", ""]}, "prompt[1]"),
    ("no token ids", {"prompt": [[]]}, "prompt"),
    ("mixed", {"prompt": [1, "a"]}, "prompt"),
    ("token id a float", {"prompt": [1.5]}, "prompt[0]"),
    ("token id a bool", {"prompt": [[True]]}, "prompt[0][0]"),
    ("token id negative", {"prompt": [5, -1]}, "prompt"),
    ("token id out of vocabulary", {"prompt": [[1], [10**6]]}, "prompt[1]"),
    ("token id 2**70", {"prompt": [2**70]}, "prompt"),
    ("too many sequences", {"prompt": ["a"] * 600, "n": 2}, "prompt"),
    ("n huge", {"prompt": "a", "n": 10**9}, "n"),
    ("too long", {"prompt": [1] * MAX_MODEL_LEN}, "prompt"),
    ("too long with output", {"prompt": [1] * 10, "max_tokens": MAX_MODEL_LEN - 9}, "max_tokens"),
    ("no output and no echo", {"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ("suffix", {"prompt": "a", "suffix": "b"}, "suffix"),
    ("best_of", {"prompt": "a", "best_of": 2}, "best_of"),
    ("logprobs 21", {"prompt": "a", "logprobs": 21}, "logprobs"),
    ("logprobs a bool", {"prompt": "a", "logprobs": True}, "logprobs"),
]


@pytest.mark.parametrize(
    ("path", "base", "change", "param"),
    [pytest.param(CHAT, {"messages": HI}, change, param, id=f"chat: {name}") for name, change, param in BAD_CHAT]
    + [pytest.param(TEXT, {"prompt": "Hi"}, change, param, id=f"text: {name}") for name, change, param in BAD_TEXT],
)
def test_bad_field_is_named(
    shared_gateway: Gateway, path: str, base: dict[str, Any], change: dict[str, Any], param: str
) -> None:
    with shared_gateway.http() as http:
        response = http.post(path, json={"model": MODEL, **base, **change})
    error = check_error(response, 400, param)
    assert error["type"] == "invalid_request_error"
    assert param.split("[")[0].split(".")[0] in error["message"]
    assert shared_gateway.engine.requests == []


def test_a_wrong_choice_names_the_right_ones(shared_gateway: Gateway) -> None:
    with shared_gateway.http() as http:
        response = http.post(CHAT, json={"model": MODEL, "messages": HI, "response_format": {"type": "yaml"}})
    error = check_error(response, 400, "response_format.type")
    assert error["message"].endswith("must be one of text, json_object, json_schema")


def test_too_long_says_how_long(shared_gateway: Gateway) -> None:
    with shared_gateway.http() as http:
        prompt = http.post(TEXT, json={"model": MODEL, "prompt": [1] * 600})
        output = http.post(TEXT, json={"model": MODEL, "prompt": [1] * 10, "max_tokens": 600})
    limit = f"This model's maximum context length is {MAX_MODEL_LEN} tokens. However, there are "  # clients look for it
    for response, param, however in (
        (prompt, "prompt", "600 tokens in prompt, and at least one must be left for the output; shorten the prompt"),
        (
            output,
            "max_tokens",
            "10 tokens in prompt and max_tokens is 600; shorten the prompt or ask for at most "
            f"{MAX_MODEL_LEN - 10} tokens",
        ),
    ):
        error = check_error(response, 400, param)
        assert error["code"] == "context_length_exceeded"
        assert error["message"] == limit + however


def body(text: str) -> bytes:
    return f'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "Hi"}}], {text}}}'.encode()


@pytest.mark.parametrize(
    ("content", "param"),
    [
        pytest.param(b"", None, id="empty"),
        pytest.param(b"{", None, id="truncated"),
        pytest.param(b"not json", None, id="no JSON"),
        pytest.param(b"[]", None, id="an array"),
        pytest.param(b"null", None, id="null"),
        pytest.param(b'{"model": "\xff\xfe"}', None, id="broken UTF-8"),
        pytest.param('{"model": "x"}'.encode("utf-16"), None, id="UTF-16"),
        pytest.param(b'{"model": "\\ud800", "messages": []}', None, id="half a surrogate pair"),
        pytest.param(b"[" * 100_000, None, id="deep array"),
        pytest.param(body('"x": ' + "[" * 100_000 + "]" * 100_000), "x", id="deep unknown field"),
        pytest.param(body('"tools": [{"a":' + '{"a":' * 5000 + "1" + "}" * 5001 + "]"), None, id="deep tool"),
        pytest.param(body('"temperature": NaN'), None, id="NaN"),
        pytest.param(body('"temperature": Infinity'), None, id="Infinity"),
        pytest.param(body('"temperature": 1e400'), "temperature", id="1e400"),
        pytest.param(body('"max_tokens": ' + "9" * 5000), "max_tokens", id="5000 digits"),
        pytest.param(body('"max_tokens": ' + "9" * 4200), "max_tokens", id="4200 digits"),
        pytest.param(body('"seed": ' + "9" * 4200), "seed", id="4200 digits of seed"),
        pytest.param(b"{} trailing", "model", id="missing before trailing"),
    ],
)
def test_bad_json(shared_gateway: Gateway, content: bytes, param: str | None) -> None:
    with shared_gateway.http() as http:
        check_error(http.post(CHAT, content=content), 400, param)
    assert shared_gateway.engine.requests == []


@pytest.fixture(scope="module")
def http(tokenizer: Tokenizer) -> Iterator[httpx.Client]:
    with serving(tokenizer) as gateway, gateway.http() as client:
        yield client


@pytest.mark.parametrize("depth", [50, 300, 900])
def test_deep_tools_are_rendered_or_refused(http: httpx.Client, depth: int) -> None:
    """Deep enough to pass the JSON parser but not necessarily the template."""
    nested = '{"a":' * depth + "1" + "}" * depth
    response = http.post(CHAT, content=body(f'"max_tokens": 1, "tools": [{nested}]'))
    assert response.status_code in (200, 400)


def test_unknown_model(shared_gateway: Gateway) -> None:
    with shared_gateway.http() as http:
        for path, request in ((CHAT, {"messages": HI}), (TEXT, {"prompt": "a"}), ("/tokenize", {"prompt": "a"})):
            error = check_error(http.post(path, json={"model": "gpt-4", **request}), 404, "model")
            assert error["code"] == "model_not_found"
            assert MODEL in error["message"]
        check_error(http.get("/v1/models/gpt-4"), 404, "model")


@pytest.mark.parametrize(
    ("request_body", "param"),
    [({}, "prompt"), ({"prompt": "a", "messages": HI}, "prompt"), ({"messages": []}, "messages")],
)
def test_tokenize_takes_one_of_prompt_and_messages(shared_gateway: Gateway, request_body: Any, param: str) -> None:
    with shared_gateway.http() as http:
        check_error(http.post("/tokenize", json=request_body), 400, param)


def test_detokenize_checks_ids(shared_gateway: Gateway) -> None:
    with shared_gateway.http() as http:
        check_error(http.post("/detokenize", json={"tokens": [1, 10**6]}), 400, "tokens")
        check_error(http.post("/detokenize", json={"tokens": [-5]}), 400, "tokens")
        check_error(http.post("/detokenize", content=b'{"tokens":[1' + b",1" * 10**5 + b"]}"), 400, "tokens")


def test_unknown_paths_and_methods(shared_gateway: Gateway) -> None:
    with shared_gateway.http() as http:
        for path in ("/v1/nothing", "/v1/chat/completions//", "/%00", "/metrics/x"):
            assert check_error(http.get(path), 404, None)["code"] == "unknown_path"
        response = http.get(CHAT)
        check_error(response, 405, None)
        assert response.headers["allow"] == "OPTIONS, POST"
        check_error(http.delete("/health"), 405, None)


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/org/alias", "/health", "/openapi.json"])
def test_a_slash_at_the_end_makes_no_difference(shared_gateway: Gateway, path: str) -> None:
    with shared_gateway.http() as http:
        assert http.get(f"{path}/").content == http.get(path).content
        assert http.get(f"{path}/").status_code == 200


def test_body_over_the_limit_is_refused_at_its_header(shared_gateway: Gateway) -> None:
    """Nothing of the body is sent, so an answer proves that the server did not wait for it."""
    with socket.create_connection((shared_gateway.host, shared_gateway.port), timeout=20) as connection:
        connection.sendall(RAW_CHAT + b"Content-Length: 300000\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_chunked_body_over_the_limit_is_refused_on_the_way(shared_gateway: Gateway) -> None:
    with socket.create_connection((shared_gateway.host, shared_gateway.port), timeout=20) as connection:
        connection.sendall(RAW_CHAT + b"Transfer-Encoding: chunked\r\n\r\n")
        for _ in range(5):
            connection.sendall(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
        head, _, content = connection.recv(4096).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 413 ")
        assert json.loads(content)["error"]["code"] == "body_too_large"


def test_body_just_under_the_limit_is_read(shared_gateway: Gateway) -> None:
    content = b'{"prompt": "a"}'
    with shared_gateway.http() as http:
        assert http.post("/tokenize", content=content + b" " * (2**18 - len(content))).status_code == 200
        assert http.post("/tokenize", content=content + b" " * (2**18 - len(content) + 1)).status_code == 413


LENGTHS = ("max_tokens", "max_completion_tokens")  # of what the scripted engine has to say

JSON_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize(
    ("path", "base", "kind"),
    [(CHAT, {"messages": HI}, ChatRequest), (TEXT, {"prompt": "Hi"}, CompletionRequest)],
    ids=["chat", "text"],
)
@settings(max_examples=150, derandomize=True, deadline=None)
@given(data=st.data())
def test_any_value_in_any_field_is_answered_or_refused(
    http: httpx.Client, path: str, base: dict[str, Any], kind: type[ChatRequest], data: st.DataObject
) -> None:
    """No value may end in a 5xx: that is a request which could have reached, and harmed, the engine."""
    names = st.sampled_from([name for name in kind.__struct_fields__ if name not in ("model", *LENGTHS)])
    change = data.draw(st.dictionaries(names, JSON_VALUES, min_size=1, max_size=2))
    content = json.dumps({"model": MODEL, **base, "max_tokens": 1, **change}).encode()
    response = http.post(path, content=content)
    if response.status_code == 504:  # in so many milliseconds this machine could not
        check_error(response, 504, "deadline_ms")
        assert change["deadline_ms"] > 0
    elif response.status_code != 200:
        check_error(response, 400, response.json()["error"]["param"])
