"""What every endpoint shares: the models, the limits of requests, how a request is accepted."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from penstock.gateway.api.context import Context
from penstock.gateway.api.decoding import decode_json
from penstock.gateway.api.models import Model, Models, TenantBounds
from penstock.gateway.api.objectives import deadline
from penstock.gateway.api.openai_types import SUPPORTED_VALUES, SamplingFields
from penstock.gateway.api.reading import (
    INLINE_BYTES,
    Bounds,
    LongRequests,
    ModelReader,
    ModelText,
    Prompt,
    Reader,
    Terms,
)
from penstock.gateway.errors import UnsupportedMediaType, require
from penstock.gateway.http.request import Request
from penstock.gateway.http.traffic import Traffic
from penstock.gateway.tenancy.limits import Reservation
from penstock.gateway.tenancy.tenants import OPEN, Tenant
from penstock.observability.metrics import GatewayMetrics

T = TypeVar("T")
B = TypeVar("B", bound=SamplingFields)

_JSON_TYPE = re.compile(rb"application/(?:[\w.-]+\+)?json\s*(?:;.*)?", re.IGNORECASE)

encode_json = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Serving:
    models: Models
    texts: Mapping[str, ModelText]  # of the models, by every name that they have
    metrics: GatewayMetrics
    traffic: Traffic
    long_requests: LongRequests
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
            asked = await self._model_of(request, tenant, body)
            await reservation.enter(asked.metering)
        semantic = endpoint in self.semantic_routes
        options, prompts = await self.parse(request, tenant, body, reader, semantic=semantic)
        model = self.models.by_name[options.model]
        context = Context(
            id=request.unique,
            request_id=request.id,
            arrived=request.arrived,
            endpoint=endpoint,
            tenant=tenant,
            model=model,
            objective=model.objectives.classify(request, tenant, options.service_tier),
            deadline=deadline(request, tenant, options.deadline_ms),
            output_asked=options.max_tokens is not None or getattr(options, "max_completion_tokens", None) is not None,
        )
        return context, options, prompts

    async def _model_of(self, request: Request, tenant: Tenant, body: list[bytes]) -> Model:
        """The model whose limits a long request must keep. Where there are several, its body must be read for that."""
        if len(self.models.all) == 1:
            return self.models.all[0]
        name, _ = await self.parse(request, tenant, body, ModelReader(self.texts))
        return self.models.find(tenant, name)

    async def parse(
        self, request: Request, tenant: Tenant, body: list[bytes], reader: Reader[T], *, semantic: bool = False
    ) -> tuple[T, list[Prompt]]:
        terms = Terms(TenantBounds(self.models, tenant), self.models.names(tenant), semantic, self.ignore_unknown)
        if request.body_size <= INLINE_BYTES:
            return reader.read(b"".join(body), terms)
        with request.cancelling_on_disconnect():
            return await self.long_requests.read(reader.name, body, terms)

    async def read(self, request: Request, decoder: msgspec.json.Decoder[T]) -> T:
        """A body of the administrator's."""
        return decode_json(decoder, b"".join(await self.body(request, OPEN)))

    def body(self, request: Request, tenant: Tenant) -> Awaitable[list[bytes]]:
        _check_content_type(request)
        most = tenant.max_body_mib
        limit = self.max_body if most is None else min(self.max_body, int(most * 2**20))
        return request.body(limit, self.body_seconds)


def check_token_ids(token_ids: Sequence[int], param: str, bounds: Bounds) -> None:
    require(min(token_ids, default=0) >= 0, param, "must not hold negative token ids")
    require(max(token_ids, default=0) < bounds.vocab_size, param, f"must hold token ids below {bounds.vocab_size}")


def check_values(body: SamplingFields) -> None:
    """What no type can say of the fields that both endpoints share, and values that are not supported."""
    stray = body.stream_options is not None and not body.stream
    require(not stray, "stream_options", "is only allowed when stream is enabled")
    require(not (body.stream and body.prompt_logprobs is not None), "prompt_logprobs", "cannot be streamed")
    for name, (values, otherwise) in SUPPORTED_VALUES.items():
        if (value := getattr(body, name, None)) is not None:
            require(value in values, name, otherwise)


def _check_content_type(request: Request) -> None:
    """A web page can send any other type, or none, without asking; JSON only where `server.cors` lets it."""
    given = request.headers.get(b"content-type", b"")
    if given != b"application/json" and _JSON_TYPE.fullmatch(given.strip()) is None:
        found = repr(given[:200].decode("latin-1")) if given else "missing"
        raise UnsupportedMediaType(f"Content-Type is {found}: send JSON with 'Content-Type: application/json'")


DONE = b"data: [DONE]\n\n"


def event(data: msgspec.Struct) -> bytes:
    return b"data: %b\n\n" % encode_json(data)
