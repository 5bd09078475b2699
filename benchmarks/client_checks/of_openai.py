"""Checks of clients of OpenAI's API: openai, langchain-openai."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from typing import Any, Literal

import openai
from pydantic import BaseModel, Field

QUESTION = "What is the weather in Bonn tomorrow?"
Check = Callable[[str, str], str]  # of the URL of a server and a model: what was seen


class GetWeather(BaseModel):
    """Weather of a city."""

    city: str = Field(max_length=20)
    when: Literal["today", "tomorrow"]


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)
    country: Literal["Germany", "France", "Spain"]


def _client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


def openai_tools(url: str, model: str) -> str:
    tool = openai.pydantic_function_tool(GetWeather)
    answer = _client(url).chat.completions.parse(
        model=model,
        messages=[{"role": "user", "content": QUESTION}],
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls or []
    assert choice.finish_reason == "tool_calls"
    assert isinstance(call.function.parsed_arguments, GetWeather)
    return repr(call.function.parsed_arguments)


def openai_tool_stream(url: str, model: str) -> str:
    pieces = 0
    with _client(url).chat.completions.stream(
        model=model,
        messages=[{"role": "user", "content": QUESTION}],
        tools=[openai.pydantic_function_tool(GetWeather)],
        tool_choice={"type": "function", "function": {"name": "GetWeather"}},
    ) as stream:
        for event in stream:
            pieces += event.type == "tool_calls.function.arguments.delta"
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, GetWeather)
    return f"{call.function.parsed_arguments!r} in {pieces} pieces"


def openai_round_trip(url: str, model: str) -> str:
    """A call, its result, and an answer in words."""
    client = _client(url)
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    tools: Any = [openai.pydantic_function_tool(GetWeather)]
    asked = client.chat.completions.create(model=model, messages=messages, tools=tools, tool_choice="required")
    message = asked.choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in message.tool_calls or []]
    messages += [message, *results]
    done = client.chat.completions.create(
        model=model, messages=messages, tools=tools, tool_choice="none", max_tokens=40
    )
    assert done.choices[0].message.content
    return f"{len(results)} results sent back, an answer of {len(done.choices[0].message.content)} characters"


def openai_structured(url: str, model: str) -> str:
    answer = _client(url).chat.completions.parse(
        model=model, messages=[{"role": "user", "content": "Name a city."}], response_format=City
    )
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, City)
    return repr(parsed)


def _langchain(url: str, model: str, **options: Any) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=model, max_retries=0, timeout=120, **options)


def langchain_bind_tools(url: str, model: str) -> str:
    bound = _langchain(url, model).bind_tools([GetWeather], tool_choice="any", parallel_tool_calls=False)
    (call,) = bound.invoke(QUESTION).tool_calls
    GetWeather.model_validate(call["args"])
    return f"{call['name']}({call['args']})"


def langchain_stream(url: str, model: str) -> str:
    bound = _langchain(url, model).bind_tools([GetWeather], tool_choice="GetWeather")
    whole, chunks = None, 0
    for chunk in bound.stream(QUESTION):
        whole, chunks = chunk if whole is None else whole + chunk, chunks + 1
    assert whole is not None
    (call,) = whole.tool_calls
    GetWeather.model_validate(call["args"])
    return f"{call['name']}({call['args']}) in {chunks} chunks"


def _langchain_structured(method: str) -> Check:
    def check(url: str, model: str) -> str:
        found = _langchain(url, model).with_structured_output(City, method=method).invoke("Name a city.")
        assert isinstance(found, City)
        return repr(found)

    return check


def responses_text(url: str, model: str) -> str:
    client = _client(url)
    first = client.responses.create(model=model, input="Name a river.", max_output_tokens=24)
    second = client.responses.create(
        model=model, input="Where is it?", previous_response_id=first.id, max_output_tokens=24
    )
    assert second.output_text
    items = list(client.responses.input_items.list(second.id))
    return f"{len(items)} items before {second.output_text[:60]!r}"


def responses_stream(url: str, model: str) -> str:
    async def ask() -> tuple[int, str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
            async with client.responses.stream(model=model, input="Name a river.", max_output_tokens=24) as stream:
                kinds = [event.type async for event in stream]
            last = await client.responses.create(model=model, input="Hi", max_output_tokens=8)
            return kinds.count("response.output_text.delta"), last.status or ""

    pieces, status = asyncio.run(ask())
    assert pieces > 1
    return f"{pieces} pieces; cut at max_output_tokens: {status}"


def responses_tools(url: str, model: str) -> str:
    client = _client(url)
    tool: Any = openai.pydantic_function_tool(GetWeather)["function"]
    tools: Any = [{"type": "function", **tool}]
    asked = client.responses.create(model=model, input=QUESTION, tools=tools, tool_choice="required")
    (call,) = [item for item in asked.output if item.type == "function_call"]
    GetWeather.model_validate_json(call.arguments)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    done = client.responses.create(
        model=model,
        input=[result],
        previous_response_id=asked.id,
        tools=tools,
        tool_choice="none",
        max_output_tokens=24,
    )
    assert done.output_text
    return f"{call.name}({call.arguments}), then an answer of {len(done.output_text)} characters"


def responses_parse(url: str, model: str) -> str:
    parsed = _client(url).responses.parse(model=model, input="Name a city.", text_format=City).output_parsed
    assert isinstance(parsed, City)
    return repr(parsed)


def responses_background(url: str, model: str) -> str:
    client = _client(url)
    response = client.responses.create(model=model, input="Name a river.", background=True, max_output_tokens=24)
    seen = [response.status]
    while response.status in ("queued", "in_progress"):
        response = client.responses.retrieve(response.id)
        seen += [response.status] if response.status != seen[-1] else []
    client.responses.delete(response.id)
    assert response.output_text
    return ", ".join(str(status) for status in seen)


def responses_resumed(url: str, model: str) -> str:
    client = _client(url)
    fields: Any = {"model": model, "input": "Name a river.", "max_output_tokens": 24}
    with client.responses.create(**fields, background=True, stream=True) as stream:
        first = list(itertools.islice(stream, 8))
    created: Any = first[0]
    rest = list(client.responses.retrieve(created.response.id, stream=True, starting_after=7))
    assert [event.sequence_number for event in [*first, *rest]] == list(range(8 + len(rest)))
    return f"dropped after {len(first)} events, {len(rest)} more to {rest[-1].type}"


def encoder(url: str) -> str:
    """The first model for embeddings that is served."""
    return next(each.id for each in _client(url).models.list() if getattr(each, "task", None) == "embed")


def openai_embeddings(url: str, model: str) -> str:
    """What the client asks for by itself is base64."""
    client, encoded = _client(url), encoder(url)
    vectors = [item.embedding for item in client.embeddings.create(model=encoded, input=["a", "b"]).data]
    (floats,) = client.embeddings.create(model=encoded, input="a", encoding_format="float").data
    assert all(abs(one - other) < 1e-5 for one, other in zip(vectors[0], floats.embedding, strict=True))
    return f"{len(vectors)} vectors of {len(vectors[0])} numbers"


def openai_batch(url: str, model: str) -> str:
    client = _client(url)
    body = {"model": model, "messages": [{"role": "user", "content": "Name a river."}], "max_tokens": 8}
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body} for name in ("one", "two")
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("lines.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    seen = [batch.status]
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        batch = client.batches.retrieve(batch.id)
        seen += [batch.status] if batch.status != seen[-1] else []
    answers = [json.loads(line) for line in client.files.content(batch.output_file_id or "").text.splitlines()]
    assert {answer["custom_id"] for answer in answers} == {"one", "two"}
    assert all(answer["response"]["body"]["choices"][0]["message"]["content"] for answer in answers)
    client.files.delete(file.id)
    return ", ".join(str(status) for status in seen)


def langchain_embeddings(url: str, model: str) -> str:
    from langchain_openai import OpenAIEmbeddings

    client = OpenAIEmbeddings(
        base_url=f"{url}/v1", api_key="none", model=encoder(url), check_embedding_ctx_length=False
    )
    vectors = client.embed_documents(["a", "b"])
    assert len(vectors) == 2
    return f"{len(vectors)} vectors of {len(vectors[0])} numbers"


def langchain_responses(url: str, model: str) -> str:
    llm = _langchain(url, model, use_responses_api=True, max_tokens=24)
    chunks = list(llm.stream("Name a river."))
    return f"{len(chunks)} chunks; {llm.with_structured_output(City).invoke('Name a city.')!r}"


CHECKS: dict[str, Check] = {
    "openai: `parse(tools=…)`": openai_tools,
    "openai: `stream(tools=…)`": openai_tool_stream,
    "openai: results sent back": openai_round_trip,
    "openai: `parse(response_format=…)`": openai_structured,
    "openai: `responses.create`, `previous_response_id`": responses_text,
    "openai: `responses.stream`, asynchronous": responses_stream,
    "openai: `responses` with tools and results": responses_tools,
    "openai: `responses.parse`": responses_parse,
    "openai: `responses` in the background": responses_background,
    "openai: `responses` in the background, streamed": responses_resumed,
    "openai: `embeddings.create`": openai_embeddings,
    "openai: `files`, `batches`": openai_batch,
    "langchain-openai: `bind_tools`, `invoke`": langchain_bind_tools,
    "langchain-openai: `bind_tools`, `stream`": langchain_stream,
    "langchain-openai: `with_structured_output`, functions": _langchain_structured("function_calling"),
    "langchain-openai: `with_structured_output`, JSON schema": _langchain_structured("json_schema"),
    "langchain-openai: `use_responses_api`": langchain_responses,
    "langchain-openai: `OpenAIEmbeddings`": langchain_embeddings,
}
