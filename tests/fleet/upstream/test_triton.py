"""Triton's generate endpoints, as a real server answers them: text in server-sent events, and no reason for the end."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from penstock.core.errors import InvalidRequest, StartupError, Unavailable
from penstock.core.request import GenerateRequest, SamplingParams
from penstock.fleet.upstream.engine import Upstream
from penstock.fleet.upstream.settings import TritonTensors, UpstreamConfig
from penstock.text.tokenizer import Tokenizer
from tests.client.web_server import serving
from tests.fleet.upstream.scripted_server import STORY

PROMPT = STORY[:20]
GREEDY = SamplingParams(temperature=0.0)


class TritonStory:
    """A model that goes on with the story, three characters in an event."""

    def __init__(self, *, cumulative: bool = False, inputs: tuple[str, ...] = ("max_tokens", "temperature")) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.error = ""
        self._cumulative, self._inputs = cumulative, ("text_input", *inputs)

    @contextmanager
    def running(self) -> Iterator[str]:
        inputs = [{"name": name} for name in self._inputs]
        metadata = {"name": "story", "inputs": inputs, "outputs": [{"name": "text_output"}]}
        routes = [
            Route("/v2/models/story", lambda request: JSONResponse(metadata)),
            Route("/v2/models/story/config", lambda request: JSONResponse({"backend": "python"})),
            Route("/v2/models/story/ready", lambda request: Response()),
            Route("/v2/models/story/generate_stream", self._generate, methods=["POST"]),
        ]
        with serving(Starlette(routes=routes)) as url:
            yield url

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        return StreamingResponse(self._events(body), media_type="text/event-stream")

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[str]:
        rest = STORY.removeprefix(body["text_input"])
        for end in range(3, len(rest) + 3, 3):
            text = rest[:end] if self._cumulative else rest[end - 3 : end]
            yield f"data: {json.dumps({'model_name': 'story', 'text_output': text})}\n\n"
            if self.error:
                yield f"data: {json.dumps({'error': self.error})}\n\n"


async def connect(url: str, tokenizer: Tokenizer, **fields: Any) -> Upstream:
    config = UpstreamConfig(url, kind="triton", model="story", **({"max_model_len": 512} | fields))
    return await Upstream.connect(config, tokenizer)


@pytest.mark.parametrize("cumulative", [False, True])
async def test_text_comes_through_and_can_be_continued(tokenizer: Tokenizer, cumulative: bool) -> None:
    story = TritonStory(cumulative=cumulative)
    with story.running() as url:
        upstream = await connect(url, tokenizer, triton=TritonTensors(cumulative=cumulative))
        assert upstream.capabilities.continuation
        whole: list[int] = []
        async for chunk in upstream.submit(GenerateRequest("r", tokenizer.encode(PROMPT), GREEDY)):
            whole += chunk.token_ids
        assert chunk.finish_reason == "stop"
        assert PROMPT + tokenizer.join_bytes(whole).decode() == STORY
        rest: list[int] = []
        request = GenerateRequest("r", tokenizer.encode(PROMPT), SamplingParams(max_tokens=6), output=whole[:5])
        async for chunk in upstream.submit(request):
            rest += chunk.token_ids
        assert PROMPT + tokenizer.join_bytes(whole[:5] + rest).decode() == STORY
        assert chunk.finish_reason == "length"
        assert story.bodies[-1]["parameters"]["max_tokens"] == 1
        assert (await upstream.check()).ok
        await upstream.close()


async def test_parameters_go_by_the_names_of_the_input_tensors(tokenizer: Tokenizer) -> None:
    story = TritonStory(inputs=("max_tokens", "random_seed", "top_k"))
    with story.running() as url:
        upstream = await connect(url, tokenizer)
        params = SamplingParams(seed=5, top_k=7)
        async for _ in upstream.submit(GenerateRequest("r", tokenizer.encode(PROMPT), params, seed=2**40 + 3)):
            pass
        sent = story.bodies[-1]["parameters"]
        assert (sent["random_seed"], sent["top_k"], sent["stream"]) == (3, 7, True)
        assert "temperature" not in sent
        with pytest.raises(InvalidRequest, match="temperature"):
            await anext(upstream.submit(GenerateRequest("r", tokenizer.encode(PROMPT), GREEDY)))
        await upstream.close()


async def test_an_error_in_mid_stream(tokenizer: Tokenizer) -> None:
    story = TritonStory()
    with story.running() as url:
        upstream = await connect(url, tokenizer)
        story.error = "the instance died"
        stream = upstream.submit(GenerateRequest("r", tokenizer.encode(PROMPT), GREEDY))
        await anext(stream)
        with pytest.raises(Unavailable, match="the instance died"):
            await anext(stream)
        await upstream.close()


@pytest.mark.parametrize(
    ("fields", "named"),
    [({"max_model_len": None}, "max_model_len"), ({"triton": TritonTensors(text_output="OUT")}, "triton.text_output")],
)
async def test_settings_that_do_not_fit_the_model(tokenizer: Tokenizer, fields: dict[str, Any], named: str) -> None:
    with TritonStory().running() as url, pytest.raises(StartupError) as refused:
        await connect(url, tokenizer, **fields)
    assert refused.value.param == named
