"""The metrics of several gateway processes as those of one server."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

# Of workers, which every process sees as a whole; all other counters are each process's own.
_SEEN_BY_ALL = ("penstock_engine_", "penstock_replica_restarts", "penstock_replica_cpu", "penstock_gpu_energy")
_PER_OWN_TOKEN = "penstock_machine_cost_per_million_tokens"  # the machine's whole cost over each process's tokens
_OWN_GAUGES = (
    "penstock_requests_in_flight",
    "penstock_held_requests",
    "penstock_replica_streams",
    "penstock_answer_cache_flights",
)

Sample = tuple[str, tuple[tuple[str, str], ...]]


def merged(expositions: Iterable[bytes]) -> bytes:
    """What each process counts for itself adds up; of what all of them see, the largest reading is taken."""
    families: dict[str, Metric] = {}
    values: dict[str, dict[Sample, float]] = {}
    for exposition in expositions:
        for family in text_string_to_metric_families(exposition.decode()):
            families.setdefault(family.name, family)
            known = values.setdefault(family.name, {})
            add = _addition(family)
            for sample in family.samples:
                key = (sample.name, tuple(sorted(sample.labels.items())))
                before = known.get(key)
                known[key] = sample.value if before is None else add(before, sample.value)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Merged(families, values))
    return generate_latest(registry)


def _addition(family: Metric) -> Callable[[float, float], float]:
    if family.name == _PER_OWN_TOKEN:
        return lambda one, other: one * other / (one + other) if one and other else max(one, other)
    own = family.name.startswith(_OWN_GAUGES) if family.type == "gauge" else not family.name.startswith(_SEEN_BY_ALL)
    return operator.add if own else max


class _Merged(Collector):
    def __init__(self, families: dict[str, Metric], values: dict[str, dict[Sample, float]]) -> None:
        self._families = families
        self._values = values

    def collect(self) -> Iterable[Metric]:
        for name, family in self._families.items():
            merged = Metric(name, family.documentation, family.type)
            for (sample, labels), value in self._values[name].items():
                merged.add_sample(sample, dict(labels), value)
            yield merged
