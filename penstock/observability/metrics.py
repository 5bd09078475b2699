"""Prometheus metrics of a gateway and the engine behind it. One registry per app, no global state.

The hot path only adds to plain numbers (an event loop is one thread, so no locks); text is made when scraped.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import add, itemgetter
from typing import Any, TypeVar, get_args

from msgspec.structs import astuple
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics_text
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from penstock.core.engine import EngineStats
from penstock.core.ledger import MissCause, QueueCause
from penstock.observability.account import Account, Parts

SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
GAP_SECONDS = (
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 5.0,
)  # fmt: skip

MODEL_COUNTERS = (
    ("prompt_tokens", "Prompt tokens of choices that got a first token"),
    ("cached_tokens", "Those of them served from cache"),
    ("output_tokens", "Tokens sent to clients"),
    ("refused", "Requests that clients saw refused (429): no engine had room for them or could meet their objective"),
    (
        "refused_deadlines",
        "Requests refused (429) for a deadline that their own prefill cannot meet, on an idle engine too",
    ),
)
ENGINE_GAUGES = (
    ("running_sequences", "Sequences in the batch"),
    ("waiting_sequences", "Sequences queued in the engine"),
    ("kv_blocks", "KV blocks of the engine"),
    ("kv_blocks_used", "KV blocks held by sequences"),
    ("kv_utilisation", "KV blocks held over all, 0 to 1"),
    ("seconds_since_step", "Age of the last step while there is work"),
    ("step_time_error", "Median relative error of predicted step times"),
    ("prefill_tokens_per_second", "As the step-time model knows it"),
    ("decode_step_seconds", "Predicted step of the running sequences"),
)
ENGINE_COUNTERS = (
    ("steps", "Engine steps"),
    ("prompt_tokens", "Prompt tokens of admitted sequences, cached ones included"),
    ("cached_tokens", "Prompt tokens found in the prefix cache; over engine_prompt_tokens: the hit ratio"),
    ("output_tokens", "Tokens sampled"),
    ("drafted_tokens", "Tokens guessed ahead, to be verified several in a step"),
    ("accepted_tokens", "Drafted tokens that were right"),
    ("preemptions", "Sequences put back to waiting for lack of KV memory"),
    ("batch_tokens", "Tokens computed over all steps; over engine_steps: tokens per step"),
    ("batch_sequences", "Sequences advanced over all steps; over engine_steps: batch size"),
    ("step_seconds", "Time that steps took; its rate is the share of time in which the engine computes"),
    (
        "read_bytes_estimate",
        "Estimate of the memory that steps on a CPU read: all weights, and the KV of each sequence, once a step; over "
        "engine_step_seconds: memory bandwidth",
    ),
    (
        "refused",
        "Refusals by replicas, for lack of room or an objective that could not be met; a request that several refuse "
        "counts at each, also where one more then serves it; without those of refused_deadlines",
    ),
    ("expired", "Requests stopped because their deadline passed"),
)


class Histogram:
    """Counts per bucket; a tenth of the cost of the client library's, which locks on every observation."""

    __slots__ = ("bounds", "counts", "exemplars", "help", "name", "sum")

    def __init__(self, name: str, help: str, bounds: tuple[float, ...]) -> None:
        self.name = name
        self.help = help
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.exemplars: list[Exemplar | None] = [None] * (len(bounds) + 1)  # the latest of each bucket
        self.sum = 0.0

    def observe(self, value: float, times: int = 1, trace_id: str | None = None) -> None:
        """`trace_id` of a trace that is recorded, for whoever wonders what such a value was."""
        bucket = bisect_left(self.bounds, value)
        self.counts[bucket] += times
        self.sum += value * times
        if trace_id is not None:
            self.exemplars[bucket] = Exemplar({"trace_id": trace_id}, value, time.time())

    def plus(self, other: Histogram) -> Histogram:
        both = Histogram(self.name, self.help, self.bounds)
        both.counts = [*map(add, self.counts, other.counts)]
        both.exemplars = [*map(latest, self.exemplars, other.exemplars)]
        both.sum = self.sum + other.sum
        return both

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        bounds = [*map(str, self.bounds), "+Inf"]
        buckets = [*zip(bounds, accumulate(self.counts), self.exemplars, strict=True)]
        family.add_metric(labels, buckets, self.sum)  # type: ignore[arg-type]  # None is as good as no exemplar


