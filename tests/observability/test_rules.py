"""The exported rules in promtool's own rule tests: each alert fires for its fault, and only then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.cli.dashboards import RULES, export_to
from penstock.observability.rules import ALERTS
from tests.observability.rule_tests import SAMPLES, run_rule_tests

OBJECTIVE = 'penstock_objectives_total{model="m",class="interactive",objective="%s",met="%s"}'
ANSWERS = 'penstock_answers_total{model="m",status="%s"}'
MODEL = '{model="m"}'
REPLICA = '{model="m",replica="m-0"}'
GPU = '{model="m",replica="m-0",gpu="GPU-0"}'
TOKENS = 'penstock_tenant_tokens_total{tenant="%s",model="m"}'
GROWING, STEADY = "0+%sx" + str(SAMPLES), "%s+0x" + str(SAMPLES)


def grows(series: str, per_sample: float) -> tuple[str, str]:
    return series, GROWING % per_sample


def stays(series: str, value: float) -> tuple[str, str]:
    return series, STEADY % value


def missed(objective: str, of_a_hundred: float) -> list[tuple[str, str]]:
    return [
        grows(OBJECTIVE % (objective, "true"), 100 - of_a_hundred),
        grows(OBJECTIVE % (objective, "false"), of_a_hundred),
    ]


def failed(of_a_hundred: float) -> list[tuple[str, str]]:
    return [grows(ANSWERS % 200, 100 - of_a_hundred), grows(ANSWERS % 502, of_a_hundred)]


# What the metrics are while each alert must fire, and while it must not.
CASES: dict[str, tuple[list[tuple[str, str]], list[tuple[str, str]]]] = {
    "PenstockTTFTOverObjective": (missed("ttft", 2), missed("ttft", 0.5)),
    "PenstockITLOverObjective": (missed("gap", 2), missed("gap", 0.5)),
    "PenstockObjectiveBudgetBurnFast": (missed("ttft", 20), missed("ttft", 10)),
    "PenstockObjectiveBudgetBurnSlow": (missed("ttft", 10), missed("ttft", 5)),
    "PenstockErrorBudgetBurnFast": (failed(20), failed(10)),
    "PenstockErrorBudgetBurnSlow": (failed(10), failed(5)),
    "PenstockQueueGrows": (
        [grows(f"penstock_waiting_sequences{MODEL}", 1)],
        [stays(f"penstock_waiting_sequences{MODEL}", 100)],
    ),
    "PenstockRequestsRefused": (
        [grows(f"penstock_refused_total{MODEL}", 6), *failed(0)],
        [grows(f"penstock_refused_total{MODEL}", 4), grows(f"penstock_engine_refused_total{MODEL}", 8), *failed(0)],
    ),
    "PenstockTenantFloods": (
        [grows(TOKENS % "ann", 90), grows(TOKENS % "bob", 10), stays(f"penstock_waiting_sequences{MODEL}", 20)],
        [grows(TOKENS % "ann", 90), grows(TOKENS % "bob", 10), stays(f"penstock_waiting_sequences{MODEL}", 0)],
    ),
    "PenstockTenantLimited": (
        [grows('penstock_limited_total{tenant="ann",limit="requests"}', 60)],
        [grows('penstock_limited_total{tenant="ann",limit="requests"}', 1)],
    ),
    "PenstockBudgetNearlySpent": (
        [stays('penstock_budget_spent_ratio{tenant="ann",period="day"}', 0.95)],
        [stays('penstock_budget_spent_ratio{tenant="ann",period="day"}', 0.5)],
    ),
    "PenstockKVPressure": (
        [
            stays(f"penstock_replica_kv_utilisation{REPLICA}", 0.99),
            grows(f"penstock_engine_preemptions_total{MODEL}", 1),
        ],
        [
            stays(f"penstock_replica_kv_utilisation{REPLICA}", 0.99),
            stays(f"penstock_engine_preemptions_total{MODEL}", 7),
        ],
    ),
    "PenstockKVFragmented": (
        [
            stays(f"penstock_replica_kv_fragmentation{REPLICA}", 0.5),
            stays(f"penstock_replica_kv_utilisation{REPLICA}", 0.9),
        ],
        [
            stays(f"penstock_replica_kv_fragmentation{REPLICA}", 0.5),
            stays(f"penstock_replica_kv_utilisation{REPLICA}", 0.5),
        ],
    ),
    "PenstockPrefixHitsCollapsed": (
        [
            ("penstock_engine_cached_tokens_total" + MODEL, f"0+80x{SAMPLES - 30} {80 * (SAMPLES - 30)}+1x30"),
            grows(f"penstock_engine_prompt_tokens_total{MODEL}", 100),
        ],
        [
            grows(f"penstock_engine_cached_tokens_total{MODEL}", 80),
            grows(f"penstock_engine_prompt_tokens_total{MODEL}", 100),
        ],
    ),
    "PenstockReplicaDown": (
        [stays(f"penstock_replica_up{REPLICA}", 0), stays(f"penstock_replica_restarts_total{REPLICA}", 1)],
        [stays(f"penstock_replica_up{REPLICA}", 0), stays(f"penstock_replica_restarts_total{REPLICA}", 0)],
    ),
    "PenstockModelDown": (
        [stays(f"penstock_replica_up{REPLICA}", 0), stays('penstock_replica_up{model="other",replica="other-0"}', 1)],
        [stays(f"penstock_replica_up{REPLICA}", 0), stays('penstock_replica_up{model="m",replica="m-1"}', 1)],
    ),
    "PenstockReplicaRestarted": (
        [grows(f"penstock_replica_restarts_total{REPLICA}", 0.05)],
        [stays(f"penstock_replica_restarts_total{REPLICA}", 3)],
    ),
    "PenstockEngineStalled": (
        [stays(f"penstock_seconds_since_step{MODEL}", 8)],
        [stays(f"penstock_seconds_since_step{MODEL}", 1)],
    ),
    "PenstockSharedStateDown": ([stays("penstock_state_up", 0)], [stays("penstock_state_up", 1)]),
    "PenstockAnswerCacheDown": (
        [stays('penstock_answer_cache_up{tier="redis"}', 0)],
        [stays('penstock_answer_cache_up{tier="redis"}', 1)],
    ),
    "PenstockGPUHot": (
        [stays(f"penstock_gpu_temperature_celsius{GPU}", 90)],
        [stays(f"penstock_gpu_temperature_celsius{GPU}", 70)],
    ),
    "PenstockGPUMemoryFull": (
        [stays(f"penstock_gpu_memory_used_bytes{GPU}", 99), stays(f"penstock_gpu_memory_bytes{GPU}", 100)],
        [stays(f"penstock_gpu_memory_used_bytes{GPU}", 90), stays(f"penstock_gpu_memory_bytes{GPU}", 100)],
    ),
    "PenstockGPUPowerLimited": (
        [
            stays(f"penstock_gpu_power_watts{GPU}", 699),
            stays(f"penstock_gpu_power_limit_watts{GPU}", 700),
            stays(f"penstock_gpu_clock_hertz{GPU}", 1),
            stays(f"penstock_gpu_clock_limit_hertz{GPU}", 2),
        ],
        [
            stays(f"penstock_gpu_power_watts{GPU}", 699),
            stays(f"penstock_gpu_power_limit_watts{GPU}", 700),
            stays(f"penstock_gpu_clock_hertz{GPU}", 1.9),
            stays(f"penstock_gpu_clock_limit_hertz{GPU}", 2),
        ],
    ),
    "PenstockDown": ([stays('up{job="penstock"}', 0)], [stays('up{job="penstock"}', 1)]),
}


def test_every_alert_has_a_case() -> None:
    assert sorted(CASES) == sorted(alert.name for alert in ALERTS)


@pytest.mark.parametrize("fires", [True, False])
def test_alerts_fire_for_their_fault_alone(tmp_path: Path, fires: bool) -> None:
    export_to(tmp_path)
    run_rule_tests(tmp_path, tmp_path / RULES, [rule_test(name, fires) for name in CASES])


def rule_test(name: str, fires: bool) -> dict[str, Any]:
    """`promql_expr_test` counts the alert, whatever its labels and texts are."""
    series = CASES[name][0 if fires else 1]
    expr = f'count(ALERTS{{alertname="{name}",alertstate="firing"}}) or vector(0)'
    return {
        "input_series": [{"series": labels, "values": values} for labels, values in series],
        "promql_expr_test": [
            {"expr": expr, "eval_time": "1h", "exp_samples": [{"labels": "{}", "value": 1 if fires else 0}]}
        ],
    }
