"""GET /openapi.json: every endpoint as OpenAPI 3.1, made from the types that requests and responses are decoded with.

What a type cannot say is added from the limits of `core/request.py`; tests send what the document allows and forbids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock import __version__
from penstock.core.request import MAX_CHOICES, MAX_LOGPROBS
from penstock.gateway.api import openai_types as types
from penstock.gateway.api.chat import ROLES
from penstock.gateway.api.objectives import OPENAI_TIERS
from penstock.gateway.api.requests import DEFAULT_LIMIT, MAX_LIMIT
from penstock.gateway.api.serving import Serving, encode_json
from penstock.gateway.errors import ErrorBody
from penstock.gateway.http.request import Request
from penstock.gateway.http.response import Response
from penstock.gateway.settings import TenantConfig
from penstock.gateway.tenancy.admin import Deleted, KeyView, NewKey
from penstock.gateway.tenancy.tenants import Tenant
from penstock.observability.account import Account

Schema = dict[str, Any]

JSON, EVENTS, TEXT, CSV = "application/json", "text/event-stream", "text/plain", "text/csv"


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
class Operation:
    method: str
    path: str
    summary: str
    answer: type | None  # None: text
    body: type | None = None
    status: int = 200
    media: tuple[str, ...] = (JSON,)
    parameters: tuple[Schema, ...] = field(default=())
    public: bool = False


def _parameter(where: str, name: str, schema: Schema, about: str) -> Schema:
    return {"in": where, "name": name, "required": where == "path", "schema": schema, "description": about}


_LEDGER = _parameter("header", "x-penstock-ledger", {"type": "string"}, "`true`: usage.ledger says where the time went")
_GENERATE = (
    _LEDGER,
    _parameter("header", "x-request-id", {"type": "string"}, "found again in the response, the log and /v1/requests"),
    _parameter("header", "cache-control", {"type": "string"}, "no-cache, no-store, max-age=SECONDS or only-if-cached"),
    _parameter("header", "traceparent", {"type": "string"}, "W3C trace context"),
)
_DAY = {"type": "string", "format": "date"}

OPERATIONS = (
    Operation(
        "post",
        "/v1/chat/completions",
        "Answer a conversation",
        types.ChatCompletion,
        types.ChatRequest,
        media=(JSON, EVENTS),
        parameters=_GENERATE,
    ),
    Operation(
        "post",
        "/v1/completions",
        "Continue a text",
        types.Completion,
        types.CompletionRequest,
        media=(JSON, EVENTS),
        parameters=_GENERATE,
    ),
    Operation("get", "/v1/models", "The models served here", types.ModelList),
    Operation(
        "get",
        "/v1/models/{id}",
        "One model",
        types.ModelCard,
        parameters=(_parameter("path", "id", {"type": "string"}, "its name; may hold slashes"),),
    ),
    Operation(
        "get",
        "/v1/requests",
        "The slowest requests lately, and where their time went",
        AccountList,
        parameters=(
            _parameter(
                "query", "limit", {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT}, ""
            ),
        ),
    ),
    Operation(
        "get",
        "/v1/requests/{id}",
        "Where the time of one request went",
        Account,
        parameters=(_parameter("path", "id", {"type": "string"}, "of a response, or its x-request-id"),),
    ),
    Operation("post", "/tokenize", "Text or a conversation to tokens", types.Tokenized, types.TokenizeRequest),
    Operation("post", "/detokenize", "Tokens to text", types.Detokenized, types.DetokenizeRequest),
    Operation("get", "/admin/tenants", "All tenants", ObjectList),
    Operation(
        "put",
        "/admin/tenants/{name}",
        "Make or change a tenant",
        dict[str, Any],
        TenantConfig,
        parameters=(_parameter("path", "name", {"type": "string"}, ""),),
    ),
    Operation(
        "delete",
        "/admin/tenants/{name}",
        "Remove a tenant and its keys",
        Deleted,
        parameters=(_parameter("path", "name", {"type": "string"}, ""),),
    ),
    Operation("get", "/admin/keys", "All keys, without their secrets", KeyList),
    Operation("post", "/admin/keys", "Make a key; this answer alone holds it", KeyView, NewKey, status=201),
    Operation(
        "delete",
        "/admin/keys/{id}",
        "Revoke a key",
        Deleted,
        parameters=(_parameter("path", "id", {"type": "string"}, ""),),
    ),
    Operation(
        "get",
        "/admin/usage",
        "Tokens and cost by day, tenant and model",
        ObjectList,
        media=(JSON, CSV),
        parameters=(
            _parameter("query", "since", _DAY, "default: the first of this month"),
            _parameter("query", "until", _DAY, "default: today"),
            _parameter("query", "tenant", {"type": "string"}, ""),
            _parameter("query", "format", {"enum": ["json", "csv"]}, ""),
        ),
    ),
    Operation("get", "/health", "Whether requests make progress", types.HealthReport, public=True),
    Operation("get", "/ready", "Whether a request would be taken now", types.HealthReport, public=True),
    Operation("get", "/version", "Of this server", types.Version, public=True),
    Operation("get", "/metrics", "Prometheus", None, media=(TEXT,)),
    Operation("get", "/openapi.json", "This document", dict[str, Any], public=True),
    Operation("get", "/", "A hint", None, media=(TEXT,), public=True),
)

# Bounds of fields whose type is wider, by the struct that has them.
_POSITIVE = {"minimum": 1}
BOUNDS: dict[str, Schema] = {
    "temperature": {"minimum": 0, "maximum": 100},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1},
    "min_p": {"minimum": 0, "maximum": 1},
    "repetition_penalty": {"minimum": 0.01, "maximum": 100},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "n": {"minimum": 1, "maximum": MAX_CHOICES},
    "seed": {"minimum": -(2**63), "maximum": 2**63 - 1},
    "min_tokens": {"minimum": 0},
    "max_completion_tokens": _POSITIVE,
    "top_logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS},
    "prompt_logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS},
    "deadline_ms": {"exclusiveMinimum": 0},
}


class OpenApi:
    """Served from bytes made once, on the first request for them."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._body: bytes | None = None

    async def __call__(self, request: Request, response: Response, tenant: Tenant) -> None:
        if self._body is None:
            serving = self._serving
            classes = serving.models.all[0].objectives.known  # the settings name them, for all models
            vocab_size = max(model.engine.info.vocab_size for model in serving.models.all)
            self._body = encode_json(document(list(serving.models.by_name), vocab_size, classes))
        await response.send(200, self._body)


