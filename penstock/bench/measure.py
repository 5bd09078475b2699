"""Computes the figures of a run from the times of its tokens, for an engine in process and a server over HTTP alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from penstock.bench.workloads import Metric
from penstock.core.ledger import Ledger
from penstock.core.request import Objective

FORECAST_TOLERANCE = 0.2


@dataclass(slots=True)
class Timeline:
    """What happened to one request, in seconds on one clock. `token_times` has one entry per delivery of tokens."""

    sent: float  # in an open loop: when it was due
    prompt_tokens: int = 0
    output_tokens: int = 0
    token_times: list[float] = field(default_factory=list)
    finished: float | None = None
    error: str | None = None  # a short kind, such as "timeout" or "http 500"
    kind: str = ""
    objective: Objective | None = None
    late: float = 0.0  # how long after it was due it was really sent
    refused: bool = False
    retry_after: float | None = None  # seconds, with a refusal
    ledger: Ledger | None = None
    message: str = ""  # what the server said of the error

    @property
    def ttft(self) -> float | None:
        return self.token_times[0] - self.sent if self.token_times else None

    @property
    def itls(self) -> list[float]:
        """The inter-token latencies."""
        return [later - earlier for earlier, later in pairwise(self.token_times)]

    @property
    def decode_tok_s(self) -> float | None:
        """Tokens per second after the first one, which is what a reader of the stream sees."""
        elapsed = self.token_times[-1] - self.token_times[0] if self.token_times else 0.0
        return (self.output_tokens - 1) / elapsed if elapsed > 0 else None

    @property
    def failed(self) -> bool:
        return self.refused or self.error is not None

    @property
    def met(self) -> bool:
        """Whether the request met its objective: by its TTFT, and by the 99th percentile of its own ITLs."""
        ttft, itls, objective = self.ttft, self.itls, self.objective or Objective()
        if self.failed or ttft is None or (objective.ttft is not None and ttft > objective.ttft):
            return False
        return objective.itl is None or not itls or percentile(itls, 0.99) <= objective.itl

    @property
    def forecast_error(self) -> float | None:
        """Of the time to the first token as predicted on arrival, relative to the one measured from sending."""
        ttft, predicted = self.ttft, self.ledger.predicted_ttft if self.ledger else None
        if ttft is None or predicted is None or ttft <= self.late:
            return None
        return abs(predicted / (ttft - self.late) - 1)


def percentile(values: Sequence[float], q: float) -> float:
    """The nearest-rank percentile of at least one value."""
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


@dataclass(frozen=True, slots=True)
class Percentiles:
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles | None:
        return cls(*(percentile(values, q) for q in (0.50, 0.90, 0.99, 1.0))) if values else None

    @classmethod
    def of_ms(cls, seconds: Sequence[float]) -> Percentiles | None:
        return cls.of([value * 1e3 for value in seconds])


@dataclass(frozen=True, slots=True)
class ClassSummary:
    """The requests of one class, or of all of them."""

    requests: int
    refused: int
    failed: int
    met: int
    goodput_tok_s: float  # output of the requests that met their objectives
    ttft_ms: Percentiles | None
    gap_ms: Percentiles | None  # ITL; the name is that of the JSON report
    objective: Objective | None

    @property
    def share_met(self) -> float:
        return self.met / self.requests if self.requests else 0.0


@dataclass(frozen=True, slots=True)
class Forecast:
    """Of the time to the first token, where the engine made one."""

    requests: int
    within_20_percent: float  # share
    median_error: float


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one run over one workload."""

    requests: int
    errors: dict[str, int]
    messages: dict[str, str]  # of the first error of each kind
    wall_s: float
    prompt_tokens: int
    output_tokens: int
    output_tok_s: float
    prompt_tok_s: float
    total_tok_s: float
    ms_per_token: float | None  # wall time over output tokens, prefill included
    decode_tok_s: float | None  # median over requests
    ttft_ms: Percentiles | None
    gap_ms: Percentiles | None  # ITL; the name is that of the JSON report
    e2e_ms: Percentiles | None
    refused: int
    refusal_ms: Percentiles | None  # until the refusal was known
    retry_after_s: Percentiles | None
    share_met: float | None  # of all requests, refused ones too; only where there are objectives
    share_met_admitted: float | None
    goodput_tok_s: float | None
    classes: dict[str, ClassSummary]
    forecast: Forecast | None
    lateness_ms: Percentiles | None  # of the sender itself; open loops only

    def figure(self, metric: Metric) -> float | None:
        return getattr(self, metric)  # type: ignore[no-any-return]


