"""Prometheus rules: recorded ratios over several windows, and alerts on them.

Objectives are judged by counters of what was met and missed, not by histogram buckets: the p99 of a class is over its
objective exactly when more than 1% of its requests missed it, whatever the objective is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.observability.promql import FLEET, added, once, total

# Of requests that may miss their objective or fail; a burn rate is a multiple of it.
ERROR_BUDGET = 0.01
Severity = Literal["critical", "warning"]
# (burn rate, long window, short window, severity): 14.4 spends 2% of a 30-day budget in an hour, 6 spends 5% in six
# hours. The short window ends the alert soon after its cause.
BURN_RATES: tuple[tuple[float, str, str, Severity], ...] = (
    (14.4, "1h", "5m", "critical"),
    (6.0, "6h", "30m", "warning"),
)
REPLICA = "model, replica"
GPU = "model, replica, gpu"
WINDOWS = ("5m", "30m", "1h", "6h")


@dataclass(frozen=True, slots=True)
class Record:
    name: str
    expr: str

    def rule(self) -> dict[str, Any]:
        return {"record": self.name, "expr": self.expr}


@dataclass(frozen=True, slots=True)
class Alert:
    name: str
    expr: str
    summary: str
    action: str  # what to look at, and what to do
    severity: Severity = "warning"
    pending: str = "0s"  # how long it must hold before the alert fires
    labels: dict[str, str] = field(default_factory=dict)

    def rule(self) -> dict[str, Any]:
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.pending,
            "labels": {"severity": self.severity, **self.labels},
            "annotations": {"summary": self.summary, "description": self.action},
        }


def _share(part: str, whole: str) -> str:
    """0 where the part has no series yet, and nothing where nothing came: no traffic is not a fault."""
    return f"({part} or {whole} * 0) / ({whole} > 0)"


def _missed(window: str) -> Record:
    counter = "penstock_objectives_total"
    missed, all_of_them = f'rate({counter}{{met="false"}}[{window}])', f"rate({counter}[{window}])"
    by = "model, class, objective"
    return Record(f"penstock:objectives_missed:ratio_rate{window}", _share(added(missed, by), added(all_of_them, by)))


def _errors(window: str) -> Record:
    failed, answered = (f"rate(penstock_answers_total{labels}[{window}])" for labels in ('{status=~"5.."}', ""))
    return Record(f"penstock:errors:ratio_rate{window}", _share(added(failed, "model"), added(answered, "model")))


def _hits(window: str) -> Record:
    cached, prompts = (f"rate(penstock_engine_{name}_tokens_total[{window}])" for name in ("cached", "prompt"))
    return Record(f"penstock:prefix_hits:ratio_rate{window}", _share(total(cached), total(prompts)))


def _quantile(name: str, metric: str, quantile: float) -> Record:
    buckets = added(f"rate({metric}_bucket[5m])", "model, le")
    return Record(f"penstock:{name}:p{quantile * 100:g}_rate5m", f"histogram_quantile({quantile}, {buckets})")


RECORDS = (
    *(_missed(window) for window in WINDOWS),
    *(_errors(window) for window in WINDOWS),
    *(_hits(window) for window in ("5m", "6h")),
    *(_quantile("ttft_seconds", "penstock_time_to_first_token_seconds", quantile) for quantile in (0.5, 0.99)),
    *(_quantile("itl_seconds", "penstock_inter_token_seconds", quantile) for quantile in (0.5, 0.99)),
    Record("penstock:output_tokens:rate1m", added("rate(penstock_output_tokens_total[1m])", "model")),
)


def _burn(name: str, record: str, what: str, rate: float, windows: tuple[str, str], severity: Severity) -> Alert:
    limit = f"{rate * ERROR_BUDGET:g}"
    over = " and ".join(f"penstock:{record}:ratio_rate{window} > {limit}" for window in windows)
    return Alert(
        f"Penstock{name}BudgetBurn{'Fast' if severity == 'critical' else 'Slow'}",
        over,
        f"{what} at {rate:g} times the rate that a month's error budget allows",
        "The latency dashboard shows when it began, penstock explain where requests spend their time.",
        severity,
    )


ALERTS = (
    Alert(
        "PenstockTTFTOverObjective",
        f'penstock:objectives_missed:ratio_rate5m{{objective="ttft"}} > {ERROR_BUDGET:g}',
        "p99 TTFT of class {{ $labels.class }} of {{ $labels.model }} is over its objective: "
        "{{ $value | humanizePercentage }} of requests missed it",
        "penstock explain shows where the time goes: queued, prefill, stalled. Add replicas, or limit the tenant that "
        "sends most.",
        pending="2m",
    ),
    Alert(
        "PenstockITLOverObjective",
        f'penstock:objectives_missed:ratio_rate5m{{objective="gap"}} > {ERROR_BUDGET:g}',
        "{{ $value | humanizePercentage }} of requests of class {{ $labels.class }} of {{ $labels.model }} missed "
        "their ITL objective: chunks came later than it allows more than once in 100 tokens",
        "Streams wait for prompts of others (part stalled) or the batch is too large for the objective. The whole gap "
        "before a chunk counts here, also where drafts make it one of several tokens; penstock_inter_token_seconds "
        "divides it by them.",
        pending="2m",
    ),
    *(
        _burn(name, record, what, rate, (long, short), severity)
        for rate, long, short, severity in BURN_RATES
        for name, record, what in (
            (
                "Objective",
                "objectives_missed",
                "Objectives ({{ $labels.objective }}) of class {{ $labels.class }} of {{ $labels.model }} are missed",
            ),
            ("Error", "errors", "Requests to {{ $labels.model }} fail (5xx)"),
        )
    ),
    Alert(
        "PenstockQueueGrows",
        f"{once('penstock_waiting_sequences', 'model')} > 16 "
        f"and {once('deriv(penstock_waiting_sequences[5m])', 'model')} > 0",
        "{{ $value }} requests wait in engines of {{ $labels.model }}, and more come than leave",
        "Load is above capacity: add replicas, set autoscale, or limit tenants.",
        pending="2m",
    ),
    Alert(
        "PenstockRequestsRefused",
        "sum by (model) (rate(penstock_refused_total[1m])) > 0.05 * sum by (model) (rate(penstock_answers_total[1m]))",
        "Requests to {{ $labels.model }} are refused (429) because their objective could not be kept or too many wait",
        "Load is above what the objectives leave room for: add replicas. Where the refusals say that waiting does not "
        "help, prompts are too long for the TTFT objective of their class: relax it.",
    ),
    Alert(
        "PenstockTenantFloods",
        "sum by (tenant) (rate(penstock_tenant_tokens_total[1m])) > 0.8 * "
        "scalar(sum(rate(penstock_tenant_tokens_total[1m]))) "
        f"and on () sum({once('penstock_waiting_sequences', 'model')}) > 8",
        "{{ $labels.tenant }} uses more than 80% of all tokens while requests wait",
        "Fairness keeps the others served. Limit it: penstock keys, or tenants in the settings.",
    ),
    Alert(
        "PenstockTenantLimited",
        "sum by (tenant, limit) (rate(penstock_limited_total[1m])) > 1",
        "{{ $labels.tenant }} is refused more than once a second for its limit of {{ $labels.limit }}",
        "A client retries without waiting for Retry-After, or the limit is too low.",
    ),
    Alert(
        "PenstockBudgetNearlySpent",
        f"{once('penstock_budget_spent_ratio', 'tenant, period')} > 0.9",
        "{{ $labels.tenant }} has spent {{ $value | humanizePercentage }} of its budget of the {{ $labels.period }}",
        "Requests are refused once it is spent. Raise it, or tell the tenant.",
    ),
    Alert(
        "PenstockKVPressure",
        f"{once('penstock_replica_kv_utilisation', REPLICA)} > 0.95 "
        f"and on ({FLEET}, model) {once('rate(penstock_engine_preemptions_total[5m])', 'model')} > 0",
        "KV memory of {{ $labels.replica }} of {{ $labels.model }} is full and sequences are preempted and recomputed",
        "Raise engine.kv_memory_gib, lower max_seqs or max_model_len, or add a replica.",
        pending="2m",
    ),
    Alert(
        "PenstockKVFragmented",
        f"{once('penstock_replica_kv_fragmentation', REPLICA)} > 0.4 "
        f"and {once('penstock_replica_kv_utilisation', REPLICA)} > 0.8",
        "KV memory of {{ $labels.replica }} of {{ $labels.model }} is nearly full, and "
        "{{ $value | humanizePercentage }} of it holds no token",
        "Sequences are so short that their last blocks stay mostly empty. A smaller engine.block_size holds more of "
        "them; or raise engine.kv_memory_gib.",
        pending="5m",
    ),
    Alert(
        "PenstockPrefixHitsCollapsed",
        "penstock:prefix_hits:ratio_rate5m < 0.5 * penstock:prefix_hits:ratio_rate6h "
        "and penstock:prefix_hits:ratio_rate6h > 0.2",
        "The prefix cache of {{ $labels.model }} hits less than half as often as in the last six hours",
        "A changed prompt template, salts, evictions by a flood of long prompts, or replicas added: "
        "penstock_cache_miss_tokens_total says why.",
        pending="5m",
    ),
    Alert(
        "PenstockReplicaDown",
        f"count by ({FLEET}, {REPLICA}) (penstock_replica_up == 0 and penstock_replica_restarts_total > 0)",
        "Replica {{ $labels.replica }} of {{ $labels.model }} does not serve, as {{ $value }} of the gateways see it",
        "penstock fleet list shows why it does not start.",
        "critical",
        "30s",
    ),
    Alert(
        "PenstockModelDown",
        f"{once('penstock_replica_up', 'model')} == 0",
        "No replica of {{ $labels.model }} serves",
        "Its requests get 503; the gateway stays ready while another model works. penstock fleet list shows why its "
        "replicas do not start.",
        "critical",
        "5m",
    ),
    Alert(
        "PenstockReplicaRestarted",
        f"{once('increase(penstock_replica_restarts_total[10m])', REPLICA)} > 0",
        "Replica {{ $labels.replica }} of {{ $labels.model }} was lost",
        "Its requests go on at another replica, or at this one once it is back: a local worker is started again, a "
        "remote one connected to again. PenstockReplicaDown fires if it does not come back. The gateway's log has the "
        "reason: killed, frozen, out of memory, unreachable.",
    ),
    Alert(
        "PenstockEngineStalled",
        f"{once('penstock_seconds_since_step', 'model')} > 5",
        "An engine of {{ $labels.model }} has work and has finished no step for {{ $value }} s",
        "A GPU that hangs, or a machine that swaps. The worker ends itself after ten times the predicted time.",
        "critical",
    ),
    Alert(
        "PenstockSharedStateDown",
        f"count by ({FLEET}) (penstock_state_up == 0)",
        "The shared state (Redis) does not answer {{ $value }} of the gateways",
        "Limits are counted by each gateway alone and keys are those last read until it is back.",
        "critical",
    ),
    Alert(
        "PenstockAnswerCacheDown",
        f"count by ({FLEET}, tier) (penstock_answer_cache_up == 0)",
        "The tier {{ $labels.tier }} of the answer cache does not answer {{ $value }} of the gateways",
        "Requests are computed instead.",
    ),
    Alert(
        "PenstockGPUHot",
        f"{once('penstock_gpu_temperature_celsius', GPU)} > 85",
        "GPU {{ $labels.gpu }} of {{ $labels.replica }} of {{ $labels.model }} has {{ $value }} °C",
        "It lowers its clocks soon: check cooling and the power limit.",
        pending="5m",
    ),
    Alert(
        "PenstockGPUMemoryFull",
        f"{once('penstock_gpu_memory_used_bytes / penstock_gpu_memory_bytes', GPU)} > 0.98",
        "GPU {{ $labels.gpu }} of {{ $labels.replica }} of {{ $labels.model }} has less than 2% of its memory free",
        "Another process uses it, or engine.gpu_memory is too high.",
        pending="5m",
    ),
    Alert(
        "PenstockGPUPowerLimited",
        f"{once('penstock_gpu_power_watts / penstock_gpu_power_limit_watts', GPU)} > 0.98 "
        f"and {once('penstock_gpu_clock_hertz / penstock_gpu_clock_limit_hertz', GPU)} < 0.7",
        "GPU {{ $labels.gpu }} of {{ $labels.replica }} of {{ $labels.model }} is at its power limit and lowers clocks",
        "Raise its power limit or expect longer steps.",
        pending="10m",
    ),
    Alert(
        "PenstockDown",
        'up{job=~"penstock.*"} == 0',
        "{{ $labels.instance }} cannot be scraped",
        "The gateway does not run, or /metrics needs an admin key that Prometheus does not have.",
        "critical",
        "30s",
    ),
)


def rules() -> dict[str, Any]:
    """As a file of Prometheus rules has them."""
    return {
        "groups": [
            {"name": "penstock-records", "rules": [record.rule() for record in RECORDS]},
            {"name": "penstock-alerts", "rules": [alert.rule() for alert in ALERTS]},
        ]
    }
