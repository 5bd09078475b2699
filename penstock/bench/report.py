"""Results for people (a plain table) and for programs (JSON with a description of the machine)."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.bench.measure import Percentiles, Summary
from penstock.bench.targets import Target
from penstock.bench.workloads import Metric, Workload

UNITS: dict[Metric, str] = {
    "ms_per_token": "ms/token",
    "decode_tok_s": "decode tok/s",
    "prompt_tok_s": "prompt tok/s",
    "output_tok_s": "output tok/s",
    "share_met": "share met",
}


@dataclass(frozen=True, slots=True)
class Result:
    """One workload measured. `detail` holds what only this kind of benchmark knows."""

    workload: Workload
    summary: Summary
    target: Target | None
    detail: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        value = self.summary.figure(self.workload.metric)
        result = {
            "workload": self.workload.name,
            "about": self.workload.about,
            "metric": self.workload.metric,
            "value": value,
            **dataclasses.asdict(self.summary),
            **self.detail,
        }
        if self.target is not None:
            result["target"] = dataclasses.asdict(self.target)
            result["ratio_to_goal"] = None if value is None else self.target.ratio(value, self.workload.metric)
        return result


def describe_machine() -> dict[str, Any]:
    """What the figures depend on. Torch is described only when this process uses it."""
    machine: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
    }
    if torch := sys.modules.get("torch"):
        machine["torch"] = torch.__version__
        machine["threads"] = torch.get_num_threads()
        machine["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return machine


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def results_table(results: Sequence[Result]) -> str:
    """One row per workload: its own figure beside the goal and the peer, then the rest."""
    columns = ["workload", "result", "", "goal", "ratio", "peer", "out tok/s", "total tok/s", "wall s", "errors"]
    return render_table(columns, [_row(result) for result in results])


def _row(result: Result) -> list[str]:
    metric, summary, target = result.workload.metric, result.summary, result.target
    value = summary.figure(metric)
    goal = ratio = peer = "-"
    if target is not None:
        goal = f"{format_figure(metric, target.goal)} {target.precision}"
        peer = f"{format_figure(metric, target.peer)} {target.peer_name}"
        ratio = "-" if value is None else f"{target.ratio(value, metric):.2f}"
    own = "-" if value is None else format_figure(metric, value)
    return [
        *(result.workload.name, own, UNITS[metric], goal, ratio, peer),
        *(f"{summary.output_tok_s:,.1f}", f"{summary.total_tok_s:,.1f}"),
        *(f"{summary.wall_s:.2f}", str(sum(summary.errors.values()))),
    ]


def format_figure(metric: Metric, value: float) -> str:
    if metric == "share_met":
        return f"{value:.1%}"
    return f"{value:.2f}" if metric == "ms_per_token" else f"{value:,.0f}"


def latency_table(results: Sequence[Result]) -> str:
    """Every latency at every percentile, in milliseconds, with the errors and the lateness of the generator itself."""
    rows = []
    for result in results:
        summary = result.summary
        series = [("TTFT", summary.ttft_ms), ("gap", summary.gap_ms), ("end to end", summary.e2e_ms)]
        series += [(f"TTFT {kind}", values) for kind, values in summary.ttft_by_kind_ms.items()]
        if late := result.detail.get("lateness_ms"):
            series.append(("sent late by", Percentiles(**late)))
        for name, values in series:
            if values is not None:
                figures = [f"{value:,.1f}" for value in (values.p50, values.p90, values.p99)]
                rows.append([f"{result.workload.name} {name}", *figures])
        rows += [[f"{result.workload.name} errors: {kind}", str(n), "", ""] for kind, n in summary.errors.items()]
    return render_table(["milliseconds", "p50", "p90", "p99"], rows)


def render_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns, the first to the left and the others to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(columns, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        others = (cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))
        return "  ".join([cells[0].ljust(widths[0]), *others]).rstrip()

    return "\n".join([line(columns), line(["-" * width for width in widths]), *map(line, rows)])


def write_json(path: str, command: str, results: Sequence[Result], **facts: Any) -> None:
    report = {
        "benchmark": command,
        "machine": describe_machine(),
        **facts,
        "results": [result.as_json() for result in results],
    }
    Path(path).write_text(json.dumps(report, indent=2) + "\n")