# Series of these are there before the first event, at 0: Prometheus sees no increase from nothing to the first burst.
STATUSES = (200, 429, 499, 500, 502, 503, 504, 507)  # of answers
QUEUE_CAUSES: tuple[str, ...] = get_args(QueueCause)
MISS_CAUSES: tuple[str, ...] = get_args(MissCause)

E = TypeVar("E", bound=tuple[Any, ...])


def latest(one: E | None, other: E | None) -> E | None:
    """Of two exemplars, whose last field is their time."""
    if one is None or other is None:
        return one or other
    return max(one, other, key=itemgetter(2))


def exposition(registry: CollectorRegistry, openmetrics: bool) -> bytes:
    """In the text format of Prometheus, or of OpenMetrics, which has exemplars."""
    if not openmetrics:
        return generate_latest(registry)
    text: bytes = openmetrics_text(registry)  # type: ignore[no-untyped-call]
    return text


Promise = tuple[str, str, str]  # model, class, ttft or gap


class ClassMetrics:
    """The latencies of one class of requests."""

    def __init__(self) -> None:
        self.first_token = Histogram(
            "penstock_time_to_first_token_seconds", "From arrival of a request to its first token", SECONDS
        )
        self.inter_token = Histogram(
            "penstock_inter_token_seconds",
            "Between tokens of one choice, after the first; of a chunk of several: its gap over their number",
            GAP_SECONDS,
        )


class ModelMetrics:
    """What the gateway counts of the requests that one model answers."""

    def __init__(self) -> None:
        self.answers: Counter[int] = Counter(dict.fromkeys(STATUSES, 0))  # by status
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.refused = 0
        self.refused_deadlines = 0
        self.classes: dict[str, ClassMetrics] = {}
        self.request_time = Histogram(
            "penstock_request_seconds",
            "From arrival of a generation request to the end of its response; of those that were not refused",
            SECONDS,
        )
        self.queue_time = Histogram("penstock_queue_seconds", "From arrival at the engine to the first step", SECONDS)

    @property
    def histograms(self) -> tuple[Histogram, ...]:
        first, between = ClassMetrics().first_token, ClassMetrics().inter_token
        for latencies in self.classes.values():
            first, between = first.plus(latencies.first_token), between.plus(latencies.inter_token)
        return first, between, self.request_time, self.queue_time

    def of_class(self, name: str) -> ClassMetrics:
        return self.classes.get(name) or self.classes.setdefault(name, ClassMetrics())


