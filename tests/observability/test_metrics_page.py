"""docs/metrics.md lists every metric that a server can expose, made from the collectors themselves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.core import Metric

from penstock.fleet.metrics import fleet_metrics
from penstock.settings import settings_from_mapping
from tests.gateway.conftest import serving
from tests.gateway.scripted_server import load_built_in_tokenizer
from tests.redis_server import RedisServer

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
HEAD = """# Metrics

Everything that `GET /metrics` exposes, in the text format of Prometheus. Durations are in seconds, sizes in bytes,
shares from 0 to 1, money in the currency of the prices. Names and labels are stable: one that is renamed or taken away
stands in the changelog. Which panels and alerts use them: [dashboards.md](dashboards.md); what they are good for:
[observability.md](observability.md).

This page is made from the code; a test fails where it is out of date.

| metric | type | labels | |
|---|---|---|---|
"""


@pytest.fixture
def queue() -> Iterator[RedisServer]:
    server = RedisServer()
    yield server
    server.stop()


def test_every_metric_is_documented(tmp_path: Path, queue: RedisServer) -> None:
    settings = settings_from_mapping(
        {"machine_per_hour": 2.5, "batches": {"folder": str(tmp_path)}, "consume": {"url": queue.url}}
    )
    with serving(load_built_in_tokenizer(), settings, cached=True) as gateway:
        families = list(gateway.edge.metrics.registry.collect())
    families += [family for collector in fleet_metrics((), ()) for family in collector.collect()]
    own = sorted((family for family in families if family.name.startswith("penstock_")), key=lambda f: f.name)
    page = HEAD + "".join(row(family) for family in own)
    if os.environ.get("PENSTOCK_WRITE_DOCS"):
        PAGE.write_text(page)
    assert PAGE.read_text() == page, "PENSTOCK_WRITE_DOCS=1 pytest tests/observability/test_metrics_page.py writes it"


def row(family: Metric) -> str:
    name = f"{family.name}_total" if family.type == "counter" else family.name
    labels = ", ".join(f"`{label}`" for label in family._labelnames)  # type: ignore[attr-defined]
    return f"| `{name}` | {family.type} | {labels} | {family.documentation} |\n"
