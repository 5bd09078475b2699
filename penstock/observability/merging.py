"""The metrics of several gateway processes as those of one server."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable

import msgspec
from msgspec import Struct
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from penstock.observability.metrics import exposition, latest

# Of workers, which every process sees as a whole; all other counters are each process's own.
_SEEN_BY_ALL = ("penstock_engine_", "penstock_replica_restarts", "penstock_replica_cpu", "penstock_gpu_energy")
_PER_OWN_TOKEN = "penstock_machine_cost_per_million_tokens"  # the machine's whole cost over each process's tokens
_OWN_GAUGES = (
    "penstock_requests_in_flight",
    "penstock_held_requests",
    "penstock_replica_streams",
    "penstock_answer_cache_flights",
)


class _Sample(Struct, array_like=True):
    name: str
    labels: dict[str, str]
    value: float
    exemplar: tuple[dict[str, str], float, float] | None  # labels, value and time


class _Family(Struct, array_like=True):
    name: str
    help: str
    type: str
    samples: list[_Sample]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[_Family]).decode


def snapshot(registry: CollectorRegistry) -> bytes:
    """All metrics of a process, for `merged`."""
    return _encode(
        [
            (
                family.name,
                family.documentation,
                family.type,
                [(sample.name, sample.labels, float(sample.value), sample.exemplar) for sample in family.samples],
            )
            for family in registry.collect()
        ]
    )


def merged(snapshots: Iterable[bytes], openmetrics: bool) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Merged(_added(snapshots)))
    return exposition(registry, openmetrics)


def retired(snapshots: Iterable[bytes]) -> bytes:
    """What stays of processes that have gone, as the snapshot of one: a counter that shrinks passes for one that has
    been reset, and Prometheus adds up all of it again. Counters of a replica are the replica's own, and go with it."""
    families = [family for family in _added(snapshots) if family.type != "gauge"]
    for family in families:
        family.samples = [sample for sample in family.samples if "replica" not in sample.labels]
    return _encode(families)


def _added(snapshots: Iterable[bytes]) -> list[_Family]:
    """What each process counts for itself adds up; of what all of them see, the largest reading is taken. A bucket of a
    histogram has the latest exemplar of all."""
    families: dict[str, _Family] = {}
    samples: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], _Sample]] = {}
    for one in snapshots:
        for family in _decode(one):
            families.setdefault(family.name, family)
            known = samples.setdefault(family.name, {})
            add = _addition(family)
            for sample in family.samples:
                before = known.setdefault((sample.name, tuple(sorted(sample.labels.items()))), sample)
                if before is not sample:
                    before.value = add(before.value, sample.value)
                    before.exemplar = latest(before.exemplar, sample.exemplar)
    for name, family in families.items():
        family.samples = list(samples[name].values())
    return list(families.values())


def _addition(family: _Family) -> Callable[[float, float], float]:
    if family.name == _PER_OWN_TOKEN:
        return lambda one, other: one * other / (one + other) if one and other else max(one, other)
    own = family.name.startswith(_OWN_GAUGES) if family.type == "gauge" else not family.name.startswith(_SEEN_BY_ALL)
    return operator.add if own else max


class _Merged(Collector):
    def __init__(self, families: Iterable[_Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.help, family.type)
            for sample in family.samples:
                exemplar = None if sample.exemplar is None else Exemplar(*sample.exemplar)
                metric.add_sample(sample.name, sample.labels, sample.value, exemplar=exemplar)
            yield metric
