"""What tokens cost, and who spent how much."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.core.engine import EngineStats
from penstock.core.errors import InvalidRequest
from penstock.gateway.errors import require
from penstock.gateway.settings import GatewaySettings, PriceConfig
from penstock.state.store import BILLION, Limit, UsageKey, UsageRecord

MAX_DAYS = 400  # of usage in one answer


@dataclass(frozen=True, slots=True)
class Price:
    """Of one token, in billionths of the currency."""

    input: float = 0.0
    cached: float = 0.0
    output: float = 0.0

    def cost(self, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> int:
        computed = prompt_tokens - cached_tokens
        return round(computed * self.input + cached_tokens * self.cached + output_tokens * self.output)


_FREE = Price()


def listed_price(given: PriceConfig) -> Price:
    per_token = BILLION / 1_000_000
    cached = given.input if given.cached is None else given.cached
    return Price(given.input * per_token, cached * per_token, given.output * per_token)


def machine_price(per_hour: float, stats: EngineStats) -> Price:
    """What the machine costs over what it does: a prompt token pays its share of prefill, an output token its share of
    a step with those that run beside it, a cached token nothing. All zero until the engine has measured itself."""
    per_second = per_hour / 3600 * BILLION
    rate, step = stats.prefill_tokens_per_second, stats.decode_step_seconds
    return Price(
        input=per_second / rate if rate > 0 else 0.0,
        output=per_second * step / max(1, stats.running),
    )


class Prices:
    """Of a model, by the first of its names that has a price."""

    def __init__(self, settings: GatewaySettings, names: Sequence[str], stats: Callable[[], EngineStats]) -> None:
        given = next((settings.prices[name] for name in names if name in settings.prices), None)
        self._listed = None if given is None else listed_price(given)
        self._per_hour = settings.machine_per_hour
        self._stats = stats

    def now(self) -> Price:
        if self._listed is not None:
            return self._listed
        return _FREE if self._per_hour is None else machine_price(self._per_hour, self._stats())


_LIMITED_BY: dict[Limit, str] = {
    "requests": "requests_per_minute",
    "tokens": "tokens_per_minute",
    "concurrent": "concurrent",
    "day": "budget_per_day",
    "month": "budget_per_month",
}


def limits_in(settings: GatewaySettings) -> Iterator[tuple[str, Limit]]:
    """Those that refuse requests, of the tenants in the settings; without tenants, of everybody."""
    for name, tenant in (settings.tenants or {"": settings.tenant_defaults}).items():
        for limit, field in _LIMITED_BY.items():
            if getattr(tenant, field) is not None or any(own.get(field) for own in tenant.model_limits.values()):
                yield name, limit


class SpendMetrics(Collector):
    """Of this gateway since its start."""

    def __init__(self, machine_per_hour: float | None, limits: Iterable[tuple[str, Limit]] = ()) -> None:
        """`limits` of tenants, which are counted from 0 on before the first refusal."""
        self._limits = dict.fromkeys(limits, 0)
        self.used: dict[tuple[str, str], UsageRecord] = {}  # by (tenant, model)
        self.refused: dict[tuple[str, Limit], int] = {}  # by (tenant, limit)
        self._machine_per_hour = machine_per_hour
        self._started = time.monotonic()

    def add(self, tenant: str, model: str, used: UsageRecord) -> None:
        known = self.used.get((tenant, model))
        self.used[tenant, model] = used if known is None else known.plus(used)

    def refuse(self, tenant: str, limit: Limit) -> None:
        self.refused[tenant, limit] = self.refused.get((tenant, limit), 0) + 1

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        labels = ["tenant", "model"]
        spend = CounterMetricFamily(
            "penstock_spend", "Cost of finished requests, in the prices' currency", labels=labels
        )
        tokens = CounterMetricFamily(
            "penstock_tenant_tokens", "Tokens of finished requests; input includes cached", labels=[*labels, "kind"]
        )
        requests = CounterMetricFamily(
            "penstock_tenant_requests",
            "Requests that were answered, failed or aborted; not those refused",
            labels=labels,
        )
        for (tenant, model), used in sorted(self.used.items()):
            spend.add_metric([tenant, model], used.cost / BILLION)
            requests.add_metric([tenant, model], used.requests)
            for kind, count in (
                ("input", used.prompt_tokens),
                ("cached", used.cached_tokens),
                ("output", used.output_tokens),
            ):
                tokens.add_metric([tenant, model, kind], count)
        refused = CounterMetricFamily("penstock_limited", "Requests refused for a limit", labels=["tenant", "limit"])
        for (tenant, limit), count in sorted((self._limits | self.refused).items()):
            refused.add_metric([tenant, limit], count)
        yield from (spend, tokens, requests, refused)
        yield from self._collect_cost()

    def _collect_cost(self) -> Iterator[Metric]:
        cost = GaugeMetricFamily(
            "penstock_cost_per_million_tokens",
            "What tenants were charged, over input and output tokens",
            labels=["model"],
        )
        total = 0
        for model in sorted({model for _, model in self.used}):
            used = [used for (_, name), used in self.used.items() if name == model]
            tokens = sum(u.tokens for u in used)
            total += tokens
            if tokens:
                cost.add_metric([model], sum(u.cost for u in used) / BILLION / tokens * 1_000_000)
        yield cost
        if self._machine_per_hour is None:
            return
        yield GaugeMetricFamily(
            "penstock_machine_cost_per_hour", "Price of the machine in the settings", self._machine_per_hour
        )
        per_million = GaugeMetricFamily(
            "penstock_machine_cost_per_million_tokens",
            "What the machine cost since the start, idle time included, over the tokens it handled",
            labels=[],
        )
        if total:
            hours = (time.monotonic() - self._started) / 3600
            per_million.add_metric([], self._machine_per_hour * hours / total * 1_000_000)
        yield per_million


COLUMNS = ("day", "tenant", "model", "requests", "input_tokens", "cached_tokens", "output_tokens", "cost")
Row = tuple[str, str, str, int, int, int, int, str]


def rows(usage: Mapping[UsageKey, UsageRecord], tenant: str | None = None) -> list[Row]:
    return [
        (
            *(key.day, key.tenant, key.model),
            *(used.requests, used.prompt_tokens, used.cached_tokens, used.output_tokens),
            money(used.cost),
        )
        for key, used in sorted(usage.items())
        if tenant is None or key.tenant == tenant
    ]


def money(amount: int) -> str:
    """Exact: all nine decimals count when requests cost millionths."""
    return f"{amount // BILLION}.{amount % BILLION:09d}"


def as_csv(found: list[Row]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(found)
    return text.getvalue()


def day_range(since: str, until: str) -> tuple[str, str]:
    first, last = _day("since", since), _day("until", until)
    require(timedelta() <= last - first <= timedelta(MAX_DAYS), "since", f"must be up to {MAX_DAYS} days before until")
    return first.isoformat(), last.isoformat()


def _day(param: str, text: str) -> date:
    try:
        return datetime.strptime(text, "%Y-%m-%d").date()
    except ValueError:
        raise InvalidRequest(f"{param} must be a day like 2031-05-06", param=param) from None
