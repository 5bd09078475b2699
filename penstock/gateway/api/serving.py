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

from penstock.core.errors import NotFound, Unavailable
from penstock.fleet.versions import assigned_version
from penstock.gateway.api.adapters import Adapters, NamedAdapter
from penstock.gateway.api.bounds import Bounds
from penstock.gateway.api.context import Context, Options
from penstock.gateway.api.decoding import decode_json
from penstock.gateway.api.models import Entry, Model, Models, TenantBounds
from penstock.gateway.api.objectives import deadline
from penstock.gateway.api.openai_types import SUPPORTED_VALUES, SamplingFields
from penstock.gateway.api.reading import (
    INLINE_BYTES,
    LongRequests,
    ModelReader,
    ModelText,
    Prompt,
    Reader,
    Terms,
    model_not_found,
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
    adapters: Adapters
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

    async def receive(
        self, request: Request, tenant: Tenant, reservation: Reservation, *, any_type: bool = False
    ) -> Incoming:
        """A request to generate, when the server is there for it. What takes long to read is admitted first, so that
        nobody pays for those who are past their limits. `any_type`: whatever its Content-Type is, it is JSON."""
        self.traffic.admit()
        body = await self.body(request, tenant, any_type=any_type)
        incoming = Incoming(request, tenant, body)
        long = request.body_size > INLINE_BYTES
        if not long and not self.models.routed:
            return incoming
        model = self.models.all[0]
        if len(self.models.all) > 1 or self.models.routed:
            asked, *_ = await self.parse(incoming, ModelReader(self.texts))
            model, _ = await self.find(asked.model, tenant)
            incoming.entry = self.models.routed.get(asked.model)
            if incoming.entry is not None and (weights := incoming.entry.config.versions):
                incoming.version = assigned_version(sticky_key(request, tenant, asked), weights)
                model = self.model_of(incoming.version)
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
        options, prompts, terms = await self.parse(incoming, reader, semantic=semantic, read_for=read_for)
        model, adapter = self.models.by_name.get(read_for or options.model), None
        if model is None:
            model, adapter = await self.find(read_for or options.model, tenant if read_for is None else None)
            if model is not self.models.by_name[terms.read_for or terms.base_of(options.model)]:
                raise Unavailable("the adapter's name was given to one of another model meanwhile; send it again")
        context = Context(
            id=request.unique,
            request_id=request.id,
            arrived=request.arrived,
            endpoint=endpoint,
            tenant=tenant,
            asked=options.model,
            model=model,
            adapter=adapter,
            why=why,
            session=session_of(request, tenant, options.prompt_cache_key),
            objective=model.objectives.classify(request, tenant, options.service_tier),
            deadline=deadline(request, tenant, options.deadline_ms),
            output_asked=any(getattr(options, name, None) is not None for name in _OUTPUT_FIELDS),
        )
        return context, options, prompts

    async def find(self, name: str, tenant: Tenant | None = None) -> tuple[Model, NamedAdapter | None]:
        """What a name stands for now. With a tenant: if that may use it."""
        if name in self.models.by_name:
            return self.models.by_name[name] if tenant is None else self.models.find(tenant, name), None
        await self.adapters.refresh()
        found = self.adapters.get(name)
        if found is None or (tenant is not None and name not in self.adapters.models(tenant)):
            raise model_not_found(name, [] if tenant is None else self.names(tenant))
        return self.models.by_name[found.model], found

    def names(self, tenant: Tenant) -> list[str]:
        """Of the models and adapters that a tenant may use."""
        return [*self.models.names(tenant), *self.adapters.models(tenant)]

    def model_of(self, name: str) -> Model:
        """Of a model, or of an adapter as it was found last; one of the settings stays what it is."""
        found = self.adapters.get(name)
        return self.models.by_name[name if found is None else found.model]

    async def parse(
        self, incoming: Incoming, reader: Reader[T], *, semantic: bool = False, read_for: str | None = None
    ) -> tuple[T, list[Prompt], Terms]:
        """What a reader makes of the request, and the terms it went by."""
        if self.models.wildcards:  # which must not match the name of an adapter that is new
            await self.adapters.refresh()
        base = None if read_for is None else self.model_of(read_for).name
        terms = self._terms(incoming.tenant, semantic, base)
        try:
            return *await self._read(incoming, reader, terms), terms
        except NotFound as error:
            if error.code != "model_not_found":
                raise
            await self.adapters.refresh()
            known, terms = terms, self._terms(incoming.tenant, semantic, base)
            if terms.adapters == known.adapters:
                raise
        return *await self._read(incoming, reader, terms), terms

    def _terms(self, tenant: Tenant, semantic: bool, read_for: str | None) -> Terms:
        bounds, allowed = TenantBounds(self.models, tenant), self.models.names(tenant)
        wildcards, adapters = self.models.wildcards, self.adapters.models(tenant)
        return Terms(bounds, allowed, semantic, self.ignore_unknown, read_for, wildcards, adapters)

    async def _read(self, incoming: Incoming, reader: Reader[T], terms: Terms) -> tuple[T, list[Prompt]]:
        request, body = incoming.request, incoming.body
        if request.body_size + incoming.added <= INLINE_BYTES:
            return reader.read(b"".join(body), terms)
        with request.cancelling_on_disconnect():
            return await self.long_requests.read(reader.name, body, terms)

    async def read(self, request: Request, decoder: msgspec.json.Decoder[T], *, any_type: bool = False) -> T:
        """A body that is not for a model, such as one of the administrator's."""
        return decode_json(decoder, b"".join(await self.body(request, OPEN, any_type=any_type)))

    def body(self, request: Request, tenant: Tenant, *, any_type: bool = False) -> Awaitable[list[bytes]]:
        if not any_type:
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
    coding = request.headers.get(b"content-encoding", b"identity").strip().lower()
    if coding != b"identity":
        found = repr(coding[:200].decode("latin-1"))
        raise UnsupportedMediaType(f"Content-Encoding is {found}: send the body without one", "content-encoding")


DONE = b"data: [DONE]\n\n"


def event(data: msgspec.Struct) -> bytes:
    return b"data: %b\n\n" % encode_json(data)
