"""What an endpoint is: a line of the tables from which routes and the OpenAPI document are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from penstock.gateway.api.generation import Handler
from penstock.gateway.errors import OPENAI_ERRORS, ErrorBody, ErrorFormat

Schema = dict[str, Any]
# Whose key is needed. metrics: an administrator's, or none while there are no tenants; operator: the same, but without
# tenants only for this machine.
Access = Literal["public", "tenant", "admin", "metrics", "operator"]

JSON, EVENTS, TEXT, CSV = "application/json", "text/event-stream", "text/plain", "text/csv"
HTML, STYLES, SCRIPT, IMAGE = "text/html", "text/css", "text/javascript", "image/svg+xml"
JSONL, LINES = "application/jsonl", "application/x-ndjson"
STRING = {"type": "string"}


@dataclass(frozen=True, slots=True)
class Endpoint:
    method: str
    path: str  # "{name}" stands for one segment, "{name:path}" for all the rest
    access: Access
    summary: str
    handler: Callable[[Any], Handler]  # of the gateway's `Handlers`
    answer: type | None  # None: text
    body: type | None = None
    status: int = 200
    media: tuple[str, ...] = (JSON,)
    parameters: tuple[Schema, ...] = ()
    form: Schema | None = None  # of a body that is multipart/form-data
    errors: ErrorFormat = OPENAI_ERRORS
    error: type = ErrorBody  # the type of what `errors` writes
    aliases: tuple[str, ...] = ()  # other paths of it, which metrics and traces count as `path`


def parameter(where: str, name: str, schema: Schema, about: str) -> Schema:
    return {"in": where, "name": name, "required": where == "path", "schema": schema, "description": about}


def in_path(name: str, about: str = "") -> tuple[Schema, ...]:
    return (parameter("path", name, STRING, about),)


CLASS_HEADER = "x-penstock-class"
DEADLINE = {"type": "string", "pattern": r"^[0-9]{1,9}(\.[0-9]{1,3})?$"}

GENERATE = (
    parameter("header", "x-penstock-ledger", STRING, "`true`: usage.ledger says where the time went"),
    parameter("header", "x-request-id", STRING, "found again in the response, the log and /v1/requests"),
    parameter("header", CLASS_HEADER, STRING, "the class, where service_tier does not say"),
    parameter("header", "x-penstock-deadline-ms", DEADLINE, "as deadline_ms, where the body does not say"),
    parameter("header", "x-penstock-session", STRING, "requests of one session meet on one replica if they can"),
    parameter("header", "x-session-id", STRING, "the same, as other servers call it"),
    parameter("header", "cache-control", STRING, "no-cache, no-store, max-age=SECONDS or only-if-cached"),
    parameter("header", "traceparent", STRING, "W3C trace context"),
)
