"""A tenant's limits around a generation: reserve what it will probably use, settle what it did."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from penstock.core.errors import BudgetSpent, LimitReached, RequestTooLarge
from penstock.gateway.http.request import Request
from penstock.gateway.http.response import Response
from penstock.gateway.tenancy.budgets import Prices, SpendMetrics, money
from penstock.gateway.tenancy.tenants import Tenant
from penstock.state.store import BILLION, Claim, Grant, Store, UsageRecord

FIRST_GUESS = 256  # output tokens of a request that sets no limit, before any has been seen
BUSY_RETRY_SECONDS = 1.0  # nobody knows when one of the running requests will end

T = TypeVar("T")


class Metering:
    """`names` of one model, the canonical one first: all is counted under that, as an alias has nothing of its own."""

    def __init__(self, prices: Prices, metrics: SpendMetrics, names: Sequence[str]) -> None:
        self.prices = prices
        self.metrics = metrics
        self.names = names
        self.model = names[0]
        self._typical: dict[str, float] = {}  # output tokens of a choice, by tenant: a moving average

    def expected_output(self, tenant: str, most: int, asked: bool) -> int:
        """Of one choice. A limit the client set is taken at its word."""
        return most if asked else min(most, round(self._typical.get(tenant, FIRST_GUESS)))

    def observe(self, tenant: str, outputs: list[int]) -> None:
        """Learn from the output tokens of each choice of a request."""
        typical = self._typical.get(tenant)
        for count in outputs:
            typical = count if typical is None else 0.9 * typical + 0.1 * count
            self._typical[tenant] = typical


def metered(
    store: Store, handle: Callable[[Request, Response, Tenant, Reservation], Awaitable[T]]
) -> Callable[[Request, Response, Tenant], Awaitable[T]]:
    """Hand a reservation to a handler. If it fails nothing stays reserved; otherwise what it returns has to settle or
    to release it."""

    async def handle_metered(request: Request, response: Response, tenant: Tenant) -> T:
        reservation = Reservation(store, request.unique, tenant, response.headers)
        try:
            return await handle(request, response, tenant, reservation)
        except BaseException:
            reservation.release()
            raise

    return handle_metered


class Reservation:
    """What one request holds of its tenant's limits, until it is settled or released. `metering` is that of the model
    that it asks for."""

    __slots__ = ("_grants", "_id", "_response_headers", "_store", "_tenant")

    def __init__(self, store: Store, id: str, tenant: Tenant, response_headers: dict[bytes, bytes]) -> None:
        self._store = store
        self._id = id
        self._tenant = tenant
        self._response_headers = response_headers  # they tell the client what is left of each limit
        self._grants: list[Grant] = []

    async def enter(self, metering: Metering) -> None:
        """Admit a request of which nobody knows the tokens yet: it counts as a request, and has one at least."""
        await self._reserve(metering, tokens=1, cost=0)

    async def admit(self, metering: Metering, prompt_tokens: int, output_tokens: int) -> None:
        """Raises when a limit has no room for what is expected. What another model holds is given back."""
        tenant = self._tenant
        if any(grant.claim.model != metering.model for grant in self._grants):
            self.release()
        tokens, limit = prompt_tokens + output_tokens, tenant.limits_of(metering.names).tokens_per_minute
        if limit is not None and tokens > limit:
            raise RequestTooLarge(
                f"the request needs {tokens} tokens, prompt and max_tokens together, but tenant {tenant.name} has "
                f"{limit} per minute; shorten the prompt or lower max_tokens",
                param="max_tokens",
                code="rate_limit_exceeded",
            )
        cost = metering.prices.now().cost(prompt_tokens, 0, output_tokens)
        await self._reserve(metering, tokens - sum(grant.claim.tokens for grant in self._grants), cost)

    async def _reserve(self, metering: Metering, tokens: int, cost: int) -> None:
        tenant = self._tenant
        limits = tenant.limits_of(metering.names)
        entered = bool(self._grants)
        claim = Claim(
            self._id,
            tenant.name,
            metering.model,
            tokens,
            None if entered else limits.requests_per_minute,
            limits.tokens_per_minute,
            None if entered else limits.concurrent,
            _billionths(tenant.budget_per_day),
            _billionths(tenant.budget_per_month),
            cost=cost,
            requests=0 if entered else 1,
        )
        grant = await self._store.reserve(claim)
        _set_headers(self._response_headers, claim, grant)
        if grant.refused is not None:
            metering.metrics.refuse(tenant.name, grant.refused)
            raise _refusal(grant)
        self._grants.append(grant)

    def settle(self, metering: Metering, prompt_tokens: int, cached_tokens: int, outputs: list[int]) -> None:
        """`outputs` of each choice. Nothing at all, where the engine never began, costs nothing."""
        tenant, output_tokens = self._tenant.name, sum(outputs)
        cost = metering.prices.now().cost(prompt_tokens, cached_tokens, output_tokens)
        used = UsageRecord(1, prompt_tokens, cached_tokens, output_tokens, cost)
        *entries, last = self._grants
        self._grants = []
        for grant in entries:
            self._store.settle(grant, UsageRecord(grant.claim.requests))
        self._store.settle(last, used if last.claim.requests else used._replace(requests=0))
        metering.metrics.add(tenant, metering.model, used)
        metering.observe(tenant, outputs)

    def release(self) -> None:
        """Give back what is not settled, of a request that failed or was refused before the work began."""
        for grant in self._grants:
            self._store.settle(grant, UsageRecord())
        self._grants.clear()


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