class GatewayMetrics(Collector):
    """What the gateway counts itself, plus the engine's own figures read at the moment of the scrape."""

    def __init__(self, engine_stats: Mapping[str, Callable[[], EngineStats]]) -> None:
        """`engine_stats` by the model's name."""
        self._engine_stats = engine_stats
        self.models = {model: ModelMetrics() for model in engine_stats}
        self.requests: Counter[tuple[str, int]] = Counter()  # by (endpoint, status)
        self.in_flight = 0
        self.cascades: Counter[tuple[str, str]] = Counter()  # by (virtual model, outcome)
        self.shadows: Counter[tuple[str, str]] = Counter()  # by (model that is shadowed to, outcome)
        self.part_seconds: dict[str, list[float]] = {}  # by class: one sum for each of Parts
        self.queue_causes: Counter[str] = Counter(dict.fromkeys(QUEUE_CAUSES, 0))  # seconds
        self.missed_tokens: Counter[str] = Counter(dict.fromkeys(MISS_CAUSES, 0))  # by cause
        self.objectives: Counter[tuple[str, str, str, bool]] = Counter()  # by (model, class, ttft or gap, met)
        self.promised: Callable[[], Iterable[Promise]] = tuple  # what is or will be in `objectives`, met and missed
        self.recomputed_tokens = 0
        self.forced_tokens = 0
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def settle(self, account: Account) -> None:
        """Add a finished request's time and what the engine says of it."""
        self.models[account.model].answers[account.status] += 1
        name = account.objective
        for choice in account.choices:
            parts = astuple(choice.parts)
            self.part_seconds[name] = [*map(add, self.part_seconds.get(name, [0.0] * len(parts)), parts)]
            ledger = choice.engine
            if ledger is None:
                continue
            for cause, seconds in ledger.queued.items():
                self.queue_causes[cause] += seconds  # type: ignore[assignment]  # a Counter of floats is still one
            for reason, tokens in ledger.missed_tokens.items():
                self.missed_tokens[reason] += tokens
            self.recomputed_tokens += ledger.recomputed_tokens
            self.forced_tokens += ledger.forced_tokens
            for objective, met in (("ttft", ledger.met_ttft), ("gap", ledger.met_gap)):
                if met is not None:
                    self.objectives[account.model, name, objective, met] += 1

    def describe(self) -> list[Metric]:
        return []  # the default would scrape once at registration, before the engine runs

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "penstock_requests", "HTTP requests finished; 499: the client left first", labels=["endpoint", "status"]
        )
        for (endpoint, status), count in sorted(self.requests.items()):
            requests.add_metric([endpoint, str(status)], count)
        yield requests
        yield GaugeMetricFamily("penstock_requests_in_flight", "HTTP requests being answered", self.in_flight)
        yield from self._collect_models()
        yield from self._collect_ledgers()
        yield from self._collect_engines()

    def _collect_models(self) -> Iterator[Metric]:
        answers = CounterMetricFamily(
            "penstock_answers",
            "Requests that reached a model, by the status they ended with",
            labels=["model", "status"],
        )
        for model, counted in self.models.items():
            for status, count in sorted(counted.answers.items()):
                answers.add_metric([model, str(status)], count)
        yield answers
        for name, help in MODEL_COUNTERS:
            counter = CounterMetricFamily(f"penstock_{name}", help, labels=["model"])
            for model, counted in self.models.items():
                counter.add_metric([model], getattr(counted, name))
            yield counter
        for of_models in zip(*(counted.histograms for counted in self.models.values()), strict=True):
            family = HistogramMetricFamily(of_models[0].name, of_models[0].help, labels=["model"])
            for model, histogram in zip(self.models, of_models, strict=True):
                histogram.add_to(family, [model])
            yield family
        for name, help, counts in (
            ("cascades", "Requests for a cascade, by what became of them", self.cascades),
            ("shadows", "Shadow requests to a model, by what became of them", self.shadows),
        ):
            outcomes = CounterMetricFamily(f"penstock_{name}", help, labels=["model", "outcome"])
            for (model, outcome), count in sorted(counts.items()):
                outcomes.add_metric([model, outcome], count)
            yield outcomes

    def _collect_ledgers(self) -> Iterator[Metric]:
        parts = CounterMetricFamily(
            "penstock_part_seconds", "Time of finished choices by the part it went to", labels=["class", "part"]
        )
        for name, sums in sorted(self.part_seconds.items()):
            for part, seconds in zip(Parts.__struct_fields__, sums, strict=True):
                parts.add_metric([name, part], seconds)
        yield parts
        causes = CounterMetricFamily(
            "penstock_queue_cause_seconds", "Time queued in the engine by its cause", labels=["cause"]
        )
        for cause, seconds in sorted(self.queue_causes.items()):
            causes.add_metric([cause], seconds)
        yield causes
        missed = CounterMetricFamily(
            "penstock_cache_miss_tokens", "Prompt tokens not found in the prefix cache, by why", labels=["cause"]
        )
        for cause, tokens in sorted(self.missed_tokens.items()):
            missed.add_metric([cause], tokens)
        yield missed
        objectives = CounterMetricFamily(
            "penstock_objectives",
            "Promises of finished choices, kept or not",
            labels=["model", "class", "objective", "met"],
        )
        known = {(*promise, met): 0 for promise in self.promised() for met in (False, True)}
        for (model, name, objective, met), count in sorted((known | self.objectives).items()):
            objectives.add_metric([model, name, objective, "true" if met else "false"], count)
        yield objectives
        yield CounterMetricFamily(
            "penstock_recomputed_tokens", "Tokens computed again after a preemption", self.recomputed_tokens
        )
        yield CounterMetricFamily(
            "penstock_forced_tokens", "Output tokens that a grammar forced and nobody sampled", self.forced_tokens
        )

    def _collect_engines(self) -> Iterator[Metric]:
        readings = {model: read() for model, read in self._engine_stats.items()}
        for name, help in ENGINE_GAUGES:
            gauge = GaugeMetricFamily(f"penstock_{name}", help, labels=["model"])
            for model, stats in readings.items():
                gauge.add_metric([model], _gauge_value(name, stats))
            yield gauge
        for name, help in ENGINE_COUNTERS:
            counter = CounterMetricFamily(f"penstock_engine_{name}", help, labels=["model"])
            for model, stats in readings.items():
                counter.add_metric([model], getattr(stats, name))
            yield counter


def _gauge_value(name: str, stats: EngineStats) -> float:
    if name == "kv_utilisation":
        return stats.kv_blocks_used / stats.kv_blocks if stats.kv_blocks else 0.0
    value: float = getattr(stats, name.removesuffix("_sequences"))
    return value
