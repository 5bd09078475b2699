"""Grafana dashboards as data."""

from __future__ import annotations

from penstock.observability.panels import Dashboard, Panel
from penstock.observability.promql import added, total

REPLICA = "model, replica"
OBJECTIVE = "model, class, objective"


def _rate(metric: str, by: str = "model") -> str:
    """Of what gateways count themselves."""
    return added(f"rate({metric}[$__rate_interval])", by)


def _engine_rate(metric: str) -> str:
    """Of what engines count, and every gateway reports."""
    return total(f"rate({metric}[$__rate_interval])")


def _reading(metric: str, by: str = "model") -> str:
    """Of what does not add up: the largest, of all gateways and fleets."""
    return f"max by ({by}) ({metric})"


def _of_replicas(metric: str) -> tuple[str, str]:
    return _reading(metric, REPLICA), "{{model}} {{replica}}"


def _of_gpus(metric: str) -> str:
    return _reading(metric, f"{REPLICA}, gpu")


def _over(part: str, whole: str) -> str:
    return f"{part} / ({whole} > 0)"


def _engines_over(part: str, whole: str) -> str:
    return _over(_engine_rate(f"penstock_engine_{part}_total"), _engine_rate(f"penstock_engine_{whole}_total"))


def _quantiles(metric: str) -> tuple[tuple[str, str], ...]:
    buckets = f"sum by (model, le) (rate({metric}_bucket[$__rate_interval]))"
    return tuple(
        (f"histogram_quantile({quantile}, {buckets})", f"p{quantile * 100:g} {{{{model}}}}")
        for quantile in (0.5, 0.9, 0.99)
    )


# As penstock_cost_per_million_tokens, of all gateways together.
CHARGED = (
    added("penstock_spend_total", "model")
    + " / ("
    + added('penstock_tenant_tokens_total{kind=~"input|output"}', "model")
    + " > 0) * 1e6"
)
# Each gateway reckons the whole machine over the tokens that it handled itself.
MACHINE = "1 / sum(1 / penstock_machine_cost_per_million_tokens)"

OVERVIEW = Dashboard(
    "overview",
    "overview",
    "Is it up, is it fast, is it busy, and what does it cost.",
    (
        Panel(
            "Requests by status", "reqps", ((_rate("penstock_requests_total", "status"), "{{status}}"),), stacked=True
        ),
        Panel("Requests in flight", "short", (("sum(penstock_requests_in_flight)", "in flight"),)),
        Panel("Output tokens", "tps", ((_rate("penstock_output_tokens_total"), "{{model}}"),), stacked=True),
        Panel("Time to first token", "s", _quantiles("penstock_time_to_first_token_seconds")),
        Panel("Inter-token latency", "s", _quantiles("penstock_inter_token_seconds")),
        Panel(
            "Objectives met",
            "percentunit",
            (
                (
                    _over(
                        _rate('penstock_objectives_total{met="true"}', OBJECTIVE),
                        _rate("penstock_objectives_total", OBJECTIVE),
                    ),
                    "{{model}} {{class}} {{objective}}",
                ),
            ),
        ),
        Panel(
            "Engine",
            "short",
            (
                (total("penstock_running_sequences"), "{{model}} running"),
                (total("penstock_waiting_sequences"), "{{model}} waiting"),
            ),
        ),
        Panel(
            "Answers by where they came from",
            "ops",
            ((_rate("penstock_answer_cache_requests_total", "state"), "{{state}}"),),
            stacked=True,
        ),
        Panel("Cost per million tokens", "currencyUSD", ((CHARGED, "{{model}}"),)),
    ),
)

LATENCY = Dashboard(
    "latency",
    "latency and objectives",
    "What was promised, what was kept, how fast the error budget burns, and where the time of requests goes.",
    (
        Panel("Time to first token", "s", _quantiles("penstock_time_to_first_token_seconds")),
        Panel("Inter-token latency", "s", _quantiles("penstock_inter_token_seconds")),
        Panel(
            "Objectives",
            "s",
            ((_reading("penstock_objective_seconds", OBJECTIVE), "{{model}} {{class}} {{objective}}"),),
        ),
        Panel(
            "Error budget burn rate, one hour",
            "short",
            (
                ("penstock:objectives_missed:ratio_rate1h / 0.01", "{{model}} {{class}} {{objective}}"),
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
                (_rate("penstock_refused_deadlines_total"), "deadline too short {{model}}"),
                (_engine_rate("penstock_engine_expired_total"), "deadline passed {{model}}"),
            ),
        ),
    ),
)

