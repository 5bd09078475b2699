"""Chat completions through the real OpenAI client, against a scripted engine."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import openai
import pytest

from penstock.core.errors import DeadlineTooShort, EngineFailure, Overloaded
from penstock.core.request import SamplingParams
from penstock.simulation.scripted_engine import MODEL, hang, logprob_of
from penstock.text.tokenizer import Tokenizer
from tests.families import family
from tests.gateway.conftest import Gateway, serving

HI: list[Any] = [{"role": "user", "content": "Hi"}]
WEATHER: Any = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


def events(gateway: Gateway, **body: object) -> list[dict[str, Any]]:
    """The raw events of a stream, without the final [DONE], which must be there."""
    with gateway.http() as http:
        response = http.post("/v1/chat/completions", json={"model": MODEL, "messages": HI, "stream": True, **body})
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def test_answer_has_text_usage_and_ids(gateway: Gateway) -> None:
    raw = gateway.client().chat.completions.with_raw_response.create(
        model=MODEL, messages=HI, extra_headers={"x-request-id": "my-id.1"}
    )
    answer = raw.parse()
    assert raw.headers["x-request-id"] == "my-id.1"
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == MODEL
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert (choice.message.role, choice.message.content) == ("assistant", "Hello there, friend!")
    (request,) = gateway.engine.requests
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(request.prompt)
    assert answer.usage.completion_tokens == len(gateway.tokenizer.encode("Hello there, friend!")) + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2


def test_request_ids_that_could_break_a_log_are_replaced(gateway: Gateway) -> None:
    with gateway.http() as http:
        for bad in (b"a b", b"x" * 129, "é".encode()):
            response = http.get("/v1/models", headers={b"x-request-id": bad})
            assert response.headers["x-request-id"].isalnum()


def test_prompt_is_the_rendered_template(gateway: Gateway) -> None:
    gateway.client().chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}]},
        ],
    )
    text = gateway.tokenizer.decode(gateway.engine.requests[0].prompt, skip_special_tokens=False)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne\ntwo<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(("tool_choice", "shown"), [("auto", True), (None, True), ("none", False)])
def test_tools_reach_the_template(gateway: Gateway, tool_choice: Any, shown: bool) -> None:
    call: Any = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Bonn"}'}}
    gateway.client().chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        ],
        tools=[WEATHER],
        tool_choice=tool_choice,
    )
    text = gateway.tokenizer.decode(gateway.engine.requests[0].prompt, skip_special_tokens=False)
    assert ('"properties"' in text) is shown
    assert '"Bonn"' in text
    assert "rain" in text


def test_what_the_assistant_refused_with_is_what_it_said(gateway: Gateway) -> None:
    for said in (
        {"content": [{"type": "refusal", "refusal": "I will not."}]},
        {"content": None, "refusal": "I will not."},
    ):
        messages = [*HI, {"role": "assistant", **said}, *HI]
        gateway.client().chat.completions.create(model=MODEL, messages=messages)
        text = gateway.tokenizer.decode(gateway.engine.requests[-1].prompt, skip_special_tokens=False)
        assert "<|im_start|>assistant\nI will not.<|im_end|>" in text


@pytest.mark.parametrize(
    "begun",
    ["The answer is", "The answer is ", "<", "|", "im", "assistant", [{"type": "text", "text": "The"}]],
)
def test_continue_final_message_leaves_it_open(gateway: Gateway, begun: Any) -> None:
    """Also where its text stands in what the template puts after a message."""
    messages = [*HI, {"role": "assistant", "content": begun}]
    gateway.client().chat.completions.create(
        model=MODEL, messages=messages, extra_body={"continue_final_message": True}
    )
    text = gateway.tokenizer.decode(gateway.engine.requests[0].prompt, skip_special_tokens=False)
    assert text.endswith(f"<|im_start|>assistant\n{begun if isinstance(begun, str) else 'The'}")


def test_a_message_to_continue_ends_as_the_template_ends_it(tokenizer: Tokenizer) -> None:
    strips = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}[end]{% endfor %}"
    with serving(family(tokenizer, "hermes", strips)) as gateway:
        gateway.client().chat.completions.create(
            model=MODEL,
            messages=[*HI, {"role": "assistant", "content": "e "}],
            extra_body={"continue_final_message": True},
        )
        assert gateway.tokenizer.decode(gateway.engine.requests[0].prompt).endswith("[assistant]e")


def test_stream_is_role_then_deltas_then_finish(gateway: Gateway) -> None:
    gateway.answers("Héllo 🌍!")
    got = events(gateway)
    assert len({event["id"] for event in got}) == 1
    assert {event["object"] for event in got} == {"chat.completion.chunk"}
    choices = [event["choices"][0] for event in got]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert all(set(choice["delta"]) == {"content"} and choice["delta"]["content"] for choice in choices[1:-1])
    assert "".join(choice["delta"]["content"] for choice in choices[1:-1]) == "Héllo 🌍!"
    assert choices[-1]["delta"] == {}
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert not any("usage" in event for event in got)


def test_stream_usage_comes_last_and_only_when_asked(gateway: Gateway) -> None:
    got = events(gateway, stream_options={"include_usage": True})
    assert [event["usage"] for event in got[:-1]] == [None] * (len(got) - 1)
    assert got[-1]["choices"] == []
    whole = gateway.client().chat.completions.create(model=MODEL, messages=HI).usage
    assert whole is not None
    assert got[-1]["usage"]["total_tokens"] == whole.total_tokens


def test_one_network_message_per_engine_chunk(gateway: Gateway) -> None:
    """Latency: no chunk waits for the next one; cost: none is sent in pieces."""
    with (
        gateway.http() as http,
        http.stream("POST", "/v1/chat/completions", json={"model": MODEL, "messages": HI, "stream": True}) as response,
    ):
        pieces = list(response.iter_raw())
    tokens = len(gateway.tokenizer.encode("Hello there, friend!"))
    assert sum(piece.count(b'"content"') for piece in pieces) == tokens + 1
    assert len(pieces) <= tokens + 2


async def test_async_client_streams(gateway: Gateway) -> None:
    client = openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", timeout=20)
    stream = await client.chat.completions.create(model=MODEL, messages=HI, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == "Hello there, friend!"


@pytest.mark.parametrize("stream", [False, True])
def test_choices_keep_their_own_text(gateway: Gateway, stream: bool) -> None:
    texts = ["Red is a colour.", "One", "A much longer answer than the others"]
    gateway.answers(*texts)
    if stream:
        built = ["", "", ""]
        finished = []
        for event in events(gateway, n=3):
            (choice,) = event["choices"]
            built[choice["index"]] += choice["delta"].get("content", "")
            finished += [choice["index"]] if choice["finish_reason"] else []
        assert sorted(finished) == [0, 1, 2]
        assert finished[0] == 1, "the shortest answer must not wait for the others"
    else:
        answer = gateway.client().chat.completions.create(model=MODEL, messages=HI, n=3)
        built = [choice.message.content or "" for choice in answer.choices]
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(gateway.engine.requests[0].prompt), "a shared prompt is billed once"
    assert built == texts


def test_seeds_differ_between_choices_and_repeat_between_requests(gateway: Gateway) -> None:
    client = gateway.client()
    for _ in range(2):
        client.chat.completions.create(model=MODEL, messages=HI, n=3, seed=-(2**63))
    client.chat.completions.create(model=MODEL, messages=HI, n=1, seed=-(2**63))
    client.chat.completions.create(model=MODEL, messages=HI, n=2)
    seeds = [request.seed for request in gateway.engine.requests]
    assert seeds[:3] == seeds[3:6]
    assert seeds[6] == seeds[0]
    assert len(set(seeds[:3] + seeds[7:])) == 5
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert len({request.id for request in gateway.engine.requests}) == 9


def test_stop_string_ends_the_request_in_the_engine(gateway: Gateway) -> None:
    words = gateway.tokenizer.encode("alpha beta gamma")
    gateway.runs(lambda request: [*([token_id] for token_id in words), hang])
    answer = gateway.client().chat.completions.create(model=MODEL, messages=HI, stop=["gamma"])
    assert answer.choices[0].message.content == "alpha beta "
    assert answer.choices[0].finish_reason == "stop"
    assert gateway.engine.ended[gateway.engine.requests[0].id].wait(10)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(words)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_end_where_the_text_does(gateway: Gateway, stream: bool) -> None:
    gateway.answers("alpha beta gamma delta")
    body: dict[str, Any] = {"stop": [" gamma delta"], "logprobs": True}
    if stream:
        choices = [event["choices"][0] for event in events(gateway, **body)]
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        content = [entry for choice in choices for entry in (choice["logprobs"] or {"content": []})["content"]]
    else:
        choice = gateway.client().chat.completions.create(model=MODEL, messages=HI, **body).choices[0]
        assert choice.logprobs is not None
        text, content = choice.message.content, choice.logprobs.model_dump()["content"]
    assert text == "".join(entry["token"] for entry in content) == "alpha beta"


def test_max_tokens_gives_length(gateway: Gateway) -> None:
    create = gateway.client().chat.completions.create
    for answer in (
        create(model=MODEL, messages=HI, max_tokens=2),
        create(model=MODEL, messages=HI, max_completion_tokens=2),
    ):
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 2


def test_output_defaults_to_the_rest_of_the_context(gateway: Gateway) -> None:
    gateway.client().chat.completions.create(model=MODEL, messages=HI)
    (request,) = gateway.engine.requests
    assert request.params.max_tokens == gateway.engine.info.max_model_len - len(request.prompt)


def test_sampling_fields_reach_the_engine(gateway: Gateway) -> None:
    gateway.client().chat.completions.create(
        model=MODEL,
        messages=HI,
        temperature=0,
        max_tokens=3,
        top_p=0.5,
        presence_penalty=-1,
        frequency_penalty=0.25,
        logit_bias={"5": -100},
        stop="END",
        user="someone",
        metadata={"a": "b"},
        store=True,
        extra_body={
            "top_k": 10**12,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "min_tokens": 1,
            "ignore_eos": True,
            "stop_token_ids": [7],
            "priority": -3,
            "cache_salt": "tenant",
        },
    )
    (request,) = gateway.engine.requests
    params = request.params
    assert (params.temperature, params.top_p, params.presence_penalty, params.frequency_penalty) == (0, 0.5, -1, 0.25)
    assert (params.logit_bias, params.stop, params.stop_token_ids) == ({5: -100}, ("END",), (7,))
    assert (params.top_k, params.min_p, params.repetition_penalty, params.min_tokens) == (0, 0.1, 1.1, 1)
    assert params.ignore_eos
    assert (request.priority, request.cache_salt) == (-3, "tenant")


def test_what_a_request_does_not_say_is_as_the_model_recommends(gateway: Gateway) -> None:
    recommended = SamplingParams(temperature=0.2, top_p=0.9, top_k=20, min_p=0.05, repetition_penalty=1.1)
    gateway.engine.info = replace(gateway.engine.info, sampling_defaults=recommended)
    said = {"temperature": 1.5, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
    with gateway.http() as http:
        for fields in ({}, dict.fromkeys(said), said):
            http.post("/v1/chat/completions", json={"model": MODEL, "messages": HI, **fields}).raise_for_status()
        defaults = http.get("/v1/models").json()["data"][0]["sampling_defaults"]
    silent, null, loud = ([getattr(r.params, name) for name in said] for r in gateway.engine.requests)
    assert silent == null == list(defaults.values()) == [0.2, 0.9, 20, 0.05, 1.1]
    assert list(defaults) == list(said)
    assert loud == [1.5, 1, 0, 0, 1]


def test_null_means_default_for_every_optional_field(gateway: Gateway) -> None:
    from penstock.gateway.api.openai_types import ChatRequest

    nulls = dict.fromkeys(name for name in ChatRequest.__struct_fields__ if name not in ("model", "messages"))
    with gateway.http() as http:
        response = http.post("/v1/chat/completions", json={"model": MODEL, "messages": HI, **nulls})
    assert response.status_code == 200, response.text
    assert gateway.engine.requests[0].params.temperature == 1.0


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_have_bytes_and_alternatives(gateway: Gateway, stream: bool) -> None:
    gateway.answers("ab🌍")
    token_ids = [*gateway.tokenizer.encode("ab🌍"), gateway.tokenizer.eos_ids[0]]
    if stream:
        content = []
        for event in events(gateway, logprobs=True, top_logprobs=2):
            content += (event["choices"][0]["logprobs"] or {"content": []})["content"]
    else:
        answer = gateway.client().chat.completions.create(model=MODEL, messages=HI, logprobs=True, top_logprobs=2)
        assert answer.choices[0].logprobs is not None
        content = answer.choices[0].logprobs.model_dump()["content"]
    assert [entry["logprob"] for entry in content] == [logprob_of(i) for i in token_ids]
    assert b"".join(bytes(entry["bytes"]) for entry in content[:-1]) == "ab🌍".encode()
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert content[0]["top_logprobs"][1]["token"] == gateway.tokenizer.token_text(token_ids[0] + 1)


def test_prompt_logprobs_are_by_token_id(gateway: Gateway) -> None:
    with gateway.http() as http:
        body = {"model": MODEL, "messages": HI, "prompt_logprobs": 1}
        entries = http.post("/v1/chat/completions", json=body).json()["prompt_logprobs"]
    prompt = gateway.engine.requests[0].prompt
    assert entries[0] is None
    assert [next(iter(entry)) for entry in entries[1:]] == [str(i) for i in prompt[1:]]
    assert entries[1][str(prompt[1])] == {
        "logprob": logprob_of(prompt[1]),
        "decoded_token": gateway.tokenizer.token_text(prompt[1]),
    }


@pytest.mark.parametrize("stream", [False, True])
def test_error_before_the_first_token_keeps_its_status(gateway: Gateway, stream: bool) -> None:
    gateway.runs(lambda request: [Overloaded("too busy", retry_after=2.2)])
    with pytest.raises(openai.RateLimitError) as caught:
        gateway.client().chat.completions.create(model=MODEL, messages=HI, stream=stream)
    assert caught.value.response.headers["retry-after"] == "3"
    assert caught.value.body == {"message": "too busy", "type": "rate_limit_error", "param": None, "code": "overloaded"}


def test_a_deadline_too_short_for_the_prompt_is_refused_and_counted_apart(gateway: Gateway) -> None:
    gateway.runs(lambda request: [DeadlineTooShort("waiting does not help", retry_after=0.1)])
    with gateway.http() as http:
        refused = http.post("/v1/chat/completions", json={"model": MODEL, "messages": HI, "deadline_ms": 60_000})
        metrics = http.get("/metrics").text
    assert (refused.status_code, refused.headers.get("x-should-retry")) == (429, "false"), refused.text
    assert (refused.json()["error"]["code"], refused.json()["error"]["param"]) == ("deadline_too_short", "deadline_ms")
    assert f'penstock_refused_total{{model="{MODEL}"}} 0.0' in metrics
    assert f'penstock_refused_deadlines_total{{model="{MODEL}"}} 1.0' in metrics


def test_error_in_mid_stream_is_an_event_and_the_end(gateway: Gateway) -> None:
    gateway.runs(lambda request: [[100], EngineFailure("step failed")])
    with gateway.http() as http:
        text = http.post("/v1/chat/completions", json={"model": MODEL, "messages": HI, "stream": True}).text
    last = json.loads(text.split("\n\n")[-2].removeprefix("data: "))
    assert last["error"]["message"] == "step failed"
    assert "[DONE]" not in text
    with pytest.raises(openai.APIError, match="step failed"):
        list(gateway.client().chat.completions.create(model=MODEL, messages=HI, stream=True))


def test_one_failing_choice_ends_the_others(gateway: Gateway) -> None:
    gateway.runs(lambda request: [hang] if request.id.endswith("-0") else [EngineFailure("step failed")])
    with pytest.raises(openai.InternalServerError, match="step failed"):
        gateway.client().chat.completions.create(model=MODEL, messages=HI, n=2)
    assert all(ended.wait(10) for ended in gateway.engine.ended.values())


def test_unforeseen_error_hides_its_details(gateway: Gateway) -> None:
    gateway.runs(lambda request: [ZeroDivisionError("secret")])
    with pytest.raises(openai.InternalServerError) as caught:
        gateway.client().chat.completions.create(model=MODEL, messages=HI, extra_headers={"x-request-id": "find-me"})
    assert "secret" not in str(caught.value)
    assert "find-me" in str(caught.value)


def test_stream_that_ends_without_a_reason_is_an_error(gateway: Gateway) -> None:
    gateway.runs(lambda request: [[100]])
    with pytest.raises(openai.InternalServerError, match="finish reason"):
        gateway.client().chat.completions.create(model=MODEL, messages=HI)
