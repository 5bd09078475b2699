"""Run the clients that people use, as they are, against `penstock serve`: tools, structured output, streams.

    python -m benchmarks.clients --url http://127.0.0.1:8000 --model smollm2-135m > docs/clients.md

It needs openai, langchain-openai and instructor, which may want other versions of what Penstock's tests use: install
them into an environment of their own. The output is a page of Markdown; the exit code is 1 if something failed.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, Literal

import openai
from pydantic import BaseModel, Field

QUESTION = "What is the weather in Bonn tomorrow?"
Check = Callable[[str, str], str]  # of a base URL and a model: what was seen


class GetWeather(BaseModel):
    """Weather of a city."""

    city: str = Field(max_length=20)
    when: Literal["today", "tomorrow"]


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)
    country: Literal["Germany", "France", "Spain"]


def _client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)


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


def _langchain(url: str, model: str) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(base_url=url, api_key="none", model=model, max_retries=0, timeout=120)


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


def _instructor(mode: str) -> Check:
    def check(url: str, model: str) -> str:
        import instructor

        client = instructor.from_openai(_client(url), mode=instructor.Mode[mode])
        found = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "Name a city."}], response_model=City, max_retries=0
        )
        assert isinstance(found, City)
        return repr(City(**found.model_dump()))

    return check


CHECKS: dict[str, Check] = {
    "openai: `parse(tools=…)`": openai_tools,
    "openai: `stream(tools=…)`": openai_tool_stream,
    "openai: results sent back": openai_round_trip,
    "openai: `parse(response_format=…)`": openai_structured,
    "langchain-openai: `bind_tools`, `invoke`": langchain_bind_tools,
    "langchain-openai: `bind_tools`, `stream`": langchain_stream,
    "langchain-openai: `with_structured_output`, functions": _langchain_structured("function_calling"),
    "langchain-openai: `with_structured_output`, JSON schema": _langchain_structured("json_schema"),
    "instructor: `Mode.TOOLS`": _instructor("TOOLS"),
    "instructor: `Mode.JSON_SCHEMA`": _instructor("JSON_SCHEMA"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="smollm2-135m")
    args = parser.parse_args()
    packages = ", ".join(f"{name} {version(name)}" for name in ("openai", "langchain-openai", "instructor"))
    print(f"# Clients\n\nWhat `benchmarks/clients.py` saw: {packages}, as they are, with {args.model}.")
    print("Answers are those of a very small model: what counts is that they have the form that was asked for.\n")
    print("| client | outcome |\n|---|---|")
    failed = 0
    for name, check in CHECKS.items():
        try:
            seen = check(f"{args.url}/v1", args.model)
        except Exception as error:
            failed += 1
            seen = f"**failed**: {error!r}"
            traceback.print_exc(file=sys.stderr)
        cell = seen.replace("|", "\\|").replace("\n", " ")[:200]
        print(f"| {name} | {cell} |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
