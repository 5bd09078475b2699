"""Anthropic's Messages API through its real client, against an engine that says what models say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import ContextTooLong
from penstock.core.request import GenerateRequest
from penstock.fleet.settings import ModelConfig
from penstock.gateway.api.anthropic_types import MessagesRequest
from penstock.gateway.settings import TenantConfig
from penstock.settings import Settings
from penstock.simulation.scripted_engine import MAX_MODEL_LEN, MODEL, says
from penstock.text.tokenizer import Tokenizer
from tests.families import family
from tests.gateway.api.test_bad_input import JSON_VALUES
from tests.gateway.conftest import Gateway, serving

PATH = "/v1/messages"
HI: list[Any] = [{"role": "user", "content": "Hi"}]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"name": "weather", "description": "of a city", "input_schema": SCHEMA}
CALLED = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
THOUGHT = "<think>\nThey greet me.\n</think>\n\nHello!"


@pytest.fixture
def qwen(tokenizer: Tokenizer) -> Iterator[Gateway]:
    """A model that reasons unless it is told not to, and calls in the Hermes format."""
    with serving(family(tokenizer, "hermes")) as gateway:
        yield gateway


def client_of(gateway: Gateway, key: str = "none") -> Any:
    anthropic = pytest.importorskip("anthropic")
    return anthropic.Anthropic(base_url=gateway.url, api_key=key, max_retries=0, timeout=20)


def create(gateway: Gateway, **fields: Any) -> Any:
    """Strictly validated: the client itself takes whatever comes."""
    answer = client_of(gateway).messages.create(**{"model": MODEL, "messages": HI, "max_tokens": 80, **fields})
    return type(answer).model_validate(answer.model_dump(mode="json"), strict=False)


def streamed(gateway: Gateway, **fields: Any) -> tuple[Any, list[str]]:
    """The message as the client's own helper puts it together, and the types of the events."""
    given = {"model": MODEL, "messages": HI, "max_tokens": 80, **fields}
    with client_of(gateway).messages.stream(**given) as stream:
        kinds = [event.type for event in stream]
        return stream.get_final_message(), kinds


def post(gateway: Gateway, **fields: Any) -> httpx.Response:
    with gateway.http() as http:
        return http.post(PATH, json={"model": MODEL, "messages": HI, "max_tokens": 80, **fields})


def events_of(response: httpx.Response) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert all(name == data["type"] for name, data in found)
    return found


def prompt_of(gateway: Gateway) -> str:
    return gateway.tokenizer.decode(gateway.engine.requests[-1].prompt, skip_special_tokens=False)


def test_text_whole_and_streamed(gateway: Gateway) -> None:
    whole = create(gateway, system="Be kind.")
    message, kinds = streamed(gateway, system=[{"type": "text", "text": "Be kind."}])
    for answer in (whole, message):
        assert [block.text for block in answer.content] == ["Hello there, friend!"]
        assert (answer.stop_reason, answer.stop_sequence, answer.role) == ("end_turn", None, "assistant")
        assert answer.id.startswith("msg_")
        usage = answer.usage
        assert usage.output_tokens == len(gateway.tokenizer.encode("Hello there, friend!")) + 1
        assert usage.input_tokens + usage.cache_read_input_tokens == len(gateway.engine.requests[-1].prompt)
        assert usage.cache_creation_input_tokens == 0
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    first, second = gateway.engine.requests
    assert first.prompt == second.prompt
    assert "Be kind." in prompt_of(gateway)


def test_a_stream_has_the_events_of_anthropic(gateway: Gateway) -> None:
    response = post(gateway, stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = events_of(response)
    names = [name for name, _ in events]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert set(names[3:-3]) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    start = events[0][1]["message"]
    assert (start["content"], start["stop_reason"], start["type"]) == ([], None, "message")
    assert start["usage"]["input_tokens"] > 0
    assert events[-2][1]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}


def test_the_asynchronous_client(gateway: Gateway) -> None:
    anthropic = pytest.importorskip("anthropic")
    import asyncio

    async def ask() -> tuple[str, str]:
        async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key="none", max_retries=0, timeout=20) as client:
            given: dict[str, Any] = {"model": MODEL, "messages": HI, "max_tokens": 80}
            whole = await client.messages.create(**given)
            async with client.messages.stream(**given) as stream:
                text = "".join([piece async for piece in stream.text_stream])
            return whole.content[0].text, text

    assert asyncio.run(ask()) == ("Hello there, friend!",) * 2


