"""The real model behind `penstock serve`, through the real OpenAI client."""

from __future__ import annotations

import asyncio
import math
import re
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.conftest import Server

MODEL = "smollm2-135m"
GREEDY: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Name three rivers in Europe."}],
    "temperature": 0,
    "max_tokens": 24,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    """Of the model itself: answers the server remembers are of no interest here."""
    fresh = {"Cache-Control": "no-store"}
    return openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0, timeout=120, default_headers=fresh)


def greedy(client: openai.OpenAI, **fields: Any) -> ChatCompletion:
    answer: ChatCompletion = client.chat.completions.create(**GREEDY | fields)
    return answer


def greedy_stream(client: openai.OpenAI, **fields: Any) -> openai.Stream[ChatCompletionChunk]:
    stream: openai.Stream[ChatCompletionChunk] = client.chat.completions.create(**GREEDY | fields, stream=True)
    return stream


def test_greedy_answer_makes_sense_and_repeats(client: openai.OpenAI) -> None:
    first, second = greedy(client), greedy(client)
    text = first.choices[0].message.content
    assert text is not None
    assert text == second.choices[0].message.content
    assert any(river in text for river in ("Danube", "Rhine", "Volga", "Thames", "Seine", "Loire"))


def test_second_request_is_served_from_the_prefix_cache(client: openai.OpenAI) -> None:
    long = [{"role": "user", "content": "Repeat after me: " + "the river runs to the sea, " * 20}]
    usages = [greedy(client, messages=long, max_tokens=1).usage for _ in range(2)]
    assert usages[0] is not None
    assert usages[1] is not None
    details = usages[1].prompt_tokens_details
    assert details is not None
    assert details.cached_tokens is not None
    assert 0 < details.cached_tokens < usages[1].prompt_tokens


def test_stream_adds_up_to_the_whole(client: openai.OpenAI) -> None:
    whole = greedy(client)
    parts = list(greedy_stream(client, stream_options={"include_usage": True}))
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == (
        whole.choices[0].message.content
    )
    assert parts[-1].usage is not None
    assert whole.usage is not None
    assert parts[-1].usage.total_tokens == whole.usage.total_tokens
    assert parts[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "length"


async def test_concurrent_streams_equal_lone_ones(server: Server, client: openai.OpenAI) -> None:
    """Batching must not change what anyone gets: each stream has its own prompt and its own answer."""
    cities = ("Paris", "Cairo", "Lima", "Oslo")
    fresh = {"Cache-Control": "no-store"}
    many = openai.AsyncOpenAI(base_url=server.base_url, api_key="none", timeout=120, default_headers=fresh)

    async def stream(city: str) -> str:
        parts = await many.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": f"Tell me about {city}."}],
            temperature=0,
            max_tokens=16,
            stream=True,
        )
        return "".join([part.choices[0].delta.content or "" async for part in parts])

    together = await asyncio.gather(*(stream(city) for city in cities))
    alone = [await stream(city) for city in cities]
    assert len(set(alone)) == len(cities)
    assert together == alone


def test_seed_repeats_and_choices_differ(client: openai.OpenAI) -> None:
    sampled = [greedy(client, temperature=1.2, seed=11, n=3, max_tokens=20) for _ in range(2)]
    texts = [[choice.message.content for choice in answer.choices] for answer in sampled]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 3


def test_logprobs_are_those_of_the_chosen_tokens(client: openai.OpenAI) -> None:
    answer = greedy(client, logprobs=True, top_logprobs=3, max_tokens=8)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 8
    for entry in logprobs.content:
        alternatives = [top.logprob for top in entry.top_logprobs]
        assert alternatives == sorted(alternatives, reverse=True)
        assert sum(map(math.exp, alternatives)) <= 1.001
        assert entry.top_logprobs[0].token == entry.token, "greedy takes the likeliest"
    spelled = b"".join(bytes(entry.bytes or []) for entry in logprobs.content)
    assert spelled.decode() == answer.choices[0].message.content


