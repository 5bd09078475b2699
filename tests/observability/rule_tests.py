"""Tests of Prometheus rules as `promtool test rules` runs them: series of samples in, alerts out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.prometheus_server import promtool

INTERVAL_SECONDS = 30  # between samples: two in the shortest window of a rule
SAMPLES = 3600 // INTERVAL_SECONDS


def run_rule_tests(folder: Path, rules: Path, tests: list[dict[str, Any]]) -> None:
    """Each test has `input_series` and `alert_rule_test` as promtool's documentation describes them."""
    file = folder / "rule-tests.yaml"
    tests = [{"interval": f"{INTERVAL_SECONDS}s", **test} for test in tests]
    file.write_text(json.dumps({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": tests}))
    promtool("test", "rules", str(file))


def continued(before: str, after: str, seconds: float) -> list[dict[str, str]]:
    """The series of two scrapes, so many seconds apart, continued: gauges as they were last, counters at their rate."""
    began = {_key(sample): sample.value for _, sample in _samples(before)}
    series = []
    for family, sample in _samples(after):
        counts = family.type in ("counter", "histogram")
        gain = (sample.value - began.get(_key(sample), 0.0)) / seconds * INTERVAL_SECONDS if counts else 0.0
        series.append({"series": _key(sample), "values": f"{sample.value}+{gain}x{SAMPLES}"})
    return series


def _samples(exposition: str) -> Iterator[tuple[Metric, Sample]]:
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if sample.value == sample.value:  # not NaN
                yield family, sample


def _key(sample: Sample) -> str:
    labels = ",".join(f"{name}={json.dumps(value)}" for name, value in sample.labels.items())
    return f"{sample.name}{{{labels}}}"
