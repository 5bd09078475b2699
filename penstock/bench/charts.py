"""Draws plots as inline SVG: lines over linear or logarithmic axes, and lanes over time. The CSS has the colours.

Drawn 400 units wide with text of 11 units, so that a plot on a phone's width is read at its natural size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 400, 250
LEFT, RIGHT, TOP, BOTTOM = 46, 20, 12, 36
COLOURS = 6  # of series, in the page's CSS as .c0 to .c5

Format = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Axis:
    label: str
    low: float
    high: float
    log: bool = False
    format: Format = lambda value: f"{value:g}"

    def at(self, value: float) -> float:
        """Where it lies, 0 to 1; outside values are moved to the edge."""
        value = min(max(value, self.low), self.high)
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        return _log_ticks(self.low, self.high) if self.log else _linear_ticks(self.low, self.high)


def axis_over(
    label: str, values: Sequence[float], *, log: bool = False, format: Format = lambda value: f"{value:g}"
) -> Axis:
    """An axis that holds these values, of which there is at least one, and ends at round numbers."""
    low, high = min(values), max(values)
    if log:
        low, high = _round_down(low), _round_up(high)
        return Axis(label, low, high if high > low else low * 10, log=True, format=format)
    step = _linear_step(high - min(low, 0.0) or 1.0)
    return Axis(label, min(0.0, low), math.ceil(high / step) * step or 1.0, format=format)


def _round_down(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return max(digit for digit in (1, 2, 5) if digit * power <= value * (1 + 1e-9)) * power


def _round_up(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return min(digit for digit in (1, 2, 5, 10) if digit * power >= value * (1 - 1e-9)) * power


def _linear_step(span: float) -> float:
    return _round_up(span / 5)


def _linear_ticks(low: float, high: float) -> list[float]:
    step = _linear_step(high - low)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    digits = (1, 2, 5) if math.log10(high / low) <= 2.2 else (1,)
    ticks = [digit * 10.0**decade for decade in decades for digit in digits]
    return [tick for tick in ticks if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    points: Sequence[tuple[float, float]]
    colour: int
    dashed: bool = False
    dots: bool = True


@dataclass(frozen=True, slots=True)
class Limit:
    """A dashed line across the plot, such as an objective."""

    value: float
    label: str
    vertical: bool = False


def line_chart(title: str, x: Axis, y: Axis, series: Sequence[Series], limits: Sequence[Limit] = ()) -> str:
    parts = [_frame(x, y)]
    for limit in limits:
        parts.append(_limit(limit, x, y))
    for one in series:
        points = [(_x(x, a), _y(y, b)) for a, b in one.points]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        style = f"line c{one.colour % COLOURS}" + (" dashed" if one.dashed else "")
        if len(points) > 1:
            parts.append(f'<polyline class="{style}" points="{path}"/>')
        if one.dots:
            for (a, b), (at, value) in zip(points, one.points, strict=True):
                told = escape(f"{one.name}: {y.format(value)} at {x.format(at)}")
                parts.append(
                    f'<circle class="dot c{one.colour % COLOURS}" cx="{a:.1f}" cy="{b:.1f}" r="3.2">'
                    f"<title>{told}</title></circle>"
                )
    return figure(title, "".join(parts), HEIGHT, _legend(series))


def figure(title: str, content: str, height: float, below: str) -> str:
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
        f'aria-label="{escape(title)}">{content}</svg>{below}</figure>'
    )


def _legend(series: Sequence[Series]) -> str:
    keys = "".join(
        f'<span class="key"><i class="c{one.colour % COLOURS}{" dashed" if one.dashed else ""}"></i>'
        f"{escape(one.name)}</span>"
        for one in series
    )
    return f'<div class="legend">{keys}</div>'


def _x(axis: Axis, value: float) -> float:
    return LEFT + axis.at(value) * (WIDTH - LEFT - RIGHT)


def _y(axis: Axis, value: float) -> float:
    return HEIGHT - BOTTOM - axis.at(value) * (HEIGHT - TOP - BOTTOM)


def _frame(x: Axis, y: Axis) -> str:
    parts = []
    for tick in y.ticks():
        at = _y(y, tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{LEFT - 5}" y="{at + 3.5:.1f}" text-anchor="end">{escape(y.format(tick))}</text>')
    floor = HEIGHT - BOTTOM
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{floor}" y2="{floor}"/>')
    for tick in x.ticks():
        at = _x(x, tick)
        parts.append(f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="{floor}" y2="{floor + 4}"/>')
        parts.append(f'<text x="{at:.1f}" y="{floor + 15}" text-anchor="middle">{escape(x.format(tick))}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="name" x="{middle}" y="{HEIGHT - 5}" text-anchor="middle">{escape(x.label)}</text>')
    return "".join(parts)


def _limit(limit: Limit, x: Axis, y: Axis) -> str:
    label = escape(limit.label)
    if limit.vertical:
        at = _x(x, limit.value)
        anchor, dx = ("end", -4) if at > WIDTH / 2 else ("start", 4)
        return (
            f'<line class="limit" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
            f'<text class="limit" x="{at + dx:.1f}" y="{TOP + 9}" text-anchor="{anchor}">{label}</text>'
        )
    at = _y(y, limit.value)
    return (
        f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        f'<text class="limit" x="{WIDTH - RIGHT - 2}" y="{at - 3:.1f}" text-anchor="end">{label}</text>'
    )


@dataclass(frozen=True, slots=True)
class Bar:
    start: float
    end: float
    style: str  # a class of the page's CSS
    told: str


@dataclass(frozen=True, slots=True)
class Lane:
    name: str
    bars: Sequence[Bar]
    dots: Sequence[float] = ()


def lanes_chart(title: str, x: Axis, lanes: Sequence[Lane], shaded: tuple[float, float], below: str) -> str:
    """One lane for each request over time, a name above each; a shaded interval across all."""
    row, bottom = 27, 34
    height = TOP + row * len(lanes) + bottom
    floor = height - bottom

    def at(value: float) -> float:
        return 8 + x.at(value) * (WIDTH - 16)

    left, right = at(shaded[0]), at(shaded[1])
    parts = [f'<rect class="shade" x="{left:.1f}" y="{TOP}" width="{right - left:.1f}" height="{floor - TOP}"/>']
    for index, lane in enumerate(lanes):
        top = TOP + row * index
        parts.append(f'<text x="8" y="{top + 9}">{escape(lane.name)}</text>')
        for bar in lane.bars:
            start, end = at(bar.start), at(bar.end)
            if end > start:
                parts.append(
                    f'<rect class="{bar.style}" x="{start:.1f}" y="{top + 12}" width="{end - start:.1f}" height="9" '
                    f'rx="2"><title>{escape(bar.told)}</title></rect>'
                )
        inside = [dot for dot in lane.dots if x.low <= dot <= x.high]
        parts += [f'<circle class="token" cx="{at(dot):.1f}" cy="{top + 16.5}" r="1.8"/>' for dot in inside]
    parts.append(f'<line class="axis" x1="8" x2="{WIDTH - 8}" y1="{floor}" y2="{floor}"/>')
    for tick in x.ticks():
        parts.append(f'<line class="axis" x1="{at(tick):.1f}" x2="{at(tick):.1f}" y1="{floor}" y2="{floor + 4}"/>')
        parts.append(f'<text x="{at(tick):.1f}" y="{floor + 15}" text-anchor="middle">{escape(x.format(tick))}</text>')
    parts.append(f'<text class="name" x="{WIDTH / 2}" y="{height - 4}" text-anchor="middle">{escape(x.label)}</text>')
    return figure(title, "".join(parts), height, below)
