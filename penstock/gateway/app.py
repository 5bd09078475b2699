"""The composition of the gateway: routes over one engine."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.core.config import ServerConfig
from penstock.core.engine import ServedEngine
from penstock.core.errors import InvalidRequest, StartupError
from penstock.gateway.chat import ChatCompletions
from penstock.gateway.completions import Completions
from penstock.gateway.exchange import Edge, Endpoint, Exchange, Handler, Traffic
from penstock.gateway.openai_types import (
    Detokenized,
    DetokenizeRequest,
    HealthReport,
    ModelCard,
    ModelList,
    Tokenized,
    TokenizeRequest,
)
from penstock.gateway.serving import Serving, encode_json, off_loop_if_long
from penstock.observability.metrics import GatewayMetrics
from penstock.text.tokenizer import Tokenizer

HINT = b"""Penstock serves the OpenAI API: POST /v1/chat/completions, POST /v1/completions, GET /v1/models.
Also POST /tokenize, POST /detokenize, GET /health, GET /metrics.
"""

_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)


def create_app(
    engine: ServedEngine, tokenizer: Tokenizer, settings: ServerConfig, *, model_names: Sequence[str]
) -> Starlette:
    """`model_names` are what clients may put in `model`; the first is the canonical one.

    `app.state.traffic` drains: `drain()` refuses new generation requests, `idle()` waits for those in flight,
    `abort()` ends them.
    """
    if not model_names:
        raise StartupError("a gateway must serve at least one model name", param="served_model_name")
    traffic = Traffic()
    metrics = GatewayMetrics(lambda: engine.stats)
    serving = Serving(
        engine, tokenizer, tuple(model_names), metrics, traffic, max_body=int(settings.max_body_mib * 2**20)
    )
    chat = ChatCompletions(serving)
    text = TextEndpoints(serving, chat)
    status = StatusEndpoints(serving)

    def route(method: str, path: str, handle: Handler) -> Route:
        return Route(path, Endpoint(path, handle), methods=[method])

    app = Starlette(
        routes=[
            route("POST", "/v1/chat/completions", chat),
            route("POST", "/v1/completions", Completions(serving)),
            route("GET", "/v1/models", status.models),
            route("GET", "/v1/models/{id:path}", status.model),
            route("POST", "/tokenize", text.tokenize),
            route("POST", "/detokenize", text.detokenize),
            route("GET", "/health", status.health),
            route("GET", "/metrics", status.metrics),
            route("GET", "/", status.hint),
        ],
        middleware=[Middleware(Edge, traffic=traffic, metrics=metrics)],
        exception_handlers={HTTPException: _leave_to_edge},
    )
    app.router.redirect_slashes = False
    app.state.traffic = traffic
    return app


async def _leave_to_edge(request: Request, error: Exception) -> Response:
    raise error


class TextEndpoints:
    """Tokens without generation."""

    def __init__(self, serving: Serving, chat: ChatCompletions) -> None:
        self.serving = serving
        self.chat = chat

    async def tokenize(self, exchange: Exchange) -> None:
        body = await self.serving.read(exchange, _tokenize_decoder)
        if body.model is not None:
            self.serving.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("send either prompt or messages", param="prompt")
        if body.prompt is None:
            token_ids = list((await self.chat.tokenize(body, exchange.body_size)).token_ids)
        else:
            token_ids = await self._encode(body.prompt, body.add_special_tokens)
        info = self.serving.engine.info
        await exchange.send(200, encode_json(Tokenized(token_ids, len(token_ids), info.max_model_len)))

    async def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        encode = self.serving.tokenizer.encode
        return await off_loop_if_long(len(text), lambda: encode(text, add_special_tokens=add_special_tokens), "prompt")

    async def detokenize(self, exchange: Exchange) -> None:
        body = await self.serving.read(exchange, _detokenize_decoder)
        if body.model is not None:
            self.serving.check_model(body.model)
        self.serving.check_token_ids(body.tokens, "tokens")
        text = self.serving.tokenizer.decode(body.tokens, skip_special_tokens=False)
        await exchange.send(200, encode_json(Detokenized(text)))


class StatusEndpoints:
    """What is served here, and how it is doing."""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving

    def _card(self, name: str) -> ModelCard:
        return ModelCard(name, self.serving.created, self.serving.engine.info.max_model_len)

    async def models(self, exchange: Exchange) -> None:
        await exchange.send(200, encode_json(ModelList([self._card(name) for name in self.serving.model_names])))

    async def model(self, exchange: Exchange) -> None:
        name: str = exchange.scope["path_params"]["id"]
        self.serving.check_model(name)
        await exchange.send(200, encode_json(self._card(name)))

    async def health(self, exchange: Exchange) -> None:
        health = self.serving.engine.health()
        if self.serving.traffic.draining:
            report = HealthReport("draining", "the server is shutting down")
        else:
            report = HealthReport("ok" if health.ok else "unhealthy", health.detail)
        await exchange.send(200 if report.status == "ok" else 503, encode_json(report))

    async def metrics(self, exchange: Exchange) -> None:
        content_type = (b"content-type", CONTENT_TYPE_LATEST.encode())
        await exchange.send(200, self.serving.metrics.exposition(), content_type)

    async def hint(self, exchange: Exchange) -> None:
        await exchange.send(200, HINT, (b"content-type", b"text/plain; charset=utf-8"))