@pytest.mark.parametrize("answer", ["Sure.\n" + CALLED, CALLED + "\n" + CALLED], ids=["text and a call", "two calls"])
def test_tools_whole_and_streamed(gateway: Gateway, answer: str) -> None:
    gateway.answers(answer)
    for message in (create(gateway, tools=[WEATHER]), streamed(gateway, tools=[WEATHER])[0]):
        calls = [block for block in message.content if block.type == "tool_use"]
        assert [(call.name, call.input) for call in calls] == [("weather", {"city": "Bonn"})] * answer.count("Bonn")
        assert len({call.id for call in calls}) == len(calls)
        assert message.stop_reason == "tool_use"
    assert '"weather"' in prompt_of(gateway)


@pytest.mark.parametrize("count", [3, 5, 8, 13, 18, 21, 34, 80])
def test_text_behind_a_call_stays_there_however_many_tokens_come_at_once(gateway: Gateway, count: int) -> None:
    """As they do with speculation, or from the cache."""
    (tokens,) = says(gateway.tokenizer, f"Sure.\n{CALLED}\nThen we see.")
    gateway.runs(lambda request: [tokens[start : start + count] for start in range(0, len(tokens), count)])
    for message in (create(gateway, tools=[WEATHER]), streamed(gateway, tools=[WEATHER])[0]):
        text, call, more = message.content
        assert (text.text, call.input, more.text) == ("Sure.", {"city": "Bonn"}, "Then we see.")


