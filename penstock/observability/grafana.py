"""Grafana dashboards as data: each is a page of panels over a Prometheus data source that is chosen in Grafana."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

COLUMNS = 24  # of Grafana's grid
WIDTH, HEIGHT = 8, 8  # of a panel

Unit = Literal[
    "short", "s", "percentunit", "reqps", "tps", "bytes", "Bps", "watt", "celsius", "hertz", "currencyUSD", "ops"
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    unit: Unit
    queries: tuple[tuple[str, str], ...]  # (PromQL, legend)
    about: str = ""
    stacked: bool = False
    threshold: float | None = None  # from here on red

    def json(self, number: int) -> dict[str, Any]:
        steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
        if self.threshold is not None:
            steps.append({"color": "red", "value": self.threshold})
        per_row = COLUMNS // WIDTH
        source = {"type": "prometheus", "uid": "${source}"}
        return {
            "id": number + 1,
            "type": "timeseries",
            "title": self.title,
            "description": self.about,
            "datasource": source,
            "gridPos": {"x": number % per_row * WIDTH, "y": number // per_row * HEIGHT, "w": WIDTH, "h": HEIGHT},
            "fieldConfig": {
                "defaults": {
                    "unit": self.unit,
                    "min": 0,
                    "thresholds": {"mode": "absolute", "steps": steps},
                    "custom": {
                        "fillOpacity": 30 if self.stacked else 8,
                        "lineWidth": 1,
                        "stacking": {"mode": "normal" if self.stacked else "none"},
                        "thresholdsStyle": {"mode": "off" if self.threshold is None else "dashed"},
                    },
                },
                "overrides": [],
            },
            "options": {
                "legend": {"displayMode": "list", "placement": "bottom"},
                "tooltip": {"mode": "multi", "sort": "desc"},
            },
            "targets": [
                {
                    "refId": chr(ord("A") + i),
                    "expr": query,
                    "legendFormat": legend,
                    "datasource": source,
                    "exemplar": query.startswith("histogram_quantile"),  # a dot for each, which leads to its trace
                }
                for i, (query, legend) in enumerate(self.queries)
            ],
        }


@dataclass(frozen=True, slots=True)
class Dashboard:
    name: str  # of its file
    title: str
    about: str
    panels: tuple[Panel, ...]

    def json(self) -> dict[str, Any]:
        return {
            "uid": f"penstock-{self.name}",
            "title": f"Penstock: {self.title}",
            "description": self.about,
            "tags": ["penstock"],
            "schemaVersion": 39,
            "version": 1,
            "editable": True,
            "refresh": "10s",
            "time": {"from": "now-1h", "to": "now"},
            "templating": {
                "list": [
                    {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus", "hide": 0}
                ]
            },
            "links": [{"type": "dashboards", "tags": ["penstock"], "title": "Penstock", "asDropdown": True}],
            "annotations": {"list": []},
            "panels": [panel.json(number) for number, panel in enumerate(self.panels)],
        }


def _rate(metric: str, by: str = "model") -> str:
    return f"sum by ({by}) (rate({metric}[$__rate_interval]))"


def _over(part: str, whole: str, by: str = "model") -> str:
    return f"{_rate(part, by)} / ({_rate(whole, by)} > 0)"


def _quantiles(metric: str) -> tuple[tuple[str, str], ...]:
    buckets = f"sum by (model, le) (rate({metric}_bucket[$__rate_interval]))"
    return tuple(
        (f"histogram_quantile({quantile}, {buckets})", f"p{quantile * 100:g} {{{{model}}}}")
        for quantile in (0.5, 0.9, 0.99)
    )


OVERVIEW = Dashboard(
    "overview",
    "overview",
    "Is it up, is it fast, is it busy, and what does it cost.",
    (
        Panel(
            "Requests by status", "reqps", ((_rate("penstock_requests_total", "status"), "{{status}}"),), stacked=True
        ),
        Panel("Requests in flight", "short", (("penstock_requests_in_flight", "in flight"),)),
        Panel("Output tokens", "tps", ((_rate("penstock_output_tokens_total"), "{{model}}"),), stacked=True),
        Panel("Time to first token", "s", _quantiles("penstock_time_to_first_token_seconds")),
        Panel("Inter-token latency", "s", _quantiles("penstock_inter_token_seconds")),
        Panel(
            "Objectives met",
            "percentunit",
            (
                (
                    _over(
                        'penstock_objectives_total{met="true"}', "penstock_objectives_total", "model, class, objective"
                    ),
                    "{{class}} {{objective}}",
                ),
            ),
        ),
        Panel(
            "Engine", "short", (("penstock_running_sequences", "running"), ("penstock_waiting_sequences", "waiting"))
        ),
        Panel(
            "Answers by where they came from",
            "ops",
            ((_rate("penstock_answer_cache_requests_total", "state"), "{{state}}"),),
            stacked=True,
        ),
        Panel("Cost per million tokens", "currencyUSD", (("penstock_cost_per_million_tokens", "{{model}}"),)),
    ),
)

LATENCY = Dashboard(
    "latency",
    "latency and objectives",
    "What was promised, what was kept, how fast the error budget burns, and where the time of requests goes.",
    (
        Panel("Time to first token", "s", _quantiles("penstock_time_to_first_token_seconds")),
        Panel("Inter-token latency", "s", _quantiles("penstock_inter_token_seconds")),
        Panel("Objectives", "s", (("penstock_objective_seconds", "{{class}} {{objective}}"),)),
        Panel(
            "Error budget burn rate, one hour",
            "short",
            (
                ("penstock:objectives_missed:ratio_rate1h / 0.01", "{{class}} {{objective}}"),
                ("penstock:errors:ratio_rate1h / 0.01", "5xx {{model}}"),
            ),
            "1: the budget of 1% lasts exactly as long as its period. An alert fires at 14.4.",
            threshold=14.4,
        ),
        Panel(
            "Where the time of requests goes",
            "percentunit",
            (
                (
                    f"{_rate('penstock_part_seconds_total', 'part')} / "
                    "scalar(sum(rate(penstock_part_seconds_total[$__rate_interval])) > 0)",
                    "{{part}}",
                ),
            ),
            stacked=True,
        ),
        Panel(
            "Why requests queue",
            "short",
            ((_rate("penstock_queue_cause_seconds_total", "cause"), "{{cause}}"),),
            "Seconds of waiting a second.",
            stacked=True,
        ),
        Panel("Queued in the engine", "s", _quantiles("penstock_queue_seconds")),
        Panel("Whole requests", "s", _quantiles("penstock_request_seconds")),
        Panel(
            "Refused and expired",
            "reqps",
            (
                (_rate("penstock_refused_total"), "refused {{model}}"),
                (_rate("penstock_engine_expired_total"), "deadline passed {{model}}"),
            ),
        ),
    ),
)

CAPACITY = Dashboard(
    "capacity",
    "capacity",
    "How full the engines are, what their steps hold, and what the caches save.",
    (
        Panel("KV memory in use", "percentunit", (("penstock_kv_utilisation", "{{model}}"),), threshold=0.95),
        Panel(
            "KV fragmentation",
            "percentunit",
            (("penstock_replica_kv_fragmentation", "{{model}} {{replica}}"),),
            "Share of the token slots in held KV blocks that hold no token.",
            threshold=0.4,
        ),
        Panel(
            "Sequences a step",
            "short",
            ((_over("penstock_engine_batch_sequences_total", "penstock_engine_steps_total"), "{{model}}"),),
        ),
        Panel(
            "Tokens a step",
            "short",
            ((_over("penstock_engine_batch_tokens_total", "penstock_engine_steps_total"), "{{model}}"),),
        ),
        Panel(
            "Prefix cache hits",
            "percentunit",
            ((_over("penstock_engine_cached_tokens_total", "penstock_engine_prompt_tokens_total"), "{{model}}"),),
        ),
        Panel(
            "Why prompt tokens were computed",
            "tps",
            ((_rate("penstock_cache_miss_tokens_total", "cause"), "{{cause}}"),),
            stacked=True,
        ),
        Panel(
            "Preempted, recomputed",
            "short",
            (
                (_rate("penstock_engine_preemptions_total"), "preemptions {{model}}"),
                ("rate(penstock_recomputed_tokens_total[$__rate_interval])", "tokens computed again"),
            ),
        ),
        Panel(
            "Memory bandwidth of steps, estimated",
            "Bps",
            ((_over("penstock_engine_read_bytes_estimate_total", "penstock_engine_step_seconds_total"), "{{model}}"),),
            "On CPUs: bytes of weights and KV that steps read, over the time that they took. A decoding engine that is "
            "near what the memory gives cannot be faster.",
        ),
        Panel("Prefill speed", "tps", (("penstock_prefill_tokens_per_second", "{{model}}"),)),
        Panel("Predicted decode step", "s", (("penstock_decode_step_seconds", "{{model}}"),)),
        Panel(
            "Error of the step-time model",
            "percentunit",
            (("penstock_step_time_error", "{{model}}"),),
            "Median of |predicted - measured| / measured.",
        ),
        Panel("Answer cache", "bytes", (("penstock_answer_cache_bytes", "{{tier}}"),)),
    ),
)

FLEET = Dashboard(
    "fleet",
    "fleet",
    "Replicas: which serve, how loaded they are, and how often they were lost.",
    (
        Panel("Replicas that serve", "short", (("sum by (model) (penstock_replica_up)", "{{model}}"),)),
        Panel("Streams", "short", (("penstock_replica_streams", "{{model}} {{replica}}"),), stacked=True),
        Panel("Waiting", "short", (("penstock_replica_waiting", "{{model}} {{replica}}"),)),
        Panel("KV memory in use", "percentunit", (("penstock_replica_kv_utilisation", "{{model}} {{replica}}"),)),
        Panel(
            "Restarts and failovers",
            "short",
            (
                ("sum by (model, replica) (increase(penstock_replica_restarts_total[10m]))", "{{replica}} restarted"),
                ("sum by (model) (increase(penstock_failovers_total[10m]))", "{{model}} failed over"),
            ),
            "In the last ten minutes.",
        ),
        Panel(
            "CPU of replicas", "short", (("rate(penstock_replica_cpu_seconds_total[$__rate_interval])", "{{replica}}"),)
        ),
        Panel("Memory of replicas", "bytes", (("penstock_replica_resident_bytes", "{{replica}}"),)),
        Panel("Held for a replica", "short", (("penstock_held_requests", "{{model}}"),)),
        Panel(
            "Phases of the last start",
            "s",
            (("penstock_replica_start_seconds", "{{replica}} {{phase}}"),),
            stacked=True,
        ),
    ),
)

TENANTS = Dashboard(
    "tenants",
    "tenants and cost",
    "Who uses how much, what it costs, and who is limited.",
    (
        Panel(
            "Tokens by tenant", "tps", ((_rate("penstock_tenant_tokens_total", "tenant"), "{{tenant}}"),), stacked=True
        ),
        Panel("Requests by tenant", "reqps", ((_rate("penstock_tenant_requests_total", "tenant"), "{{tenant}}"),)),
        Panel(
            "Spent in the last hour",
            "currencyUSD",
            (("sum by (tenant) (increase(penstock_spend_total[1h]))", "{{tenant}}"),),
        ),
        Panel("Budgets", "percentunit", (("penstock_budget_spent_ratio", "{{tenant}} {{period}}"),), threshold=0.9),
        Panel(
            "Refused for a limit",
            "reqps",
            ((_rate("penstock_limited_total", "tenant, limit"), "{{tenant}} {{limit}}"),),
        ),
        Panel(
            "Cost per million tokens",
            "currencyUSD",
            (
                ("penstock_cost_per_million_tokens", "charged, {{model}}"),
                ("penstock_machine_cost_per_million_tokens", "the machine"),
            ),
        ),
    ),
)

_GPU = "{{replica}} GPU {{gpu}}"
GPU = Dashboard(
    "gpu",
    "GPUs",
    "Use, memory, heat, power and energy per token of the GPUs that replicas run on.",
    (
        Panel("Utilisation", "percentunit", (("penstock_gpu_utilisation", _GPU),)),
        Panel(
            "Memory",
            "percentunit",
            (("penstock_gpu_memory_used_bytes / penstock_gpu_memory_bytes", _GPU),),
            threshold=0.98,
        ),
        Panel("Temperature", "celsius", (("penstock_gpu_temperature_celsius", _GPU),), threshold=85),
        Panel(
            "Power", "watt", (("penstock_gpu_power_watts", _GPU), ("penstock_gpu_power_limit_watts", f"limit {_GPU}"))
        ),
        Panel("Clock of the SMs", "hertz", (("penstock_gpu_clock_hertz", _GPU),)),
        Panel(
            "Energy per output token",
            "short",
            (
                (
                    f"{_rate('penstock_gpu_energy_joules_total')} / ({_rate('penstock_output_tokens_total')} > 0)",
                    "joules {{model}}",
                ),
            ),
        ),
    ),
)

DASHBOARDS = (OVERVIEW, LATENCY, CAPACITY, FLEET, TENANTS, GPU)
