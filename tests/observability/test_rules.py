"""The exported rules in promtool's own rule tests: each alert fires for its fault, and only then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.cli.dashboards import RULES, export_to
from penstock.observability.grafana import DASHBOARDS, FLEET
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
        [
            grows(f"penstock_refused_total{MODEL}", 4),
            grows(f"penstock_engine_refused_total{MODEL}", 8),
            grows(f"penstock_refused_deadlines_total{MODEL}", 90),
            *failed(0),
        ],
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


GATEWAYS = ("gateway-0", "gateway-1")


def at(gateway: str, series: str) -> str:
    """As Prometheus has it after a scrape."""
    name, _, labels = series.partition("{")
    return f'{name}{{job="penstock-prod",namespace="ml",instance="{gateway}",' + (labels or "}")


# What two gateways report alike of their only replica, its engine and its GPU; and what each counts of its own.
OF_REPLICAS = [
    stays(f"penstock_replica_up{REPLICA}", 1),
    stays(f"penstock_replica_waiting{REPLICA}", 6),
    stays(f"penstock_replica_kv_utilisation{REPLICA}", 0.5),
    stays(f"penstock_replica_resident_bytes{REPLICA}", 1e9),
    stays(f"penstock_running_sequences{MODEL}", 3),
    stays(f"penstock_waiting_sequences{MODEL}", 6),
    grows(f"penstock_engine_preemptions_total{MODEL}", 30),
    grows(f"penstock_engine_expired_total{MODEL}", 30),
    grows(f"penstock_engine_steps_total{MODEL}", 60),
    grows(f"penstock_engine_batch_tokens_total{MODEL}", 600),
    grows(f"penstock_replica_cpu_seconds_total{REPLICA}", 15),
    grows(f"penstock_gpu_energy_joules_total{GPU}", 6000),
    stays('penstock_budget_spent_ratio{tenant="ann",period="day"}', 0.2),
]
OF_EACH_GATEWAY = [
    stays("penstock_requests_in_flight", 2),
    stays(f"penstock_replica_streams{REPLICA}", 2),
    stays(f"penstock_held_requests{MODEL}", 1),
    grows(f"penstock_output_tokens_total{MODEL}", 300),
    grows("penstock_recomputed_tokens_total", 30),
    grows('penstock_spend_total{tenant="ann",model="m"}', 8),
    grows('penstock_tenant_tokens_total{tenant="ann",model="m",kind="output"}', 1e6),
    stays("penstock_machine_cost_per_million_tokens", 8),
]
LOST_ONCE = (f"penstock_replica_restarts_total{REPLICA}", f"0x{SAMPLES - 10} 1x10")
# By dashboard and panel: what each line is meanwhile.
SHOWN: dict[tuple[str, str], list[tuple[str, float] | None]] = {
    ("fleet", "Replicas that serve"): [('{model="m"}', 1)],
    ("fleet", "Waiting"): [(REPLICA, 6)],
    ("fleet", "Streams"): [(REPLICA, 4)],
    ("fleet", "KV memory in use"): [(REPLICA, 0.5)],
    ("fleet", "Held for a replica"): [(MODEL, 2)],
    ("fleet", "CPU of replicas"): [(REPLICA, 0.5)],
    ("fleet", "Memory of replicas"): [(REPLICA, 1e9)],
    ("overview", "Requests in flight"): [("{}", 4)],
    ("overview", "Engine"): [(MODEL, 3), (MODEL, 6)],
    ("overview", "Output tokens"): [(MODEL, 20)],
    ("overview", "Cost per million tokens"): [(MODEL, 8)],
    ("latency", "Refused and expired"): [None, None, (MODEL, 1)],
    ("capacity", "Preempted, recomputed"): [(MODEL, 1), ("{}", 2)],
    ("capacity", "Tokens a step"): [(MODEL, 10)],
    ("tenants", "Budgets"): [('{tenant="ann",period="day"}', 0.2)],
    ("tenants", "Cost per million tokens"): [(MODEL, 8), ("{}", 4)],
    ("gpu", "Energy per output token"): [(MODEL, 10)],
}


def test_two_gateways_of_one_replica_count_it_once(tmp_path: Path) -> None:
    """And what each counts of its own requests adds up. The threshold of a flood is that of sequences that wait."""
    export_to(tmp_path)
    panels = {(dashboard.name, panel.title): panel.queries for dashboard in DASHBOARDS for panel in dashboard.panels}
    expected: list[dict[str, Any]] = [
        {
            "expr": query.replace("$__rate_interval", "5m"),
            "eval_time": "1h",
            "exp_samples": [] if shown is None else [{"labels": shown[0], "value": shown[1]}],
        }
        for panel, lines in SHOWN.items()
        for (query, _), shown in zip(panels[panel], lines, strict=True)
    ]
    expected += [
        {"expr": 'count(ALERTS{alertname="PenstockTenantFloods"}) or vector(0)', "eval_time": "1h",
         "exp_samples": [{"labels": "{}", "value": 0}]},
        {"expr": 'count(ALERTS{alertname="PenstockReplicaRestarted"})', "eval_time": "1h",
         "exp_samples": [{"labels": "{}", "value": 1}]},
    ]  # fmt: skip
    both = [(at(gateway, series), values) for gateway in GATEWAYS for series, values in OF_REPLICAS + OF_EACH_GATEWAY]
    both += [(at(gateway, LOST_ONCE[0]), LOST_ONCE[1]) for gateway in GATEWAYS]
    series = [{"series": name, "values": values} for name, values in both]
    run_rule_tests(tmp_path, tmp_path / RULES, [{"input_series": series, "promql_expr_test": expected}])


def test_fleets_with_replicas_of_the_same_name_add_up(tmp_path: Path) -> None:
    export_to(tmp_path)
    (query, _), *_ = next(panel.queries for panel in FLEET.panels if panel.title == "Replicas that serve")
    ups = ['{job="penstock-a",%s', '{job="penstock-b",%s', '{job="penstock-b",namespace="ml",%s']
    series = [{"series": f"penstock_replica_up{up % REPLICA[1:]}", "values": "1x9"} for up in ups]
    expected = {"expr": query, "eval_time": "2m", "exp_samples": [{"labels": MODEL, "value": 3}]}
    run_rule_tests(tmp_path, tmp_path / RULES, [{"input_series": series, "promql_expr_test": [expected]}])


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
