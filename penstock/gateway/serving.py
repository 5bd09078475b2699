"""What every endpoint shares: the engine, its tokenizer, the names it is served under, the limits."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from penstock.core.engine import ServedEngine
from penstock.core.errors import InvalidRequest, NotFound
from penstock.gateway.decoding import decode_json
from penstock.gateway.errors import UnsupportedMediaType, require
from penstock.gateway.exchange import Exchange, Traffic
from penstock.gateway.limits import Metering
from penstock.gateway.objectives import Objectives
from penstock.gateway.openai_types import SUPPORTED_VALUES, SamplingFields
from penstock.observability.metrics import GatewayMetrics
from penstock.text.tokenizer import Tokenizer

T = TypeVar("T")
B = TypeVar("B", bound=SamplingFields)

INLINE_CHARACTERS = 2048  # tokenising more than this would stall the event loop for about a millisecond

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
    max_body: int  # bytes
    body_seconds: float
    ignore_unknown: bool = False  # fields of a request that nobody here knows
    semantic_routes: frozenset[str] = frozenset()  # where prompts of the same meaning may share an answer
    created: int = field(default_factory=lambda: int(time.time()))

    async def accept(self, exchange: Exchange, decoder: msgspec.json.Decoder[B]) -> B:
        """A request to generate: its body, when the server, the model and its class are there for it."""
        self.traffic.admit()
        body = await self.read(exchange, decoder)
        _check_values(body)
        self.check_model(exchange, body.model)
        self.objectives.assign(exchange, body)
        return body

    async def read(self, exchange: Exchange, decoder: msgspec.json.Decoder[T]) -> T:
        _check_content_type(exchange)
        most = exchange.tenant.max_body_mib
        limit = self.max_body if most is None else min(self.max_body, int(most * 2**20))
        body = await exchange.body(limit, self.body_seconds)
        return decode_json(decoder, body, ignore_unknown=self.ignore_unknown)

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

    def check_token_ids(self, token_ids: Sequence[int], param: str) -> None:
        vocab_size = self.engine.info.vocab_size
        require(min(token_ids, default=0) >= 0, param, "must not hold negative token ids")
        require(max(token_ids, default=0) < vocab_size, param, f"must hold token ids below {vocab_size}")


def _check_values(body: SamplingFields) -> None:
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


async def off_loop_if_long(characters: int, work: Callable[[], T], param: str) -> T:
    """Tokenising releases the GIL: long texts go to a thread, short ones are done before it would have started."""
    try:
        return work() if characters <= INLINE_CHARACTERS else await asyncio.to_thread(work)
    except InvalidRequest as error:
        error.param = error.param or param
        raise
    except RecursionError:
        raise InvalidRequest(f"{param} is nested too deeply", param=param) from None


DONE = b"data: [DONE]\n\n"


def event(data: msgspec.Struct) -> bytes:
    return b"data: %b\n\n" % encode_json(data)
