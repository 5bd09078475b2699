"""The composition of the gateway: routes over one engine."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from penstock import __version__
from penstock.core.config import JwtConfig, Settings
from penstock.core.engine import ServedEngine
from penstock.core.errors import StartupError
from penstock.core.request import RECOMMENDED
from penstock.gateway.admin import AdminEndpoints
from penstock.gateway.auth import Door, Verifier
from penstock.gateway.budgets import Prices, SpendMetrics
from penstock.gateway.chat import ChatCompletions
from penstock.gateway.completions import Completions
from penstock.gateway.edge import Edge, Enter, Handler, Route, Routes, anybody
from penstock.gateway.exchange import Exchange, Traffic
from penstock.gateway.limits import Metering
from penstock.gateway.objectives import Objectives, milliseconds
from penstock.gateway.openai_types import (
    ClassCard,
    HealthReport,
    ModelCard,
    ModelList,
    Version,
)
from penstock.gateway.openapi import OpenApi
from penstock.gateway.origins import Origins
from penstock.gateway.prefixes import Prefixes
from penstock.gateway.reading import LongRequests
from penstock.gateway.requests import RequestEndpoints
from penstock.gateway.serving import Serving, encode_json
from penstock.gateway.tenants import Directory
from penstock.gateway.text_endpoints import TextEndpoints
from penstock.observability.metrics import GatewayMetrics
from penstock.observability.request_log import RequestLog
from penstock.observability.tracing import start_tracing
from penstock.state.memory import MemoryStore
from penstock.text.tokenizer import Tokenizer

logger = logging.getLogger("penstock.gateway")

HINT = b"""Penstock serves the OpenAI API: POST /v1/chat/completions, POST /v1/completions, GET /v1/models.
Also POST /tokenize, POST /detokenize, GET /health, GET /ready, GET /version, GET /metrics.
"""


def create_app(
    engine: ServedEngine,
    tokenizer: Tokenizer,
    settings: Settings,
    *,
    model_names: Sequence[str],
    directory: Directory | None = None,
    collectors: Sequence[Collector] = (),
) -> Edge:
    """`model_names` are what clients may put in `model`; the first is the canonical one. Without a directory there are
    the tenants of the settings, no keys, and nothing is remembered."""
    if not model_names:
        raise StartupError("a gateway must serve at least one model name", param="served_model_name")
    _warn_of_other_models(settings, model_names)
    traffic = Traffic()
    metrics = GatewayMetrics(lambda: engine.stats)
    for collector in collectors:
        metrics.registry.register(collector)
    directory = directory or Directory(settings, MemoryStore())
    origins = Origins(settings.server)
    door = Door(directory, _verifier(settings.jwt), origins)
    spend = SpendMetrics(settings.machine_per_hour)
    metrics.registry.register(spend)
    objectives = Objectives(settings.classes, settings.default_class, lambda: engine.stats)
    serving = Serving(
        engine,
        tokenizer,
        tuple(model_names),
        metrics,
        traffic,
        objectives,
        Metering(directory.store, Prices(settings, model_names[0], lambda: engine.stats), spend, model_names),
        LongRequests(tokenizer),
        Prefixes(settings.cache, tokenizer),
        max_body=int(settings.server.max_body_mib * 2**20),
        body_seconds=settings.server.body_seconds,
        ignore_unknown=settings.server.unknown_fields == "ignore",
        semantic_routes=frozenset(settings.cache.semantic.routes or ()) if settings.cache.enabled else frozenset(),
    )
    chat = ChatCompletions(serving)
    text = TextEndpoints(serving)
    status = StatusEndpoints(serving, settings.engine.max_waiting)
    admin = AdminEndpoints(serving, directory)
    requests = RequestLog()
    accounts = RequestEndpoints(requests)

    def route(method: str, path: str, handle: Handler, enter: Enter = door.enter) -> Route:
        return Route(method, path, handle, enter)

    routes = Routes(
        [
            route("POST", "/v1/chat/completions", serving.metering.around(chat)),
            route("POST", "/v1/completions", serving.metering.around(Completions(serving))),
            route("GET", "/v1/models", status.models),
            route("GET", "/v1/models/{id:path}", status.model),
            route("GET", "/v1/requests", accounts.slowest),
            route("GET", "/v1/requests/{id:path}", accounts.one),
            route("POST", "/tokenize", text.tokenize),
            route("POST", "/detokenize", text.detokenize),
            route("GET", "/admin/tenants", admin.tenants, door.enter_admin),
            route("PUT", "/admin/tenants/{name}", admin.put_tenant, door.enter_admin),
            route("DELETE", "/admin/tenants/{name}", admin.delete_tenant, door.enter_admin),
            route("GET", "/admin/keys", admin.keys, door.enter_admin),
            route("POST", "/admin/keys", admin.create_key, door.enter_admin),
            route("DELETE", "/admin/keys/{id}", admin.revoke_key, door.enter_admin),
            route("GET", "/admin/usage", admin.usage, door.enter_admin),
            route("GET", "/health", status.health, anybody),
            route("GET", "/ready", status.ready, anybody),
            route("GET", "/version", status.version, anybody),
            route("GET", "/metrics", status.metrics, door.enter_metrics),
            route("GET", "/openapi.json", OpenApi(serving), anybody),
            route("GET", "/", status.hint, anybody),
        ]
    )
    tracing = start_tracing(settings.observability.otlp_endpoint)
    return Edge(routes, origins, traffic, metrics, requests, serving.long_requests, tracing)


def _warn_of_other_models(settings: Settings, model_names: Sequence[str]) -> None:
    """No mistake where gateways of several models share their settings, but a misspelt limit would limit nothing."""
    limited = {
        model for tenant in (settings.tenant_defaults, *settings.tenants.values()) for model in tenant.model_limits
    }
    for section, models in (("model_limits", limited), ("prices", set(settings.prices))):
        for model in sorted(models.difference(model_names)):
            served = ", ".join(model_names)
            logger.warning("%s.%s has no effect here: the models served are %s", section, model, served)


def _verifier(config: JwtConfig | None) -> Verifier | None:
    if config is None:
        return None
    from penstock.gateway.web_tokens import TokenVerifier  # its cryptography takes a while to load

    return TokenVerifier(config)


class StatusEndpoints:
    """What is served here, and how it is doing."""

    def __init__(self, serving: Serving, max_waiting: int) -> None:
        self.serving = serving
        self.max_waiting = max_waiting

    def _card(self, name: str) -> ModelCard:
        info = self.serving.engine.info
        defaults = {field: getattr(info.sampling_defaults, field) for field in RECOMMENDED}
        classes = {
            objective.name: ClassCard(milliseconds(objective.ttft), milliseconds(objective.itl))
            for objective in self.serving.objectives.all().values()
        }
        return ModelCard(name, self.serving.created, info.max_model_len, defaults, classes)

    async def models(self, exchange: Exchange) -> None:
        cards = [self._card(name) for name in self.serving.models_of(exchange)]
        await exchange.send(200, encode_json(ModelList(cards)))

    async def model(self, exchange: Exchange) -> None:
        name = exchange.path_params["id"]
        self.serving.check_model(exchange, name)
        await exchange.send(200, encode_json(self._card(name)))

    async def health(self, exchange: Exchange) -> None:
        await self._send(exchange, self._health())

    async def ready(self, exchange: Exchange) -> None:
        """Whether a request that came now would be taken: also no when the engine's queue is full."""
        report = self._health()
        if report.status == "ok" and (waiting := self.serving.engine.stats.waiting) >= self.max_waiting:
            report = HealthReport("overloaded", f"{waiting} requests wait, and no more are taken")
        await self._send(exchange, report)

    def _health(self) -> HealthReport:
        if self.serving.traffic.draining:
            return HealthReport("draining", "the server is shutting down")
        health = self.serving.engine.health()
        return HealthReport("ok" if health.ok else "unhealthy", health.detail)

    async def _send(self, exchange: Exchange, report: HealthReport) -> None:
        await exchange.send(200 if report.status == "ok" else 503, encode_json(report))

    async def version(self, exchange: Exchange) -> None:
        await exchange.send(200, encode_json(Version(__version__)))

    async def metrics(self, exchange: Exchange) -> None:
        content_type = (b"content-type", CONTENT_TYPE_LATEST.encode())
        await exchange.send(200, self.serving.metrics.exposition(), content_type)

    async def hint(self, exchange: Exchange) -> None:
        await exchange.send(200, HINT, (b"content-type", b"text/plain; charset=utf-8"))
