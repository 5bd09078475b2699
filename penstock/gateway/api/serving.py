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
from penstock.gateway.api.context import Context
from penstock.gateway.api.decoding import decode_json
from penstock.gateway.api.objectives import Objectives, deadline
from penstock.gateway.api.openai_types import SUPPORTED_VALUES, SamplingFields
from penstock.gateway.api.reading import INLINE_BYTES, Bounds, LongRequests, Prompt, Reader
from penstock.gateway.errors import UnsupportedMediaType, require
from penstock.gateway.http.request import Request
from penstock.gateway.http.traffic import Traffic
from penstock.gateway.tenancy.limits import Metering, Reservation
from penstock.gateway.tenancy.prefixes import Prefixes
from penstock.gateway.tenancy.tenants import OPEN, Tenant
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

    async def accept(
        self, request: Request, tenant: Tenant, reservation: Reservation, endpoint: str, reader: Reader[B]
    ) -> tuple[Context, B, list[Prompt]]:
        """A request to generate: its context, body and prompts, when the server, the model and its class are there for
        it. What takes long to read is admitted first, so that nobody pays for those who are past their limits."""
        self.traffic.admit()
        body = await self.body(request, tenant)
        if request.body_size > INLINE_BYTES:
            await reservation.enter()
        semantic = endpoint in self.semantic_routes
        options, prompts = await self.parse(request, tenant, body, reader, semantic=semantic)
        self.check_model(tenant, options.model)
        context = Context(
            id=request.unique,
            request_id=request.id,
            arrived=request.arrived,
            endpoint=endpoint,
            tenant=tenant,
            model=options.model,
            objective=self.objectives.classify(request, tenant, options.service_tier),
            deadline=deadline(request, tenant, options.deadline_ms),
            output_asked=options.max_tokens is not None or getattr(options, "max_completion_tokens", None) is not None,
        )
        return context, options, prompts

    async def parse(
        self, request: Request, tenant: Tenant, body: list[bytes], reader: Reader[T], *, semantic: bool = False
    ) -> tuple[T, list[Prompt]]:
        info, most = self.engine.info, tenant.max_prompt_tokens
        room = info.max_model_len - 1
        bounds = Bounds(
            room if most is None else min(room, most),
            info.max_model_len,
            info.vocab_size,
            semantic,
            self.ignore_unknown,
        )
        if request.body_size <= INLINE_BYTES:
            return reader.read(b"".join(body), bounds)
        with request.cancelling_on_disconnect():
            return await self.long_requests.read(reader.name, body, bounds)

    async def read(self, request: Request, decoder: msgspec.json.Decoder[T]) -> T:
        """A body of the administrator's."""
        return decode_json(decoder, b"".join(await self.body(request, OPEN)))

    async def body(self, request: Request, tenant: Tenant) -> list[bytes]:
        _check_content_type(request)
        most = tenant.max_body_mib
        limit = self.max_body if most is None else min(self.max_body, int(most * 2**20))
        return await request.body(limit, self.body_seconds)

    def models_of(self, tenant: Tenant) -> tuple[str, ...]:
        """The names a tenant may use: they all mean the same model, so one that is allowed allows the others."""
        allowed = tenant.models
        return self.model_names if allowed is None or not set(allowed).isdisjoint(self.model_names) else ()

    def check_model(self, tenant: Tenant, name: str) -> None:
        models = self.models_of(tenant)
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


def _check_content_type(request: Request) -> None:
    """A web page can send any other type, or none, without asking; JSON only where `server.cors` lets it."""
    given = request.headers.get(b"content-type", b"")
    if given != b"application/json" and _JSON_TYPE.fullmatch(given.strip()) is None:
        found = repr(given[:200].decode("latin-1")) if given else "missing"
        raise UnsupportedMediaType(f"Content-Type is {found}: send JSON with 'Content-Type: application/json'")


DONE = b"data: [DONE]\n\n"


def event(data: msgspec.Struct) -> bytes:
    return b"data: %b\n\n" % encode_json(data)
