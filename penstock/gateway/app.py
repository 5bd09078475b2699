"""The composition of the gateway: routes over one engine."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from prometheus_client.registry import Collector

from penstock.core.engine import ServedEngine
from penstock.core.errors import StartupError
from penstock.gateway.api.chat import ChatCompletions
from penstock.gateway.api.completions import Completions
from penstock.gateway.api.objectives import Objectives
from penstock.gateway.api.openapi import OpenApi
from penstock.gateway.api.reading import LongRequests
from penstock.gateway.api.requests import RequestEndpoints
from penstock.gateway.api.serving import Serving
from penstock.gateway.api.status import StatusEndpoints
from penstock.gateway.api.text_endpoints import TextEndpoints
from penstock.gateway.edge import Authenticate, Edge, Handler, Route, Routes
from penstock.gateway.http.origins import Origins
from penstock.gateway.http.traffic import Traffic
from penstock.gateway.settings import GatewaySettings, JwtConfig
from penstock.gateway.tenancy.admin import AdminEndpoints
from penstock.gateway.tenancy.auth import Authenticator, Verifier, public
from penstock.gateway.tenancy.budgets import Prices, SpendMetrics
from penstock.gateway.tenancy.limits import Metering
from penstock.gateway.tenancy.prefixes import Prefixes
from penstock.gateway.tenancy.tenants import Directory
from penstock.observability.metrics import GatewayMetrics
from penstock.observability.request_log import RequestLog
from penstock.observability.tracing import start_tracing
from penstock.state.memory import MemoryStore
from penstock.text.tokenizer import Tokenizer

logger = logging.getLogger("penstock.gateway")


def create_app(
    engine: ServedEngine,
    tokenizer: Tokenizer,
    settings: GatewaySettings,
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
    requests = RequestLog()
    routes = _routes(serving, settings, directory, origins, requests)
    tracing = start_tracing(settings.observability.otlp_endpoint)
    return Edge(routes, origins, traffic, metrics, requests, serving.long_requests, tracing)


def _routes(
    serving: Serving, settings: GatewaySettings, directory: Directory, origins: Origins, requests: RequestLog
) -> Routes:
    auth = Authenticator(directory, _verifier(settings.jwt), origins)
    text = TextEndpoints(serving)
    status = StatusEndpoints(serving, settings.engine.max_waiting)
    admin = AdminEndpoints(serving, directory)
    accounts = RequestEndpoints(requests)

    def generating(endpoint: ChatCompletions | Completions) -> Route:
        return Route("POST", endpoint.endpoint, serving.metering.metered(endpoint), auth.authenticate)

    def route(method: str, path: str, handle: Handler, authenticate: Authenticate = auth.authenticate) -> Route:
        return Route(method, path, handle, authenticate)

    return Routes(
        [
            generating(ChatCompletions(serving)),
            generating(Completions(serving)),
            route("GET", "/v1/models", status.models),
            route("GET", "/v1/models/{id:path}", status.model),
            route("GET", "/v1/requests", accounts.slowest),
            route("GET", "/v1/requests/{id:path}", accounts.one),
            route("POST", "/tokenize", text.tokenize),
            route("POST", "/detokenize", text.detokenize),
            route("GET", "/admin/tenants", admin.tenants, auth.authenticate_admin),
            route("PUT", "/admin/tenants/{name}", admin.put_tenant, auth.authenticate_admin),
            route("DELETE", "/admin/tenants/{name}", admin.delete_tenant, auth.authenticate_admin),
            route("GET", "/admin/keys", admin.keys, auth.authenticate_admin),
            route("POST", "/admin/keys", admin.create_key, auth.authenticate_admin),
            route("DELETE", "/admin/keys/{id}", admin.revoke_key, auth.authenticate_admin),
            route("GET", "/admin/usage", admin.usage, auth.authenticate_admin),
            route("GET", "/health", status.health, public),
            route("GET", "/ready", status.ready, public),
            route("GET", "/version", status.version, public),
            route("GET", "/metrics", status.metrics, auth.authenticate_metrics),
            route("GET", "/openapi.json", OpenApi(serving), public),
            route("GET", "/", status.hint, public),
        ]
    )


def _warn_of_other_models(settings: GatewaySettings, model_names: Sequence[str]) -> None:
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
    from penstock.gateway.tenancy.web_tokens import TokenVerifier  # its cryptography takes a while to load

    return TokenVerifier(config)
