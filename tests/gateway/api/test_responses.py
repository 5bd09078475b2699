"""OpenAI's Responses API through its real client, against an engine that says what models say."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response
from openai.types.responses.response_item_list import ResponseItemList

from penstock.core.errors import EngineFailure, Unavailable
from penstock.gateway.api import responses
from penstock.gateway.api.responses_store import ResponseStore
from penstock.gateway.api.responses_types import ResponsesRequest
from penstock.gateway.settings import ResponsesConfig, TenantConfig
from penstock.settings import Settings
from penstock.simulation.scripted_engine import MAX_MODEL_LEN, MODEL
from penstock.text.tokenizer import Tokenizer
from tests.families import family
from tests.gateway.api.test_bad_input import JSON_VALUES
from tests.gateway.conftest import Gateway, serving
from tests.redis_server import RedisServer

PATH = "/v1/responses"
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"type": "function", "name": "weather", "description": "of a city", "parameters": SCHEMA}
CALLED = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
ASKED: dict[str, Any] = {"model": MODEL, "input": "Hi"}


def client_of(gateway: Gateway, key: str = "none") -> Any:
    """Not typed: what its methods return is one of dozens of types."""
    return gateway.client(key)


def validated(response: Any) -> Any:
    """Strictly: the client itself takes whatever comes."""
    return Response.model_validate(response.model_dump(mode="json", by_alias=True, warnings="error"))


def create(gateway: Gateway, **fields: Any) -> Any:
    return validated(client_of(gateway).responses.create(**ASKED | fields))


def streamed(gateway: Gateway, **fields: Any) -> tuple[Any, list[Any]]:
    """The response as the client's own helper puts it together, and the events, each strictly validated."""
    with client_of(gateway).responses.stream(**ASKED | fields) as stream:
        events = list(stream)
    raw = list(client_of(gateway).responses.create(**ASKED | fields, stream=True))
    assert [type(event).model_validate(event.model_dump(mode="json", by_alias=True, warnings="error")) for event in raw]
    assert [event.sequence_number for event in raw] == list(range(len(raw)))
    assert [event.type for event in raw] == [event.type for event in events]
    return validated(raw[-1].response), raw


def post(gateway: Gateway, **fields: Any) -> httpx.Response:
    with gateway.http() as http:
        return http.post(PATH, json=ASKED | fields)


def prompt_of(gateway: Gateway) -> str:
    return gateway.tokenizer.decode(gateway.engine.requests[-1].prompt, skip_special_tokens=False)


def test_text_whole_and_streamed(gateway: Gateway) -> None:
    whole = create(gateway, instructions="Be kind.", metadata={"a": "b"}, temperature=0.5)
    final, events = streamed(gateway, instructions="Be kind.", input=[{"role": "user", "content": "Hi"}])
    for answer in (whole, final):
        assert answer.output_text == "Hello there, friend!"
        assert (answer.status, answer.error, answer.instructions) == ("completed", None, "Be kind.")
        assert answer.id.startswith("resp_")
        assert answer.usage is not None
        assert answer.usage.input_tokens == len(gateway.engine.requests[-1].prompt)
        assert answer.usage.output_tokens == len(gateway.tokenizer.encode("Hello there, friend!")) + 1
    assert (whole.metadata, whole.temperature) == ({"a": "b"}, 0.5)
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert len({tuple(request.prompt) for request in gateway.engine.requests}) == 1
    assert "Be kind." in prompt_of(gateway)


def test_the_asynchronous_client(gateway: Gateway) -> None:
    async def ask() -> tuple[str, str, str]:
        url = f"{gateway.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=20) as client:
            whole = await client.responses.create(**ASKED)
            pieces = []
            async for event in await client.responses.create(**ASKED, stream=True):
                if event.type == "response.output_text.delta":
                    pieces.append(event.delta)
            kept = await client.responses.retrieve(whole.id)
            return whole.output_text, "".join(pieces), kept.output_text

    assert asyncio.run(ask()) == ("Hello there, friend!",) * 3


