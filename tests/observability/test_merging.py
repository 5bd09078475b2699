"""The metrics of several processes as those of one."""

from __future__ import annotations

import time
from functools import partial

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from penstock.core.engine import EngineStats
from penstock.observability.merging import merged, retired, snapshot
from penstock.observability.metrics import GatewayMetrics, exposition
from tests.prometheus_server import openmetrics_families


def process(requests: int, in_flight: int, steps: int) -> GatewayMetrics:
    metrics = GatewayMetrics({"m": lambda: EngineStats(steps=steps, running=3)})
    metrics.requests["/v1/completions", 200] = requests
    metrics.in_flight = in_flight
    metrics.models["m"].queue_time.observe(0.2)
    return metrics


def test_own_counts_add_up_and_what_all_see_is_counted_once() -> None:
    text = merged([snapshot(process(*counts).registry) for counts in ((3, 1, 90), (4, 2, 100))], False).decode()
    samples = {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["penstock_requests_total", ("/v1/completions", "200")] == 7
    assert samples["penstock_requests_in_flight", ()] == 3
    assert samples["penstock_queue_seconds_count", ("m",)] == 2
    assert samples["penstock_engine_steps_total", ("m",)] == 100
    assert samples["penstock_running_sequences", ("m",)] == 3


def test_counters_of_processes_that_have_gone_stay() -> None:
    gone = retired([])
    for requests, steps in ((3, 120), (4, 110)):
        gone = retired([gone, snapshot(process(requests, 5, steps).registry)])
    text = merged([snapshot(process(10, 1, 50).registry), gone], False).decode()
    samples = {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["penstock_requests_total", ("/v1/completions", "200")] == 17
    assert samples["penstock_requests_in_flight", ()] == 1
    assert samples["penstock_queue_seconds_count", ("m",)] == 3
    assert samples["penstock_engine_steps_total", ("m",)] == 120


def test_counters_of_replicas_go_with_them() -> None:
    """Those of a process that has started again begin at 0 too."""
    registry = CollectorRegistry(auto_describe=False)
    Counter("penstock_replica_cpu_seconds", "", ["model", "replica"], registry=registry).labels("m", "m-0").inc(500)
    assert b"m-0" not in merged([retired([snapshot(registry)])], False)


@pytest.mark.parametrize("openmetrics", [False, True])
def test_one_process_reads_as_it_is(openmetrics: bool) -> None:
    registry = process(3, 1, 90).registry
    assert merged([snapshot(registry)], openmetrics) == exposition(registry, openmetrics)


def test_the_latest_exemplar_of_a_bucket_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = [process(3, 1, 90), process(4, 2, 100)]
    for now, (which, seconds, trace) in enumerate(((0, 0.2, "old"), (1, 0.21, "new"), (0, 0.3, "other bucket"))):
        monkeypatch.setattr(time, "time", partial(float, 1e9 + now))
        processes[which].models["m"].queue_time.observe(seconds, 1, trace)
    text = merged([snapshot(each.registry) for each in processes], True).decode()
    found = {
        sample.labels["le"]: (sample.exemplar.labels["trace_id"], sample.exemplar.value)
        for family in openmetrics_families(text)
        for sample in family.samples
        if sample.exemplar is not None
    }
    assert found == {"0.25": ("new", 0.21), "0.5": ("other bucket", 0.3)}
