"""Every endpoint of the gateway in one table, from which its routes and its OpenAPI document are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.gateway.api import adapter_endpoints as lora
from penstock.gateway.api import openai_types as types
from penstock.gateway.api.batches import BatchEndpoints, BatchList, BatchObject, NewBatch
from penstock.gateway.api.caches import CacheEndpoints, Caches, Flushed
from penstock.gateway.api.chat import ChatCompletions
from penstock.gateway.api.completions import Completions
from penstock.gateway.api.endpoint import (
    CSV,
    EVENTS,
    GENERATE,
    HTML,
    IMAGE,
    JSON,
    JSONL,
    SCRIPT,
    STRING,
    STYLES,
    TEXT,
    Endpoint,
    in_path,
    parameter,
)
from penstock.gateway.api.files import PURPOSES, DeletedFile, FileEndpoints, FileList, FileObject
from penstock.gateway.api.fleet import (
    Drain,
    FleetEndpoints,
    InjectedFault,
    NewReplicas,
    NewVersion,
    Replicas,
    WholeFleet,
)
from penstock.gateway.api.generation import Handler
from penstock.gateway.api.live import Live
from penstock.gateway.api.llama import LlamaStatus
from penstock.gateway.api.ollama import OllamaStatus
from penstock.gateway.api.other_endpoints import OTHER_ENDPOINTS
from penstock.gateway.api.profile import DEFAULT_SECONDS, MAX_SECONDS, MIN_SECONDS, ProfileEndpoint, Trace
from penstock.gateway.api.requests import DEFAULT_LIMIT, MAX_LIMIT, RequestEndpoints
from penstock.gateway.api.responses import Responses
from penstock.gateway.api.status import StatusEndpoints
from penstock.gateway.api.text_endpoints import TextEndpoints
from penstock.gateway.api.web import WebEndpoints
from penstock.gateway.api.websocket import WebSocketEndpoint
from penstock.gateway.settings import TenantConfig
from penstock.gateway.tenancy.admin import AdminEndpoints, Deleted, KeyView, NewKey
from penstock.observability.account import Account


class AccountList(msgspec.Struct):
    data: list[Account]
    object: str = "list"


class KeyList(msgspec.Struct):
    data: list[KeyView]
    object: str = "list"


class ObjectList(msgspec.Struct):
    data: list[dict[str, Any]]
    object: str = "list"


@dataclass(frozen=True, slots=True)
class Handlers:
    """What answers the endpoints of one gateway."""

    chat: Handler
    completions: Handler
    embeddings: Handler
    rerank: Handler
    score: Handler
    text: TextEndpoints
    status: StatusEndpoints
    accounts: RequestEndpoints
    admin: AdminEndpoints
    fleet: FleetEndpoints
    adapters: lora.AdapterEndpoints
    caches: CacheEndpoints
    live: Live
    profile: ProfileEndpoint
    socket: WebSocketEndpoint
    web: WebEndpoints
    files: FileEndpoints
    batches: BatchEndpoints
    openapi: Handler
    messages: Handler
    count_tokens: Handler
    create_response: Handler
    responses: Responses
    ollama_chat: Handler
    ollama_generate: Handler
    ollama_embed: Handler
    ollama_embeddings: Handler
    ollama: OllamaStatus
    llama_completions: Handler
    llama_infill: Handler
    llama_embedding: Handler
    llama: LlamaStatus


_DAY = {"type": "string", "format": "date"}
_LIMIT = {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT}
_LISTING = (
    parameter("query", "limit", _LIMIT, ""),
    parameter("query", "after", STRING, "the id after which the list goes on"),
)
_UPLOAD = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
        "purpose": {"enum": list(PURPOSES)},
    },
    "required": ["file", "purpose"],
}
_USAGE = (
    parameter("query", "since", _DAY, "default: the first of this month"),
    parameter("query", "until", _DAY, "default: today"),
    parameter("query", "tenant", STRING, ""),
    parameter("query", "format", {"enum": ["json", "csv"]}, ""),
)
_SECONDS = {"type": "number", "minimum": MIN_SECONDS, "maximum": MAX_SECONDS, "default": DEFAULT_SECONDS}


ENDPOINTS = (
    Endpoint(
        "POST",
        ChatCompletions.endpoint,
        "tenant",
        "Answer a conversation",
        lambda h: h.chat,
        types.ChatCompletion,
        types.ChatRequest,
        media=(JSON, EVENTS),
        parameters=GENERATE,
    ),
    Endpoint(
        "POST",
        Completions.endpoint,
        "tenant",
        "Continue a text",
        lambda h: h.completions,
        types.Completion,
        types.CompletionRequest,
        media=(JSON, EVENTS),
        parameters=GENERATE,
    ),
    Endpoint("GET", "/v1/models", "tenant", "The models served here", lambda h: h.status.models, types.ModelList),
    Endpoint(
        "GET",
        "/v1/models/{id:path}",
        "tenant",
        "One model",
        lambda h: h.status.model,
        types.ModelCard,
        parameters=in_path("id", "its name; may hold slashes"),
    ),
    Endpoint(
        "GET",
        "/v1/requests",
        "tenant",
        "The slowest requests lately, and where their time went",
        lambda h: h.accounts.slowest,
        AccountList,
        parameters=(parameter("query", "limit", _LIMIT, ""),),
    ),
    Endpoint(
        "GET",
        "/v1/requests/{id:path}",
        "tenant",
        "Where the time of one request went",
        lambda h: h.accounts.one,
        Account,
        parameters=in_path("id", "of a response, or its x-request-id"),
    ),
    Endpoint("POST", "/v1/files", "tenant", "Upload a file", lambda h: h.files.upload, FileObject, form=_UPLOAD),
    Endpoint("GET", "/v1/files", "tenant", "Uploaded files", lambda h: h.files.list, FileList, parameters=_LISTING),
    Endpoint(
        "GET", "/v1/files/{id}", "tenant", "One file", lambda h: h.files.one, FileObject, parameters=in_path("id")
    ),
    Endpoint(
        "GET",
        "/v1/files/{id}/content",
        "tenant",
        "What a file holds",
        lambda h: h.files.content,
        None,
        media=(JSONL,),
        parameters=in_path("id"),
    ),
    Endpoint(
        "DELETE",
        "/v1/files/{id}",
        "tenant",
        "Delete a file",
        lambda h: h.files.delete,
        DeletedFile,
        parameters=in_path("id"),
    ),
    Endpoint(
        "POST",
        "/v1/batches",
        "tenant",
        "Run the requests of a file, each once, when there is room",
        lambda h: h.batches.create,
        BatchObject,
        NewBatch,
    ),
    Endpoint("GET", "/v1/batches", "tenant", "Batches", lambda h: h.batches.list, BatchList, parameters=_LISTING),
    Endpoint(
        "GET", "/v1/batches/{id}", "tenant", "One batch", lambda h: h.batches.one, BatchObject, parameters=in_path("id")
    ),
    Endpoint(
        "POST",
        "/v1/batches/{id}/cancel",
        "tenant",
        "Stop a batch; what is answered stays",
        lambda h: h.batches.cancel,
        BatchObject,
        parameters=in_path("id"),
    ),
    Endpoint(
        "POST",
        "/tokenize",
        "tenant",
        "Text or a conversation to tokens",
        lambda h: h.text.tokenize,
        types.Tokenized,
        types.TokenizeRequest,
    ),
    Endpoint(
        "POST",
        "/detokenize",
        "tenant",
        "Tokens to text",
        lambda h: h.text.detokenize,
        types.Detokenized,
        types.DetokenizeRequest,
    ),
    Endpoint("GET", "/admin/tenants", "admin", "All tenants", lambda h: h.admin.tenants, ObjectList),
    Endpoint(
        "PUT",
        "/admin/tenants/{name}",
        "admin",
        "Make or change a tenant",
        lambda h: h.admin.put_tenant,
        dict[str, Any],
        TenantConfig,
        parameters=in_path("name"),
    ),
    Endpoint(
        "DELETE",
        "/admin/tenants/{name}",
        "admin",
        "Remove a tenant and its keys",
        lambda h: h.admin.delete_tenant,
        Deleted,
        parameters=in_path("name"),
    ),
    Endpoint("GET", "/admin/keys", "admin", "All keys, without their secrets", lambda h: h.admin.keys, KeyList),
    Endpoint(
        "POST",
        "/admin/keys",
        "admin",
        "Make a key; this answer alone holds it",
        lambda h: h.admin.create_key,
        KeyView,
        NewKey,
        status=201,
    ),
    Endpoint(
        "DELETE",
        "/admin/keys/{id}",
        "admin",
        "Revoke a key",
        lambda h: h.admin.revoke_key,
        Deleted,
        parameters=in_path("id"),
    ),
    Endpoint(
        "GET",
        "/admin/usage",
        "admin",
        "Tokens and cost by day, tenant and model",
        lambda h: h.admin.usage,
        ObjectList,
        media=(JSON, CSV),
        parameters=_USAGE,
    ),
    Endpoint("GET", "/admin/fleet", "admin", "All replicas", lambda h: h.fleet.replicas, WholeFleet),
    Endpoint(
        "POST",
        "/admin/fleet",
        "admin",
        "Start more replicas of a model",
        lambda h: h.fleet.add,
        Replicas,
        NewReplicas,
        status=201,
    ),
    Endpoint(
        "POST",
        "/admin/fleet/replace",
        "admin",
        "Replace a model's replicas by those of another checkpoint, one after the other",
        lambda h: h.fleet.replace,
        Replicas,
        NewVersion,
    ),
    Endpoint(
        "POST",
        "/admin/fleet/{replica}/drain",
        "admin",
        "Let a replica finish what it has, and stop it",
        lambda h: h.fleet.drain,
        dict[str, Any],
        Drain,
        status=202,
        parameters=in_path("replica"),
    ),
    Endpoint(
        "POST",
        "/admin/fleet/{replica}/restart",
        "admin",
        "Start a new replica in its place, then let it finish what it has, and stop it",
        lambda h: h.fleet.restart,
        Replicas,
        Drain,
        parameters=in_path("replica"),
    ),
    Endpoint(
        "POST",
        "/admin/fleet/{replica}/fault",
        "admin",
        "Break a replica on purpose",
        lambda h: h.fleet.fault,
        dict[str, Any],
        InjectedFault,
        status=202,
        parameters=in_path("replica"),
    ),
    Endpoint("GET", "/admin/cache", "admin", "What the caches hold and save", lambda h: h.caches.show, Caches),
    Endpoint("DELETE", "/admin/cache", "admin", "Forget all cached answers", lambda h: h.caches.flush, Flushed),
    Endpoint(
        "GET", "/admin/live", "metrics", "What the engines do now", lambda h: h.live.stream, None, media=(EVENTS,)
    ),
    Endpoint(
        "POST",
        "/admin/profile",
        "operator",
        "Record everything that this gateway and its replicas do for some seconds, as a trace for ui.perfetto.dev",
        lambda h: h.profile.take,
        Trace,
        parameters=(parameter("query", "seconds", _SECONDS, "to record"),),
    ),
    Endpoint(
        "GET", "/health", "public", "Whether requests make progress", lambda h: h.status.health, types.HealthReport
    ),
    Endpoint(
        "GET", "/ready", "public", "Whether a request would be taken now", lambda h: h.status.ready, types.HealthReport
    ),
    Endpoint("GET", "/ping", "public", "The same as /health", lambda h: h.status.health, types.HealthReport),
    Endpoint("GET", "/load", "public", "How many requests run or wait", lambda h: h.status.load, types.Load),
    Endpoint("GET", "/version", "public", "Of this server", lambda h: h.status.version, types.Version),
    Endpoint("GET", "/metrics", "metrics", "Prometheus", lambda h: h.status.metrics, None, media=(TEXT,)),
    Endpoint("GET", "/openapi.json", "public", "This document", lambda h: h.openapi, dict[str, Any]),
    Endpoint("GET", "/docs", "public", "This document as a page", lambda h: h.web.docs, None, media=(HTML,)),
    Endpoint("GET", "/", "public", "The web page, or a hint in text", lambda h: h.web.page, None, media=(TEXT, HTML)),
    Endpoint(
        "GET",
        "/web/{name}",
        "public",
        "A file of the web page",
        lambda h: h.web.file,
        None,
        media=(HTML, STYLES, SCRIPT, IMAGE),
        parameters=in_path("name"),
    ),
    Endpoint(
        "GET",
        "/v1/stream",
        "tenant",
        "A WebSocket for many requests at once",
        lambda h: h.socket.open,
        None,
        status=101,
        media=(),
    ),
    *OTHER_ENDPOINTS,
)
