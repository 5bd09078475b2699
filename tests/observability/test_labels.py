"""Panels and alerts name what they are of: the labels of their queries, as a parser of PromQL reads them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from penstock.observability.grafana import DASHBOARDS
from penstock.observability.rules import ALERTS, RECORDS

promql_parser = pytest.importorskip("promql_parser")
RECORDED = {record.name: record.expr for record in RECORDS}


def test_every_line_and_every_alert_says_what_it_is_of() -> None:
    """Each label of a query's result, but for those of the fleet, stands in the panel's legend or the alert's summary;
    no query has a result for each gateway, unless it is about gateways."""
    for dashboard in DASHBOARDS:
        for panel in dashboard.panels:
            for query, legend in panel.queries:
                labels = labels_of(query.replace("$__rate_interval", "5m"))
                assert labels == set(re.findall(r"{{(\w+)}}", legend)), (dashboard.name, panel.title)
    for alert in ALERTS:
        labels = {"instance"} if alert.name == "PenstockDown" else labels_of(alert.expr) - {"job", "namespace"}
        labels -= set(re.findall(r'(\w+)="', alert.expr))  # there is one value
        assert labels <= set(re.findall(r"\$labels\.(\w+)", alert.summary)), alert.name


def labels_of(query: str) -> set[str]:
    return _labels(promql_parser.parse(query))


def _labels(expr: Any) -> set[str]:
    match expr:
        case promql_parser.AggregateExpr():
            return set(expr.modifier.labels) if expr.modifier is not None else set()
        case promql_parser.Call() if expr.func.name == "histogram_quantile":
            return _labels(expr.args[1]) - {"le"}
        case promql_parser.Call():
            return _labels(expr.args[0])
        case promql_parser.BinaryExpr() if isinstance(expr.lhs, promql_parser.NumberLiteral):
            return _labels(expr.rhs)
        case promql_parser.BinaryExpr():
            return _labels(expr.lhs)
        case promql_parser.ParenExpr():
            return _labels(expr.expr)
        case promql_parser.VectorSelector() if expr.name in RECORDED:
            return labels_of(RECORDED[expr.name])
    raise AssertionError(f"a line for each gateway: {expr}")
