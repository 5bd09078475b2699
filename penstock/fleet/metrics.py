"""The Prometheus metrics of replicas, read when they are scraped."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.fleet.fleet import Fleet


class FleetMetrics(Collector):
    def __init__(self, fleets: Collection[Fleet]) -> None:
        self._fleets = fleets

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        labels = ["model", "replica"]
        up = GaugeMetricFamily("penstock_replica_up", "1: it takes requests", labels=labels)
        streams = GaugeMetricFamily("penstock_replica_streams", "Requests in flight there", labels=labels)
        waiting = GaugeMetricFamily("penstock_replica_waiting", "Requests queued in its engine", labels=labels)
        kv = GaugeMetricFamily("penstock_replica_kv_utilisation", "Share of its KV blocks in use", labels=labels)
        restarts = CounterMetricFamily("penstock_replica_restarts", "Times that it was lost", labels=labels)
        failovers = CounterMetricFamily(
            "penstock_failovers", "Requests that went on at another replica, or at a restarted one", labels=["model"]
        )
        hedges = CounterMetricFamily(
            "penstock_hedges",
            "Requests that a second replica was asked for, too; won: its first token came first",
            labels=["model", "outcome"],
        )
        for fleet in self._fleets:
            if fleet.hedging is not None:
                hedges.add_metric([fleet.model, "won"], fleet.hedging.won)
                hedges.add_metric([fleet.model, "lost"], fleet.hedging.lost)
            failovers.add_metric([fleet.model], fleet.failovers)
            for replica in fleet.replicas:
                names, stats = [fleet.model, replica.name], replica.stats
                up.add_metric(names, replica.state == "ready")
                streams.add_metric(names, fleet.streams(replica))
                waiting.add_metric(names, stats.waiting)
                kv.add_metric(names, stats.kv_blocks_used / stats.kv_blocks if stats.kv_blocks else 0.0)
                restarts.add_metric(names, replica.restarts)
        yield from (up, streams, waiting, kv, restarts, failovers, hedges)
