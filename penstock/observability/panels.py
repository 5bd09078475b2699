"""Panels and dashboards as Grafana's JSON has them, over a Prometheus data source that is chosen in Grafana."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

COLUMNS = 24  # of Grafana's grid
WIDTH, HEIGHT = 8, 8  # of a panel

Unit = Literal[
    "short", "s", "percentunit", "reqps", "tps", "bytes", "Bps", "watt", "celsius", "hertz", "currencyUSD", "ops"
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    unit: Unit
    queries: tuple[tuple[str, str], ...]  # (PromQL, legend)
    about: str = ""
    stacked: bool = False
    threshold: float | None = None  # from here on red

    def json(self, number: int) -> dict[str, Any]:
        steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
        if self.threshold is not None:
            steps.append({"color": "red", "value": self.threshold})
        per_row = COLUMNS // WIDTH
        source = {"type": "prometheus", "uid": "${source}"}
        return {
            "id": number + 1,
            "type": "timeseries",
            "title": self.title,
            "description": self.about,
            "datasource": source,
            "gridPos": {"x": number % per_row * WIDTH, "y": number // per_row * HEIGHT, "w": WIDTH, "h": HEIGHT},
            "fieldConfig": {
                "defaults": {
                    "unit": self.unit,
                    "min": 0,
                    "thresholds": {"mode": "absolute", "steps": steps},
                    "custom": {
                        "fillOpacity": 30 if self.stacked else 8,
                        "lineWidth": 1,
                        "stacking": {"mode": "normal" if self.stacked else "none"},
                        "thresholdsStyle": {"mode": "off" if self.threshold is None else "dashed"},
                    },
                },
                "overrides": [],
            },
            "options": {
                "legend": {"displayMode": "list", "placement": "bottom"},
                "tooltip": {"mode": "multi", "sort": "desc"},
            },
            "targets": [
                {
                    "refId": chr(ord("A") + i),
                    "expr": query,
                    "legendFormat": legend,
                    "datasource": source,
                    "exemplar": query.startswith("histogram_quantile"),  # a dot for each, which leads to its trace
                }
                for i, (query, legend) in enumerate(self.queries)
            ],
        }


@dataclass(frozen=True, slots=True)
class Dashboard:
    name: str  # of its file
    title: str
    about: str
    panels: tuple[Panel, ...]

    def json(self) -> dict[str, Any]:
        return {
            "uid": f"penstock-{self.name}",
            "title": f"Penstock: {self.title}",
            "description": self.about,
            "tags": ["penstock"],
            "schemaVersion": 39,
            "version": 1,
            "editable": True,
            "refresh": "10s",
            "time": {"from": "now-1h", "to": "now"},
            "templating": {
                "list": [
                    {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus", "hide": 0}
                ]
            },
            "links": [{"type": "dashboards", "tags": ["penstock"], "title": "Penstock", "asDropdown": True}],
            "annotations": {"list": []},
            "panels": [panel.json(number) for number, panel in enumerate(self.panels)],
        }