def summarise(timelines: Sequence[Timeline], wall_s: float) -> Summary:
    """`wall_s` runs from the first request sent to the last one finished."""
    done = [t for t in timelines if not t.failed]
    refused = [t for t in timelines if t.refused]
    prompt_tokens = sum(t.prompt_tokens for t in done)
    output_tokens = sum(t.output_tokens for t in done)
    known_rates = [rate for t in done if (rate := t.decode_tok_s) is not None]
    whole = _summarise_class(timelines, wall_s)
    has_objectives = any(t.objective is not None for t in timelines)
    admitted = len(timelines) - len(refused)
    return Summary(
        requests=len(timelines),
        errors=dict(Counter(t.error for t in timelines if t.error is not None)),
        messages={t.error: t.message for t in reversed(timelines) if t.error is not None},
        wall_s=wall_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        output_tok_s=output_tokens / wall_s,
        prompt_tok_s=prompt_tokens / wall_s,
        total_tok_s=(prompt_tokens + output_tokens) / wall_s,
        ms_per_token=wall_s * 1e3 / output_tokens if output_tokens else None,
        decode_tok_s=percentile(known_rates, 0.5) if known_rates else None,
        ttft_ms=whole.ttft_ms,
        gap_ms=whole.gap_ms,
        e2e_ms=Percentiles.of_ms([t.finished - t.sent for t in done if t.finished is not None]),
        refused=len(refused),
        refusal_ms=Percentiles.of_ms([t.finished - t.sent for t in refused if t.finished is not None]),
        retry_after_s=Percentiles.of([t.retry_after for t in refused if t.retry_after is not None]),
        share_met=whole.share_met if has_objectives else None,
        share_met_admitted=whole.met / admitted if has_objectives and admitted else None,
        goodput_tok_s=whole.goodput_tok_s if has_objectives else None,
        classes={
            kind: _summarise_class([t for t in timelines if t.kind == kind], wall_s)
            for kind in sorted({t.kind for t in timelines} - {""})
        },
        forecast=_forecast([error for t in done if (error := t.forecast_error) is not None]),
        lateness_ms=Percentiles.of_ms([t.late for t in timelines]) if any(t.late for t in timelines) else None,
    )


def _summarise_class(timelines: Sequence[Timeline], wall_s: float) -> ClassSummary:
    done = [t for t in timelines if not t.failed]
    met = [t for t in done if t.met]
    return ClassSummary(
        requests=len(timelines),
        refused=sum(t.refused for t in timelines),
        failed=sum(t.error is not None for t in timelines),
        met=len(met),
        goodput_tok_s=sum(t.output_tokens for t in met) / wall_s,
        ttft_ms=Percentiles.of_ms([ttft for t in done if (ttft := t.ttft) is not None]),
        gap_ms=Percentiles.of_ms([itl for t in done for itl in t.itls]),
        objective=timelines[0].objective if timelines else None,
    )


def _forecast(errors: Sequence[float]) -> Forecast | None:
    if not errors:
        return None
    within = sum(error <= FORECAST_TOLERANCE for error in errors) / len(errors)
    return Forecast(len(errors), within, percentile(errors, 0.5))


def better(metric: Metric, a: Summary, b: Summary) -> Summary:
    """The run with the better figure."""
    first, second = a.figure(metric), b.figure(metric)
    if first is None or second is None:
        return a if second is None else b
    lower_wins = metric == "ms_per_token"
    return a if (first < second) == lower_wins or first == second else b
