"""The Prometheus metrics of a process that serves or launches, whatever it serves."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.core.machine import file_limit, open_files
from penstock.observability.logging import dropped_lines


class ProcessMetrics(Collector):
    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "penstock_log_lines_dropped", "Lines of the log that nobody read in time", dropped_lines()
        )
        yield GaugeMetricFamily("penstock_open_files", "File descriptors that are open", open_files())
        yield GaugeMetricFamily("penstock_open_files_limit", "File descriptors that may be open", file_limit())
