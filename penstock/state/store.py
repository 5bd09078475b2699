"""The `Store` protocol: windows and leases for limits, counters for spend, named records, and tenants' documents.

`memory` forgets at the end of the process. `sqlite:///PATH` keeps records and spend in a file, limits in memory: for
one gateway. `redis://HOST:PORT/DB` shares everything between gateways.
"""

from __future__ import annotations

import operator
from datetime import date, timedelta
from typing import Literal, NamedTuple, Protocol

WINDOW_SECONDS = 60
BILLION = 1_000_000_000  # amounts are kept in billionths of the currency, as whole numbers
# The types below are tuples, not dataclasses: each request makes several, and a tuple takes a fifth of the time.
Limit = Literal["requests", "tokens", "concurrent", "day", "month"]


class Claim(NamedTuple):
    """What a request wants to use, and what its tenant may use of the model. None: without limit."""

    id: str  # unique among all requests of all gateways
    tenant: str
    model: str
    tokens: int  # prompt plus expected output
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None
    budget_per_day: int | None = None  # billionths of the currency, as all amounts here
    budget_per_month: int | None = None
    cost: int = 0  # as expected
    requests: int = 1  # 0: more of a request that has been admitted

    @property
    def limited(self) -> bool:
        return self[4:9] != _UNLIMITED

    @property
    def reserved(self) -> int:
        """The cost that is reserved of its tenant's budgets until it is settled."""
        return 0 if self.budget_per_day is None and self.budget_per_month is None else self.cost


_UNLIMITED = (None,) * 5


class Room(NamedTuple):
    """What is left of a limit per minute, and in how many seconds all of it will be there again."""

    left: int
    reset: float


class Grant(NamedTuple):
    """The answer to a claim. Whatever was granted must be settled, once."""

    claim: Claim
    second: int  # on which the tokens were booked
    refused: Limit | None = None
    retry_after: float = 0.0  # seconds; 0 where it depends on other requests
    requests: Room | None = None
    tokens: Room | None = None
    left: int = 0  # of a budget that refused it
    local: bool = True  # booked in this process, not in the shared store


class UsageRecord(NamedTuple):
    """What a request used, or many requests."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt tokens
    output_tokens: int = 0
    cost: int = 0  # billionths of the currency

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    def plus(self, other: UsageRecord) -> UsageRecord:
        return UsageRecord(*map(operator.add, self, other))


class UsageKey(NamedTuple):
    day: str  # 2031-05-06, UTC
    tenant: str
    model: str


class Keep(NamedTuple):
    """What is kept of one kind of documents of one tenant. The oldest go first."""

    documents: int
    bytes: int
    seconds: float


class Store(Protocol):
    async def open(self) -> None: ...

    async def close(self) -> None:
        """Close the store. What was settled is kept."""
        ...

    async def reserve(self, claim: Claim) -> Grant:
        """Book the claim if every limit has room for it, else nothing; atomic among all users of the store."""
        ...

    def settle(self, grant: Grant, used: UsageRecord) -> None:
        """Replace what was reserved by what was used. Returns at once; the store catches up in the background."""
        ...

    async def usage(self, first_day: str, last_day: str) -> dict[UsageKey, UsageRecord]: ...

    async def put(self, kind: str, name: str, value: str) -> None: ...

    async def delete(self, kind: str, name: str) -> bool:
        """Delete a record. Returns whether it existed."""
        ...

    async def records(self, kind: str) -> dict[str, str]: ...

    async def save(
        self, kind: str, tenant: str, name: str, document: bytes, keep: Keep, instead_of: bytes | None = None
    ) -> bool:
        """Keep a document, in UTF-8, in place of the one of this name; with `instead_of` only if that is the one there
        now, atomically (compare and set). Whether it was kept: one that is too large is not either."""
        ...

    async def load(self, kind: str, tenant: str, name: str) -> bytes | None: ...

    async def discard(self, kind: str, tenant: str, name: str) -> bool:
        """Whether it was there."""
        ...

    async def version(self) -> int:
        """A number that changes with every change of a record; cheap enough to poll twice a second."""
        ...


def days_between(first: str, last: str) -> list[str]:
    begin, end = date.fromisoformat(first), date.fromisoformat(last)
    return [(begin + timedelta(days=n)).isoformat() for n in range((end - begin).days + 1)]
