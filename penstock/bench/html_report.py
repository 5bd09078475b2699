"""Writes a report with plots as one HTML file: no scripts, nothing loaded from elsewhere, light and dark."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from penstock.bench.charts import Axis, Limit, Series, axis_over, line_chart
from penstock.bench.measure import Percentiles
from penstock.bench.report import Result, comparisons, describe_machine, format_figure, spoken_capacity
from penstock.bench.stall import stall_section
from penstock.core.request import Objective

CURVE_POINTS = 120
LONGEST_CURVES = 6  # results in one plot


def write_html(path: Path, command: str, results: Sequence[Result], facts: Mapping[str, Any]) -> None:
    path.write_text(render(command, results, facts))


def render(command: str, results: Sequence[Result], facts: Mapping[str, Any]) -> str:
    machine = describe_machine()
    where = machine.get("gpu") or f"{machine['cpu']}, {machine['cores']} cores"
    about = [facts.get("precision"), facts.get("url") or where, machine["date"][:16].replace("T", " ") + " UTC"]
    sections = [
        f"<h1>{escape(str(facts['model']))}</h1>",
        f'<p class="about">{escape(" · ".join(str(fact) for fact in about if fact))}</p>',
        _capacities(facts),
        _results_table(results),
        _lines(comparisons(results)),
        _plots(results),
        stall_section(results),
        _percentiles_table(results),
    ]
    return page(f"penstock bench {command}: {facts['model']}", sections)


def page(title: str, sections: Sequence[str]) -> str:
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
        f"<style>{CSS}</style></head><body><main>{''.join(sections)}</main></body></html>\n"
    )


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"<p>{escape(line)}</p>" for line in lines)


def _capacities(facts: Mapping[str, Any]) -> str:
    return _lines(f"{name}: {spoken_capacity(rate, facts['attainment'])}." for name, rate in facts["capacity"].items())


# -- tables ------------------------------------------------------------------------------------------------------------


def _results_table(results: Sequence[Result]) -> str:
    columns = [
        "",
        "requests",
        "met",
        "of admitted",
        "goal elsewhere",
        "refused",
        "goodput tok/s",
        "output tok/s",
        "errors",
    ]
    rows = []
    for result in results:
        summary, target = result.summary, result.target
        promised = summary.share_met is not None
        rows.append(
            [
                result.label,
                str(summary.requests),
                format_figure("share_met", summary.share_met),
                format_figure("share_met", summary.share_met_admitted),
                format_figure(result.workload.metric, target.goal) if target else "–",
                str(summary.refused),
                f"{summary.goodput_tok_s:,.0f}" if promised and summary.goodput_tok_s is not None else "–",
                f"{summary.output_tok_s:,.0f}",
                str(sum(summary.errors.values())),
            ]
        )
    return html_table(columns, rows)


def _percentiles_table(results: Sequence[Result]) -> str:
    columns = ["milliseconds", "p50", "p90", "p99", "max", "objective"]
    rows = []
    for result in results:
        summary = result.summary
        for name, found in summary.classes.items():
            objective = found.objective or Objective()
            rows.append(_percentiles_row(f"{result.label} {name} TTFT", found.ttft_ms, objective.ttft))
            rows.append(_percentiles_row(f"{result.label} {name} ITL", found.gap_ms, objective.itl))
        if not summary.classes:
            rows.append(_percentiles_row(f"{result.label} TTFT", summary.ttft_ms, None))
            rows.append(_percentiles_row(f"{result.label} ITL", summary.gap_ms, None))
        rows.append(_percentiles_row(f"{result.label} end to end", summary.e2e_ms, None))
        rows.append(_percentiles_row(f"{result.label} refused after", summary.refusal_ms, None))
        rows.append(_percentiles_row(f"{result.label} sent late by", summary.lateness_ms, None))
    return "<h2>Percentiles</h2>" + html_table(columns, [row for row in rows if row])


def _percentiles_row(name: str, values: Percentiles | None, objective: float | None) -> list[str]:
    if values is None:
        return []
    figures = [f"{value:,.1f}" for value in (values.p50, values.p90, values.p99, values.max)]
    return [name, *figures, "" if objective is None else f"{objective * 1e3:,.0f}"]


def html_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


# -- plots -------------------------------------------------------------------------------------------------------------


def spoken_ms(value: float) -> str:
    if value >= 1000:
        return f"{value / 1000:g} s"
    return f"{value:g} ms"


def _group(result: Result) -> str:
    """Results that differ by their rate alone belong to one curve."""
    return " ".join([result.workload.name.partition("@")[0], result.variant]).strip()


def _plots(results: Sequence[Result]) -> str:
    groups: dict[str, list[Result]] = {}
    for result in results:
        if result.workload.rate is not None:
            groups.setdefault(_group(result), []).append(result)
    for group in groups.values():
        group.sort(key=lambda result: result.workload.rate or 0.0)
    plots = [_attainment_plot(groups), *_ttft_plots(groups), _itl_plot(results)]
    return f'<div class="plots">{"".join(plots)}</div>'


def _rate_axis(results: Iterable[Result]) -> Axis:
    rates = [result.workload.rate or 0.0 for result in results]
    return axis_over("arrivals a second", rates, log=max(rates) >= 16 * min(rates))


def _attainment_plot(groups: Mapping[str, Sequence[Result]]) -> str:
    series, shares = [], []
    for index, (name, group) in enumerate(groups.items()):
        points = [(r.workload.rate or 0.0, r.summary.share_met) for r in group if r.summary.share_met is not None]
        if points:
            series.append(Series(name, points, index))
            shares += [share for _, share in points]
    goals = sorted({(r.workload.rate or 0.0, r.target.goal) for group in groups.values() for r in group if r.target})
    if goals:
        series.append(Series("goal elsewhere", goals, 5, dashed=True))
    if not shares:
        return ""
    low = max(0.0, min(int(min(shares) * 10) / 10, 0.9))
    y = Axis("", low, 1.0, format=lambda value: f"{value:.0%}" if low < 0.9 else f"{value:.1%}")
    x = _rate_axis(result for group in groups.values() for result in group)
    return line_chart("Share of requests that met their objectives", x, y, series)


def _ttft_plots(groups: Mapping[str, Sequence[Result]]) -> list[str]:
    """One for each curve of rates, all on the same scale."""
    found = {name: _ttft_curves(group) for name, group in groups.items()}
    values = [value for curves, _ in found.values() for one in curves for _, value in one.points]
    values += [limit.value for _, limits in found.values() for limit in limits]
    if not values:
        return []
    y = axis_over("", [max(value, 0.1) for value in values], log=True, format=spoken_ms)
    return [
        line_chart(f"Time to first token, {name}", _rate_axis(groups[name]), y, curves, limits)
        for name, (curves, limits) in found.items()
    ]


def _ttft_curves(group: Sequence[Result]) -> tuple[list[Series], list[Limit]]:
    curves: dict[tuple[str, str], list[tuple[float, float]]] = {}
    limits: dict[str, Limit] = {}
    for result in group:
        classes = {kind: (c.ttft_ms, c.objective) for kind, c in result.summary.classes.items()}
        for kind, (ttft, objective) in (classes or {"all": (result.summary.ttft_ms, None)}).items():
            if ttft is not None:
                for which in ("p99", "p50"):
                    curves.setdefault((kind, which), []).append((result.workload.rate or 0.0, getattr(ttft, which)))
            if objective is not None and objective.ttft is not None:
                limits[kind] = Limit(objective.ttft * 1e3, f"objective of {kind}")
    kinds = sorted({kind for kind, _ in curves})
    series = [
        Series(f"{kind} {which}", points, kinds.index(kind), dashed=which == "p50")
        for (kind, which), points in sorted(curves.items())
    ]
    return series, list(limits.values())


def _itl_plot(results: Sequence[Result]) -> str:
    """Plot the share of ITLs above each value, on logarithmic axes so that the tail, where stalls are, is visible."""
    chosen = [result for result in results if result.summary.gap_ms is not None][-LONGEST_CURVES:]
    curves = [(result.label, longer_than([itl * 1e3 for t in result.timelines for itl in t.itls])) for result in chosen]
    curves = [(label, curve) for label, curve in curves if curve]
    if not curves:
        return ""
    series = [Series(label, curve, index, dots=False) for index, (label, curve) in enumerate(curves)]
    x = axis_over("inter-token latency", [a for _, curve in curves for a, _ in curve], log=True, format=spoken_ms)
    shares = [share for _, curve in curves for _, share in curve]
    y = axis_over("", shares, log=True, format=lambda share: f"{share * 100:g}%")
    objectives = {o.itl for r in chosen for o in r.workload.objectives.values() if o.itl is not None}
    limits = [Limit(itl * 1e3, "objective", vertical=True) for itl in objectives if x.low <= itl * 1e3 <= x.high]
    return line_chart("Inter-token latency: share that is longer", x, y, series, limits)


def longer_than(values: list[float]) -> list[tuple[float, float]]:
    """Points (value, share of values at least that long), thinned evenly in the logarithm of the share."""
    values = sorted(max(value, 0.01) for value in values)
    if len(values) < 2:
        return []
    ranks = sorted({round(len(values) ** (1 - i / CURVE_POINTS)) for i in range(CURVE_POINTS + 1)}, reverse=True)
    return [(values[len(values) - rank], rank / len(values)) for rank in ranks]


CSS = """
:root{--bg:#fff;--ink:#1c1f23;--soft:#5d6570;--grid:#e4e7eb;--axis:#9aa2ad;--shade:#e0662e2e;
--c0:#2864c8;--c1:#d9622b;--c2:#1f8f6b;--c3:#8a4fc4;--c4:#b58a00;--c5:#7b828c;--wait:#c3c9d1;--prefill:#d9622b}
@media(prefers-color-scheme:dark){:root{--bg:#14171b;--ink:#e8eaed;--soft:#9da5b0;--grid:#2a2f36;--axis:#59616c;
--shade:#f0885038;--c0:#6ea1f5;--c1:#f08a55;--c2:#4cc39b;--c3:#b98cf0;--c4:#dcb53c;--c5:#9299a3;--wait:#474e58;--prefill:#f08a55}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,sans-serif;-webkit-text-size-adjust:100%}
main{max-width:960px;margin:0 auto;padding:20px 16px 48px}
h1{font-size:22px;margin:0}h2{font-size:17px;margin:32px 0 8px}
p{margin:6px 0}.about{color:var(--soft);margin-bottom:18px}
.scroll{overflow-x:auto;margin:12px 0}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:13px;white-space:nowrap}
th{color:var(--soft);font-weight:500}th,td{padding:4px 10px;text-align:right;border-bottom:1px solid var(--grid)}
th:first-child,td:first-child{text-align:left;padding-left:0}
@media(max-width:600px){th,td{padding:4px 5px;font-size:12px}td:first-child{white-space:normal;min-width:92px}}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(320px,100%),1fr));gap:24px;margin-top:24px}
figure{margin:0;max-width:520px}figcaption{font-weight:600;font-size:14px;margin-bottom:4px}
svg{width:100%;height:auto;display:block}
svg text{font:11px system-ui,sans-serif;fill:var(--soft)}
text.limit{font-size:10px;paint-order:stroke;stroke:var(--bg);stroke-width:3px}
.grid{stroke:var(--grid)}.axis{stroke:var(--axis)}line.limit{stroke:var(--soft);stroke-dasharray:2 3}
.line{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
.line.dashed{stroke-dasharray:5 5;stroke-width:1.5}
.c0{--c:var(--c0)}.c1{--c:var(--c1)}.c2{--c:var(--c2)}.c3{--c:var(--c3)}.c4{--c:var(--c4)}.c5{--c:var(--c5)}
.line{stroke:var(--c)}.dot{fill:var(--c);stroke:var(--bg);stroke-width:1}
.shade{fill:var(--shade)}.wait{fill:var(--wait)}.prefill{fill:var(--prefill)}.decode{fill:var(--c0);opacity:.35}
.token{fill:var(--c0)}.victim{fill:var(--c0);opacity:.7}
.legend{display:flex;flex-wrap:wrap;gap:4px 14px;font-size:12px;color:var(--soft);margin-top:4px}
.key i{display:inline-block;width:16px;height:0;border-top:2.5px solid var(--c);margin-right:5px;vertical-align:middle}
.key i.dashed{border-top-style:dashed}.key i.box{height:9px;border:0;border-radius:2px}
i.box.wait{background:var(--wait)}i.box.prefill{background:var(--prefill)}i.box.decode{background:var(--c0);opacity:.5}
i.box.shade{background:var(--shade)}
"""
