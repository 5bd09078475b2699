"""The document at /openapi.json is true: schemathesis sends what it allows and what it forbids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
import schemathesis.specs.openapi.schemas  # at its first use, beside another thread, compiling it may fail in 3.11
from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from penstock.gateway.api.endpoint import Endpoint
from penstock.gateway.api.endpoints import ENDPOINTS
from penstock.gateway.api.openapi import documented_path
from penstock.text.tokenizer import Tokenizer
from tests.gateway.conftest import Gateway, serving

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
MODES = {
    # What the document forbids must be refused; what it allows may still be refused for what a schema cannot say,
    # such as a prompt that is too long.
    GenerationMode.NEGATIVE: [*CHECKS, negative_data_rejection],
    GenerationMode.POSITIVE: CHECKS,
}


@pytest.fixture(scope="module")
def admin_gateway(tokenizer: Tokenizer) -> Iterator[Gateway]:
    """Of its own: the first tenant made there ends the time when nobody needed a key."""
    with serving(tokenizer) as gateway:
        yield gateway


UNREAD = {"x-penstock-class", "x-penstock-deadline-ms"}
NO_ANSWER = ("/admin/live", "/v1/stream")  # a stream that never ends, and a WebSocket

CASES = [(op, GenerationMode.POSITIVE) for op in ENDPOINTS if op.path not in NO_ANSWER] + [
    (op, GenerationMode.NEGATIVE) for op in ENDPOINTS if op.body is not None or op.path == "/v1/requests"
]


@pytest.mark.parametrize(
    ("operation", "mode"), CASES, ids=[f"{op.method} {op.path} {mode.value}" for op, mode in CASES]
)
def test_operations_conform(
    shared_gateway: Gateway, admin_gateway: Gateway, operation: Endpoint, mode: GenerationMode
) -> None:
    admin = operation.path.startswith("/admin")
    gateway = admin_gateway if admin else shared_gateway
    headers = {"Authorization": f"Bearer {gateway.key('')}"} if admin else {}
    schema = schemathesis.openapi.from_url(f"{gateway.url}/openapi.json")
    found = schema[documented_path(operation)][operation.method]
    answered = set()

    @seed(20261115)
    @settings(
        max_examples=25 if operation.body else 8,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=found.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        # Refused only where the body does not say the same and something is generated: see test_objectives.py.
        assume(mode is GenerationMode.POSITIVE or UNREAD.isdisjoint(case.headers))
        response = case.call(headers=headers)
        answered.add(response.status_code)
        checks = MODES[mode]
        if response.status_code == 504 and (case.body.get("deadline_ms") or "x-penstock-deadline-ms" in case.headers):
            checks = [check for check in checks if check is not not_a_server_error]  # it was asked for
        if response.status_code == 413:  # which is no word of whether the body is right
            checks = [check for check in checks if check is not negative_data_rejection]
        case.validate_response(response, checks=checks)

    check()
    if mode is GenerationMode.POSITIVE and "{" not in operation.path and operation.body is None:
        assert operation.status in answered, f"nothing got through: {answered}"


def test_every_request_header_is_documented(shared_gateway: Gateway) -> None:
    with shared_gateway.http() as http:
        operation = http.get("/openapi.json").json()["paths"]["/v1/chat/completions"]["post"]
    schemas = {each["name"]: each["schema"] for each in operation["parameters"]}
    assert {"x-penstock-class", "x-penstock-deadline-ms", "x-penstock-session", "x-session-id"} <= set(schemas)
    assert schemas["x-penstock-class"] == {"enum": ["interactive", "standard", "batch"]}


def test_every_route_is_documented(shared_gateway: Gateway) -> None:
    with shared_gateway.http() as http:
        document = http.get("/openapi.json").json()
        documented = {(path, method) for path, operations in document["paths"].items() for method in operations}
        for path, method in documented:
            with http.stream(method, path.replace("{", "").replace("}", ""), content=b"") as response:
                body = response.read() if response.status_code == 404 else b""
            assert response.status_code != 405, (method, path)
            assert b"unknown_path" not in body, (method, path)
    assert documented == {(path, op.method.lower()) for op in ENDPOINTS for path in (documented_path(op), *op.aliases)}