def document(model_names: Sequence[str], vocab_size: int, classes: Sequence[str]) -> Schema:
    used = [kind for op in OPERATIONS for kind in (op.body, op.answer) if kind is not None]
    found, components = msgspec.json.schema_components([*used, ErrorBody], ref_template="#/components/schemas/{name}")
    schemas = dict(zip(map(id, [*used, ErrorBody]), found, strict=True))
    for name in ("ChatRequest", "CompletionRequest"):
        _refine(components[name]["properties"], model_names, vocab_size)
        tiers = [*classes, "auto", "default", *(tier for tier, of in OPENAI_TIERS.items() if of in classes)]
        components[name]["properties"]["service_tier"] = {"enum": [*tiers, None], "default": None}
    components["Message"]["properties"]["role"] = {"enum": list(ROLES)}
    components["ContentPart"]["properties"]["type"] = {"enum": ["text", "refusal"]}
    paths: dict[str, Schema] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Penstock", "version": __version__, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "psk-… or a JWT"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "the same"},
            },
        },
    }


def _refine(properties: Schema, model_names: Sequence[str], vocab_size: int) -> None:
    properties["model"] = {"enum": list(model_names)}
    token = {"type": "integer", "minimum": 0, "exclusiveMaximum": vocab_size}
    tokens = {"type": "array", "items": token, "maxItems": types.MAX_TOKEN_LIST}
    properties["stop_token_ids"] = {"anyOf": [tokens, {"type": "null"}], "default": None}
    for name, bounds in BOUNDS.items():
        for option in properties.get(name, {}).get("anyOf", ()):
            kind = option.get("type")
            if kind in ("number", "integer"):
                option.update(bounds)
    for name, (values, otherwise) in types.SUPPORTED_VALUES.items():
        if name in properties:
            properties[name] = {"enum": [*values, None], "default": None, "description": otherwise}


def _operation(operation: Operation, schemas: dict[int, Schema]) -> Schema:
    answer = {"type": "string"} if operation.answer is None else schemas[id(operation.answer)]
    # Tools check events one by one, as objects with `data`: a stream gets no schema of its own.
    shapes: Schema = {JSON: answer, EVENTS: {}}
    content = {media: {"schema": shapes.get(media, {"type": "string"})} for media in operation.media}
    error = {"description": "an error", "content": {JSON: {"schema": schemas[id(ErrorBody)]}}}
    described: Schema = {
        "summary": operation.summary,
        "parameters": list(operation.parameters),
        "responses": {str(operation.status): {"description": operation.summary, "content": content}, "4XX": error},
    }
    described["responses"]["5XX"] = error
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": schemas[id(operation.body)]}}}
    if not operation.public:
        # Without tenants everybody may use the API, but never /admin.
        keys: list[Schema] = [{"key": []}, {"header": []}]
        described["security"] = keys if operation.path.startswith("/admin") else [*keys, {}]
    return described