def test_echoed_logprobs_agree_with_generated_ones(client: openai.OpenAI) -> None:
    """Scoring a text must give what generating it gave, as evaluation harnesses rely on."""
    prompt = "The capital of Italy is"
    made = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=6, logprobs=1)
    scored = client.completions.create(
        model=MODEL, prompt=prompt + made.choices[0].text, max_tokens=0, echo=True, logprobs=1
    )
    generated, echoed = made.choices[0].logprobs, scored.choices[0].logprobs
    assert generated is not None
    assert echoed is not None
    assert echoed.tokens is not None
    assert echoed.token_logprobs is not None
    assert generated.token_logprobs is not None
    assert echoed.tokens[-6:] == generated.tokens
    assert echoed.token_logprobs[-6:] == pytest.approx(generated.token_logprobs, abs=1e-2)
    assert echoed.token_logprobs[0] is None
    assert scored.usage is not None
    assert scored.usage.completion_tokens == 0


def first_token(server: Server, text: str) -> int:
    token: int = httpx.post(f"{server.url}/tokenize", json={"prompt": text}, timeout=60).json()["tokens"][0]
    return token


def test_logit_bias_and_stop_take_effect(client: openai.OpenAI, server: Server) -> None:
    plain = greedy(client).choices[0].message.content or ""
    words = plain.split()
    stopped = greedy(client, stop=[words[3]]).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.message.content == plain[: plain.index(words[3])]
    first = first_token(server, plain)
    banned = greedy(client, logit_bias={str(first): -100}).choices[0].message.content or ""
    assert first_token(server, banned) != first


def test_tools_change_the_prompt(client: openai.OpenAI) -> None:
    without, with_tools = (greedy(client, max_tokens=1, tools=tools).usage for tools in (openai.NOT_GIVEN, [TOOL]))
    assert without is not None
    assert with_tools is not None
    assert with_tools.prompt_tokens > without.prompt_tokens + 20


class GetWeather(pydantic.BaseModel):
    """Weather of a city."""

    city: str = pydantic.Field(max_length=12)
    when: Literal["today", "tomorrow"]


class GetTime(pydantic.BaseModel):
    """Time of day."""


@pytest.mark.parametrize("choice", ["required", "GetWeather"])
def test_calls_that_are_asked_for_come_and_match(client: openai.OpenAI, choice: str) -> None:
    """From a model that does not know what a tool is: whole, streamed, and from the answers that the server keeps."""
    pytest.importorskip("llguidance")
    named = {"type": "function", "function": {"name": choice}}
    fields: Any = {
        **GREEDY,
        "max_tokens": 200,
        "tools": [openai.pydantic_function_tool(GetTime), openai.pydantic_function_tool(GetWeather)],
        "tool_choice": choice if choice == "required" else named,
        "parallel_tool_calls": False,
    }
    whole = client.chat.completions.parse(**fields)
    with client.chat.completions.stream(**fields) as stream:
        pieces = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        streamed = stream.get_final_completion()
    kept = [client.chat.completions.parse(**fields, extra_headers={"Cache-Control": "max-age=60"}) for _ in range(2)]
    found = []
    for answer in (whole, streamed, *kept):
        (call,) = answer.choices[0].message.tool_calls or []
        assert (answer.choices[0].finish_reason, answer.choices[0].message.content) == ("tool_calls", None)
        found.append((call.function.name, call.function.arguments))
        kinds = (GetTime, GetWeather) if choice == "required" else GetWeather
        assert isinstance(call.function.parsed_arguments, kinds)
    assert len(set(found)) == 1
    assert pieces


def test_a_strict_function_leaves_text_free(client: openai.OpenAI) -> None:
    pytest.importorskip("llguidance")
    tools = [openai.pydantic_function_tool(GetWeather)]
    text = greedy(client, tools=tools).choices[0].message.content
    assert text
    assert "<tool_call>" not in text


def test_context_overflow_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        greedy(client, max_tokens=10**6)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "max_tokens"


def test_abandoned_stream_frees_the_engine(server: Server, client: openai.OpenAI) -> None:
    stream = greedy_stream(client, max_tokens=2000, extra_body={"ignore_eos": True})
    next(iter(stream))
    with httpx.Client(base_url=server.url, timeout=60) as http:

        def wait_for_running(count: int) -> None:
            while not re.search(rf"^penstock_running_sequences\S* {count}\.0", http.get("/metrics").text, re.M):
                pass

        wait_for_running(1)
        stream.close()
        wait_for_running(0)
        assert http.get("/health").json()["status"] == "ok"