def test_calls_and_their_results(gateway: Gateway) -> None:
    gateway.answers("Sure.\n" + CALLED)
    whole = create(gateway, tools=[WEATHER])
    final, events = streamed(gateway, tools=[WEATHER])
    for answer in (whole, final):
        text, call = answer.output
        assert (text.type, call.type) == ("message", "function_call")
        assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Bonn"})
    assert "response.function_call_arguments.done" in [event.type for event in events]
    gateway.answers("It rains.")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    by_id = create(gateway, tools=[WEATHER], previous_response_id=final.id, input=[result])
    prompt = prompt_of(gateway)
    assert prompt.index("<tool_call>") < prompt.index("rain")
    sent_back = [{"role": "user", "content": "Hi"}, *(item.model_dump() for item in final.output), result]
    create(gateway, tools=[WEATHER], input=sent_back)
    assert prompt_of(gateway) == prompt
    assert by_id.output_text == "It rains."
    references = [{"type": "item_reference", "id": item.id} for item in final.output]
    create(gateway, tools=[WEATHER], input=[{"role": "user", "content": "Hi"}, *references, result])
    assert prompt_of(gateway) == prompt


def test_tool_choice(gateway: Gateway) -> None:
    gateway.answers(CALLED)
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
    for choice in ("required", {"type": "function", "name": "weather"}, allowed):
        create(gateway, tools=[WEATHER], tool_choice=choice)
        assert gateway.engine.requests[-1].params.grammar is not None
    assert create(gateway, tools=[WEATHER], tool_choice="none").output[0].type == "message"


def test_reasoning_comes_and_goes_back(tokenizer: Tokenizer) -> None:
    with serving(family(tokenizer, "hermes")) as gateway:
        gateway.answers("<think>\nThey greet me.\n</think>\n\nHello!")
        include = ["reasoning.encrypted_content"]
        final, events = streamed(gateway, reasoning={"effort": "high"}, include=include, store=False)
        thought, text = final.output
        assert (thought.content[0].text, text.content[0].text) == ("They greet me.", "Hello!")
        assert final.usage.output_tokens_details.reasoning_tokens > 0
        assert "response.reasoning_text.delta" in [event.type for event in events]
        open_item, sealed = thought.model_dump(), {**thought.model_dump(), "content": None}
        prompts = []
        for item in (open_item, sealed):
            create(
                gateway,
                input=[{"role": "user", "content": "Hi"}, item, text.model_dump(), {"role": "user", "content": "?"}],
            )
            prompts.append(prompt_of(gateway))
        assert prompts[0] == prompts[1]


def test_structured_output(gateway: Gateway) -> None:
    gateway.answers('{"city": "Bonn"}')
    answer = create(gateway, text={"format": {"type": "json_schema", "name": "city", "schema": SCHEMA, "strict": True}})
    assert json.loads(answer.output_text) == {"city": "Bonn"}
    grammar = gateway.engine.requests[-1].params.grammar
    assert grammar is not None
    assert json.loads(grammar.source) == SCHEMA


