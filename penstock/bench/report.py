"""Prints results as tables, and writes them as JSON with a description of the machine."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.bench.measure import Summary, Timeline, percentile
from penstock.bench.targets import MEASURED, Target
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
    label: str  # the workload's name, and its variant where there are several
    timelines: Sequence[Timeline] = ()

    @property
    def variant(self) -> str:
        """How it was scheduled and sampled, as far as results of the same workload differ in that."""
        return self.label.removeprefix(self.workload.name).strip()

    @property
    def value(self) -> float | None:
        """In the workload's metric, as the target counts it."""
        if self.target is not None and self.target.admitted_only:
            return self.summary.share_met_admitted
        return self.summary.figure(self.workload.metric)

    @property
    def ratio(self) -> float | None:
        value = self.value
        return None if self.target is None or value is None else self.target.ratio(value, self.workload.metric)

    def as_json(self) -> dict[str, Any]:
        result = {
            "workload": self.workload.name,
            "about": self.workload.about,
            "rate": self.workload.rate,
            "metric": self.workload.metric,
            "value": self.value,
            **_summary_json(self.summary),
            **self.detail,
        }
        if self.target is not None:
            target = {**dataclasses.asdict(self.target), "measured": MEASURED[self.target.device]}
            result |= {"target": target, "ratio_to_goal": self.ratio}
        if self.workload.rate is not None:
            start = min((t.sent for t in self.timelines), default=0.0)
            result["timelines"] = [_timeline_json(timeline, start) for timeline in self.timelines]
        return result


def _summary_json(summary: Summary) -> dict[str, Any]:
    found = dataclasses.asdict(summary)
    for one in found["classes"].values():
        if one["objective"] is not None:
            one["objective"]["gap"] = one["objective"].pop("itl")  # its name in reports
    return found


def _timeline_json(timeline: Timeline, start: float) -> dict[str, Any]:
    """One request of an open loop, in seconds after the start of the run."""
    itls = timeline.itls
    ledger = timeline.ledger
    return {
        "sent": timeline.sent - start,
        "late": timeline.late,
        "class": timeline.kind,
        "prompt_tokens": timeline.prompt_tokens,
        "output_tokens": timeline.output_tokens,
        "ttft": timeline.ttft,
        "predicted_ttft": ledger and ledger.predicted_ttft,
        "p99_gap": percentile(itls, 0.99) if itls else None,
        "longest_gap": max(itls, default=None),
        "finished": None if timeline.finished is None else timeline.finished - start,
        "met": timeline.met,
        "error": timeline.error,
        "refused": timeline.refused,
        "retry_after": timeline.retry_after,
        "ledger": ledger and dataclasses.asdict(ledger),
    }


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


def print_report(results: Sequence[Result]) -> None:
    tables = [results_table(results), objectives_table(results), latency_table(results), steps_table(results)]
    print(*filter(None, [*tables, "\n".join(comparisons(results)), "\n".join(error_lines(results))]), sep="\n\n")


def error_lines(results: Sequence[Result]) -> list[str]:
    """What the server said of the first request that failed in each way."""
    return [
        f"{result.label}: {kind}, {count} times{f'; the first one: {message}' if message else ''}"
        for result in results
        for kind, count in result.summary.errors.items()
        for message in [result.summary.messages[kind]]
    ]


def results_table(results: Sequence[Result]) -> str:
    """One row per workload: its own figure, the goal and the peer where there are some, then the rest."""
    sources = {MEASURED[result.target.device] for result in results if result.target is not None}
    targets = ["goal*", "ratio*", "peer*"] if sources else []
    columns = ["workload", "result", "", *targets, "out tok/s", "total tok/s", "wall s", "errors"]
    table = render_table(columns, [_row(result, bool(sources)) for result in results])
    return "\n".join([table, *(f"* not measured here, but on {source}" for source in sorted(sources))])


def _row(result: Result, targets: bool) -> list[str]:
    metric, summary = result.workload.metric, result.summary
    return [
        *(result.label, format_figure(metric, result.value), UNITS[metric]),
        *(_target_cells(result) if targets else ()),
        *(f"{summary.output_tok_s:,.1f}", f"{summary.total_tok_s:,.1f}"),
        *(f"{summary.wall_s:.2f}", str(sum(summary.errors.values()))),
    ]


def _target_cells(result: Result) -> list[str]:
    metric, target = result.workload.metric, result.target
    if target is None:
        return ["-", "-", "-"]
    goal, peer = format_figure(metric, target.goal), format_figure(metric, target.peer)
    return [f"{goal} {target.precision}", _or_dash(result.ratio, ".2f"), f"{peer} {target.peer_name}"]


