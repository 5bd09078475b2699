"""The composition of the gateway: routes over the models that it serves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from prometheus_client.registry import Collector

from penstock.batches.place import Batches
from penstock.core.engine import EngineStats, ServedEngine
from penstock.core.errors import StartupError
from penstock.gateway.api.adapter_endpoints import AdapterEndpoints
from penstock.gateway.api.adapters import Adapters, NamedAdapter
from penstock.gateway.api.anthropic_messages import CountTokens, Messages
from penstock.gateway.api.batches import BatchEndpoints
from penstock.gateway.api.caches import AnswerCache, CacheEndpoints, NoAnswerCache
from penstock.gateway.api.chat import ChatCompletions
from penstock.gateway.api.comparisons import Reranking, Scoring
from penstock.gateway.api.completions import Completions
from penstock.gateway.api.embeddings import Embeddings
from penstock.gateway.api.endpoint import Access
from penstock.gateway.api.endpoints import ENDPOINTS, Handlers
from penstock.gateway.api.files import FileEndpoints
from penstock.gateway.api.fleet import Control, FleetEndpoints, NoFleet
from penstock.gateway.api.live import Live
from penstock.gateway.api.llama import LlamaCompletions, LlamaEmbeddings, LlamaInfills, LlamaStatus
from penstock.gateway.api.models import Model, Models, ServedModel
from penstock.gateway.api.objectives import ObjectiveMetrics, Objectives
from penstock.gateway.api.ollama import OllamaChats, OllamaGenerate, OllamaStatus
from penstock.gateway.api.ollama_embeddings import OllamaEmbed, OllamaEmbeddings
from penstock.gateway.api.openapi import OpenApi
from penstock.gateway.api.profile import NoReplicas, ProfileEndpoint, Profiler
from penstock.gateway.api.reading import LongRequests, ModelText
from penstock.gateway.api.requests import RequestEndpoints
from penstock.gateway.api.responses import Responses
from penstock.gateway.api.responses_store import ResponseStore
from penstock.gateway.api.serving import Serving
from penstock.gateway.api.shadow import OUTCOMES as SHADOWED
from penstock.gateway.api.shadow import Shadows
from penstock.gateway.api.siblings import Alone, Siblings
from penstock.gateway.api.status import StatusEndpoints
from penstock.gateway.api.text_endpoints import TextEndpoints
from penstock.gateway.api.trial import OUTCOMES as CASCADED
from penstock.gateway.api.web import WebEndpoints
from penstock.gateway.api.websocket import WebSocketEndpoint
from penstock.gateway.edge import Authenticate, Edge, Route, Routes
from penstock.gateway.http.origins import Origins
from penstock.gateway.http.traffic import Traffic
from penstock.gateway.settings import GatewaySettings, JwtConfig
from penstock.gateway.tenancy.admin import AdminEndpoints
from penstock.gateway.tenancy.auth import Authenticator, Verifier, public
from penstock.gateway.tenancy.budgets import Prices, SpendMetrics, limits_in
from penstock.gateway.tenancy.limits import Metering, metered
from penstock.gateway.tenancy.prefixes import Prefixes
from penstock.gateway.tenancy.tenants import Directory, DirectoryMetrics
from penstock.observability.metrics import GatewayMetrics
from penstock.observability.process_metrics import ProcessMetrics
from penstock.observability.request_log import RequestLog
from penstock.observability.tracing import start_tracing
from penstock.state.memory import MemoryStore

logger = logging.getLogger("penstock.gateway")


def create_app(
    served: Sequence[ServedModel],
    settings: GatewaySettings,
    *,
    directory: Directory | None = None,
    collectors: Sequence[Collector] = (),
    control: Control | None = None,
    siblings: Siblings | None = None,
    adapters: Sequence[NamedAdapter] = (),
    cache: AnswerCache | None = None,
    batches: Batches | None = None,
    profiler: Profiler | None = None,
) -> Edge:
    """Without a directory there are the tenants of the settings, no keys, and nothing is remembered. `control` acts on
    the replicas behind the models; `siblings` are other processes of the same server; `adapters` are there from the
    start; `cache` is what stands before the engines; `profiler` takes profiles of the replicas."""
    if not served or not all(model.names for model in served):
        raise StartupError("a gateway must serve at least one model name", param="served_model_name")
    traffic = Traffic()
    metrics = GatewayMetrics({model.names[0]: _stats_of(model.engine) for model in served})
    for collector in (ProcessMetrics(), *collectors):
        metrics.registry.register(collector)
    directory = directory or Directory(settings, MemoryStore())
    metrics.registry.register(DirectoryMetrics(directory))
    origins = Origins(settings.server)
    spend = SpendMetrics(settings.machine_per_hour, limits_in(settings))
    metrics.registry.register(spend)
    fixed = {each.name: each.model for each in adapters if each.source == "settings"}
    models = Models([_model(model, settings, spend) for model in served], settings.models, fixed)
    bases = {model.names[0]: model.adapter_base for model in served if model.adapter_base is not None}
    _count_from_zero(metrics, models)
    _warn_of_other_models(settings, [name for model in models.all for name in model.names])
    _warn_of_free_models(settings, models)
    _warn_of_tenants_models(settings, [*models.by_name, *(adapter.name for adapter in adapters)])
    texts = {name: model.text for name, model in models.by_name.items()}
    serving = Serving(
        models,
        Adapters(directory.store, bases, adapters, models.by_name),
        texts,
        metrics,
        traffic,
        LongRequests(texts, settings.server.logs),
        Shadows(metrics.shadows),
        max_body=int(settings.server.max_body_mib * 2**20),
        body_seconds=settings.server.body_seconds,
        ignore_unknown=settings.server.unknown_fields == "ignore",
        semantic_routes=frozenset(settings.cache.semantic.routes or ()) if settings.cache.enabled else frozenset(),
    )
    requests = RequestLog()
    control, siblings = control or NoFleet(), siblings or Alone()
    caches = CacheEndpoints(serving, cache or NoAnswerCache(), siblings)
    live = Live(serving, requests, control, caches, spend, directory, settings.server.processes)
    socket = WebSocketEndpoint(serving)
    profile = ProfileEndpoint(serving, profiler or NoReplicas())
    parts = Parts(directory, requests, control, siblings, batches, caches, live, profile, socket)
    routes = _routes(serving, settings, origins, parts)
    tracing = start_tracing(settings.observability.otlp_endpoint)
    edge = Edge(routes, origins, serving, requests, live, tracing)
    socket.answer = edge.answer
    return edge


@dataclass(frozen=True, slots=True)
class Parts:
    """What endpoints need beside the models."""

    directory: Directory
    requests: RequestLog
    control: Control
    siblings: Siblings
    batches: Batches | None
    caches: CacheEndpoints
    live: Live
    profile: ProfileEndpoint
    socket: WebSocketEndpoint


def _model(given: ServedModel, settings: GatewaySettings, spend: SpendMetrics) -> Model:
    names, stats = tuple(given.names), _stats_of(given.engine)
    return Model(
        names,
        _text(given, settings),
        given.engine,
        Objectives(settings.classes, settings.default_class, stats),
        Metering(Prices(settings, names, stats), spend, names),
        Prefixes(settings.cache, given.tokenizer),
    )


def _count_from_zero(metrics: GatewayMetrics, models: Models) -> None:
    """What can happen is counted before it does."""
    objectives = ObjectiveMetrics({model.name: model.objectives for model in models.all})
    metrics.registry.register(objectives)
    metrics.promised = objectives.promises
    for name, config in models.routed.values():
        if config.cascade is not None:
            metrics.cascades.update(dict.fromkeys(((name, outcome) for outcome in CASCADED), 0))
        if config.shadow is not None:
            shadow = models.by_name[config.shadow.model].name
            metrics.shadows.update(dict.fromkeys(((shadow, outcome) for outcome in SHADOWED), 0))


def _text(given: ServedModel, settings: GatewaySettings) -> ModelText:
    config = settings.models.get(given.names[0])
    if config is None:
        return ModelText(given.tokenizer)
    return ModelText(given.tokenizer, config.tool_parser, config.reasoning_parser)


def _stats_of(engine: ServedEngine) -> Callable[[], EngineStats]:
    return lambda: engine.stats


def _routes(serving: Serving, settings: GatewaySettings, origins: Origins, parts: Parts) -> Routes:
    directory, siblings = parts.directory, parts.siblings
    auth = Authenticator(directory, _verifier(settings.jwt), origins)
    authenticate: dict[Access, Authenticate] = {
        "public": public,
        "tenant": auth.authenticate,
        "admin": auth.authenticate_admin,
        "metrics": auth.authenticate_metrics,
        "operator": auth.authenticate_operator,
    }
    responses = Responses(serving, ResponseStore(directory.store, settings.responses))
    handlers = Handlers(
        chat=metered(directory.store, ChatCompletions(serving)),
        completions=metered(directory.store, Completions(serving)),
        embeddings=metered(directory.store, Embeddings(serving)),
        rerank=metered(directory.store, Reranking(serving)),
        score=metered(directory.store, Scoring(serving)),
        text=TextEndpoints(serving),
        status=StatusEndpoints(serving, settings.engine.max_waiting, siblings),
        accounts=RequestEndpoints(parts.requests, siblings),
        admin=AdminEndpoints(serving, directory),
        fleet=FleetEndpoints(serving, parts.control),
        adapters=AdapterEndpoints(serving),
        files=FileEndpoints(serving, parts.batches),
        batches=BatchEndpoints(serving, parts.batches, {endpoint.path for endpoint in ENDPOINTS}),
        caches=parts.caches,
        live=parts.live,
        profile=parts.profile,
        socket=parts.socket,
        web=WebEndpoints(),
        openapi=OpenApi(serving),
        messages=metered(directory.store, Messages(serving)),
        count_tokens=CountTokens(serving),
        create_response=metered(directory.store, responses),
        responses=responses,
        ollama_chat=metered(directory.store, OllamaChats(serving)),
        ollama_generate=metered(directory.store, OllamaGenerate(serving)),
        ollama_embed=metered(directory.store, OllamaEmbed(serving)),
        ollama_embeddings=metered(directory.store, OllamaEmbeddings(serving)),
        ollama=OllamaStatus(serving),
        llama_completions=metered(directory.store, LlamaCompletions(serving)),
        llama_infill=metered(directory.store, LlamaInfills(serving)),
        llama_embedding=metered(directory.store, LlamaEmbeddings(serving)),
        llama=LlamaStatus(serving),
    )
    return Routes(
        [Route(e.method, e.path, e.handler(handlers), authenticate[e.access], e.errors, e.aliases) for e in ENDPOINTS]
    )


def _warn_of_other_models(settings: GatewaySettings, model_names: Collection[str]) -> None:
    """No mistake where gateways of several models share their settings, but a misspelt limit would limit nothing."""
    limited = {
        model for tenant in (settings.tenant_defaults, *settings.tenants.values()) for model in tenant.model_limits
    }
    for section, models in (("model_limits", limited), ("prices", set(settings.prices))):
        for model in sorted(models.difference(model_names)):
            served = ", ".join(model_names)
            logger.warning("%s.%s has no effect here: the models served are %s", section, model, served)


def _warn_of_free_models(settings: GatewaySettings, models: Models) -> None:
    """Their answers spend nothing of a budget."""
    if settings.machine_per_hour is not None:
        return
    tenants = {f"tenants.{name}": tenant for name, tenant in settings.tenants.items()}
    tenants["tenant_defaults"] = settings.tenant_defaults
    for model in models.all:
        names = set(model.names)
        limited = [
            where
            for where, tenant in tenants.items()
            if tenant.budget_per_day is not None or tenant.budget_per_month is not None
            if tenant.models is None or names.intersection(tenant.models)
        ]
        if limited and not names.intersection(settings.prices):
            text = "%s has no price, so the budget of %s does not limit it: set prices.%s"
            logger.warning(text, model.name, ", ".join(limited[:3]), model.name)


def _warn_of_tenants_models(settings: GatewaySettings, names: Collection[str]) -> None:
    """`names` of models and adapters. A misspelt one would lock the tenant out of the model that is meant."""
    defaults = settings.tenant_defaults.models
    inherited = [("tenant_defaults", defaults)]
    own = [(f"tenants.{name}", t.models) for name, t in settings.tenants.items() if t.models != defaults]
    for section, models in inherited + own:
        for model in sorted(set(models or ()).difference(names)):
            served = ", ".join(names)
            logger.warning(
                "%s.models.%s has no effect here: models and adapters at the start are %s", section, model, served
            )


def _verifier(config: JwtConfig | None) -> Verifier | None:
    if config is None:
        return None
    from penstock.gateway.tenancy.web_tokens import TokenVerifier  # its cryptography takes a while to load

    return TokenVerifier(config)
