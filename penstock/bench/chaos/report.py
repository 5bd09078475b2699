"""What `penstock chaos` found: a table, JSON and HTML."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from penstock.bench.chaos.faults import FAULTS, Fault
from penstock.bench.chaos.load import Phase
from penstock.bench.chaos.streams import Difference, Stream
from penstock.bench.charts import Series, axis_over, line_chart
from penstock.bench.html_report import html_table, longer_than, page, spoken_ms
from penstock.bench.measure import Percentiles
from penstock.bench.report import describe_machine, render_table

CALM, BETWEEN, ALL = "nothing broken", "between faults", "all"
EXAMPLES = 20  # of streams that failed or differ
COLUMNS = ("", "faults", "streams", "failed", "lost", "repeated", "changed", "shed")
TIMES = {"gaps": ("p50", "p99", "max"), "moved": ("p50", "p99"), "prefill": ("p50", "p99"), "rest": ("p99", "max")}
HEADINGS = [*COLUMNS, *(f"{name.removesuffix('s')} {of}" for name, shown in TIMES.items() for of in shown)]


@dataclass(slots=True)
class Row:
    """Streams of one kind of fault, or of none. A stream that several faults hit is in the row of each."""

    name: str
    faults: int = 0
    streams: int = 0
    failed: int = 0
    lost_tokens: int = 0
    repeated_tokens: int = 0
    changed: int = 0  # streams with other text
    shed: int = 0
    gaps: list[float] = field(default_factory=list)  # seconds: the longest of each stream in the time of the fault
    # What the gaps of those consist of that were moved once:
    moved: list[float] = field(default_factory=list)  # from the last chunk until another replica had the request
    prefill: list[float] = field(default_factory=list)  # there, with the wait for the prefill of others
    rest: list[float] = field(default_factory=list)

    def count(self, stream: Stream, found: Difference) -> None:
        self.streams += 1
        self.failed += stream.error is not None
        self.lost_tokens += found.lost
        self.repeated_tokens += found.repeated
        self.changed += found.changed
        self.shed += stream.shed

    def cells(self) -> list[str]:
        numbers = (self.streams, self.failed, self.lost_tokens, self.repeated_tokens, self.changed, self.shed)
        return [self.name, str(self.faults) if self.faults else "–", *map(str, numbers), *self._times()]

    def _times(self) -> Iterator[str]:
        for name, shown in TIMES.items():
            values = Percentiles.of_ms(getattr(self, name))
            yield from (f"{getattr(values, of):,.0f}" if values else "–" for of in shown)

    def as_json(self) -> dict[str, Any]:
        found = asdict(self)
        for name in TIMES:
            percentiles = Percentiles.of_ms(found.pop(name))
            found[f"{name}_ms"] = asdict(percentiles) if percentiles else None
        return found


@dataclass(frozen=True, slots=True)
class Hit:
    """A fault that a choice of a stream has met."""

    fault: Fault
    choice: int  # -1: the stream failed or was shed as a whole
    moved: float | None = None  # None: it stayed


def hits(stream: Stream, faults: Sequence[Fault]) -> Iterator[Hit]:
    """Follow each choice from replica to replica, by the failovers in its ledger, and say which faults it met. A stream
    that failed or was shed has no ledger: whatever fault there was in its time is to blame."""
    in_time = [fault for fault in faults if stream.sent <= fault.recovered and fault.at <= stream.finished]
    if stream.error is not None or stream.shed:
        yield from (Hit(fault, -1) for fault in in_time)
    for index, ledger in stream.ledgers.items():
        moves = list(ledger["failovers"])
        for fault in in_time:
            at = moves[0]["replica"] if moves else ledger["replica"]
            if at != fault.replica or fault.at < stream.sent:
                continue
            if fault.kind == "slow":
                yield Hit(fault, index)
            elif moves:
                yield Hit(fault, index, moves.pop(0)["lost"])


def longest_gap(stream: Stream, hit: Hit) -> float | None:
    """Between two deliveries in the time of a fault; None: nothing came before it or after it."""
    choice = stream.choices.get(hit.choice)
    gaps = choice.gaps if choice else []
    return max((b - a for a, b in gaps if b > hit.fault.at and a < hit.fault.recovered), default=None)


class Report:
    """`ended`: why there are fewer faults than were asked for."""

    def __init__(
        self, args: Namespace, model: str, seed: int, calm: Phase, chaos: Phase, faults: Sequence[Fault], ended: str
    ) -> None:
        self._args, self._model, self._seed = args, model, seed
        self._phase, self._faults, self._ended = chaos, faults, ended
        kinds = [kind for kind in FAULTS if kind in args.faults]
        self.rows = rows = {name: Row(name) for name in (CALM, *kinds, BETWEEN, ALL)}
        for stream, found in zip(calm.streams, calm.differences, strict=True):
            rows[CALM].count(stream, found)
            rows[CALM].gaps += _longest(stream)
        for fault in faults:
            rows[fault.kind].faults += 1
            rows[ALL].faults += 1
        for stream, found in zip(chaos.streams, chaos.differences, strict=True):
            self._count(stream, found)

    def _count(self, stream: Stream, found: Difference) -> None:
        met = list(hits(stream, self._faults))
        self.rows[ALL].count(stream, found)
        for kind in {hit.fault.kind for hit in met} or {BETWEEN}:
            self.rows[kind].count(stream, found)
        survived = [hit for hit in met if hit.choice in stream.ledgers]
        for hit in survived:
            if (gap := longest_gap(stream, hit)) is not None:
                for row in (self.rows[hit.fault.kind], self.rows[ALL]):
                    row.gaps.append(gap)
                    _divide(gap, hit, stream.ledgers[hit.choice], row)
        if not met:
            self.rows[BETWEEN].gaps += _longest(stream)

    @property
    def passed(self) -> bool:
        row = self.rows[ALL]
        wrong = row.failed or row.lost_tokens or row.repeated_tokens
        return not wrong and not self._ended and (not row.changed or self._args.tolerate_changed_text)

    def verdict(self) -> str:
        row, calm = self.rows[ALL], self.rows[CALM]
        found = (
            f"{row.faults} faults, {row.streams} streams: {row.failed} failed, {row.lost_tokens} tokens lost, "
            f"{row.repeated_tokens} repeated, {row.changed} streams changed, {row.shed} shed."
        )
        if self._ended:
            found += f" Ended early: {self._ended}."
        if calm.changed:
            found += (
                f" {calm.changed} of {calm.streams} answers changed with nothing broken, too: this server "
                f"does not repeat its answers, so changed text says nothing about failover (--tolerate-changed-text)."
            )
        return found

    def table(self) -> str:
        table = render_table(HEADINGS, [row.cells() for row in self.rows.values()])
        lines = [table, "tokens lost and repeated; streams failed, changed and shed; times in ms", "", self.verdict()]
        return "\n".join([*lines, *(f"  {example}" for example in self.examples())])

    def examples(self) -> list[str]:
        """Streams that failed or differ, with the ids by which `penstock explain` knows them."""
        lines = []
        for stream, found in zip(self._phase.streams, self._phase.differences, strict=True):
            if stream.error is not None or found:
                met = ", ".join(sorted({f"{hit.fault.kind} {hit.fault.replica}" for hit in hits(stream, self._faults)}))
                what = stream.error or f"{found.lost} tokens lost, {found.repeated} repeated, changed: {found.changed}"
                name = stream.id.partition("-")[2]
                lines.append(f"{stream.ask.kind} {name} ({met or 'no fault'}): {what}")
        return lines[:EXAMPLES]

    def write_json(self, path: Path) -> None:
        began = min((stream.sent for stream in self._phase.streams), default=0.0)
        options = ("streams", "output_tokens", "interval", "slow_seconds", "tolerate_changed_text")
        report = {
            "machine": describe_machine(),
            "url": self._args.url,
            "model": self._model,
            "seed": self._seed,
            **{name: getattr(self._args, name) for name in options},
            "seconds": self._phase.seconds,
            "passed": self.passed,
            "verdict": self.verdict(),
            "rows": {name: row.as_json() for name, row in self.rows.items()},
            "examples": self.examples(),
            "faults": [
                {"kind": f.kind, "replica": f.replica, "at": f.at - began, "requests": f.requests}
                | {"ready_after": f.ready - f.at, "recovered_after": f.recovered - f.at}
                for f in self._faults
            ],
        }
        path.write_text(json.dumps(report, indent=2) + "\n")

    def write_html(self, path: Path) -> None:
        machine, args = describe_machine(), self._args
        when = machine["date"][:16].replace("T", " ") + " UTC"
        about = [args.url, f"{args.streams} streams", f"{self._phase.seconds:.0f} s", when]
        sections = [
            f"<h1>{escape(self._model)}: {'passed' if self.passed else 'not passed'}</h1>",
            f'<p class="about">{escape(" · ".join(about))}</p>',
            f"<p>{escape(self.verdict())}</p>",
            html_table(HEADINGS, [row.cells() for row in self.rows.values()]),
            *(f"<p>{escape(example)}</p>" for example in self.examples()),
            _gaps_plot([row for name, row in self.rows.items() if name not in (BETWEEN, ALL)]),
        ]
        path.write_text(page(f"penstock chaos: {self._model}", sections))


def _divide(gap: float, hit: Hit, ledger: dict[str, Any], row: Row) -> None:
    """The ledger is of the last replica, so it tells of one move alone."""
    if hit.moved is None or len(ledger["failovers"]) != 1:
        return
    prefill = sum(ledger["queued"].values()) + sum(chunk["seconds"] for chunk in ledger["prefill"])
    row.moved.append(hit.moved)
    row.prefill.append(prefill)
    row.rest.append(gap - hit.moved - prefill)


def _longest(stream: Stream) -> list[float]:
    gaps = [b - a for choice in stream.choices.values() for a, b in choice.gaps]
    return [max(gaps)] if gaps else []


def _gaps_plot(rows: Sequence[Row]) -> str:
    curves = [(row.name, curve) for row in rows if (curve := longer_than([gap * 1e3 for gap in row.gaps]))]
    if not curves:
        return ""
    series = [Series(name, curve, index, dots=False) for index, (name, curve) in enumerate(curves)]
    x = axis_over("longest gap of a stream", [a for _, c in curves for a, _ in c], log=True, format=spoken_ms)
    y = axis_over("", [b for _, c in curves for _, b in c], log=True, format=lambda share: f"{share * 100:g}%")
    return f'<div class="plots">{line_chart("Longest gap: share of streams above it", x, y, series)}</div>'
