"""The Prometheus metrics of replicas, read when they are scraped."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.fleet.autoscaler import Autoscaler
from penstock.fleet.fleet import Fleet
from penstock.fleet.host_metrics import HostMetrics


def fleet_metrics(fleets: Collection[Fleet], autoscalers: Collection[Autoscaler]) -> list[Collector]:
    return [FleetMetrics(fleets), HostMetrics(fleets), ScalingMetrics(fleets, autoscalers)]


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
        fragmentation = GaugeMetricFamily(
            "penstock_replica_kv_fragmentation",
            "Token slots without a token over all slots of the KV blocks that sequences hold, 0 to 1: the unused ends "
            "of their last blocks",
            labels=labels,
        )
        restarts = CounterMetricFamily("penstock_replica_restarts", "Times that it was lost", labels=labels)
        failovers = CounterMetricFamily(
            "penstock_failovers", "Requests that went on at another replica, or at a restarted one", labels=["model"]
        )
        hedges = CounterMetricFamily(
            "penstock_hedges",
            "Requests that a second replica was asked for, too; won: its first token came first",
            labels=["model", "outcome"],
        )
        held = GaugeMetricFamily("penstock_held_requests", "That wait for a replica: none is running", labels=["model"])
        for fleet in self._fleets:
            held.add_metric([fleet.model], fleet.held)
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
                fragmentation.add_metric(names, stats.kv_slots_empty / stats.kv_slots if stats.kv_slots else 0.0)
                restarts.add_metric(names, replica.restarts)
        yield from (up, streams, waiting, kv, fragmentation, restarts, held, failovers, hedges)


class ScalingMetrics(Collector):
    """How replicas start and how many there should be: of the process that launches them. Of others: first tokens."""

    def __init__(self, fleets: Collection[Fleet], autoscalers: Collection[Autoscaler] = ()) -> None:
        self._fleets = fleets
        self._autoscalers = autoscalers

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield self._starts()
        yield from self._standbys()
        yield from self._decisions()

    def _starts(self) -> Metric:
        starts = GaugeMetricFamily(
            "penstock_replica_start_seconds",
            "Phases of its last start; first_token: of its first request, from being sent there",
            labels=["model", "replica", "phase"],
        )
        for fleet in self._fleets:
            for replica in fleet.replicas:
                for phase, seconds in replica.start_seconds.items():
                    starts.add_metric([fleet.model, replica.name, phase], seconds)
        return starts

    def _standbys(self) -> Iterator[Metric]:
        workers = GaugeMetricFamily("penstock_standby_workers", "Prepared, in the warm pool", labels=["model"])
        taken = CounterMetricFamily(
            "penstock_standby_starts", "Starts from the warm pool, and cold ones beside it", labels=["model", "outcome"]
        )
        for fleet in self._fleets:
            if fleet.pool is not None:
                workers.add_metric([fleet.model], fleet.pool.prepared)
                taken.add_metric([fleet.model, "taken"], fleet.pool.taken)
                taken.add_metric([fleet.model, "missed"], fleet.pool.missed)
        yield from (workers, taken)

    def _decisions(self) -> Iterator[Metric]:
        wanted = GaugeMetricFamily("penstock_autoscale_replicas", "That there should be", labels=["model"])
        ready = GaugeMetricFamily("penstock_autoscale_ready_replicas", "That serve and stay", labels=["model"])
        starting = GaugeMetricFamily("penstock_autoscale_starting_replicas", "On their way", labels=["model"])
        need = GaugeMetricFamily("penstock_autoscale_need", "Of the load, in replicas", labels=["model"])
        changes = CounterMetricFamily(
            "penstock_autoscale_changes", "Decisions for another number", labels=["model", "direction"]
        )
        for autoscaler in self._autoscalers:
            if (decision := autoscaler.decision) is None:
                continue
            model, current = [autoscaler.fleet.model], autoscaler.current
            serving = sum(replica.state == "ready" for replica in current)
            wanted.add_metric(model, decision.replicas)
            ready.add_metric(model, serving)
            starting.add_metric(model, len(current) - serving)
            need.add_metric(model, decision.need)
            changes.add_metric([*model, "up"], autoscaler.raised)
            changes.add_metric([*model, "down"], autoscaler.lowered)
        yield from (wanted, ready, starting, need, changes)
