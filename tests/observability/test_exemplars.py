"""From a bucket of a latency histogram to the trace of a request, by way of a real Prometheus."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cli.dashboards import RULES, export_to
from penstock.observability.grafana import LATENCY
from penstock.observability.settings import ObservabilityConfig
from penstock.settings import Settings
from penstock.simulation.scripted_engine import MODEL
from tests.gateway.conftest import serving
from tests.gateway.scripted_server import load_built_in_tokenizer
from tests.otlp_collector import Collector
from tests.prometheus_server import PrometheusServer, openmetrics_families, wait_for

LATENCIES = (
    "penstock_time_to_first_token_seconds",
    "penstock_inter_token_seconds",
    "penstock_request_seconds",
    "penstock_queue_seconds",
)
OPENMETRICS = {"accept": "application/openmetrics-text; version=1.0.0"}


def test_every_latency_leads_to_sampled_traces_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    export_to(tmp_path)
    collector = Collector()
    settings = Settings(observability=ObservabilityConfig(collector.url))
    sampled, silent = "5a" * 16, "51" * 16
    with serving(load_built_in_tokenizer(), settings) as gateway, gateway.http() as http:
        for trace_id, flag in ((sampled, "01"), (silent, "00")):
            body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
            headers = {"traceparent": f"00-{trace_id}-{'01' * 8}-{flag}"}
            assert http.post("/v1/chat/completions", json=body, headers=headers).status_code == 200
        prometheus = PrometheusServer(tmp_path, tmp_path / RULES, [f"{gateway.host}:{gateway.port}"], "none")
        try:
            for name in LATENCIES:
                found = wait_for(lambda: prometheus.exemplars(f"{name}_bucket") or None, f"exemplars of {name}")  # noqa: B023
                assert {exemplar["labels"]["trace_id"] for exemplar in found} == {sampled}
        finally:
            prometheus.stop()
        plain = http.get("/metrics")
        assert plain.headers["content-type"].startswith("text/plain")
        assert sampled not in plain.text
        whole = http.get("/metrics", headers=OPENMETRICS)
        assert whole.headers["content-type"].startswith("application/openmetrics-text")
        for family in openmetrics_families(whole.text):
            for sample in family.samples:
                if sample.exemplar is not None:
                    assert sample.exemplar.value <= float(sample.labels["le"])
    assert collector.trace(bytes.fromhex(sampled))
    collector.stop()


def test_panels_of_latencies_show_exemplars() -> None:
    shown = {target["expr"] for panel in LATENCY.json()["panels"] for target in panel["targets"] if target["exemplar"]}
    assert all(any(name in expr for expr in shown) for name in LATENCIES)