def _or_dash(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def format_figure(metric: Metric, value: float | None) -> str:
    if metric == "share_met":
        return _or_dash(value, ".1%")
    return _or_dash(value, ".2f" if metric == "ms_per_token" else ",.0f")


def objectives_table(results: Sequence[Result]) -> str:
    """How many requests met their objectives, where there are some. A refused request did not."""
    columns = ["objectives", "requests", "met", "of admitted", "refused", "refused in p99", "max", "retry after p50"]
    columns += ["goodput tok/s", "forecast within 20%", "step error"]
    rows = []
    for result in results:
        summary = result.summary
        if summary.share_met is None:
            continue
        refusal, forecast, error = summary.refusal_ms, summary.forecast, result.detail.get("step_time_error")
        rows.append(
            [
                *(result.label, str(summary.requests), f"{summary.share_met:.1%}"),
                *(_or_dash(summary.share_met_admitted, ".1%"), str(summary.refused)),
                f"{refusal.p99:.1f} ms" if refusal else "-",
                f"{refusal.max:.1f} ms" if refusal else "-",
                f"{summary.retry_after_s.p50:.1f} s" if summary.retry_after_s else "-",
                _or_dash(summary.goodput_tok_s, ",.0f"),
                f"{forecast.within_20_percent:.1%}" if forecast else "-",
                f"{error:.1%}" if error else "-",
            ]
        )
    return render_table(columns, rows) if rows else ""


def latency_table(results: Sequence[Result]) -> str:
    """Every latency at every percentile, in milliseconds, with the errors and the lateness of the generator itself."""
    rows = []
    for result in results:
        summary, label = result.summary, result.label
        series = [("TTFT", summary.ttft_ms), ("ITL", summary.gap_ms), ("end to end", summary.e2e_ms)]
        for name, found in summary.classes.items():
            series += [(f"TTFT {name}", found.ttft_ms), (f"ITL {name}", found.gap_ms)]
            rows.append([f"{label} {name}: met", f"{found.met} of {found.requests}", "", "", ""])
        series.append(("sent late by", summary.lateness_ms))
        for name, values in series:
            if values is not None:
                figures = [f"{value:,.1f}" for value in (values.p50, values.p90, values.p99, values.max)]
                rows.append([f"{label} {name}", *figures])
        rows += [[f"{label} errors: {kind}", str(n), "", "", ""] for kind, n in summary.errors.items()]
    return render_table(["milliseconds", "p50", "p90", "p99", "max"], rows)


def steps_table(results: Sequence[Result]) -> str:
    """What the engine did; only known in process."""
    columns = ["engine", "steps", "sequences/step", "tokens/step", "cached tokens", "preemptions"]
    columns += ["drafted", "accepted", "device waited"]
    rows = []
    for result in results:
        detail, metric = result.detail, result.workload.metric
        if "steps" not in detail:
            continue
        idle = detail["device_idle_s"]
        rows.append(
            [
                *(result.label, str(detail["steps"])),
                *(f"{detail['mean_batch']:.1f}", f"{detail['mean_step_tokens']:.1f}"),
                *(str(detail["cached_tokens"]), str(detail["preemptions"])),
                *(str(detail["drafted_tokens"]), str(detail["accepted_tokens"])),
                "-"
                if idle is None
                else f"{idle / result.summary.wall_s:.1%}, {idle / detail['steps'] * 1e3:.2f} ms/step",
                " ".join(format_figure(metric, value) for value in detail["values"]),
            ]
        )
    return render_table([*columns, "values of all seeds"], rows) if rows else ""


def comparisons(results: Sequence[Result]) -> list[str]:
    """Each result against the first of the same workload, which was scheduled or sampled in another way."""
    first: dict[str, Result] = {}
    lines = []
    for result in results:
        base = first.setdefault(result.workload.name, result)
        if base.variant != result.variant:
            against = f"{result.workload.name}: {result.variant} against {base.variant}:"
            lines.append(f"{against} {'; '.join(_compare(base, result))}")
    return lines


def _compare(base: Result, result: Result) -> list[str]:
    metric = result.workload.metric
    line = f"{format_figure(metric, base.value)} -> {format_figure(metric, result.value)} {UNITS[metric]}"
    if base.value and result.value:
        line += f", {result.value / base.value:.3f}x"
    if metric != "share_met":
        ratios = [b / a for a, b in zip(base.detail["values"], result.detail["values"], strict=True) if a and b]
        by_seed = " ".join(f"{ratio:.3f}x" for ratio in ratios)
        return [f"{line}; by seed {by_seed}, median {statistics.median(ratios):.3f}x" if ratios else line]
    lines = [line]
    for name, found in result.summary.classes.items():
        old = base.summary.classes[name]
        if old.ttft_ms and found.ttft_ms:
            times = f"{old.ttft_ms.p99:,.0f} -> {found.ttft_ms.p99:,.0f} ms"
            lines.append(f"p99 TTFT of {name} {times}, {old.ttft_ms.p99 / found.ttft_ms.p99:.1f}x better")
    return lines


def announce(label: str, metric: Metric, summary: Summary, stopped_early: bool = False) -> None:
    """Progress, while a benchmark runs."""
    line = f"{label}: {format_figure(metric, summary.figure(metric))} {UNITS[metric]} in {summary.wall_s:.2f} s"
    if summary.refused:
        line += f", {summary.refused} refused"
    print(line + (", stopped early" if stopped_early else ""), file=sys.stderr, flush=True)


def spoken_capacity(rate: float | None, attainment: float) -> str:
    if rate is None:
        return f"no rate tried holds {attainment:.1%}"
    return f"{attainment:.1%} of requests meet their objectives at up to {rate:g} arrivals a second"


def render_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns, the first to the left and the others to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(columns, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        others = (cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))
        return "  ".join([cells[0].ljust(widths[0]), *others]).rstrip()

    return "\n".join([line(columns), line(["-" * width for width in widths]), *map(line, rows)])


def write_json(path: Path, command: str, results: Sequence[Result], facts: Mapping[str, Any]) -> None:
    report = {
        "benchmark": command,
        "machine": describe_machine(),
        **facts,
        "results": [result.as_json() for result in results],
    }
    path.write_text(json.dumps(report, indent=2) + "\n")
