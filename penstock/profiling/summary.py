"""Where the time of a step goes, against what the device could do at best."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

Work = tuple[float, float]  # bytes and FLOPs


@dataclass(frozen=True, slots=True)
class Part:
    """Of an average step. None: not known, or not worth a limit."""

    name: str
    seconds: float
    share: float  # of the step
    bytes: float | None = None  # that must be moved, at least
    flops: float | None = None
    limit_seconds: float | None = None  # of the bytes at full bandwidth, or of the FLOPs at the peak, if that is longer


@dataclass(frozen=True, slots=True)
class StepSummary:
    """The steps of one replica. Figures without another unit are averages of a step."""

    replica: str
    model: str
    device: str
    seconds: float  # that were profiled
    busy: float  # share of these in which the engine had work
    steps: int
    step_seconds: float
    rows: float  # sequences
    prefill_tokens: float
    decode_tokens: float
    waiting: float  # requests
    bytes_per_second: float | None  # these two: what the device can do at best
    flops_per_second: float | None
    limits_source: str
    overlapped: bool  # whether kernels run beside the engine's thread, as on a GPU
    kernels: list[Part] = field(default_factory=list)  # the longest first, then all together
    engine: list[Part] = field(default_factory=list)  # what the engine's thread does, without kernels that run on it
    notes: list[str] = field(default_factory=list)  # what is missing, and why


def limit_seconds(work: Work, bytes_per_second: float | None, flops_per_second: float | None) -> float | None:
    limits = [amount / rate for amount, rate in zip(work, (bytes_per_second, flops_per_second), strict=True) if rate]
    return max(limits, default=None)


def kernel_parts(
    seconds: Mapping[str, float],
    work: Mapping[str, Work],
    rates: tuple[float | None, float | None],
    steps: int,
    step_seconds: float,
) -> list[Part]:
    """`seconds` and `work` of all steps, by kernel. The sum comes last: its limit is that of all bytes and FLOPs."""
    parts = []
    for name, total in sorted(seconds.items(), key=lambda item: -item[1]):
        moved = work.get(name)
        parts.append(_part(name, total, steps, step_seconds, moved, rates))
    everything = (sum(moved for moved, _ in work.values()), sum(flops for _, flops in work.values()))
    if parts:
        parts.append(_part("all kernels", sum(seconds.values()), steps, step_seconds, everything, rates))
    return parts


def engine_parts(seconds: Mapping[str, float], total: float, kernels: float, steps: int) -> list[Part]:
    """Of the engine's thread, in all steps. `other` is what is neither in these parts nor in kernels on this thread."""
    rest = max(0.0, total - kernels - sum(seconds.values()))
    return [_part(name, spent, steps, total / steps) for name, spent in [*seconds.items(), ("other", rest)]]


def _part(
    name: str,
    seconds: float,
    steps: int,
    step_seconds: float,
    work: Work | None = None,
    rates: tuple[float | None, float | None] = (None, None),
) -> Part:
    each = seconds / steps
    share = each / step_seconds if step_seconds else 0.0
    if work is None or not any(work):
        return Part(name, each, share)
    mean = (work[0] / steps, work[1] / steps)
    return Part(name, each, share, *mean, limit_seconds(mean, *rates))


def successive(spans: Iterable[tuple[str, int, int]]) -> Iterator[tuple[str, int, int]]:
    """Each from where those before it have ended: kernels are launched ahead and overlap the end of the one before
    (programmatic dependent launch), which is no time that they take."""
    free = 0
    for name, began, ended in sorted(spans, key=lambda span: span[1]):
        if ended > free:
            yield name, max(began, free), ended
            free = ended


def totals(spans: Iterable[tuple[str, int, int]], names: Sequence[str] = ()) -> dict[str, float]:
    """Seconds by name of spans in nanoseconds. `names` come first, in this order, where there are any."""
    found: dict[str, int] = {}
    for name, began, ended in spans:
        found[name] = found.get(name, 0) + ended - began
    ordered = [*(name for name in names if name in found), *(name for name in found if name not in names)]
    return {name: found[name] / 1e9 for name in ordered}
