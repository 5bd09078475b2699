"""A store in memory. SQLite uses it to count limits, and so does Redis while it cannot be reached."""

from __future__ import annotations

import calendar
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable

from penstock.state.store import WINDOW_SECONDS, Claim, Grant, Keep, Limit, Room, UsageKey, UsageRecord


def seconds_to_next_day(now: float) -> float:
    return 86400 - now % 86400


def seconds_to_next_month(now: float) -> float:
    year, month, *_ = time.gmtime(now)
    following = (year + month // 12, month % 12 + 1, 1, 0, 0, 0, 0, 0, 0)
    return calendar.timegm(following) - now


def fits(claim: Claim, budget: int | None, taken: int) -> bool:
    return budget is None or budget - taken >= max(1, claim.cost)


def budget_wait(claim: Claim, period: str, spent: int, now: float) -> float:
    """Seconds until there may be room in a budget: 0 where running requests hold it back and may not spend it."""
    budget = claim.budget_per_month if period == "month" else claim.budget_per_day
    if fits(claim, budget, spent):
        return 0.0
    return seconds_to_next_month(now) if period == "month" else seconds_to_next_day(now)


class Window:
    """Amounts of the last minute, by second. A second counts until all of it is a minute old, so that no sixty
    seconds, wherever they begin, hold more than the limit."""

    __slots__ = ("amounts", "total")

    def __init__(self) -> None:
        self.amounts: dict[int, int] = {}  # oldest first
        self.total = 0

    def forget(self, second: int) -> None:
        while self.amounts:
            oldest = next(iter(self.amounts))
            if oldest >= second - WINDOW_SECONDS:
                return
            self.total -= self.amounts.pop(oldest)

    def add(self, second: int, amount: int) -> None:
        self.amounts[second] = self.amounts.get(second, 0) + amount
        self.total += amount

    def correct(self, second: int, change: int) -> None:
        if second in self.amounts:
            self.add(second, change)

    def wait(self, needed: int, now: float) -> float:
        """Seconds until at least `needed` has left the window."""
        for second, amount in self.amounts.items():
            needed -= amount
            if needed <= 0:
                return second + WINDOW_SECONDS + 1 - now
        return WINDOW_SECONDS + 1.0

    def room(self, limit: int, now: float) -> Room:
        newest = next(reversed(self.amounts), None)
        return Room(max(0, limit - self.total), 0.0 if newest is None else newest + WINDOW_SECONDS + 1 - now)


class _Use:
    __slots__ = ("requests", "running", "tokens")

    def __init__(self) -> None:
        self.requests = Window()
        self.tokens = Window()
        self.running = 0


class Documents:
    """Those of one kind and tenant, the oldest first."""

    __slots__ = ("_bytes", "_found")

    def __init__(self) -> None:
        self._found: OrderedDict[str, tuple[float, bytes]] = OrderedDict()  # each with the time when it expires
        self._bytes = 0

    def save(self, name: str, document: bytes, keep: Keep, now: float) -> None:
        self.discard(name)
        self._found[name] = now + keep.seconds, document
        self._bytes += len(document)
        while self._found and (
            len(self._found) > keep.documents or self._bytes > keep.bytes or next(iter(self._found.values()))[0] <= now
        ):
            self.discard(next(iter(self._found)))

    def load(self, name: str, now: float) -> bytes | None:
        expires, document = self._found.get(name, (0.0, b""))
        return document if expires > now else None

    def discard(self, name: str) -> bool:
        _, document = self._found.pop(name, (0.0, None))
        self._bytes -= len(document or b"")
        return document is not None


class MemoryStore:
    def __init__(
        self, clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._use: defaultdict[tuple[str, str], _Use] = defaultdict(_Use)
        self._usage: dict[UsageKey, UsageRecord] = {}
        self.spent: dict[tuple[str, str], int] = {}  # by (tenant, day or month)
        self._reserved: defaultdict[str, int] = defaultdict(int)  # by tenant: what running requests may spend
        self._records: dict[str, dict[str, str]] = {}
        self._documents: defaultdict[tuple[str, str], Documents] = defaultdict(Documents)
        self._version = 0
        self._day = ""
        self._day_ends = 0.0

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def reserve(self, claim: Claim) -> Grant:
        now = self._clock()
        second = int(now)
        if not claim.limited:
            return Grant(claim, second)
        use = self._use[claim.tenant, claim.model]
        use.requests.forget(second)
        use.tokens.forget(second)
        refused, retry_after, left = self._refusal(claim, use, now)
        if refused is None:
            use.requests.add(second, claim.requests)
            use.tokens.add(second, claim.tokens)
            use.running += claim.requests
            self._reserved[claim.tenant] += claim.reserved
        return Grant(
            claim,
            second,
            refused,
            retry_after,
            None if claim.requests_per_minute is None else use.requests.room(claim.requests_per_minute, now),
            None if claim.tokens_per_minute is None else use.tokens.room(claim.tokens_per_minute, now),
            left,
        )

    def _refusal(self, claim: Claim, use: _Use, now: float) -> tuple[Limit | None, float, int]:
        """The limit, seconds to wait, and what is left of a budget."""
        over = None if claim.budget_per_month is None and claim.budget_per_day is None else self._over_budget(claim)
        if over is not None:
            return over
        if claim.concurrent is not None and use.running >= claim.concurrent:
            return "concurrent", 0.0, 0
        limit = claim.requests_per_minute
        if limit is not None and use.requests.total + 1 > limit:
            return "requests", use.requests.wait(use.requests.total + 1 - limit, now), 0
        limit = claim.tokens_per_minute
        if limit is not None and use.tokens.total + claim.tokens > limit:
            return "tokens", use.tokens.wait(use.tokens.total + claim.tokens - limit, now), 0
        return None, 0.0, 0

    def _over_budget(self, claim: Claim) -> tuple[Limit, float, int] | None:
        day, reserved = self.day(), self._reserved[claim.tenant]
        budgets: tuple[tuple[Limit, str, int | None], ...] = (
            ("month", day[:7], claim.budget_per_month),
            ("day", day, claim.budget_per_day),
        )
        for limit, period, budget in budgets:
            spent = self._spent(claim.tenant, period)
            if budget is not None and not fits(claim, budget, spent + reserved):
                return limit, budget_wait(claim, limit, spent, self._wall_clock()), budget - spent - reserved
        return None

    def _spent(self, tenant: str, period: str) -> int:
        return self.spent.get((tenant, period), 0)

    def day(self) -> str:
        """Today in UTC."""
        now = self._wall_clock()
        if not self._day_ends - 86400 <= now < self._day_ends:
            self._day = time.strftime("%Y-%m-%d", time.gmtime(now))
            self._day_ends = now + seconds_to_next_day(now)
        return self._day

    def settle(self, grant: Grant, used: UsageRecord) -> None:
        self.release(grant, used)
        self.record(UsageKey(self.day(), grant.claim.tenant, grant.claim.model), used)

    def release(self, grant: Grant, used: UsageRecord) -> None:
        """The half of settling that concerns limits."""
        claim = grant.claim
        if claim.limited:
            use = self._use[claim.tenant, claim.model]
            use.running -= claim.requests
            use.requests.correct(grant.second, used.requests - claim.requests)
            use.tokens.correct(grant.second, used.tokens - claim.tokens)
            self._reserved[claim.tenant] -= claim.reserved

    def record(self, key: UsageKey, used: UsageRecord) -> None:
        """The half that concerns spend."""
        if not any(used):
            return
        known = self._usage.get(key)
        self._usage[key] = used if known is None else known.plus(used)
        if used.cost:
            for period in (key.day, key.day[:7]):
                self.spent[key.tenant, period] = self._spent(key.tenant, period) + used.cost

    async def usage(self, first_day: str, last_day: str) -> dict[UsageKey, UsageRecord]:
        return {key: used for key, used in self._usage.items() if first_day <= key.day <= last_day}

    async def put(self, kind: str, name: str, value: str) -> None:
        self._records.setdefault(kind, {})[name] = value
        self._version += 1

    async def delete(self, kind: str, name: str) -> bool:
        self._version += 1
        return self._records.get(kind, {}).pop(name, None) is not None

    async def records(self, kind: str) -> dict[str, str]:
        return dict(self._records.get(kind, {}))

    async def save(
        self, kind: str, tenant: str, name: str, document: bytes, keep: Keep, instead_of: bytes | None = None
    ) -> bool:
        documents, now = self._documents[kind, tenant], self._wall_clock()
        if len(document) > keep.bytes or instead_of not in (None, documents.load(name, now)):
            return False
        documents.save(name, document, keep, now)
        return True

    async def load(self, kind: str, tenant: str, name: str) -> bytes | None:
        return self._documents[kind, tenant].load(name, self._wall_clock())

    async def discard(self, kind: str, tenant: str, name: str) -> bool:
        return self._documents[kind, tenant].discard(name)

    async def version(self) -> int:
        return self._version
