"""A real Prometheus for tests: scrapes every half second and evaluates the exported rules as often."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.redis_server import free_port

WAIT_SECONDS = 90
INTERVAL = "500ms"

T = TypeVar("T")


def wait_for(read: Callable[[], T | None], what: str) -> T:
    """The first reading that is there."""
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        if (found := read()) is not None:
            return found
        time.sleep(0.05)
    raise AssertionError(f"not within {WAIT_SECONDS} s: {what}")


def promtool(*arguments: str, stdin: str | None = None) -> str:
    """What it says. It must find nothing to complain about."""
    command = [_installed("promtool"), *arguments]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def openmetrics_families(text: str) -> list[Metric]:
    """What an exposition holds, which must be valid."""
    return list(text_string_to_metric_families(text))  # type: ignore[no-untyped-call]


class PrometheusServer:
    def __init__(self, folder: Path, rules: Path, targets: Sequence[str], key: str) -> None:
        """`targets` are addresses HOST:PORT that have /metrics; `key` is sent to all of them."""
        config = {
            "global": {"scrape_interval": INTERVAL, "scrape_timeout": INTERVAL, "evaluation_interval": INTERVAL},
            "rule_files": [str(rules)],
            "scrape_configs": [
                {
                    "job_name": "penstock",
                    "authorization": {"credentials": key},
                    "static_configs": [{"targets": list(targets)}],
                }
            ],
        }
        (folder / "prometheus.yaml").write_text(json.dumps(config))  # JSON is YAML
        address = f"127.0.0.1:{free_port()}"
        self._process = subprocess.Popen(
            [
                _installed("prometheus"),
                f"--config.file={folder / 'prometheus.yaml'}",
                f"--storage.tsdb.path={folder / 'tsdb'}",
                f"--web.listen-address={address}",
                "--enable-feature=exemplar-storage",
                "--log.level=error",
            ]
        )
        self._http = httpx.Client(base_url=f"http://{address}/api/v1", timeout=30)
        wait_for(self._ready, "Prometheus answers")

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The series that a query yields now: their labels (`metric`) and `value`."""
        answer = self._http.get("query", params={"query": expr}).json()
        assert answer["status"] == "success", f"{answer['error']}: {expr}"
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    def exemplars(self, expr: str) -> list[dict[str, Any]]:
        """Of the series that a query reads, since it runs: each with `labels`, `value` and `timestamp`."""
        now = time.time()
        params: dict[str, str | float] = {"query": expr, "start": now - 3600, "end": now + 60}
        series = self._http.get("query_exemplars", params=params).json()["data"]
        return [exemplar for each in series for exemplar in each["exemplars"]]

    def firing(self) -> set[str]:
        alerts = self._http.get("alerts").json()["data"]["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def _ready(self) -> bool | None:
        assert self._process.poll() is None, "Prometheus ended while starting"
        try:
            return self._http.get("query", params={"query": "up"}).is_success or None
        except httpx.TransportError:
            return None


def _installed(program: str) -> str:
    binary = shutil.which(program)
    if binary is None:
        pytest.fail(f"{program} is not installed; on Debian and Ubuntu: apt-get install prometheus")
    return binary
