"""The metrics of several processes as those of one."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from penstock.core.engine import EngineStats
from penstock.observability.merging import merged
from penstock.observability.metrics import GatewayMetrics


def exposition(requests: int, in_flight: int, steps: int) -> bytes:
    metrics = GatewayMetrics({"m": lambda: EngineStats(steps=steps, running=3)})
    metrics.requests["/v1/completions", 200] = requests
    metrics.in_flight = in_flight
    metrics.models["m"].queue_time.observe(0.2)
    return metrics.exposition()


def test_own_counts_add_up_and_what_all_see_is_counted_once() -> None:
    text = merged([exposition(3, 1, 90), exposition(4, 2, 100)]).decode()
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


def test_one_process_reads_as_it_is() -> None:
    alone = exposition(3, 1, 90)
    assert sorted(merged([alone]).splitlines()) == sorted(alone.splitlines())