def test_results_go_back_to_the_model(gateway: Gateway) -> None:
    gateway.answers(CALLED)
    asked = create(gateway, tools=[WEATHER])
    (call,) = asked.content
    gateway.answers("It rains.")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]}
    turns = [
        *HI,
        {"role": "assistant", "content": [block.model_dump() for block in asked.content]},
        {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
    ]
    answer = create(gateway, tools=[WEATHER], messages=turns)
    assert answer.content[0].text == "It rains."
    prompt = prompt_of(gateway)
    assert prompt.index("<tool_call>") < prompt.index("rain") < prompt.index("And now?")
    failed = {**result, "is_error": True, "content": "no such city"}
    create(gateway, tools=[WEATHER], messages=[*turns[:-1], {"role": "user", "content": [failed]}])
    assert "Error: no such city" in prompt_of(gateway)


def test_the_tool_runner_of_the_client(gateway: Gateway) -> None:
    """It asks for a thread at the server first, and goes on without one."""
    anthropic = pytest.importorskip("anthropic")

    @anthropic.beta_tool  # type: ignore[untyped-decorator]
    def weather(city: str) -> str:
        """Of a city."""
        return f"It rains in {city}."

    def script(request: GenerateRequest) -> list[Any]:
        called = "It rains in Bonn." in gateway.tokenizer.decode(request.prompt)
        return [[token] for token in says(gateway.tokenizer, "Take an umbrella." if called else CALLED)[0]]

    gateway.runs(script)
    runner = client_of(gateway).beta.messages.tool_runner(
        model=MODEL, max_tokens=80, messages=[{"role": "user", "content": "Bonn?"}], tools=[weather]
    )
    answers = list(runner)
    assert [answer.stop_reason for answer in answers] == ["tool_use", "end_turn"]
    assert answers[-1].content[0].text == "Take an umbrella."


def test_tool_choice(gateway: Gateway) -> None:
    gateway.answers(CALLED)
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        create(gateway, tools=[WEATHER], tool_choice={**choice, "disable_parallel_tool_use": True})
        assert gateway.engine.requests[-1].params.grammar is not None
    none = create(gateway, tools=[WEATHER], tool_choice={"type": "none"})
    assert [block.type for block in none.content] == ["text"]
    create(gateway, tools=[WEATHER], tool_choice={"type": "auto"})
    assert gateway.engine.requests[-1].params.grammar is None


@pytest.mark.parametrize("kind", ["enabled", "adaptive"])
def test_thinking_whole_and_streamed(qwen: Gateway, kind: str) -> None:
    qwen.answers(THOUGHT)
    thinking = {"type": kind, "budget_tokens": 1024} if kind == "enabled" else {"type": kind}
    whole = create(qwen, thinking=thinking, max_tokens=60)
    message, _ = streamed(qwen, thinking=thinking, max_tokens=60)
    for answer in (whole, message):
        thought, text = answer.content
        assert (thought.thinking, text.text) == ("They greet me.", "Hello!")
        assert thought.signature
    back = [*HI, {"role": "assistant", "content": [block.model_dump() for block in whole.content]}, *HI]
    create(qwen, thinking=thinking, messages=back)


def test_thinking_that_nobody_asked_for_is_left_out(qwen: Gateway) -> None:
    create(qwen)
    assert prompt_of(qwen).rstrip().endswith("</think>"), "the template closes it"
    with serving(family(qwen.tokenizer, "deepseek")) as gateway:  # which always thinks
        gateway.answers("They greet me.\n</think>\n\nHello!")
        for message in (create(gateway), streamed(gateway)[0]):
            assert [block.text for block in message.content] == ["Hello!"]
            assert message.usage.output_tokens > 8
        omitted = create(gateway, thinking={"type": "adaptive", "display": "omitted"})
        assert [block.type for block in omitted.content] == ["thinking", "text"]
        assert omitted.content[0].thinking == ""


def test_why_it_stopped(gateway: Gateway) -> None:
    stopped = create(gateway, stop_sequences=["friend", "x"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "friend")
    assert stopped.content[0].text == "Hello there, "
    assert create(gateway, max_tokens=2).stop_reason == "max_tokens"
    gateway.answers("word " * MAX_MODEL_LEN)
    full = create(gateway, max_tokens=64_000)  # what Claude Code asks for
    assert full.stop_reason == "model_context_window_exceeded"
    used = full.usage.input_tokens + full.usage.cache_read_input_tokens + full.usage.output_tokens
    assert used == MAX_MODEL_LEN


def test_an_answer_that_was_begun_is_continued(gateway: Gateway) -> None:
    create(gateway, messages=[*HI, {"role": "assistant", "content": "The best answer is ("}])
    assert prompt_of(gateway).endswith("The best answer is (")


def test_sampling_and_metadata_reach_the_engine(gateway: Gateway) -> None:
    response = post(gateway, temperature=0.3, top_k=7, top_p=0.5, metadata={"user_id": "u"}, service_tier="auto")
    assert response.status_code == 200
    request = gateway.engine.requests[-1]
    assert (request.params.temperature, request.params.top_k, request.params.top_p) == (0.3, 7, 0.5)
    assert request.session
    assert response.headers["request-id"] == response.headers["x-request-id"]


def test_structured_output(gateway: Gateway) -> None:
    gateway.answers('{"city": "Bonn"}')
    post(gateway, output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    grammar = gateway.engine.requests[-1].params.grammar
    assert grammar is not None
    assert json.loads(grammar.source) == SCHEMA


CLAUDE_CODE: dict[str, Any] = {  # what its version 2.1 sends, shortened
    "model": "claude-opus-4-8",
    "max_tokens": 64_000,
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>today</system-reminder>"},
                {"type": "text", "text": "Say hi", "cache_control": {"type": "ephemeral"}},
            ],
        },
        {"role": "system", "content": "Agents: none"},
    ],
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.123; cc_entrypoint=cli;"},
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ],
    "tools": [{**WEATHER, "input_schema": {"$schema": "https://json-schema.org/draft/2020-12/schema", **SCHEMA}}] * 1,
    "metadata": {"user_id": '{"device_id": "d", "session_id": "s"}'},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}


def test_what_claude_code_sends(tokenizer: Tokenizer) -> None:
    aliases = Settings(models={MODEL: ModelConfig(aliases=("claude-*",))})
    with serving(tokenizer, aliases, names=[MODEL, "claude-*"]) as gateway, gateway.http() as http:
        assert http.head("/").status_code == 200
        response = http.post(
            f"{PATH}?beta=true",
            json=CLAUDE_CODE,
            headers={"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219,effort-2025-11-24"},
        )
        events = events_of(response)
        assert events[0][1]["message"]["model"] == MODEL
        assert events[-1][0] == "message_stop"
        prompt = prompt_of(gateway)
        assert "billing-header" not in prompt
        assert prompt.index("You are an agent.") < prompt.index("Say hi") < prompt.index("Agents: none")
        count = {key: CLAUDE_CODE[key] for key in ("model", "messages", "system", "tools", "thinking")}
        counted = http.post(f"{PATH}/count_tokens?beta=true", json=count).json()
        assert counted == {"input_tokens": len(gateway.engine.requests[-1].prompt)}
        assert MODEL in [card["id"] for card in http.get("/v1/models?limit=1000").json()["data"]]
        assert http.post(PATH, json={**CLAUDE_CODE, "model": "gpt-5"}).status_code == 404


