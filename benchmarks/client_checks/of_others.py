"""Checks of clients of Anthropic's, Ollama's and Cohere's APIs, and of LiteLLM, which speaks several."""

from __future__ import annotations

import asyncio
from typing import Any

from client_checks.of_openai import QUESTION, Check, City, GetWeather, encoder

HI: Any = [{"role": "user", "content": "Name a river."}]
TOOL: Any = {"name": "GetWeather", "description": "Weather of a city.", "input_schema": GetWeather.model_json_schema()}


def _anthropic(url: str) -> Any:
    import anthropic

    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=120)


def anthropic_text(url: str, model: str) -> str:
    client = _anthropic(url)
    message = client.messages.create(model=model, max_tokens=24, system="Be brief.", messages=HI)
    counted = client.messages.count_tokens(model=model, system="Be brief.", messages=HI).input_tokens
    usage = message.usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens
    return f"{message.content[0].text[:60]!r}, {counted} tokens before"


def anthropic_stream(url: str, model: str) -> str:
    import anthropic

    async def ask() -> tuple[int, Any]:
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
            async with client.messages.stream(model=model, max_tokens=24, messages=HI) as stream:
                pieces = [piece async for piece in stream.text_stream]
            return len(pieces), await stream.get_final_message()

    pieces, message = asyncio.run(ask())
    return f"{pieces} pieces, stop_reason {message.stop_reason}"


def anthropic_tools(url: str, model: str) -> str:
    client = _anthropic(url)
    asked: Any = [{"role": "user", "content": QUESTION}]
    choice = {"type": "tool", "name": "GetWeather", "disable_parallel_tool_use": True}
    with client.messages.stream(
        model=model, max_tokens=200, messages=asked, tools=[TOOL], tool_choice=choice
    ) as stream:
        message = stream.get_final_message()
    (call,) = [block for block in message.content if block.type == "tool_use"]
    GetWeather.model_validate(call.input)
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "rain"}]}
    turns = [*asked, {"role": "assistant", "content": message.content}, result]
    done = client.messages.create(
        model=model, max_tokens=24, messages=turns, tools=[TOOL], tool_choice={"type": "none"}
    )
    return f"{call.name}({call.input}), then an answer of {len(done.content[0].text)} characters"


def langchain_anthropic(url: str, model: str) -> str:
    from langchain_anthropic import ChatAnthropic

    llm = ChatAnthropic(base_url=url, api_key="none", model=model, max_tokens=100, max_retries=0, timeout=120)
    chunks = list(llm.stream("Name a river."))
    bound = llm.bind_tools([GetWeather], tool_choice="GetWeather")
    (call,) = bound.invoke(QUESTION).tool_calls
    GetWeather.model_validate(call["args"])
    return f"{len(chunks)} chunks; {call['name']}({call['args']})"


def ollama_chat(url: str, model: str) -> str:
    import ollama

    client = ollama.Client(host=url, timeout=120)
    assert model in [one.model for one in client.list().models]
    pieces = list(client.chat(model=model, messages=HI, stream=True, options={"num_predict": 24}))
    tool: Any = {"type": "function", "function": {"name": TOOL["name"], "parameters": TOOL["input_schema"]}}
    client.chat(
        model=model, messages=[{"role": "user", "content": QUESTION}], tools=[tool], options={"num_predict": 24}
    )
    return f"{len(pieces)} lines, {pieces[-1].eval_count} tokens; {client.show(model).capabilities}"


def ollama_embed(url: str, model: str) -> str:
    import ollama

    client, encoded = ollama.Client(host=url, timeout=120), encoder(url)
    assert client.show(encoded).capabilities == ["embedding"]
    vectors = client.embed(model=encoded, input=["Name a river.", "Name a city."]).embeddings
    old = client.embeddings(model=encoded, prompt="Name a river.").embedding
    assert list(old) == list(vectors[0])
    return f"{len(vectors)} vectors of {len(old)} numbers"


def ollama_structured(url: str, model: str) -> str:
    import ollama

    async def ask() -> str:
        client = ollama.AsyncClient(host=url, timeout=120)
        answer = await client.generate(model=model, prompt="Name a city.", format=City.model_json_schema())
        return repr(City.model_validate_json(answer.response or ""))

    return asyncio.run(ask())


