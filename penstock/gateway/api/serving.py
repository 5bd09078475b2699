"""What every endpoint shares: the engine, its tokenizer, the names it is served under, the limits."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from penstock.core.engine import ServedEngine
from penstock.core.errors import NotFound
from penstock.gateway.api.decoding import decode_json
from penstock.gateway.api.objectives import Objectives
from penstock.gateway.api.openai_types import SUPPORTED_VALUES, SamplingFields
from penstock.gateway.api.reading import INLINE_BYTES, Bounds, LongRequests, Prompt, Reader
from penstock.gateway.errors import UnsupportedMediaType, require
from penstock.gateway.http.exchange import Exchange, Traffic
from penstock.gateway.tenancy.limits import Metering
from penstock.gateway.tenancy.prefixes import Prefixes
from penstock.observability.metrics import GatewayMetrics
from penstock.text.tokenizer import Tokenizer

T = TypeVar("T")
B = TypeVar("B", bound=SamplingFields)

_JSON_TYPE = re.compile(rb"application/(?:[\w.-]+\+)?json\s*(?:;.*)?", re.IGNORECASE)

encode_json = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Serving:
    engine: ServedEngine
    tokenizer: Tokenizer
    model_names: tuple[str, ...]  # the first one is canonical
    metrics: GatewayMetrics
    traffic: Traffic
    objectives: Objectives
    metering: Metering
    long_requests: LongRequests
    prefixes: Prefixes
    max_body: int  # bytes
    body_seconds: float
    ignore_unknown: bool = False  # fields of a request that nobody here knows
    semantic_routes: frozenset[str] = frozenset()  # where prompts of the same meaning may share an answer
    created: int = field(default_factory=lambda: int(time.time()))

    async def accept(self, exchange: Exchange, reader: Reader[B]) -> tuple[B, list[Prompt]]:
        """A request to generate: its body and prompts, when the server, the model and its class are there for it. What
        takes long to read is admitted first, so that nobody pays for those who are past their limits."""
        self.traffic.admit()
        body = await self.body(exchange)
        if exchange.body_size > INLINE_BYTES:
            await self.metering.enter(exchange)
        options, prompts = await self.parse(exchange, body, reader)
        self.check_model(exchange, options.model)
        self.objectives.assign(exchange, options)
        return options, prompts

    async def parse(self, exchange: Exchange, body: list[bytes], reader: Reader[T]) -> tuple[T, list[Prompt]]:
        info, most = self.engine.info, exchange.tenant.max_prompt_tokens
        room = info.max_model_len - 1
        bounds = Bounds(
            room if most is None else min(room, most),
            info.max_model_len,
            info.vocab_size,
            exchange.endpoint in self.semantic_routes,
            self.ignore_unknown,
        )
        if exchange.body_size <= INLINE_BYTES:
            return reader.read(b"".join(body), bounds)
        with exchange.ending_with_client():
            return await self.long_requests.read(reader.name, body, bounds)

    async def read(self, exchange: Exchange, decoder: msgspec.json.Decoder[T]) -> T:
        """A body of the administrator's."""
        return decode_json(decoder, b"".join(await self.body(exchange)))

    async def body(self, exchange: Exchange) -> list[bytes]:
        _check_content_type(exchange)
        most = exchange.tenant.max_body_mib
        limit = self.max_body if most is None else min(self.max_body, int(most * 2**20))
        return await exchange.body(limit, self.body_seconds)

    def models_of(self, exchange: Exchange) -> tuple[str, ...]:
        """The names a tenant may use: they all mean the same model, so one that is allowed allows the others."""
        allowed = exchange.tenant.models
        return self.model_names if allowed is None or not set(allowed).isdisjoint(self.model_names) else ()

    def check_model(self, exchange: Exchange, name: str) -> None:
        models = self.models_of(exchange)
        if name not in models:
            served = ", ".join(models) or "nothing for this tenant"
            raise NotFound(
                f"model {name[:200]!r} is not served here; served: {served}", param="model", code="model_not_found"
            )


def check_token_ids(token_ids: Sequence[int], param: str, bounds: Bounds) -> None:
    require(min(token_ids, default=0) >= 0, param, "must not hold negative token ids")
    require(max(token_ids, default=0) < bounds.vocab_size, param, f"must hold token ids below {bounds.vocab_size}")


def check_values(body: SamplingFields) -> None:
    """What no type can say of the fields that both endpoints share, and values that are not supported."""
    stray = body.stream_options is not None and not body.stream
    require(not stray, "stream_options", "is only allowed when stream is enabled")
    for name, (values, otherwise) in SUPPORTED_VALUES.items():
        value = getattr(body, name, None)
        require(value is None or value in values, name, otherwise)


def _check_content_type(exchange: Exchange) -> None:
    """A web page can send any other type, or none, without asking; JSON only where `server.cors` lets it."""
    given = exchange.received.get(b"content-type", b"")
    if given != b"application/json" and _JSON_TYPE.fullmatch(given.strip()) is None:
        found = repr(given[:200].decode("latin-1")) if given else "missing"
        raise UnsupportedMediaType(f"Content-Type is {found}: send JSON with 'Content-Type: application/json'")


DONE = b"data: [DONE]\n\n"


def event(data: msgspec.Struct) -> bytes:
    return b"data: %b\n\n" % encode_json(data)