def test_tokens_are_counted_by_the_client(gateway: Gateway) -> None:
    counted = client_of(gateway).messages.count_tokens(model=MODEL, messages=HI, system="Be kind.")
    create(gateway, system="Be kind.")
    assert counted.input_tokens == len(gateway.engine.requests[-1].prompt)


def test_models_are_listed_for_the_client(gateway: Gateway) -> None:
    anthropic = client_of(gateway)
    listed = list(anthropic.models.list())
    assert [model.id for model in listed] == [MODEL, "org/alias"]
    assert type(listed[0]).model_validate(listed[0].model_dump(mode="json")).display_name == MODEL
    assert anthropic.models.retrieve(MODEL).type == "model"


def check_error(response: httpx.Response, status: int, kind: str, named: str) -> None:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"type", "error", "request_id"}
    assert response.json()["type"] == "error"
    error = response.json()["error"]
    assert set(error) == {"type", "message"}
    assert error["type"] == kind
    assert named in error["message"], error


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("no messages", {"messages": []}, "messages"),
    ("max_tokens missing", {"max_tokens": None}, "max_tokens"),
    ("max_tokens zero", {"max_tokens": 0}, "max_tokens"),
    ("role unknown", {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ("nothing said", {"messages": [{"role": "user", "content": ""}]}, "messages"),
    ("image", {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
    (
        "image as a result",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image"}]}],
                }
            ]
        },
        "messages[0].content[0].content[0]",
    ),
    (
        "PDF",
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64"}}]}]},
        "messages[0].content[0].source",
    ),
    ("unknown block", {"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "messages[0].content[0]"),
    (
        "result of the assistant",
        {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
        "messages[0].content[0]",
    ),
    ("tool of Anthropic", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ("tool without a good name", {"tools": [{**WEATHER, "name": "a b"}]}, "tools[0].name"),
    ("tool of a list", {"tools": [{**WEATHER, "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
    ("unknown tool", {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "ping"}}, "tool_choice"),
    ("tool without a name", {"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ("temperature", {"temperature": -1}, "temperature"),
    ("top_p", {"top_p": 0}, "top_p"),
    ("stop", {"stop_sequences": [""]}, "stop_sequences[0]"),
    ("thinking", {"thinking": {"type": "hard"}}, "thinking.type"),
    ("unknown", {"prompt": "Hi"}, "prompt"),
    ("too long", {"messages": [{"role": "user", "content": "x " * 2 * MAX_MODEL_LEN}]}, "messages"),
    ("service tier", {"service_tier": "express"}, "service_tier"),
]


@pytest.mark.parametrize(("change", "param"), [pytest.param(change, param, id=name) for name, change, param in BAD])
def test_bad_field_is_named(shared_gateway: Gateway, change: dict[str, Any], param: str) -> None:
    check_error(post(shared_gateway, **change), 400, "invalid_request_error", param)
    assert shared_gateway.engine.requests == []


def test_errors_have_the_shape_of_anthropic(tokenizer: Tokenizer) -> None:
    settings = Settings(tenants={"acme": TenantConfig(requests_per_minute=1)})
    with serving(tokenizer, settings) as gateway, gateway.http() as http:
        asked = {"model": MODEL, "messages": HI, "max_tokens": 4}
        check_error(http.post(PATH, json=asked), 401, "authentication_error", "API key")
        key = {"x-api-key": gateway.key("acme"), "anthropic-version": "2023-06-01"}
        check_error(http.post(PATH, json={**asked, "model": "gpt"}, headers=key), 404, "not_found_error", "gpt")
        check_error(http.post(PATH, content=b" " * 2**25, headers=key), 413, "request_too_large", "body")
        assert http.post(PATH, json=asked, headers=key).status_code == 200
        check_error(http.post(PATH, json=asked, headers=key), 429, "rate_limit_error", "acme")
        anthropic = pytest.importorskip("anthropic")
        with pytest.raises(anthropic.RateLimitError) as caught:
            client_of(gateway, key["x-api-key"]).messages.create(**asked)
        assert caught.value.body["error"]["type"] == "rate_limit_error"


def test_too_long_is_said_in_the_words_of_anthropic(tokenizer: Tokenizer) -> None:
    settings = Settings(tenants={"small": TenantConfig(max_prompt_tokens=60), "free": TenantConfig()})
    with serving(tokenizer, settings) as gateway, gateway.http() as http:
        most = MAX_MODEL_LEN - 1

        def refusal(tenant: str, words: int) -> str:
            asked = {"model": MODEL, "messages": [{"role": "user", "content": "word " * words}], "max_tokens": 4}
            response = http.post(PATH, json=asked, headers={"x-api-key": gateway.key(tenant)})
            check_error(response, 400, "invalid_request_error", f"context length is {MAX_MODEL_LEN} tokens")
            message: str = response.json()["error"]["message"]
            return message

        for words in (2 * MAX_MODEL_LEN, 600_000):  # counted up to the limit; refused by its size
            assert refusal("free", words).startswith(f"prompt is too long: more than {most} tokens > {most} maximum. ")
        assert refusal("small", 70).startswith("prompt is too long: more than 60 tokens > 60 maximum. ")
        gateway.runs(lambda request: [ContextTooLong("what a worker says")])
        key = {"x-api-key": gateway.key("free")}
        failed = http.post(PATH, json={"model": MODEL, "messages": HI, "max_tokens": 4}, headers=key)
        assert failed.json()["error"]["message"] == "prompt is too long: what a worker says"


def test_unknown_paths_and_methods_have_it_too(gateway: Gateway) -> None:
    with gateway.http() as http:
        for refused in (http.get(PATH), http.post(f"{PATH}/batches", json={}), http.get(f"{PATH}/batches/b/results")):
            body = refused.json()
            assert refused.status_code in (404, 405)
            assert (body["type"], set(body["error"])) == ("error", {"type", "message"})
            assert body["request_id"] == refused.headers["x-request-id"]
        assert set(http.get("/v1/no_such_path").json()["error"]) == {"message", "type", "param", "code"}


def test_a_failure_in_mid_stream_is_an_event(gateway: Gateway) -> None:
    from penstock.core.errors import EngineFailure

    token = gateway.tokenizer.encode("Hi")[0]
    gateway.runs(lambda request: [[token], EngineFailure("the step failed")])
    events = events_of(post(gateway, stream=True))
    assert events[0][0] == "message_start"
    name, data = events[-1]
    assert (name, data["error"]) == ("error", {"type": "api_error", "message": "the step failed"})
    check_error(post(gateway), 500, "api_error", "the step failed")


def test_a_long_request_is_read_in_another_process(gateway: Gateway) -> None:
    short = post(gateway, system="Be kind.")
    padded = {"context_management": None, "metadata": {"user_id": "u"}, "inference_geo": "x" * 4000}
    long = post(gateway, system="Be kind.", **padded)
    assert short.json()["content"] == long.json()["content"]
    assert gateway.engine.requests[0].prompt == gateway.engine.requests[1].prompt


@pytest.fixture(scope="module")
def http(tokenizer: Tokenizer) -> Iterator[httpx.Client]:
    with serving(tokenizer) as gateway, gateway.http() as client:
        yield client


@settings(max_examples=100, derandomize=True, deadline=None)
@given(data=st.data())
def test_any_value_in_any_field_is_answered_or_refused(http: httpx.Client, data: st.DataObject) -> None:
    names = st.sampled_from([name for name in MessagesRequest.__struct_fields__ if name not in ("model", "max_tokens")])
    change = data.draw(st.dictionaries(names, JSON_VALUES, min_size=1, max_size=2))
    response = http.post(PATH, content=json.dumps({"model": MODEL, "messages": HI, "max_tokens": 1, **change}).encode())
    if response.status_code != 200:
        check_error(response, 400, "invalid_request_error", "")
        assert any(name in response.json()["error"]["message"] for name in change), response.text
