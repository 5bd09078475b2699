"""Counters of what can go wrong are there before it does. Prometheus sees no growth in a series that appears with the
first burst of events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from penstock.cli.dashboards import RULES, export_to
from penstock.settings import settings_from_mapping
from penstock.simulation.scripted_engine import MODEL
from tests.gateway.conftest import serving
from tests.gateway.scripted_server import load_built_in_tokenizer
from tests.observability.rule_tests import run_rule_tests

SETTINGS = {
    "classes": {"chat": {"ttft_ms": 500, "itl_ms": 100}, "batch": {"rank": 1}},
    "tenants": {"ann": {"requests_per_minute": 10}, "bob": {"model_limits": {MODEL: {"concurrent": 1}}}, "eve": {}},
}
MISSED = f'penstock_objectives_total{{model="{MODEL}",class="chat",objective="%s",met="false"}}'
BURSTS = {
    "PenstockErrorBudgetBurnFast": f'penstock_answers_total{{model="{MODEL}",status="503"}}',
    "PenstockTTFTOverObjective": MISSED % "ttft",
    "PenstockITLOverObjective": MISSED % "gap",
    "PenstockTenantLimited": 'penstock_limited_total{tenant="ann",limit="requests"}',
}


@pytest.fixture(scope="module")
def unused() -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """The counters of a gateway that has had no request."""
    with serving(load_built_in_tokenizer(), settings_from_mapping(SETTINGS)) as gateway:
        text = generate_latest(gateway.edge.metrics.registry).decode()
    return {key(sample): sample.value for sample in samples(text)}


def samples(text: str) -> list[Any]:
    families = text_string_to_metric_families(text)
    return [sample for family in families if family.type == "counter" for sample in family.samples]


def key(sample: Any) -> tuple[str, frozenset[tuple[str, str]]]:
    return sample.name, frozenset(sample.labels.items())


def test_the_first_burst_of_a_failure_raises_its_alert(tmp_path: Path, unused: dict[Any, float]) -> None:
    """Two hundred at once, an hour after the start, seen by scrapes before and after."""
    export_to(tmp_path)
    tests = []
    for alert, series in BURSTS.items():
        (sample,) = samples(f"# TYPE {series.partition('{')[0]} counter\n{series} 200\n")
        before = f"{unused[key(sample)]:g}x119" if key(sample) in unused else "_x119"
        expr = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})'
        tests.append(
            {
                "input_series": [{"series": series, "values": f"{before} 200x20"}],
                "promql_expr_test": [
                    # The shortest window is a minute, the longest wait two.
                    {"expr": f"{expr} or vector(0)", "eval_time": at, "exp_samples": [{"labels": "{}", "value": fires}]}
                    for at, fires in (("59m", 0), ("60m" if alert == "PenstockTenantLimited" else "64m", 1))
                ],
            }
        )
    run_rule_tests(tmp_path, tmp_path / RULES, tests)


def test_what_cannot_happen_is_not_counted(unused: dict[Any, float]) -> None:
    """Classes without an objective, tenants without a limit, and statuses of endpoints have no series."""
    labels = [dict(labels) for name, labels in unused if name == "penstock_objectives_total"]
    assert {each["class"] for each in labels} == {"chat"}
    assert len(labels) == 4
    limited = {tuple(sorted(dict(labels).values())) for name, labels in unused if name == "penstock_limited_total"}
    assert limited == {("ann", "requests"), ("bob", "concurrent")}
    assert not [name for name, _ in unused if name == "penstock_requests_total"]
