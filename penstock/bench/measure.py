"""From the times of single tokens to the figures of a run. The same for an engine in process and a server over HTTP."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from penstock.bench.workloads import Metric

TTFT_OBJECTIVE_S = {"short": 0.2, "long": 4.0}
GAP_OBJECTIVE_S = 0.05  # for the 99th percentile of one request's gaps


@dataclass(slots=True)
class Timeline:
    """What happened to one request, in seconds on one clock. `token_times` has one entry per delivery of tokens."""

    sent: float
    prompt_tokens: int = 0
    output_tokens: int = 0
    token_times: list[float] = field(default_factory=list)
    finished: float | None = None
    error: str | None = None  # a short kind, such as "timeout" or "http 429"
    kind: str = ""

    @property
    def ttft(self) -> float | None:
        return self.token_times[0] - self.sent if self.token_times else None

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.token_times)]

    @property
    def decode_tok_s(self) -> float | None:
        """Tokens per second after the first one, which is what a reader of the stream sees."""
        elapsed = self.token_times[-1] - self.token_times[0] if self.token_times else 0.0
        return (self.output_tokens - 1) / elapsed if elapsed > 0 else None

    def met_objectives(self) -> bool:
        ttft, gaps = self.ttft, self.gaps
        if self.error is not None or ttft is None or ttft > TTFT_OBJECTIVE_S[self.kind]:
            return False
        return not gaps or percentile(gaps, 0.99) <= GAP_OBJECTIVE_S


def percentile(values: Sequence[float], q: float) -> float:
    """The nearest-rank percentile of at least one value."""
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


@dataclass(frozen=True, slots=True)
class Percentiles:
    p50: float
    p90: float
    p99: float

    @classmethod
    def of_ms(cls, seconds: Sequence[float]) -> Percentiles | None:
        if not seconds:
            return None
        return cls(*(percentile(seconds, q) * 1e3 for q in (0.50, 0.90, 0.99)))


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one run over one workload."""

    requests: int
    errors: dict[str, int]
    wall_s: float
    prompt_tokens: int
    output_tokens: int
    output_tok_s: float
    prompt_tok_s: float
    total_tok_s: float
    ms_per_token: float | None  # wall time over output tokens, prefill included
    decode_tok_s: float | None  # median over requests
    ttft_ms: Percentiles | None
    gap_ms: Percentiles | None
    e2e_ms: Percentiles | None
    share_met: float | None  # of requests that met both objectives; only where the workload states some
    ttft_by_kind_ms: dict[str, Percentiles]

    def figure(self, metric: Metric) -> float | None:
        return getattr(self, metric)  # type: ignore[no-any-return]


def summarise(timelines: Sequence[Timeline], wall_s: float) -> Summary:
    """`wall_s` runs from the first request sent to the last one finished."""
    done = [t for t in timelines if t.error is None]
    prompt_tokens = sum(t.prompt_tokens for t in done)
    output_tokens = sum(t.output_tokens for t in done)
    rates = [t.decode_tok_s for t in done]
    known_rates = [rate for rate in rates if rate is not None]
    kinds = sorted({t.kind for t in timelines} - {""})
    return Summary(
        requests=len(timelines),
        errors=dict(Counter(t.error for t in timelines if t.error is not None)),
        wall_s=wall_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        output_tok_s=output_tokens / wall_s,
        prompt_tok_s=prompt_tokens / wall_s,
        total_tok_s=(prompt_tokens + output_tokens) / wall_s,
        ms_per_token=wall_s * 1e3 / output_tokens if output_tokens else None,
        decode_tok_s=percentile(known_rates, 0.5) if known_rates else None,
        ttft_ms=Percentiles.of_ms(_ttfts(done)),
        gap_ms=Percentiles.of_ms([gap for t in done for gap in t.gaps]),
        e2e_ms=Percentiles.of_ms([t.finished - t.sent for t in done if t.finished is not None]),
        share_met=sum(t.met_objectives() for t in timelines) / len(timelines) if kinds else None,
        ttft_by_kind_ms={
            kind: found
            for kind in kinds
            if (found := Percentiles.of_ms(_ttfts([t for t in done if t.kind == kind]))) is not None
        },
    )


def _ttfts(timelines: Sequence[Timeline]) -> list[float]:
    return [ttft for t in timelines if (ttft := t.ttft) is not None]


def better(metric: Metric, a: Summary, b: Summary) -> Summary:
    """The run with the better figure."""
    first, second = a.figure(metric), b.figure(metric)
    if first is None or second is None:
        return a if second is None else b
    lower_wins = metric == "ms_per_token"
    return a if (first < second) == lower_wins or first == second else b
