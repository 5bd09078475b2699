"""The Prometheus metrics of the answer cache, counted in plain numbers and rendered when scraped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.cache.tier import Reading
from penstock.core.request import CacheStatus


class CacheMetrics(Collector):
    def __init__(self, readings: Callable[[], list[Reading]]) -> None:
        self._readings = readings
        self.flights = 0  # computations in progress that identical requests may join
        self.requests: Counter[tuple[str, str]] = Counter()  # by (state, tier)
        self.stored = 0

    def count(self, status: CacheStatus) -> None:
        self.requests[status.state, status.tier] += 1

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "penstock_answer_cache_requests",
            "Choices by where their answer came from; a tier's hits over all but bypass: its hit ratio",
            labels=["state", "tier"],
        )
        for (state, tier), count in sorted(self.requests.items()):
            requests.add_metric([state, tier], count)
        yield requests
        yield CounterMetricFamily("penstock_answer_cache_stored", "Answers stored", self.stored)
        yield GaugeMetricFamily(
            "penstock_answer_cache_flights", "Computations that identical requests join", self.flights
        )
        sizes = GaugeMetricFamily("penstock_answer_cache_bytes", "Bytes held", labels=["tier"])
        evictions = CounterMetricFamily("penstock_answer_cache_evictions", "Answers pushed out", labels=["tier"])
        errors = CounterMetricFamily(
            "penstock_answer_cache_errors", "Calls that failed and so were misses", labels=["tier"]
        )
        up = GaugeMetricFamily("penstock_answer_cache_up", "0: the tier does not answer", labels=["tier"])
        for reading in self._readings():
            for family, value in ((sizes, reading.bytes), (evictions, reading.evictions), (errors, reading.errors)):
                if value is not None:
                    family.add_metric([reading.name], value)
            up.add_metric([reading.name], reading.up)
        yield from (sizes, evictions, errors, up)
