"""A loaded server with a Redis, scraped by a real Prometheus that evaluates the exported rules."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, start_http_server

from penstock.cli.dashboards import RULES, export_to
from penstock.core.engine import GpuStats, HostStats
from penstock.fleet.host_metrics import HostMetrics
from penstock.observability.grafana import DASHBOARDS
from penstock.observability.rules import ALERTS
from tests.conftest import Server, start_server
from tests.observability.rule_tests import continued, run_rule_tests
from tests.prometheus_server import PrometheusServer, promtool, wait_for
from tests.redis_server import RedisServer

SETTINGS = """
models:
  small:
    model: smollm2-135m
    engine: {kv_memory_gib: 0.2, max_seqs: 4}
    autoscale: {min_replicas: 1, max_replicas: 1}
classes:
  patient: {ttft_ms: 100000, itl_ms: 100000}
  batch: {rank: 1}
default_class: patient
tenants:
  ann: {budget_per_day: 100}
  bob: {requests_per_minute: 1}
prices: {small: {input: 1, cached: 0.1, output: 2}}
machine_per_hour: 2.5
"""


class _Replica:
    name = "small-0"
    host = HostStats(10.0, 10**9, GpuStats("GPU-0", 0.9, 10**11, 5 * 10**10, 60.0, 500.0, 700.0, 1.7e9, 2e9, 1e6))


class _Fleet:
    """No machine of the tests has a GPU: the metrics of one are made from a reading that nothing took."""

    model = "small"
    replicas = (_Replica(),)


@dataclass
class Deployment:
    server: Server
    redis: RedisServer
    prometheus: PrometheusServer
    rules: Path
    keys: dict[str, str]

    def metrics(self) -> str:
        headers = {"authorization": f"Bearer {self.keys['admin']}"}
        return httpx.get(f"{self.server.url}/metrics", headers=headers).text

    def worker(self) -> int:
        """The process of the only replica."""
        gateway = self.server.process.pid
        for child in Path(f"/proc/{gateway}/task/{gateway}/children").read_text().split():
            if b"penstock.worker" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
        raise AssertionError("no worker runs")

    def ask(self, tenant: str, text: str, **fields: Any) -> int:
        body = {"model": "small", "messages": [{"role": "user", "content": text}], **fields}
        headers = {"authorization": f"Bearer {self.keys[tenant]}"}
        url = f"{self.server.url}/v1/chat/completions"
        return httpx.post(url, json=body, headers=headers, timeout=120).status_code

    @contextmanager
    def load(self, tenant: str, clients: int, **fields: Any) -> Iterator[None]:
        """So many clients that ask one question after the other."""
        ended, numbers = threading.Event(), count()

        def client() -> None:
            while not ended.is_set():
                self.ask(tenant, f"Question {next(numbers) // 2}?", **fields)

        threads = [threading.Thread(target=client) for _ in range(clients)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            ended.set()
            for thread in threads:
                thread.join()

    def await_alert(self, name: str) -> None:
        wait_for(lambda: name in self.prometheus.firing() or None, f"{name} fires")

    def await_quiet(self, name: str) -> None:
        wait_for(lambda: name not in self.prometheus.firing() or None, f"{name} ends")


def _key(state: str, *arguments: str) -> str:
    command = [sys.executable, "-m", "penstock.cli.main", "keys", "create", *arguments, "--state", state]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "settings.yaml").write_text(SETTINGS)
    export_to(folder)
    redis = RedisServer()
    keys = {tenant: _key(redis.url, tenant) for tenant in ("ann", "bob")}
    keys["admin"] = _key(redis.url, "--admin")
    server = start_server("--config", str(folder / "settings.yaml"), "--state", redis.url)
    gpu = CollectorRegistry()
    gpu.register(HostMetrics([_Fleet()]))  # type: ignore[list-item]
    exporter, serving = start_http_server(0, "127.0.0.1", gpu)
    targets = [server.url.removeprefix("http://"), f"127.0.0.1:{exporter.server_port}"]
    prometheus = PrometheusServer(folder, folder / RULES, targets, keys["admin"])
    yield Deployment(server, redis, prometheus, folder / RULES, keys)
    prometheus.stop()
    exporter.shutdown()
    serving.join()
    server.stop()
    redis.stop()


def test_every_query_of_every_dashboard_returns_data(deployment: Deployment) -> None:
    queries = {
        f"{dashboard.title}, {panel.title}: {expr}": expr.replace("$__rate_interval", "1m")
        for dashboard in DASHBOARDS
        for panel in dashboard.panels
        for expr, _ in panel.queries
    }
    assert [deployment.ask("bob", "Hello?", max_tokens=2) for _ in range(2)] == [200, 429]
    with deployment.load("ann", 6, max_tokens=16, temperature=0):
        while queries:  # until all of them have had an answer
            query = wait_for(lambda: _answered(deployment.prometheus, queries), f"data for any of {list(queries)}")
            del queries[query]


def _answered(prometheus: PrometheusServer, queries: dict[str, str]) -> str | None:
    return next((name for name, expr in queries.items() if prometheus.query(expr)), None)


def test_names_and_types_follow_the_conventions(deployment: Deployment) -> None:
    promtool("check", "metrics", stdin=deployment.metrics())
    promtool("check", "rules", str(deployment.rules))


def test_an_hour_of_ordinary_load_raises_no_alert(deployment: Deployment, tmp_path: Path) -> None:
    """What a server under load reported twice goes on in the same way for an hour."""
    with deployment.load("ann", 2, max_tokens=16):
        before, began = deployment.metrics(), time.monotonic()
        wait_for(lambda: time.monotonic() - began > 3 or None, "some answers")
        after, seconds = deployment.metrics(), time.monotonic() - began
    series = continued(before, after, seconds)
    quiet = [{"eval_time": "1h", "alertname": alert.name, "exp_alerts": []} for alert in ALERTS]
    run_rule_tests(tmp_path, deployment.rules, [{"input_series": series, "alert_rule_test": quiet}])


def test_faults_raise_their_alerts(deployment: Deployment) -> None:
    """A flood, a Redis that is gone, a worker that hangs: each shows within seconds, and the first two end again."""
    with deployment.load("ann", 24, max_tokens=64):
        deployment.await_alert("PenstockTenantFloods")
    deployment.await_quiet("PenstockTenantFloods")
    deployment.redis.stop()
    deployment.await_alert("PenstockSharedStateDown")
    deployment.redis.start()
    deployment.await_quiet("PenstockSharedStateDown")
    os.kill(deployment.worker(), signal.SIGSTOP)
    deployment.await_alert("PenstockReplicaRestarted")
