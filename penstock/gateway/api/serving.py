"""What every endpoint shares: the models, the limits of requests, how a request is accepted."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

import msgspec

from penstock.fleet.versions import assigned_version
from penstock.gateway.api.context import Context, Options
from penstock.gateway.api.decoding import decode_json
from penstock.gateway.api.models import Entry, Models, TenantBounds
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
from penstock.gateway.api.sessions import session_of, sticky_key
from penstock.gateway.api.shadow import Shadows
from penstock.gateway.errors import UnsupportedMediaType, require
from penstock.gateway.http.request import Request
from penstock.gateway.http.traffic import Traffic
from penstock.gateway.tenancy.limits import Reservation
from penstock.gateway.tenancy.tenants import OPEN, Tenant
from penstock.observability.metrics import GatewayMetrics

T = TypeVar("T")
B = TypeVar("B", bound=Options)

_JSON_TYPE = re.compile(rb"application/(?:[\w.-]+\+)?json\s*(?:;.*)?", re.IGNORECASE)

_OUTPUT_FIELDS = ("max_tokens", "max_completion_tokens")

encode_json = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Incoming:
    """A request whose body has arrived, and what the settings say of where it goes."""

    request: Request
    tenant: Tenant
    body: list[bytes]
    entry: Entry | None = None  # the model that it names, if requests for that also go to others
    version: str | None = None  # which of the model's versions is to answer
    added: int = 0  # bytes that were put before the body


@dataclass(frozen=True, slots=True)
class Serving:
    models: Models
    texts: Mapping[str, ModelText]  # of the models, by every name that they have
    metrics: GatewayMetrics
    traffic: Traffic
    long_requests: LongRequests
    shadows: Shadows
    max_body: int  # bytes
    body_seconds: float
    ignore_unknown: bool = False  # fields of a request that nobody here knows
    semantic_routes: frozenset[str] = frozenset()  # where prompts of the same meaning may share an answer
    created: int = field(default_factory=lambda: int(time.time()))

    async def receive(self, request: Request, tenant: Tenant, reservation: Reservation) -> Incoming:
        """A request to generate, when the server is there for it. What takes long to read is admitted first, so that
        nobody pays for those who are past their limits."""
        self.traffic.admit()
        body = await self.body(request, tenant)
        incoming = Incoming(request, tenant, body)
        long = request.body_size > INLINE_BYTES
        if not long and not self.models.routed:
            return incoming
        model = self.models.all[0]
        if len(self.models.all) > 1 or self.models.routed:
            asked, _ = await self.parse(incoming, ModelReader(self.texts))
            model = self.models.find(tenant, asked.model)
            incoming.entry = self.models.routed.get(asked.model)
            if incoming.entry is not None and (weights := incoming.entry.config.versions):
                incoming.version = assigned_version(sticky_key(request, tenant, asked), weights)
                model = self.models.by_name[incoming.version]
        if long:
            await reservation.enter(model.metering)
        return incoming

    async def accept(
        self, incoming: Incoming, endpoint: str, reader: Reader[B], read_for: str | None, why: str
    ) -> tuple[Context, B, list[Prompt]]:
        """Its context, body and prompts, when the model and its class are there for it. `read_for`: the model that is
        to answer, where that is another than the request names, and `why`."""
        request, tenant = incoming.request, incoming.tenant
        semantic = endpoint in self.semantic_routes
        options, prompts = await self.parse(incoming, reader, semantic=semantic, read_for=read_for)
        model = self.models.by_name[read_for or options.model]
        context = Context(
            id=request.unique,
            request_id=request.id,
            arrived=request.arrived,
            endpoint=endpoint,
            tenant=tenant,
            asked=options.model,
            model=model,
            why=why,
            session=session_of(request, tenant, options.prompt_cache_key),
            objective=model.objectives.classify(request, tenant, options.service_tier),
            deadline=deadline(request, tenant, options.deadline_ms),
            output_asked=any(getattr(options, name, None) is not None for name in _OUTPUT_FIELDS),
        )
        return context, options, prompts

    async def parse(
        self, incoming: Incoming, reader: Reader[T], *, semantic: bool = False, read_for: str | None = None
    ) -> tuple[T, list[Prompt]]:
        request, tenant, body = incoming.request, incoming.tenant, incoming.body
        bounds, allowed = TenantBounds(self.models, tenant), self.models.names(tenant)
        terms = Terms(bounds, allowed, semantic, self.ignore_unknown, read_for, self.models.wildcards)
        if request.body_size + incoming.added <= INLINE_BYTES:
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
    names, read = _limited_fields(type(body))
    given = read(body)
    if given.count(None) < len(given):
        for name, value in zip(names, given, strict=True):
            values, otherwise = SUPPORTED_VALUES[name]
            require(value is None or value in values, name, otherwise)


@cache
def _limited_fields(body: type[SamplingFields]) -> tuple[list[str], Callable[[SamplingFields], tuple[Any, ...]]]:
    """Those of which only some values are supported, and what reads them all."""
    names = [name for name in SUPPORTED_VALUES if name in body.__struct_fields__]
    return names, attrgetter(*names)


def _check_content_type(request: Request) -> None:
    """A web page can send any other type, or none, without asking; JSON only where `server.cors` lets it."""
    given = request.headers.get(b"content-type", b"")
    if given != b"application/json" and _JSON_TYPE.fullmatch(given.strip()) is None:
        found = repr(given[:200].decode("latin-1")) if given else "missing"
        raise UnsupportedMediaType(f"Content-Type is {found}: send JSON with 'Content-Type: application/json'")


DONE = b"data: [DONE]\n\n"


def event(data: msgspec.Struct) -> bytes:
    return b"data: %b\n\n" % encode_json(data)