def test_what_was_cut_is_incomplete(gateway: Gateway) -> None:
    final, events = streamed(gateway, max_output_tokens=2)
    assert (final.status, final.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert events[-1].type == "response.incomplete"
    assert final.output[0].status == "incomplete"


def test_truncation_drops_the_oldest(gateway: Gateway) -> None:
    turns = [
        {"role": role, "content": f"{number} " + "word " * 30} for number in range(12) for role in ("user", "assistant")
    ]
    asked: dict[str, Any] = {"input": [*turns, {"role": "user", "content": "last"}], "instructions": "Be kind."}
    assert post(gateway, **asked).status_code == 400
    create(gateway, **asked, truncation="auto", max_output_tokens=20)
    prompt = prompt_of(gateway)
    assert "Be kind." in prompt
    assert "last" in prompt
    assert "11 word" in prompt
    assert "0 word word" not in prompt.replace("10 word word", "")
    assert len(gateway.engine.requests[-1].prompt) + 20 <= MAX_MODEL_LEN


def test_truncation_drops_messages_also_of_a_user_who_speaks_twice(gateway: Gateway) -> None:
    long = {"role": "user", "content": "word " * 2 * MAX_MODEL_LEN}
    said = [{"role": "user", "content": "first"}, {"role": "user", "content": "last"}]
    create(gateway, input=[long, *said], truncation="auto", max_output_tokens=20)
    assert "word" not in prompt_of(gateway)
    assert "first\nlast" in prompt_of(gateway)


def test_what_is_too_long_after_truncation_is_told_why(tokenizer: Tokenizer, gateway: Gateway) -> None:
    def refusal(param: str, **fields: Any) -> str:
        response = post(gateway, truncation="auto", **fields)
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        message: str = error["message"]
        assert message.startswith(f"This model's maximum context length is {MAX_MODEL_LEN} tokens. However, ")
        assert "tenant" not in message
        return message

    long = "word " * MAX_MODEL_LEN
    message = refusal("input", input=long, max_output_tokens=20)
    assert f"there are more than {MAX_MODEL_LEN - 20} tokens in input even after truncation" in message
    assert "and max_output_tokens is 20" in message
    assert "shorten the last message, the instructions or the tools, or ask for fewer tokens" in message
    message = refusal("input", input=long)
    assert f"more than {MAX_MODEL_LEN - 1} tokens in input even after truncation" in message
    assert "and at least one must be left" in message
    message = refusal("max_output_tokens", input="Hi", max_output_tokens=MAX_MODEL_LEN)
    assert f"max_output_tokens is {MAX_MODEL_LEN} and the prompt must fit in as well" in message

    limited = Settings(tenants={"small": TenantConfig(max_prompt_tokens=60)})
    with serving(tokenizer, limited) as keyed, keyed.http() as http:
        headers = {"authorization": f"Bearer {keyed.key('small')}"}
        for output, why in ((20, "this tenant is limited to 60"), (MAX_MODEL_LEN - 30, "max_output_tokens is")):
            asked = ASKED | {"input": long, "truncation": "auto", "max_output_tokens": output}
            message = http.post(PATH, json=asked, headers=headers).json()["error"]["message"]
            assert why in message
            assert ("tenant" in message) == ("tenant" in why)


# ---------------------------------------------------------------- the store


def test_a_conversation_outlasts_the_server(tokenizer: Tokenizer, tmp_path: Path) -> None:
    kept = Settings(state=f"sqlite:///{tmp_path / 'state.db'}")
    with serving(tokenizer, kept) as gateway:
        first = create(gateway, instructions="Be kind.")
        second = create(gateway, input="And then?", previous_response_id=first.id)
    with serving(tokenizer, kept) as gateway:
        client = client_of(gateway)
        again = validated(client.responses.retrieve(second.id))
        assert again.model_dump() == second.model_dump()
        create(gateway, input="Why?", previous_response_id=second.id)
        prompt = prompt_of(gateway)
        at = [prompt.index(text) for text in ("Hi", "Hello there", "And then?", "Why?")]
        assert at == sorted(at)
        assert "Be kind." not in prompt, "instructions are of one response"


def test_items_are_listed(gateway: Gateway) -> None:
    first = create(gateway)
    second = create(gateway, input="And then?", previous_response_id=first.id)
    client = client_of(gateway)
    items = list(client.responses.input_items.list(second.id, order="asc", limit=2))
    texts = [item.content[0].text for item in items]
    assert texts == ["Hi", "Hello there, friend!", "And then?"]
    with gateway.http() as http:
        page = http.get(f"{PATH}/{second.id}/input_items?limit=2").json()
        ResponseItemList.model_validate(page)
        assert (page["has_more"], page["data"][0]["content"][0]["text"]) == (True, "And then?")
        for query in ("limit=0", "limit=x", "order=up", "after=nothing"):
            assert http.get(f"{PATH}/{second.id}/input_items?{query}").status_code == 400


def test_what_is_deleted_or_never_stored_is_not_found(gateway: Gateway) -> None:
    client = client_of(gateway)
    stored, unstored = create(gateway), create(gateway, store=False)
    assert (stored.store, unstored.store) == (True, False)
    client.responses.delete(stored.id)
    with gateway.http() as http:
        for id in (stored.id, unstored.id, "resp_nothing", "x" * 500, "..%2f..%2fetc"):
            for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
                response = http.request(method, f"{PATH}/{id}{path}")
                assert response.status_code == 404, (id, method, path)
            response = post(gateway, previous_response_id=id[:128])
            assert response.status_code == 404
            assert response.json()["error"]["param"] == "previous_response_id"


def test_other_tenants_responses_are_not_found(tokenizer: Tokenizer) -> None:
    tenants = Settings(tenants={"acme": TenantConfig(), "other": TenantConfig()})
    with serving(tokenizer, tenants) as gateway:
        acme, other = (client_of(gateway, gateway.key(name)) for name in ("acme", "other"))
        mine = acme.responses.create(**ASKED)
        assert acme.responses.retrieve(mine.id).output_text == mine.output_text
        attempts = (
            other.responses.retrieve,
            other.responses.delete,
            other.responses.cancel,
            other.responses.input_items.list,
        )
        for attempt in attempts:
            with pytest.raises(openai.NotFoundError):
                attempt(mine.id)
        with pytest.raises(openai.NotFoundError):
            other.responses.create(**ASKED, previous_response_id=mine.id)
        reference = {"type": "item_reference", "id": mine.output[0].id}
        with pytest.raises(openai.BadRequestError):
            other.responses.create(model=MODEL, input=[reference])
        assert acme.responses.retrieve(mine.id).id == mine.id


def test_the_store_is_bounded(tokenizer: Tokenizer) -> None:
    with serving(tokenizer, Settings(responses=ResponsesConfig(max_count=2))) as gateway:
        client = client_of(gateway)
        ids = [create(gateway).id for _ in range(3)]
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(ids[0])
        assert [client.responses.retrieve(id).id for id in ids[1:]] == ids[1:]


# ---------------------------------------------------------------- in the background


class Held:
    """An engine that waits after its first token until it is let go."""

    def __init__(self, gateway: Gateway) -> None:
        self.begun = threading.Event()
        self._go = asyncio.Event()
        self._gateway = gateway
        (token, *_) = gateway.tokenizer.encode("Hello")

        async def wait() -> None:
            self.begun.set()
            await self._go.wait()

        gateway.runs(lambda request: [[token], wait, [token], [gateway.tokenizer.eos_ids[0]]])

    def let_go(self) -> None:
        self._gateway.loop.call_soon_threadsafe(self._go.set)

    def ended(self) -> threading.Event:
        return self._gateway.engine.ended[self._gateway.engine.requests[-1].id]


def polled(client: Any, id: str) -> Any:
    """As clients do, until it has ended."""
    while True:
        found = validated(client.responses.retrieve(id))
        if found.status not in ("queued", "in_progress"):
            return found


def test_background(gateway: Gateway) -> None:
    held, client = Held(gateway), client_of(gateway)
    with gateway.http() as http:
        asked = http.post(PATH, json={**ASKED, "background": True}).json()
    assert asked["status"] == "queued"  # and its connection is closed now
    assert held.begun.wait(20)
    assert client.responses.retrieve(asked["id"]).status == "in_progress"
    response = post(gateway, previous_response_id=asked["id"])
    assert response.status_code == 400
    assert "in_progress" in response.json()["error"]["message"]
    held.let_go()
    done = polled(client, asked["id"])
    assert (done.status, done.background, done.output_text) == ("completed", True, "HelloHello")
    gateway.answers("Next.")
    assert create(gateway, previous_response_id=done.id).output_text == "Next."


@pytest.mark.parametrize("elsewhere", [False, True])
def test_background_is_cancelled(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    monkeypatch.setattr(responses, "HOLD_SECONDS", 0.01)
    kept = Settings(state=f"sqlite:///{tmp_path / 'state.db'}")
    with serving(tokenizer, kept) as gateway, serving(tokenizer, kept) as other:
        client = client_of(other if elsewhere else gateway)
        held = Held(gateway)
        id = create(gateway, background=True).id
        assert held.begun.wait(20)
        assert validated(client.responses.cancel(id)).status == "cancelled"
        assert held.ended().wait(20)
        assert client.responses.retrieve(id).status == "cancelled"
        assert client.responses.cancel(id).status == "cancelled"
        with pytest.raises(openai.BadRequestError):
            client.responses.cancel(create(gateway, max_output_tokens=1).id)


def test_background_that_is_deleted_ends(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "HOLD_SECONDS", 0.01)
    held = Held(gateway)
    id = create(gateway, background=True).id
    assert held.begun.wait(20)
    client_of(gateway).responses.delete(id)
    assert held.ended().wait(20)
    with pytest.raises(openai.NotFoundError):
        client_of(gateway).responses.retrieve(id)


def test_background_fails(gateway: Gateway) -> None:
    gateway.runs(lambda request: [EngineFailure("the step failed")])
    failed = polled(client_of(gateway), create(gateway, background=True).id)
    assert (failed.status, failed.error.code, failed.error.message) == ("failed", "server_error", "the step failed")


def test_background_whose_server_has_gone_has_failed(tokenizer: Tokenizer, tmp_path: Path) -> None:
    kept = Settings(state=f"sqlite:///{tmp_path / 'state.db'}")
    with serving(tokenizer, kept) as gateway:
        held = Held(gateway)
        id = create(gateway, background=True).id
        assert held.begun.wait(20)
    with serving(tokenizer, kept) as gateway:
        found = validated(client_of(gateway).responses.retrieve(id))
        assert (found.status, found.error.code) == ("failed", "server_error")


@pytest.fixture
def own_redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisServer]:
    """It keeps what it has when it is stopped."""
    monkeypatch.setattr("penstock.state.redis.TIMEOUT_SECONDS", 60.0)
    server = RedisServer(tmp_path)
    yield server
    server.stop()


@pytest.fixture
def unstored(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when a background response has ended and the store is away."""
    unstored, end = threading.Event(), ResponseStore.end

    async def noted(*given: Any) -> Any:
        try:
            return await end(*given)
        except Unavailable:
            unstored.set()
            raise

    monkeypatch.setattr(ResponseStore, "end", noted)
    monkeypatch.setattr(responses, "RETRY_SECONDS", 0.01)
    return unstored


@pytest.mark.parametrize("fails", [False, True])
def test_background_that_ends_while_redis_is_away_is_stored_later(
    tokenizer: Tokenizer, own_redis: RedisServer, unstored: threading.Event, fails: bool
) -> None:
    with serving(tokenizer, Settings(state=own_redis.url)) as gateway:
        held, client = Held(gateway), client_of(gateway)
        if fails:
            begins = gateway.engine.script
            gateway.runs(lambda request: [*begins(request)[:2], EngineFailure("the step failed")])
        id = create(gateway, background=True).id
        assert held.begun.wait(20)
        own_redis.stop()
        held.let_go()
        assert unstored.wait(20)
        own_redis.start()
        done = polled(client, id)
        if fails:
            assert (done.status, done.error.message) == ("failed", "the step failed")
        else:
            assert (done.status, done.output_text) == ("completed", "HelloHello")


def test_a_server_that_ends_does_not_wait_for_its_store(
    tokenizer: Tokenizer, own_redis: RedisServer, unstored: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(tokenizer, Settings(state=own_redis.url)) as gateway:
        held = Held(gateway)
        create(gateway, background=True)
        assert held.begun.wait(20)
        own_redis.stop()
        held.let_go()
        assert unstored.wait(20)
    assert "response not stored" in caplog.text


def test_background_is_limited_before_it_is_accepted(tokenizer: Tokenizer) -> None:
    with serving(tokenizer, Settings(tenants={"acme": TenantConfig(requests_per_minute=1)})) as gateway:
        client = client_of(gateway, gateway.key("acme"))
        client.responses.create(**ASKED, background=True)
        with pytest.raises(openai.RateLimitError):
            client.responses.create(**ASKED, background=True)


# ---------------------------------------------------------------- errors

BAD: list[tuple[str, dict[str, Any], str]] = [
    ("no input", {"input": None}, "input"),
    ("empty input", {"input": []}, "input"),
    ("role", {"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    (
        "image",
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0]",
    ),
    ("unknown item", {"input": [{"type": "web_search_call"}]}, "input[0].type"),
    ("call without a name", {"input": [{"type": "function_call", "call_id": "x"}]}, "input[0]"),
    ("result without a call", {"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
    ("no such item", {"input": [{"type": "item_reference", "id": "msg_x_0"}]}, "input[0].id"),
    ("conversation", {"conversation": "conv_1"}, "conversation"),
    ("prompt", {"prompt": {"id": "x"}}, "prompt"),
    ("tool of OpenAI", {"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ("tool without a good name", {"tools": [{**WEATHER, "name": "a b"}]}, "tools[0].name"),
    ("unknown tool", {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "ping"}}, "tool_choice"),
    ("include", {"include": ["file_search_call.results"]}, "include[0]"),
    ("schema", {"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ("temperature", {"temperature": -1}, "temperature"),
    ("max_output_tokens", {"max_output_tokens": 0}, "max_output_tokens"),
    ("too long", {"input": "x " * 2 * MAX_MODEL_LEN}, "input"),
    ("background unstored", {"background": True, "store": False}, "background"),
    ("metadata", {"metadata": {str(number): "" for number in range(17)}}, "metadata"),
    ("unknown", {"messages": []}, "messages"),
]


@pytest.mark.parametrize(("change", "param"), [pytest.param(change, param, id=name) for name, change, param in BAD])
def test_bad_field_is_named(shared_gateway: Gateway, change: dict[str, Any], param: str) -> None:
    response = post(shared_gateway, **change)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param, error
    assert param in error["message"], error
    assert shared_gateway.engine.requests == []


def test_a_failure_in_mid_stream_is_an_event(gateway: Gateway) -> None:
    token = gateway.tokenizer.encode("Hi")[0]
    gateway.runs(lambda request: [[token], EngineFailure("the step failed")])
    *_, last = client_of(gateway).responses.create(**ASKED, stream=True)
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert last.response.error.message == "the step failed"
    assert post(gateway).status_code == 500


def test_text_is_repeated_with_the_fields_that_it_has(gateway: Gateway) -> None:
    gateway.answers('{"city": "Bonn"}')
    schema = {"type": "json_schema", "name": "city", "schema": SCHEMA, "strict": True}
    for sent, repeated in (
        (None, {"format": {"type": "text"}}),
        ({"verbosity": "low"}, {"format": {"type": "text"}, "verbosity": "low"}),
        ({"format": schema}, {"format": schema}),
    ):
        assert post(gateway, text=sent).json()["text"] == repeated


def test_tokens_are_counted_by_the_client(gateway: Gateway) -> None:
    count = client_of(gateway).responses.input_tokens.count
    first = create(gateway)
    asked: dict[str, Any] = {
        "instructions": "Be kind.",
        "input": [{"role": "user", "content": "And"}, {"role": "user", "content": "then?"}],
        "previous_response_id": first.id,
        "tools": [{**WEATHER, "description": "d" * 3000}],
        "tool_choice": "none",
    }
    counted = count(**asked, model=MODEL)
    create(gateway, **asked)
    assert counted.model_dump() == {
        "input_tokens": len(gateway.engine.requests[-1].prompt),
        "object": "response.input_tokens",
    }
    assert count(**asked, model=None) == count(**asked) == counted, "the first model"
    long = count(input="x " * 2 * MAX_MODEL_LEN)
    assert long.input_tokens > MAX_MODEL_LEN, "which need not fit"
    with gateway.http() as http:
        error = http.post(f"{PATH}/input_tokens", json={"input": []}).json()["error"]
        assert error["param"] == "input"
        for method in ("GET", "POST"):
            compact = http.request(method, f"{PATH}/compact", json={"model": MODEL})
            assert (compact.status_code, compact.json()["error"]["code"]) == (404, "unknown_path")


def test_a_long_request_is_read_in_another_process(gateway: Gateway) -> None:
    first = create(gateway, instructions="Be kind.")
    long = create(gateway, instructions="Be kind.", tools=[{**WEATHER, "description": "d" * 3000}], tool_choice="none")
    assert first.output_text == long.output_text
    create(gateway, input="And?", previous_response_id=long.id, extra_body={"client_metadata": {"x": "y" * 4000}})
    prompt = prompt_of(gateway)
    assert prompt.index("Hello there, friend!") < prompt.index("And?")


@pytest.fixture(scope="module")
def http(tokenizer: Tokenizer) -> Iterator[httpx.Client]:
    with serving(tokenizer) as gateway, gateway.http() as client:
        yield client


@settings(max_examples=100, derandomize=True, deadline=None)
@given(data=st.data())
def test_any_value_in_any_field_is_answered_or_refused(http: httpx.Client, data: st.DataObject) -> None:
    names = st.sampled_from([name for name in ResponsesRequest.__struct_fields__ if name != "model"])
    change = data.draw(st.dictionaries(names, JSON_VALUES, min_size=1, max_size=2))
    response = http.post(PATH, content=json.dumps({**ASKED, "max_output_tokens": 1, **change}).encode())
    if response.status_code != 200:
        assert response.status_code in (400, 404, 504), response.text
        assert any(name in response.json()["error"]["message"] for name in change), response.text
