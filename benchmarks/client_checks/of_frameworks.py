"""Checks of frameworks for agents and pipelines, with the clients of OpenAI's API that they bring."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import openai

from client_checks.of_openai import QUESTION, Check, City, encoder


def run(url: str, ask: Callable[[openai.AsyncOpenAI], Awaitable[str]]) -> str:
    """With a client that is closed in the event loop which used it."""

    async def closing() -> str:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
            return await ask(client)

    return asyncio.run(closing())


def weather_tool() -> tuple[Callable[..., str], list[str]]:
    """A tool, and the cities that it was called with."""
    cities: list[str] = []

    def weather(city: str) -> str:
        """Weather of a city.

        Args:
            city: The city.
        """
        cities.append(city)
        return "rain"

    return weather, cities


def _openai_agents(kind: str) -> Check:
    def check(url: str, model: str) -> str:
        import agents

        async def ask(client: openai.AsyncOpenAI) -> str:
            agents.set_tracing_disabled(True)
            served = getattr(agents, kind)(model=model, openai_client=client)
            weather, cities = weather_tool()
            settings = agents.ModelSettings(tool_choice="required", parallel_tool_calls=False, temperature=0)
            tools = [agents.function_tool(weather)]
            asked = agents.Agent(name="Weather", model=served, tools=tools, model_settings=settings)
            streamed = agents.Runner.run_streamed(asked, QUESTION, max_turns=4)
            events = [event async for event in streamed.stream_events()]
            guide = agents.Agent(name="Guide", model=served, output_type=City)
            found = (await agents.Runner.run(guide, "Name a city.")).final_output
            assert cities
            assert streamed.final_output
            assert isinstance(found, City)
            return f"weather({cities[0]!r}), {len(events)} events; {found!r}"

        return run(url, ask)

    return check


def _pydantic_ai(kind: str) -> Check:
    def check(url: str, model: str) -> str:
        from pydantic_ai import Agent, NativeOutput, ToolOutput
        from pydantic_ai.models import openai as models
        from pydantic_ai.providers.openai import OpenAIProvider

        async def ask(client: openai.AsyncOpenAI) -> str:
            served = getattr(models, kind)(model, provider=OpenAIProvider(openai_client=client))
            by_schema = await Agent(served, output_type=NativeOutput(City), retries=0).run("Name a city.")
            by_tool = await Agent(served, output_type=ToolOutput(City), retries=0).run("Name a city.")
            async with Agent(served, model_settings={"max_tokens": 24}).run_stream("Name a river.") as streamed:
                pieces = [piece async for piece in streamed.stream_text(delta=True, debounce_by=None)]
            assert isinstance(by_schema.output, City)
            assert isinstance(by_tool.output, City)
            assert len(pieces) > 1
            return f"{by_schema.output!r}; {by_tool.output!r}; {len(pieces)} pieces"

        return run(url, ask)

    return check


def smolagents(url: str, model: str) -> str:
    from smolagents import OpenAIModel, ToolCallingAgent, tool

    served = OpenAIModel(model_id=model, api_base=f"{url}/v1", api_key="none", max_tokens=60)
    weather, cities = weather_tool()
    agent = ToolCallingAgent(tools=[tool(weather)], model=served, max_steps=1, verbosity_level=0)
    answer = agent.run(QUESTION)
    pieces = list(served.generate_stream([{"role": "user", "content": "Name a river."}]))
    assert cities
    assert answer
    assert len(pieces) > 1
    return f"weather({cities[0]!r}), then an answer of {len(str(answer))} characters; {len(pieces)} pieces"


def autogen(url: str, model: str) -> str:
    from autogen_core.models import UserMessage
    from autogen_core.tools import FunctionTool
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    async def ask() -> str:
        can = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True}
        client = OpenAIChatCompletionClient(
            model=model, base_url=f"{url}/v1", api_key="none", model_info={**can, "family": "unknown"}, max_tokens=60
        )
        weather, _ = weather_tool()
        tools = [FunctionTool(weather, description="Weather of a city.")]
        asked = await client.create([UserMessage(content=QUESTION, source="user")], tools=tools, tool_choice="required")
        *pieces, last = [
            piece async for piece in client.create_stream([UserMessage(content="Name a river.", source="user")])
        ]
        found = await client.create([UserMessage(content="Name a city.", source="user")], json_output=City)
        assert asked.finish_reason == "function_calls"
        assert "".join(pieces) == last.content
        city = City.model_validate_json(found.content)
        return f"weather({asked.content[0].arguments}); {len(pieces)} pieces; {city!r}"

    return asyncio.run(ask())


def haystack(url: str, model: str) -> str:
    from haystack.components.embedders import OpenAITextEmbedder
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import create_tool_from_function
    from haystack.utils import Secret

    key = Secret.from_token("none")
    chunks: list[Any] = []
    chat = OpenAIChatGenerator(api_key=key, model=model, api_base_url=f"{url}/v1", max_retries=0)
    (asked,) = chat.run(
        [ChatMessage.from_user(QUESTION)],
        tools=[create_tool_from_function(weather_tool()[0])],
        generation_kwargs={"tool_choice": "required", "parallel_tool_calls": False},
        streaming_callback=chunks.append,
    )["replies"]
    (found,) = chat.run([ChatMessage.from_user("Name a city.")], generation_kwargs={"response_format": City})["replies"]
    embedder = OpenAITextEmbedder(api_key=key, model=encoder(url), api_base_url=f"{url}/v1")
    (call,) = asked.tool_calls
    return (
        f"weather({call.arguments}) in {len(chunks)} chunks; {City.model_validate_json(found.text)!r}; "
        f"{len(embedder.run('Name a river.')['embedding'])} numbers"
    )


def dspy(url: str, model: str) -> str:
    """The schema is given by hand, as DSPy gives one to models that it knows only."""
    import dspy

    schema = {"name": "City", "strict": True, "schema": City.model_json_schema()}
    given: Any = {"api_base": f"{url}/v1", "api_key": "none"}
    form = {"type": "json_schema", "json_schema": schema}
    lm = dspy.LM(f"openai/{model}", response_format=form, max_tokens=100, cache=False, num_retries=0, **given)
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        found = dspy.Predict(dspy.Signature("continent -> name, country: Literal['Germany', 'France', 'Spain']"))(
            continent="Europe"
        )
    vectors = dspy.Embedder(f"openai/{encoder(url)}", caching=False, **given)(["a", "b"])
    assert found.country in ("Germany", "France", "Spain")
    return f"{found.name!r}, {found.country!r}; {len(vectors)} vectors of {len(vectors[0])} numbers"


def google_adk(url: str, model: str) -> str:
    from google.adk.agents import LlmAgent
    from google.adk.agents.run_config import RunConfig, StreamingMode
    from google.adk.models.lite_llm import LiteLlm
    from google.adk.runners import InMemoryRunner
    from google.genai import types

    async def ask() -> str:
        served = LiteLlm(model=f"openai/{model}", api_base=f"{url}/v1", api_key="none", max_tokens=60)
        guide = LlmAgent(name="guide", model=served, instruction="Name a city.", output_schema=City)
        runner = InMemoryRunner(agent=guide, app_name="cities")
        session = await runner.session_service.create_session(app_name="cities", user_id="user")
        asked = types.Content(role="user", parts=[types.Part(text="Name a city.")])
        config = RunConfig(streaming_mode=StreamingMode.SSE)
        run = runner.run_async(user_id="user", session_id=session.id, new_message=asked, run_config=config)
        *pieces, last = [event async for event in run]
        found = City.model_validate_json(last.content.parts[0].text)
        return f"{found!r} after {len(pieces)} pieces"

    return asyncio.run(ask())


def outlines(url: str, model: str) -> str:
    """As a client of OpenAI, and as one of vLLM, with its fields for structured output."""
    import outlines

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
    found = City.model_validate_json(outlines.from_openai(client, model)("Name a city.", City))
    vllm = outlines.from_vllm(client, model)
    day = vllm("Name a day.", Literal["Monday", "Sunday"])
    number = vllm("A number of a telephone.", outlines.types.Regex("[0-9]{3}-[0-9]{4}"))
    pieces = list(vllm.stream("Name a river.", max_tokens=24))
    assert day in ("Monday", "Sunday")
    assert len(number) == 8
    assert len(pieces) > 1
    return f"{found!r}; {day!r}; {number!r}; {len(pieces)} pieces"


def agno(url: str, model: str) -> str:
    from agno.agent import Agent
    from agno.models.openai import OpenAILike, OpenAIResponses

    chat = OpenAILike(id=model, base_url=f"{url}/v1", api_key="none", max_tokens=60)
    responses = OpenAIResponses(id=model, base_url=f"{url}/v1", api_key="none", max_output_tokens=60)
    seen = []
    for served in (chat, responses):
        found = Agent(model=served, output_schema=City, telemetry=False).run("Name a city.").content
        pieces = [event.content for event in Agent(model=served, telemetry=False).run("Name a river.", stream=True)]
        assert isinstance(found, City)
        assert any(pieces)
        seen.append(f"{found!r}, {len(pieces)} events")
    return "; ".join(seen)


CHECKS: dict[str, Check] = {
    "openai-agents: responses": _openai_agents("OpenAIResponsesModel"),
    "openai-agents: chat": _openai_agents("OpenAIChatCompletionsModel"),
    "pydantic-ai: responses": _pydantic_ai("OpenAIResponsesModel"),
    "pydantic-ai: chat": _pydantic_ai("OpenAIChatModel"),
    "smolagents: `ToolCallingAgent`": smolagents,
    "autogen: `OpenAIChatCompletionClient`": autogen,
    "haystack: `OpenAIChatGenerator`, `OpenAITextEmbedder`": haystack,
    "dspy: `JSONAdapter`, `Embedder`": dspy,
    "google-adk: `LiteLlm`": google_adk,
    "outlines: `from_openai`, `from_vllm`": outlines,
    "agno: `OpenAILike`, `OpenAIResponses`": agno,
}
