"""Checks of clients that cannot be installed beside those of the other modules: they want an older openai or mcp."""

from __future__ import annotations

from typing import Any

import openai

from client_checks.of_frameworks import run, weather_tool
from client_checks.of_openai import QUESTION, Check, City


def _instructor(mode: str) -> Check:
    def check(url: str, model: str) -> str:
        import instructor

        wrapped = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
        client = instructor.from_openai(wrapped, mode=instructor.Mode[mode])
        found = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "Name a city."}], response_model=City, max_retries=0
        )
        assert isinstance(found, City)
        return repr(City(**found.model_dump()))

    return check


def _llama_index(llm: Any) -> str:
    from llama_index.core.llms import ChatMessage

    question = [ChatMessage(role="user", content="Name a river.")]
    whole = llm.chat(question).message.content
    pieces = [piece.delta for piece in llm.stream_chat(question)]
    assert whole
    return f"{len(whole)} characters; {len(pieces)} pieces"


def llama_index_openai(url: str, model: str) -> str:
    from llama_index.llms.openai_like import OpenAILike

    llm = OpenAILike(api_base=f"{url}/v1", api_key="none", model=model, is_chat_model=True, max_tokens=24, timeout=120)
    return _llama_index(llm)


def llama_index_ollama(url: str, model: str) -> str:
    from llama_index.llms.ollama import Ollama

    llm = Ollama(base_url=url, model=model, request_timeout=120, additional_kwargs={"num_predict": 24})
    return _llama_index(llm)


def strands(url: str, model: str) -> str:
    from strands import Agent
    from strands.models.openai import OpenAIModel

    given = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0, "timeout": 120}
    served = OpenAIModel(client_args=given, model_id=model, params={"max_tokens": 60})
    text = str(Agent(model=served, callback_handler=None)("Name a river."))
    found = Agent(model=served, callback_handler=None)("Name a city.", structured_output_model=City).structured_output
    assert text
    assert isinstance(found, City)
    return f"{len(text)} characters; {found!r}"


def semantic_kernel(url: str, model: str) -> str:
    from semantic_kernel import Kernel
    from semantic_kernel.connectors.ai import open_ai
    from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
    from semantic_kernel.contents import ChatHistory
    from semantic_kernel.functions import kernel_function

    async def ask(client: openai.AsyncOpenAI) -> str:
        chat = open_ai.OpenAIChatCompletion(ai_model_id=model, async_client=client)
        settings = open_ai.OpenAIChatPromptExecutionSettings
        weather, cities = weather_tool()
        kernel = Kernel()
        kernel.add_function("tools", kernel_function(weather))
        question, river, city = ChatHistory(), ChatHistory(), ChatHistory()
        question.add_user_message(QUESTION)
        river.add_user_message("Name a river.")
        city.add_user_message("Name a city.")
        required = settings(max_completion_tokens=60, function_choice_behavior=FunctionChoiceBehavior.Required())
        await chat.get_chat_message_content(question, required, kernel=kernel)
        stream = chat.get_streaming_chat_message_content(river, settings(max_completion_tokens=24))
        pieces = [piece async for piece in stream]
        found = await chat.get_chat_message_content(city, settings(response_format=City))
        assert cities
        assert len(pieces) > 1
        return f"weather({cities[0]!r}); {len(pieces)} pieces; {City.model_validate_json(str(found))!r}"

    return run(url, ask)


def huggingface_hub(url: str, model: str) -> str:
    """It sends schemas and the names of functions as TGI takes them."""
    from huggingface_hub import InferenceClient

    client: Any = InferenceClient(base_url=f"{url}/v1", api_key="none", timeout=120)
    asked: Any = {"model": model, "max_tokens": 60}
    river, city = ([{"role": "user", "content": f"Name a {kind}."}] for kind in ("river", "city"))
    chunks = list(client.chat_completion(river, stream=True, **asked))
    schema = {"name": "City", "schema": City.model_json_schema(), "strict": True}
    form = {"type": "json_schema", "json_schema": schema}
    found = client.chat_completion(city, response_format=form, **asked).choices[0].message.content
    tool = {"name": "GetCity", "description": "A city.", "parameters": City.model_json_schema()}
    called = client.chat_completion(
        city, tools=[{"type": "function", "function": tool}], tool_choice={"function": {"name": "GetCity"}}, **asked
    )
    (call,) = called.choices[0].message.tool_calls
    City.model_validate_json(call.function.arguments)
    assert len(chunks) > 1
    return f"{len(chunks)} chunks; {City.model_validate_json(found)!r}; {call.function.name}({call.function.arguments})"


CHECKS: dict[str, Check] = {
    "instructor: `Mode.TOOLS`": _instructor("TOOLS"),
    "instructor: `Mode.JSON_SCHEMA`": _instructor("JSON_SCHEMA"),
    "llama-index: `OpenAILike`": llama_index_openai,
    "llama-index: `Ollama`": llama_index_ollama,
    "strands-agents: `structured_output_model`": strands,
    "semantic-kernel: `OpenAIChatCompletion`": semantic_kernel,
    "huggingface_hub: `InferenceClient`": huggingface_hub,
}
