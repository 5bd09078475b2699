"""How a request gets its class, its objective and its deadline."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.core.engine import EngineStats
from penstock.core.request import GenerateRequest, Objective
from penstock.gateway.api.objectives import Objectives, derived
from penstock.settings import settings_from_mapping
from penstock.simulation.scripted_engine import MODEL
from penstock.text.tokenizer import Tokenizer
from tests.gateway.api.test_bad_input import check_error
from tests.gateway.conftest import Gateway, serving

BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
SETTINGS: dict[str, Any] = {
    "classes": {"interactive": {"ttft_ms": 200, "itl_ms": 50}, "standard": {}, "gold": {"ttft_ms": 100, "rank": -1}},
    "tenants": {"plain": {}, "vip": {"default_class": "gold"}, "hasty": {"timeout_seconds": 60}},
}


@pytest.fixture(scope="module")
def gateway(tokenizer: Tokenizer) -> Iterator[Gateway]:
    with serving(tokenizer, settings_from_mapping(SETTINGS)) as gateway:
        yield gateway


def post(gateway: Gateway, tenant: str, headers: dict[str, str] | None = None, **body: Any) -> Any:
    with gateway.http() as http:
        key = gateway.key(tenant)
        return http.post(
            "/v1/chat/completions", json={**BODY, **body}, headers={"authorization": f"Bearer {key}", **(headers or {})}
        )


def submitted(gateway: Gateway, tenant: str, headers: dict[str, str] | None = None, **body: Any) -> GenerateRequest:
    response = post(gateway, tenant, headers, **body)
    assert response.status_code == 200, response.text
    return gateway.engine.requests[-1]


@pytest.mark.parametrize(
    ("tenant", "tier", "header", "expected"),
    [
        ("plain", None, None, "standard"),
        ("vip", None, None, "gold"),
        ("vip", "default", None, "standard"),
        ("vip", "auto", None, "gold"),
        ("vip", "auto", "interactive", "interactive"),
        ("vip", "priority", None, "interactive"),
        ("plain", "gold", "interactive", "gold"),
        ("plain", None, "gold", "gold"),
    ],
)
def test_the_class_is_chosen(
    gateway: Gateway, tenant: str, tier: str | None, header: str | None, expected: str
) -> None:
    headers = {} if header is None else {"x-penstock-class": header}
    request = submitted(gateway, tenant, headers, **({} if tier is None else {"service_tier": tier}))
    assert request.objective.name == expected
    assert request.tenant == tenant


def test_what_classes_are_promised_can_be_asked(gateway: Gateway) -> None:
    with gateway.http() as http:
        card = http.get("/v1/models", headers={"authorization": f"Bearer {gateway.key('plain')}"}).json()["data"][0]
    assert card["classes"]["gold"] == {"ttft_ms": 100.0, "itl_ms": None}
    assert card["classes"]["standard"] == {"ttft_ms": None, "itl_ms": None}


def test_objectives_of_the_settings(gateway: Gateway) -> None:
    assert submitted(gateway, "vip").objective == Objective("gold", 0.1, None, -1, paced=True)
    assert submitted(gateway, "plain", service_tier="interactive").objective == Objective("interactive", 0.2, 0.05, 0)


@pytest.mark.parametrize(
    ("headers", "body", "param"),
    [
        ({}, {"service_tier": "bronze"}, "service_tier"),
        ({}, {"service_tier": "flex"}, "service_tier"),  # means batch, which these settings do not have
        ({}, {"service_tier": ""}, "service_tier"),
        ({"x-penstock-class": "bronze"}, {}, "x-penstock-class"),
        ({"x-penstock-class": ""}, {}, "x-penstock-class"),
        ({}, {"deadline_ms": 0}, "deadline_ms"),
        ({}, {"deadline_ms": -5}, "deadline_ms"),
        ({}, {"deadline_ms": 1e12}, "deadline_ms"),
        ({"x-penstock-deadline-ms": "soon"}, {}, "x-penstock-deadline-ms"),
    ],
)
def test_unknown_classes_and_deadlines_are_refused(
    gateway: Gateway, headers: dict[str, str], body: dict[str, Any], param: str
) -> None:
    error = check_error(post(gateway, "plain", headers, **body), 400, param)
    if "deadline" not in param:
        sent = body.get("service_tier", headers.get("x-penstock-class"))
        assert f"interactive, standard, gold, not {sent!r}" in error["message"]


def test_deadlines_count_from_arrival_and_the_shorter_one_wins(gateway: Gateway) -> None:
    def check(allowed: float, tenant: str, headers: dict[str, str] | None = None, **body: Any) -> None:
        """What is left when the engine gets it: less than allowed, but by no more than has passed here."""
        begun = time.monotonic()
        left = submitted(gateway, tenant, headers, **body).deadline
        assert left is not None
        assert allowed - (time.monotonic() - begun) <= left < allowed

    assert submitted(gateway, "plain").deadline is None
    check(300, "plain", deadline_ms=300_000)
    check(300, "plain", {"x-penstock-deadline-ms": "300000"})
    check(60, "hasty", deadline_ms=300_000)
    check(40, "hasty", deadline_ms=40_000)
    check_error(post(gateway, "plain", deadline_ms=0.001), 504, "deadline_ms")


def test_the_answer_names_the_tier_that_was_asked_for(gateway: Gateway) -> None:
    client = gateway.client(gateway.key("plain"))
    ask: dict[str, Any] = {"model": MODEL, "messages": BODY["messages"]}
    assert client.chat.completions.create(**ask).service_tier is None
    assert client.chat.completions.create(**ask, service_tier="auto").service_tier == "default"
    assert client.chat.completions.create(**ask, service_tier="priority").service_tier == "priority"
    chunks = list(client.chat.completions.create(**ask, service_tier="priority", stream=True))
    assert {chunk.service_tier for chunk in chunks} == {"priority"}


def test_built_in_classes_promise_what_the_machine_can_keep() -> None:
    unknown, slow = EngineStats(), EngineStats(usual_prompt_seconds=1.0, loaded_step_seconds=0.1)
    fast = EngineStats(usual_prompt_seconds=0.001, loaded_step_seconds=0.001)
    assert derived("interactive", unknown) == Objective("interactive", paced=True)
    assert derived("interactive", slow) == Objective("interactive", 4.0, 0.4)
    assert derived("interactive", fast) == Objective("interactive", 0.2, 0.05)
    assert derived("standard", slow) == Objective("standard", paced=True)
    assert derived("batch", slow) == Objective("batch", None, None, 1)


def test_what_a_built_in_class_promises_stays_when_the_machine_gets_slow() -> None:
    readings = [
        EngineStats(),
        EngineStats(usual_prompt_seconds=0.5, loaded_step_seconds=0.02),
        EngineStats(usual_prompt_seconds=3.0, loaded_step_seconds=0.2),
    ]
    objectives = Objectives({}, None, lambda: readings[0])
    assert objectives.objective("interactive").ttft is None  # nothing is promised before the speed is known
    readings.pop(0)
    assert objectives.objective("interactive") == Objective("interactive", 2.0, 0.08)
    readings.pop(0)
    assert objectives.objective("interactive") == Objective("interactive", 2.0, 0.08)
