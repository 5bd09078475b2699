"""GET /openapi.json: every endpoint as OpenAPI 3.1, made from the types that requests and responses are decoded with.

What a type cannot say is added from the ranges of `core/request.py`; tests send what the document allows and forbids.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock import __version__
from penstock.core.request import RANGES, Range
from penstock.gateway.api import openai_types as types
from penstock.gateway.api.chat import ROLES
from penstock.gateway.api.endpoint import CLASS_HEADER, EVENTS, JSON, Endpoint, Schema
from penstock.gateway.api.endpoints import ENDPOINTS
from penstock.gateway.api.objectives import OPENAI_TIERS
from penstock.gateway.api.sampling import ALL_TOKENS, OUTPUT_TOKENS
from penstock.gateway.api.serving import Serving, encode_json
from penstock.gateway.http.request import Request
from penstock.gateway.http.response import Response
from penstock.gateway.tenancy.tenants import Tenant

_PATH_REST = ":path}"  # OpenAPI has no word for a parameter that may hold slashes

# Ranges of fields whose type is wider. `max_tokens` may be 0 with echo, and `logprobs` of a chat is a bool.
_RANGES = {
    **{name: RANGES[name] for name in RANGES if name not in ("top_k", "max_tokens", "logprobs")},
    "top_k": Range(ALL_TOKENS),
    "max_completion_tokens": OUTPUT_TOKENS,
    "top_logprobs": RANGES["logprobs"],
}


# Bodies of other APIs that name a model.
OTHER_REQUESTS = ("MessagesRequest", "CountRequest", "ResponsesRequest", "OllamaChatRequest", "OllamaGenerateRequest")


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
            names = list(serving.models.by_name)
            self._body = encode_json(document(names, vocab_size, classes, adapters=bool(serving.adapters)))
        await response.send(200, self._body)


def document(model_names: Sequence[str], vocab_size: int, classes: Sequence[str], *, adapters: bool = False) -> Schema:
    """`adapters`: models may also be LoRA adapters, whose names change and are not for everybody."""
    kinds = ((endpoint.body, endpoint.answer, endpoint.error) for endpoint in ENDPOINTS)
    used = [kind for three in kinds for kind in three if kind is not None]
    found, components = msgspec.json.schema_components(used, ref_template="#/components/schemas/{name}")
    schemas = dict(zip(map(id, used), found, strict=True))
    known = {"type": "string", "examples": list(model_names)} if adapters else {"enum": list(model_names)}
    for name in ("ChatRequest", "CompletionRequest", *OTHER_REQUESTS):
        components[name]["properties"]["model"] = known
    for name in ("ChatRequest", "CompletionRequest"):
        _refine(components[name]["properties"], vocab_size)
        tiers = [*classes, "auto", "default", *(tier for tier, of in OPENAI_TIERS.items() if of in classes)]
        components[name]["properties"]["service_tier"] = {"enum": [*tiers, None], "default": None}
    components["Message"]["properties"]["role"] = {"enum": list(ROLES)}
    components["ContentPart"]["properties"]["type"] = {"enum": ["text", "refusal"]}
    paths: dict[str, Schema] = {}
    for endpoint in ENDPOINTS:
        for path in (documented_path(endpoint), *endpoint.aliases):
            paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint, schemas, classes)
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


def _refine(properties: Schema, vocab_size: int) -> None:
    token = {"type": "integer", "minimum": 0, "exclusiveMaximum": vocab_size}
    tokens = {"type": "array", "items": token, "maxItems": types.MAX_TOKEN_LIST}
    properties["stop_token_ids"] = {"anyOf": [tokens, {"type": "null"}], "default": None}
    for name, allowed in _RANGES.items():
        for option in properties.get(name, {}).get("anyOf", ()):
            if option.get("type") in ("number", "integer"):
                option.update(_schema_of(allowed))
    for name, (values, otherwise) in types.SUPPORTED_VALUES.items():
        if name in properties:
            properties[name] = {"enum": [*values, None], "default": None, "description": otherwise}


def _schema_of(allowed: Range) -> Schema:
    schema: Schema = {"exclusiveMinimum" if allowed.above else "minimum": allowed.minimum}
    return schema if allowed.maximum is None else {**schema, "maximum": allowed.maximum}


def documented_path(endpoint: Endpoint) -> str:
    return endpoint.path.replace(_PATH_REST, "}")


def _parameter(given: Schema, classes: Sequence[str]) -> Schema:
    """The names of classes are those of the settings."""
    return {**given, "schema": {"enum": list(classes)}} if given["name"] == CLASS_HEADER else given


def _operation(endpoint: Endpoint, schemas: dict[int, Schema], classes: Sequence[str]) -> Schema:
    answer = {"type": "string"} if endpoint.answer is None else schemas[id(endpoint.answer)]
    # Tools check events one by one, as objects with `data`: a stream gets no schema of its own.
    shapes: Schema = {JSON: answer, EVENTS: {}}
    content = {media: {"schema": shapes.get(media, {"type": "string"})} for media in endpoint.media}
    error = {"description": "an error", "content": {JSON: {"schema": schemas[id(endpoint.error)]}}}
    described: Schema = {
        "summary": endpoint.summary,
        "parameters": [_parameter(each, classes) for each in endpoint.parameters],
        "responses": {str(endpoint.status): {"description": endpoint.summary, "content": content}, "4XX": error},
    }
    described["responses"]["5XX"] = error
    if endpoint.body is not None:
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": schemas[id(endpoint.body)]}}}
    if endpoint.form is not None:
        described["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": endpoint.form}}}
    if endpoint.access != "public":
        # Without tenants everybody may use the API, but never /admin.
        keys: list[Schema] = [{"key": []}, {"header": []}]
        described["security"] = keys if endpoint.access == "admin" else [*keys, {}]
    return described
