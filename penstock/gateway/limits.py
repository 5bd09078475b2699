"""A tenant's limits around a generation: reserve what it will probably use, settle what it did."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from penstock.core.errors import BudgetSpent, LimitReached, RequestTooLarge
from penstock.gateway.budgets import BILLION, Prices, SpendMetrics, money
from penstock.gateway.exchange import Exchange
from penstock.state.store import Claim, Grant, Store, TenantUsage

FIRST_GUESS = 256  # output tokens of a request that sets no limit, before any has been seen
BUSY_RETRY_SECONDS = 1.0  # nobody knows when one of the running requests will end

Handler = Callable[[Exchange], Awaitable[None]]


class Metering:
    """`names` of one model, the canonical one first: all is counted under that, as an alias has nothing of its own."""

    def __init__(self, store: Store, prices: Prices, metrics: SpendMetrics, names: Sequence[str]) -> None:
        self.store = store
        self.prices = prices
        self.metrics = metrics
        self.names = names
        self.model = names[0]
        self._typical: dict[str, float] = {}  # output tokens of a choice, by tenant: a moving average

    def expected_output(self, tenant: str, most: int, asked: bool) -> int:
        """Of one choice. A limit the client set is taken at its word."""
        return most if asked else min(most, round(self._typical.get(tenant, FIRST_GUESS)))

    def around(self, handle: Handler) -> Handler:
        """A handler after which nothing stays reserved."""

        async def metered(exchange: Exchange) -> None:
            try:
                await handle(exchange)
            finally:
                for grant in exchange.grants:  # it has failed before the work began
                    self.store.settle(grant, TenantUsage())

        return metered

    async def enter(self, exchange: Exchange) -> None:
        """Admit a request of which nobody knows the tokens yet: it counts as a request, and has one at least."""
        await self._reserve(exchange, tokens=1, cost=0)

    async def admit(self, exchange: Exchange, prompt_tokens: int, output_tokens: int) -> None:
        """Raises when a limit has no room for what is expected; tells the client what is left of each."""
        tenant = exchange.tenant
        tokens, limit = prompt_tokens + output_tokens, tenant.limits_of(self.names).tokens_per_minute
        if limit is not None and tokens > limit:
            raise RequestTooLarge(
                f"the request needs {tokens} tokens, prompt and max_tokens together, but tenant {tenant.name} has "
                f"{limit} per minute; shorten the prompt or lower max_tokens",
                param="max_tokens",
                code="rate_limit_exceeded",
            )
        cost = self.prices.now().cost(prompt_tokens, 0, output_tokens)
        await self._reserve(exchange, tokens - sum(grant.claim.tokens for grant in exchange.grants), cost)

    async def _reserve(self, exchange: Exchange, tokens: int, cost: int) -> None:
        tenant = exchange.tenant
        limits = tenant.limits_of(self.names)
        entered = bool(exchange.grants)
        claim = Claim(
            exchange.unique,
            tenant.name,
            self.model,
            tokens,
            None if entered else limits.requests_per_minute,
            limits.tokens_per_minute,
            None if entered else limits.concurrent,
            _billionths(tenant.budget_per_day),
            _billionths(tenant.budget_per_month),
            cost=cost,
            requests=0 if entered else 1,
        )
        grant = await self.store.reserve(claim)
        _set_headers(exchange.headers, claim, grant)
        if grant.refused is not None:
            self.metrics.refuse(tenant.name, grant.refused)
            raise _refusal(grant)
        exchange.grants.append(grant)

    def settle(self, exchange: Exchange, prompt_tokens: int, cached_tokens: int, outputs: list[int]) -> None:
        """`outputs` of each choice. Nothing at all, where the engine never began, costs nothing."""
        tenant, output_tokens = exchange.tenant.name, sum(outputs)
        cost = self.prices.now().cost(prompt_tokens, cached_tokens, output_tokens)
        used = TenantUsage(1, prompt_tokens, cached_tokens, output_tokens, cost)
        *entries, last = exchange.grants
        exchange.grants = []
        for grant in entries:
            self.store.settle(grant, TenantUsage(grant.claim.requests))
        self.store.settle(last, used._replace(requests=last.claim.requests))
        self.metrics.add(tenant, self.model, used)
        typical = self._typical.get(tenant)
        for count in outputs:
            typical = count if typical is None else 0.9 * typical + 0.1 * count
            self._typical[tenant] = typical


def _billionths(amount: float | None) -> int | None:
    return None if amount is None else round(amount * BILLION)


def _refusal(grant: Grant) -> LimitReached | BudgetSpent:
    claim, refused = grant.claim, grant.refused
    tenant, retry_after = claim.tenant or "everybody", grant.retry_after or BUSY_RETRY_SECONDS
    if refused in ("day", "month"):
        return BudgetSpent(_budget_spent(tenant, claim, refused, grant.left), retry_after=retry_after)
    tokens = claim.tokens + 1 - claim.requests  # of one that was admitted before, one token is there already
    limit, unit = {
        "requests": (claim.requests_per_minute, "requests per minute"),
        "tokens": (claim.tokens_per_minute, f"tokens per minute, and this request needs {tokens}"),
    }.get(refused or "", (claim.concurrent, "requests at a time"))
    return LimitReached(f"tenant {tenant} is limited to {limit} {unit} of {claim.model}", retry_after=retry_after)


def _budget_spent(tenant: str, claim: Claim, period: str, left: int) -> str:
    if left <= 0:
        return f"tenant {tenant} has spent its budget for this {period}, or running requests may spend the rest of it"
    return (
        f"tenant {tenant} has {money(left)} left of its budget for this {period}, and this request may cost "
        f"{money(claim.cost)}; lower max_tokens or shorten the prompt"
    )


def _set_headers(headers: dict[bytes, bytes], claim: Claim, grant: Grant) -> None:
    """OpenAI's."""
    if claim.requests_per_minute is not None and grant.requests is not None:
        headers[b"x-ratelimit-limit-requests"] = b"%d" % claim.requests_per_minute
        headers[b"x-ratelimit-remaining-requests"] = b"%d" % grant.requests.left
        headers[b"x-ratelimit-reset-requests"] = _duration(grant.requests.reset)
    if claim.tokens_per_minute is not None and grant.tokens is not None:
        headers[b"x-ratelimit-limit-tokens"] = b"%d" % claim.tokens_per_minute
        headers[b"x-ratelimit-remaining-tokens"] = b"%d" % grant.tokens.left
        headers[b"x-ratelimit-reset-tokens"] = _duration(grant.tokens.reset)


def _duration(seconds: float) -> bytes:
    """As OpenAI writes it: 12ms, 7.660s, 1m0.500s. A window is forgotten after 61 seconds at most."""
    milliseconds = round(seconds * 1000)
    if milliseconds < 1000:
        return b"%dms" % milliseconds
    minutes, rest = divmod(milliseconds, 60_000)
    return b"%b%d.%03ds" % (b"1m" if minutes else b"", rest // 1000, rest % 1000)