def langchain_ollama(url: str, model: str) -> str:
    from langchain_ollama import ChatOllama, OllamaEmbeddings

    llm = ChatOllama(base_url=url, model=model, num_predict=100, validate_model_on_init=True)
    chunks = list(llm.stream("Name a river."))
    found = llm.with_structured_output(City).invoke("Name a city.")
    vectors = OllamaEmbeddings(base_url=url, model=encoder(url)).embed_documents(["a", "b"])
    assert isinstance(found, City)
    return f"{len(chunks)} chunks; {found!r}; {len(vectors)} vectors of {len(vectors[0])} numbers"


def _litellm(prefix: str, path: str) -> Check:
    def check(url: str, model: str) -> str:
        import litellm

        litellm.suppress_debug_info = True
        given: Any = {"model": f"{prefix}/{model}", "api_base": f"{url}{path}", "api_key": "none", "max_tokens": 24}
        whole = litellm.completion(messages=HI, timeout=120, **given)
        pieces = list(litellm.completion(messages=HI, timeout=120, stream=True, **given))
        text = whole.choices[0].message.content
        assert text
        return f"{len(text)} characters, {whole.usage.completion_tokens} tokens; {len(pieces)} chunks"

    return check


def litellm_vectors(url: str, model: str) -> str:
    import litellm

    given: Any = {"model": f"hosted_vllm/{encoder(url)}", "api_base": f"{url}/v1", "api_key": "none"}
    documents = ["My cat sleeps.", "It is raining."]
    vectors = litellm.embedding(input=documents, **given).data
    (best,) = litellm.rerank(query="weather", documents=documents, top_n=1, **given).results
    assert best["index"] == 1
    return f"{len(vectors)} vectors of {len(vectors[0]['embedding'])} numbers; {documents[best['index']]!r} first"


def litellm_responses(url: str, model: str) -> str:
    import litellm

    answer = litellm.responses(
        model=f"openai/{model}", input="Name a river.", api_base=f"{url}/v1", api_key="none", max_output_tokens=24
    )
    text = answer.output[0].content[0].text
    assert text
    return f"{answer.status}: {text[:60]!r}"


def cohere_rerank(url: str, model: str) -> str:
    import cohere

    documents = ["My cat sleeps.", "It is raining."]
    found = cohere.ClientV2(api_key="none", base_url=url).rerank(
        model=encoder(url), query="weather", documents=documents, top_n=1
    )
    (best,) = found.results
    assert best.index == 1
    whole = cohere.Client(api_key="none", base_url=url).rerank(
        model=encoder(url), query="weather", documents=documents, return_documents=True
    )
    assert [(each.index, each.document.text) for each in whole.results] == [(1, documents[1]), (0, documents[0])]
    assert whole.results[0].relevance_score == best.relevance_score
    return f"{documents[1]!r} before {documents[0]!r}"


CHECKS: dict[str, Check] = {
    "anthropic: `messages.create`, `count_tokens`": anthropic_text,
    "anthropic: `messages.stream`, asynchronous": anthropic_stream,
    "anthropic: tools streamed, results sent back": anthropic_tools,
    "langchain-anthropic: `stream`, `bind_tools`": langchain_anthropic,
    "ollama: `chat`, `list`, `show`": ollama_chat,
    "ollama: `generate(format=…)`, asynchronous": ollama_structured,
    "ollama: `embed`, `embeddings`": ollama_embed,
    "langchain-ollama: `ChatOllama`, `OllamaEmbeddings`": langchain_ollama,
    "cohere: `rerank`, versions 2 and 1": cohere_rerank,
    "litellm: `openai/…`": _litellm("openai", "/v1"),
    "litellm: `anthropic/…`": _litellm("anthropic", ""),
    "litellm: `ollama_chat/…`": _litellm("ollama_chat", ""),
    "litellm: `responses`": litellm_responses,
    "litellm: `hosted_vllm/…`, `embedding`, `rerank`": litellm_vectors,
}
