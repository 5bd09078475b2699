"""Another Penstock as an upstream: the whole way, with the real model at its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from penstock.client.http import HttpClient
from penstock.core.errors import InvalidRequest, Unavailable
from penstock.core.request import Chunk, GenerateRequest, Grammar, SamplingParams
from penstock.fleet.upstream.engine import Upstream
from penstock.fleet.upstream.settings import CapabilitySettings, UpstreamConfig
from penstock.gateway.api.models import ServedModel
from penstock.gateway.app import create_app
from penstock.gateway.http.listener import bind
from penstock.gateway.http.server import serve
from penstock.settings import Settings
from penstock.text.tokenizer import Tokenizer
from tests.conftest import Server

PROMPT = "Some emoji with their names: 🦊 fox, 🌊 wave, 水"


@asynccontextmanager
async def connected(server: Server, tokenizer: Tokenizer) -> AsyncIterator[Upstream]:
    upstream = await Upstream.connect(UpstreamConfig(server.base_url), tokenizer)
    yield upstream
    await upstream.close()


async def ask(upstream: Upstream, request: GenerateRequest) -> tuple[list[int], list[Chunk]]:
    chunks = [chunk async for chunk in upstream.submit(request)]
    return [token_id for chunk in chunks for token_id in chunk.token_ids], chunks


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_says_what_the_server_says(server: Server, tokenizer: Tokenizer, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=24, seed=7, logprobs=2, top_k=50, ignore_eos=True)
    async with connected(server, tokenizer) as upstream, HttpClient(server.url) as http:
        request = GenerateRequest("r", tokenizer.encode(PROMPT), params, seed=7)
        token_ids, chunks = await ask(upstream, request)
        sampling = {"temperature": temperature, "top_p": 1, "seed": 7, "top_k": 50, "ignore_eos": True, "logprobs": 2}
        body = {"model": upstream.found.model, "prompt": PROMPT, "max_tokens": 24, "return_token_ids": True, **sampling}
        choice = (await http.post("/v1/completions", body)).json()["choices"][0]
    assert upstream.capabilities.continuation
    assert token_ids == choice["token_ids"]
    assert tokenizer.decode(token_ids) == choice["text"]
    scores = [score for chunk in chunks for score in chunk.logprobs or []]
    assert [score.token_id for score in scores] == token_ids
    assert [score.logprob for score in scores] == choice["logprobs"]["token_logprobs"]
    assert all(len(score.top) == 2 for score in scores)
    assert chunks[-1].finish_reason == "length"
    assert chunks[-1].ledger is not None
    assert chunks[-1].ledger.output_tokens == 24


async def test_goes_on_where_another_engine_stopped(server: Server, tokenizer: Tokenizer) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=16, min_tokens=12, repetition_penalty=1.2)
    async with connected(server, tokenizer) as upstream:
        prompt = tokenizer.encode(PROMPT)
        whole, _ = await ask(upstream, GenerateRequest("whole", prompt, params))
        rest, chunks = await ask(upstream, GenerateRequest("rest", prompt, params, output=whole[:9]))
        assert whole[:9] + rest == whole
        assert chunks[-1].ledger is not None
        assert chunks[-1].ledger.output_tokens == len(whole)
        nothing, chunks = await ask(upstream, GenerateRequest("none", prompt, params, output=whole[:16]))
        assert nothing == []
        assert chunks[-1].finish_reason == "length"


async def test_ends_at_a_stop_token_with_it(server: Server, tokenizer: Tokenizer) -> None:
    async with connected(server, tokenizer) as upstream:
        prompt = tokenizer.encode(PROMPT)
        greedy, _ = await ask(upstream, GenerateRequest("a", prompt, SamplingParams(temperature=0.0, max_tokens=8)))
        params = SamplingParams(temperature=0.0, max_tokens=8, stop_token_ids=(greedy[3],))
        stopped, chunks = await ask(upstream, GenerateRequest("b", prompt, params))
        assert stopped == greedy[: greedy.index(greedy[3]) + 1]
        assert chunks[-1].finish_reason == "stop"


async def test_by_text_alone(server: Server, tokenizer: Tokenizer) -> None:
    """As for a server whose token ids mean something else."""
    by_text = CapabilitySettings(token_ids_in=False, token_ids_out=False)
    params = SamplingParams(temperature=0.0, max_tokens=16)
    texts = []
    for capabilities in (CapabilitySettings(), by_text):
        upstream = await Upstream.connect(UpstreamConfig(server.url, capabilities=capabilities), tokenizer)
        token_ids, _ = await ask(upstream, GenerateRequest("r", tokenizer.encode(PROMPT), params))
        texts.append(tokenizer.decode(token_ids))
        await upstream.close()
    assert not upstream.capabilities.token_ids_out
    assert upstream.capabilities.continuation
    assert texts[0] == texts[1]


async def test_a_gateway_before_it_answers_as_the_server_itself(server: Server, tokenizer: Tokenizer) -> None:
    message = {"role": "user", "content": "Count from one to ten, in words."}
    body = {"messages": [message], "temperature": 0, "max_tokens": 24, "stop": [" seven"], "logprobs": True, "n": 2}
    async with connected(server, tokenizer) as upstream:
        app = create_app([ServedModel([upstream.found.model], tokenizer, upstream)], Settings())
        port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        gateway = asyncio.create_task(serve(app, bind("127.0.0.1", 0), lambda _, number: port.set_result(number), 0.0))
        answers = []
        for url in (f"http://127.0.0.1:{await port}", server.url):
            async with HttpClient(url) as http:
                answers.append((await http.post("/v1/chat/completions", body | {"model": upstream.found.model})).json())
        gateway.cancel()
        await asyncio.wait([gateway])
    ours, theirs = answers
    assert ours["choices"] == theirs["choices"]
    assert ours["usage"]["completion_tokens"] == theirs["usage"]["completion_tokens"]


async def test_grammars(server: Server, tokenizer: Tokenizer) -> None:
    async with connected(server, tokenizer) as upstream:
        prompt = tokenizer.encode(PROMPT)
        assert upstream.capabilities.grammars == {"json_schema", "regex", "lark"}
        params = SamplingParams(max_tokens=16, grammar=Grammar("json_schema", '{"enum": ["fox", "wave"]}'))
        token_ids, chunks = await ask(upstream, GenerateRequest("a", prompt, params))
        assert tokenizer.decode(token_ids) in ('"fox"', '"wave"')
        assert chunks[-1].finish_reason == "stop"
        resumed = GenerateRequest("b", prompt, params, output=token_ids[:1])
        assert isinstance(upstream.refusal(resumed), Unavailable), "its grammar would begin anew"
        after = replace(params, grammar=Grammar("regex", "a", after=(5,)))
        assert isinstance(upstream.refusal(GenerateRequest("c", prompt, after)), InvalidRequest)
