"""Tenants share the engine by weight: each has a counter of the cost computed for it, divided by its weight.

Whoever leads lets those go first who have had less. A tenant that had nothing to do
comes back level with the others, not with credit for the time it was away.
"""

from __future__ import annotations

from dataclasses import dataclass

_REMEMBERED = 10_000  # tenants that are away


@dataclass(slots=True, eq=False)
class Account:
    """What one tenant has had."""

    tenant: str
    weight: float
    counter: float = 0.0
    requests: int = 0  # waiting or running

    def charge(self, cost: float) -> None:
        self.counter += cost / self.weight


class Accounts:
    def __init__(self, allowance: float) -> None:
        """`allowance`: how far ahead, in cost at weight 1, a tenant may be before it counts as a lead."""
        self._allowance = allowance
        self._active: dict[str, Account] = {}
        self._away: dict[str, Account] = {}

    def enter(self, tenant: str, weight: float) -> Account:
        """A request of this tenant arrives. The latest weight counts."""
        account = self._active.get(tenant)
        if account is None:
            account = self._active[tenant] = self._return(tenant, weight)
        account.weight = weight
        account.requests += 1
        return account

    def _return(self, tenant: str, weight: float) -> Account:
        """Level with the others: neither with credit for the time away nor with a debt from when nobody else wanted.

        At best just below them, so that the first requests do not queue behind all that a busy tenant has waiting.
        """
        account = self._away.pop(tenant, None) or Account(tenant, weight)
        if self._active:
            counters = [other.counter for other in self._active.values()]
            lowest, highest = min(counters) - self._allowance, max(counters) + self._allowance
            account.counter = min(max(account.counter, lowest), highest)
        return account

    def leave(self, account: Account) -> None:
        account.requests -= 1
        if not account.requests:
            self._away[account.tenant] = self._active.pop(account.tenant)
            if not self._active or len(self._away) > _REMEMBERED:
                self._away.clear()

    def leads(self) -> dict[Account, int]:
        """How many allowances each tenant has had more than the least served one. Empty where nobody shares."""
        if len(self._active) < 2:
            return {}
        least = min(account.counter for account in self._active.values())
        return {a: int((a.counter - least) / self._allowance) for a in self._active.values()}
