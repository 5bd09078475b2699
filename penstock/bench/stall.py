"""Explains the longest ITL of a run: which request waited, what was computed meanwhile, and what its ledger blames."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from penstock.bench.charts import Axis, Bar, Lane, lanes_chart
from penstock.bench.measure import Timeline
from penstock.bench.report import Result

LANES = 10
MARGIN = 1.0  # of the stall's length, shown before and after it


@dataclass(frozen=True, slots=True)
class WorstStall:
    victim: Timeline
    start: float
    end: float
    label: str  # of the run

    @property
    def seconds(self) -> float:
        return self.end - self.start


def worst_stall(results: Sequence[Result]) -> tuple[WorstStall, Sequence[Timeline]] | None:
    """With the requests of the same run."""
    worst: WorstStall | None = None
    others: Sequence[Timeline] = ()
    for result in results:
        for timeline in result.timelines:
            for start, end in zip(timeline.token_times, timeline.token_times[1:], strict=False):
                if worst is None or end - start > worst.seconds:
                    worst, others = WorstStall(timeline, start, end, result.label), result.timelines
    return (worst, others) if worst else None


def stall_section(results: Sequence[Result]) -> str:
    """Only of open loops: in a closed one everything starts at once. Of several variants, the last."""
    opened = [result for result in results if result.workload.rate is not None]
    found = worst_stall([result for result in opened if result.variant == opened[-1].variant])
    if found is None:
        return ""
    stall, timelines = found
    chart = _chart(stall, timelines)
    story = "".join(f"<p>{escape(line)}</p>" for line in story_of(stall, timelines))
    return f"<h2>The worst stall</h2>{story}{chart}"


def story_of(stall: WorstStall, timelines: Sequence[Timeline]) -> list[str]:
    victim, ledger = stall.victim, stall.victim.ledger
    number = victim.token_times.index(stall.end) + 1
    lines = [
        f"In {stall.label}, a request {_described(victim)} waited {stall.seconds * 1e3:,.0f} ms for token {number} of "
        f"{victim.output_tokens}."
    ]
    if ledger is None:
        return [*lines, "The server gave no account of what it did meanwhile; below is what others received."]
    parts = {
        "queued": sum(ledger.queued.values()),
        "prefilling": sum(chunk.seconds for chunk in ledger.prefill),
        "decoding": ledger.decode,
        "stalled by others": ledger.stalled,
    }
    spent = ", ".join(f"{seconds * 1e3:,.0f} ms {name}" for name, seconds in parts.items() if seconds > 0)
    lines.append(f"Its ledger: {spent}; {ledger.preemptions} preemptions.")
    by_id = {t.ledger.request_id: t for t in timelines if t.ledger is not None}
    for blamed in ledger.stalls[:3]:
        who = _described(by_id[blamed.request_id]) if blamed.request_id in by_id else f"called {blamed.request_id}"
        lines.append(f"Lost to a request {who}: {blamed.seconds * 1e3:,.0f} ms in {blamed.steps} steps.")
    return lines


def _described(timeline: Timeline) -> str:
    kind = f"of class {timeline.kind}, " if timeline.kind else ""
    return f"({kind}{timeline.prompt_tokens:,} tokens in, {timeline.output_tokens} out)"


def _chart(stall: WorstStall, timelines: Sequence[Timeline]) -> str:
    low, high = stall.start - MARGIN * stall.seconds, stall.end + MARGIN * stall.seconds
    lanes = [_lane(timeline, stall) for timeline in chosen(stall, timelines)]
    seen = sum(_overlaps(timeline, stall.start, stall.end) for timeline in timelines)
    axis = Axis("ms around the stall", low - stall.start, high - stall.start, format=lambda s: f"{s * 1e3:g}")
    keys = [
        ("wait", "queued"),
        ("prefill", "prefilling"),
        ("decode", "decoding, a dot for each token"),
        ("shade", "the stall"),
    ]
    legend = "".join(f'<span class="key"><i class="box {style}"></i>{name}</span>' for style, name in keys)
    more = f"<p>{seen - len(lanes)} more requests were under way.</p>" if seen > len(lanes) else ""
    below = f'<div class="legend">{legend}</div>{more}'
    return lanes_chart(f"{stall.label}: what others did then", axis, lanes, (0.0, stall.seconds), below)


def chosen(stall: WorstStall, timelines: Sequence[Timeline]) -> list[Timeline]:
    """The victim, whom it blames, then those with the longest prompts: what fits."""
    blamed = {entry.request_id for entry in stall.victim.ledger.stalls} if stall.victim.ledger else set()
    present = [t for t in timelines if t is not stall.victim and _overlaps(t, stall.start, stall.end)]

    def weight(timeline: Timeline) -> tuple[bool, bool, int]:
        named = timeline.ledger is not None and timeline.ledger.request_id in blamed
        prefills = not timeline.token_times or timeline.token_times[0] > stall.start
        return named, prefills, timeline.prompt_tokens

    return [stall.victim, *sorted(present, key=weight, reverse=True)[: LANES - 1]]


def _overlaps(timeline: Timeline, start: float, end: float) -> bool:
    return not timeline.refused and timeline.sent < end and (timeline.finished is None or timeline.finished > start)


def _lane(timeline: Timeline, stall: WorstStall) -> Lane:
    """Time is relative to the start of the stall. When prefill began is known from the ledger only."""
    first = timeline.token_times[0] if timeline.token_times else timeline.finished or stall.end
    queued = sum(timeline.ledger.queued.values()) if timeline.ledger else 0.0
    started = min(timeline.sent + timeline.late + queued, first)
    ended = timeline.finished if timeline.finished is not None else first
    zero = stall.start
    prefill = f"prefill {(first - started) * 1e3:,.0f} ms"
    bars = [
        Bar(timeline.sent - zero, started - zero, "wait", f"queued {(started - timeline.sent) * 1e3:,.0f} ms"),
        Bar(started - zero, first - zero, "prefill", prefill),
        Bar(first - zero, ended - zero, "victim" if timeline is stall.victim else "decode", "decoding"),
    ]
    kind = f"{timeline.kind}, " if timeline.kind else ""
    name = f"{kind}{timeline.prompt_tokens:,} in, {timeline.output_tokens} out"
    if timeline is stall.victim:
        name = f"the one that waited: {name}"
    return Lane(name, bars, [at - zero for at in timeline.token_times])
