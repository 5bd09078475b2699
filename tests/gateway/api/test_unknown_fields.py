"""Fields that no request has: refused by name with the one that was meant, or ignored where the settings say so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai.types import completion_create_params as text_params
from openai.types.chat import ChatCompletionStreamOptionsParam
from openai.types.chat import completion_create_params as chat_params

from penstock.gateway.api.openai_types import IGNORED, ChatRequest, CompletionRequest, StreamOptions
from penstock.settings import settings_from_mapping
from penstock.simulation.scripted_engine import MODEL
from penstock.text.tokenizer import Tokenizer
from tests.gateway.api.test_bad_input import CHAT, HI, TEXT, check_error
from tests.gateway.conftest import Gateway, serving

CHAT_BODY: dict[str, Any] = {"model": MODEL, "messages": HI, "max_tokens": 1}


@pytest.fixture(scope="module")
def http(tokenizer: Tokenizer) -> Iterator[httpx.Client]:
    with serving(tokenizer) as gateway, gateway.http() as client:
        yield client


@pytest.mark.parametrize(
    ("path", "fields", "param", "hint"),
    [
        (CHAT, {"temprature": 0}, "temprature", "; did you mean temperature?"),
        (CHAT, {"max_token": None}, "max_token", "; did you mean max_tokens?"),
        (CHAT, {"regex": "a"}, "regex", "; use response_format or structured_outputs"),
        (CHAT, {"max_new_tokens": 5}, "max_new_tokens", "; use max_tokens"),
        (CHAT, {"xyzzy": 5}, "xyzzy", ""),
        (CHAT, {"y" * 10_000: 5}, "y" * 64 + "…", ""),
        (
            CHAT,
            {"stream": True, "stream_options": {"include_usge": True}},
            "stream_options.include_usge",
            "; did you mean include_usage?",
        ),
        (CHAT, {"response_format": {"type": "text", "x": 1}}, "response_format.x", ""),
        (TEXT, {"prompt": "a", "messages": HI}, "messages", "; send it to /v1/chat/completions"),
        (TEXT, {"prompt": "a", "max_completion_tokens": 5}, "max_completion_tokens", "; use max_tokens"),
        (
            "/tokenize",
            {"prompt": "a", "add_special_token": True},
            "add_special_token",
            "; did you mean add_special_tokens?",
        ),
        ("/detokenize", {"tokens": [1], "token": 1}, "token", "; did you mean tokens?"),
    ],
)
def test_an_unknown_field_is_refused(
    shared_gateway: Gateway, path: str, fields: dict[str, Any], param: str, hint: str
) -> None:
    body = CHAT_BODY if path == CHAT else {"model": MODEL}
    with shared_gateway.http() as http:
        error = check_error(http.post(path, json={**body, **fields}), 400, param)
    assert error["code"] == "unrecognized_request_argument"
    assert error["message"] == f"Unrecognized request argument supplied: {param}{hint}"
    assert shared_gateway.engine.requests == []


def test_everything_openai_has_is_known() -> None:
    for params, kind in (
        (chat_params.CompletionCreateParamsBase, ChatRequest),
        (text_params.CompletionCreateParamsBase, CompletionRequest),
        (ChatCompletionStreamOptionsParam, StreamOptions),
    ):
        assert set(params.__annotations__) <= set(kind.__struct_fields__), kind


def test_what_changes_no_answer_is_accepted(http: httpx.Client) -> None:
    message: dict[str, Any] = {**HI[0], "annotations": [], "function_call": None, "audio": None, "made_up": 1}
    tool = {"type": "function", "function": {"name": "f", "strict": True}, "made_up": 1}
    fields = {
        **dict.fromkeys(IGNORED, "anything"),
        "tools": [tool],
        "modalities": ["text"],
        "response_format": {"type": "text"},
        "reasoning_effort": "low",
        "skip_special_tokens": True,
        "use_beam_search": False,
        "length_penalty": 1.0,
        "include_reasoning": True,
        "temperature": 3,
    }
    response = http.post(CHAT, json={**CHAT_BODY, **fields, "messages": [message]})
    assert response.status_code == 200, response.text


def test_settings_may_ignore_unknown_fields(tokenizer: Tokenizer) -> None:
    settings = settings_from_mapping({"server": {"unknown_fields": "ignore"}})
    with serving(tokenizer, settings) as gateway, gateway.http() as http:
        odd = {"temprature": 0, "x": [{}], "seed": -(2**63), "stream": True}
        options = {"include_usage": True, "flush": 1}
        response = http.post(CHAT, json={**CHAT_BODY, **odd, "stream_options": options})
        assert response.status_code == 200, response.text
        assert '"usage":{' in response.text
        (request,) = gateway.engine.requests
        assert (request.params.seed, request.params.max_tokens) == (-(2**63), 1)
        check_error(http.post(CHAT, json={**CHAT_BODY, "x": 1, "top_p": "all"}), 400, "top_p")
        check_error(http.post(CHAT, json=[]), 400, None)
        assert http.post("/tokenize", json={"prompt": "a", "x": 1}).status_code == 200