CAPACITY = Dashboard(
    "capacity",
    "capacity",
    "How full the engines are, what their steps hold, and what the caches save.",
    (
        Panel("KV memory in use", "percentunit", ((_reading("penstock_kv_utilisation"), "{{model}}"),), threshold=0.95),
        Panel(
            "KV fragmentation",
            "percentunit",
            (_of_replicas("penstock_replica_kv_fragmentation"),),
            "Share of the token slots in held KV blocks that hold no token.",
            threshold=0.4,
        ),
        Panel(
            "Sequences a step",
            "short",
            ((_engines_over("batch_sequences", "steps"), "{{model}}"),),
        ),
        Panel(
            "Tokens a step",
            "short",
            ((_engines_over("batch_tokens", "steps"), "{{model}}"),),
        ),
        Panel(
            "Prefix cache hits",
            "percentunit",
            ((_engines_over("cached_tokens", "prompt_tokens"), "{{model}}"),),
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
                (_engine_rate("penstock_engine_preemptions_total"), "preemptions {{model}}"),
                ("sum(rate(penstock_recomputed_tokens_total[$__rate_interval]))", "tokens computed again"),
            ),
        ),
        Panel(
            "Memory bandwidth of steps, estimated",
            "Bps",
            ((_engines_over("read_bytes_estimate", "step_seconds"), "{{model}}"),),
            "On CPUs: bytes of weights and KV that steps read, over the time that they took. A decoding engine that is "
            "near what the memory gives cannot be faster.",
        ),
        Panel("Prefill speed", "tps", ((_reading("penstock_prefill_tokens_per_second"), "{{model}}"),)),
        Panel("Predicted decode step", "s", ((_reading("penstock_decode_step_seconds"), "{{model}}"),)),
        Panel(
            "Error of the step-time model",
            "percentunit",
            ((_reading("penstock_step_time_error"), "{{model}}"),),
            "Median of |predicted - measured| / measured.",
        ),
        Panel(
            "Answer cache",
            "bytes",
            ((_reading("penstock_answer_cache_bytes", "tier"), "{{tier}}"),),
            "Of the gateway that holds most.",
        ),
    ),
)

FLEET = Dashboard(
    "fleet",
    "fleet",
    "Replicas: which serve, how loaded they are, and how often they were lost.",
    (
        Panel("Replicas that serve", "short", ((total("penstock_replica_up", of_each=REPLICA), "{{model}}"),)),
        Panel(
            "Streams",
            "short",
            ((added("penstock_replica_streams", REPLICA), "{{model}} {{replica}}"),),
            "Each gateway counts those that it has sent there.",
            stacked=True,
        ),
        Panel("Waiting", "short", (_of_replicas("penstock_replica_waiting"),)),
        Panel("KV memory in use", "percentunit", (_of_replicas("penstock_replica_kv_utilisation"),)),
        Panel(
            "Losses and failovers",
            "short",
            (
                (_reading("increase(penstock_replica_restarts_total[10m])", REPLICA), "{{model}} {{replica}} lost"),
                (added("increase(penstock_failovers_total[10m])", "model"), "{{model}} failed over"),
            ),
            "In the last ten minutes.",
        ),
        Panel(
            "CPU of replicas",
            "short",
            (_of_replicas("rate(penstock_replica_cpu_seconds_total[$__rate_interval])"),),
        ),
        Panel("Memory of replicas", "bytes", (_of_replicas("penstock_replica_resident_bytes"),)),
        Panel("Held for a replica", "short", ((added("penstock_held_requests", "model"), "{{model}}"),)),
        Panel(
            "Phases of the last start",
            "s",
            ((_reading("penstock_replica_start_seconds", f"{REPLICA}, phase"), "{{model}} {{replica}} {{phase}}"),),
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
            ((added("increase(penstock_spend_total[1h])", "tenant"), "{{tenant}}"),),
        ),
        Panel(
            "Budgets",
            "percentunit",
            ((_reading("penstock_budget_spent_ratio", "tenant, period"), "{{tenant}} {{period}}"),),
            threshold=0.9,
        ),
        Panel(
            "Refused for a limit",
            "reqps",
            ((_rate("penstock_limited_total", "tenant, limit"), "{{tenant}} {{limit}}"),),
        ),
        Panel(
            "Cost per million tokens",
            "currencyUSD",
            (
                (CHARGED, "charged, {{model}}"),
                (MACHINE, "the machine"),
            ),
        ),
    ),
)

_GPU = "{{model}} {{replica}} GPU {{gpu}}"
GPU = Dashboard(
    "gpu",
    "GPUs",
    "Use, memory, heat, power and energy per token of the GPUs that replicas run on.",
    (
        Panel("Utilisation", "percentunit", ((_of_gpus("penstock_gpu_utilisation"), _GPU),)),
        Panel(
            "Memory",
            "percentunit",
            ((_of_gpus("penstock_gpu_memory_used_bytes / penstock_gpu_memory_bytes"), _GPU),),
            threshold=0.98,
        ),
        Panel("Temperature", "celsius", ((_of_gpus("penstock_gpu_temperature_celsius"), _GPU),), threshold=85),
        Panel(
            "Power",
            "watt",
            (
                (_of_gpus("penstock_gpu_power_watts"), _GPU),
                (_of_gpus("penstock_gpu_power_limit_watts"), f"limit {_GPU}"),
            ),
        ),
        Panel("Clock of the SMs", "hertz", ((_of_gpus("penstock_gpu_clock_hertz"), _GPU),)),
        Panel(
            "Energy per output token",
            "short",
            (
                (
                    _over(
                        total("rate(penstock_gpu_energy_joules_total[$__rate_interval])", of_each="model, gpu"),
                        _rate("penstock_output_tokens_total"),
                    ),
                    "joules {{model}}",
                ),
            ),
        ),
    ),
)

DASHBOARDS = (OVERVIEW, LATENCY, CAPACITY, FLEET, TENANTS, GPU)
