"""The Prometheus metrics of the machines and GPUs that replicas run on, as their workers read them once a second."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.fleet.fleet import Fleet

LABELS = ["model", "replica"]
GPU_GAUGES = (
    ("utilisation", "Share of the time in which a kernel ran, 0 to 1"),
    ("memory_bytes", "Memory of the GPU"),
    ("memory_used_bytes", "Memory in use, by all processes"),
    ("temperature_celsius", "Temperature of the GPU"),
    ("power_watts", "Power drawn"),
    ("power_limit_watts", "Power that it may draw"),
    ("clock_hertz", "Clock of the SMs"),
    ("clock_limit_hertz", "Clock that the SMs may have"),
)


class HostMetrics(Collector):
    def __init__(self, fleets: Collection[Fleet]) -> None:
        self._fleets = fleets

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        cpu = CounterMetricFamily("penstock_replica_cpu_seconds", "CPU time of its process", labels=LABELS)
        resident = GaugeMetricFamily("penstock_replica_resident_bytes", "Memory of its process", labels=LABELS)
        gauges = [
            (name, GaugeMetricFamily(f"penstock_gpu_{name}", help, labels=[*LABELS, "gpu"]))
            for name, help in GPU_GAUGES
        ]
        energy = CounterMetricFamily(
            "penstock_gpu_energy_joules", "Energy used since the driver was loaded", labels=[*LABELS, "gpu"]
        )
        for fleet in self._fleets:
            for replica in fleet.replicas:
                if (host := replica.host) is None:
                    continue
                names = [fleet.model, replica.name]
                cpu.add_metric(names, host.cpu_seconds)
                resident.add_metric(names, host.resident_bytes)
                if (gpu := host.gpu) is not None:
                    energy.add_metric([*names, gpu.name], gpu.energy_joules)
                    for name, gauge in gauges:
                        gauge.add_metric([*names, gpu.name], getattr(gpu, name))
        yield from (cpu, resident, energy, *(gauge for _, gauge in gauges))
