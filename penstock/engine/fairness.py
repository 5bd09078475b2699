"""Tenants share the engine by weight: each has a virtual token counter, the cost computed for it divided by its weight.

Whoever leads lets those go first who have had less. A tenant that had nothing to do
comes back level with the others, not with credit for the time it was away.
"""

from __future__ import annotations

from dataclasses import dataclass

_REMEMBERED = 10_000  # tenants that are away


@dataclass(slots=True, eq=False)
class TenantCounter:
    """What one tenant has had."""

    tenant: str
    weight: float
    tokens: float = 0.0  # virtual ones
    requests: int = 0  # waiting or running

    def charge(self, cost: float) -> None:
        self.tokens += cost / self.weight


class TenantCounters:
    def __init__(self, allowance: float) -> None:
        """`allowance`: how far ahead, in cost at weight 1, a tenant may be before it counts as a lead."""
        self._allowance = allowance
        self._active: dict[str, TenantCounter] = {}
        self._away: dict[str, TenantCounter] = {}

    def enter(self, tenant: str, weight: float) -> TenantCounter:
        """A request of this tenant arrives. The latest weight counts."""
        counter = self._active.get(tenant)
        if counter is None:
            counter = self._active[tenant] = self._return(tenant, weight)
        counter.weight = weight
        counter.requests += 1
        return counter

    def _return(self, tenant: str, weight: float) -> TenantCounter:
        """Level with the others: neither with credit for the time away nor with a debt from when nobody else wanted.

        At best just below them, so that the first requests do not queue behind all that a busy tenant has waiting.
        """
        counter = self._away.pop(tenant, None) or TenantCounter(tenant, weight)
        if self._active:
            had = [other.tokens for other in self._active.values()]
            lowest, highest = min(had) - self._allowance, max(had) + self._allowance
            counter.tokens = min(max(counter.tokens, lowest), highest)
        return counter

    def leave(self, counter: TenantCounter) -> None:
        counter.requests -= 1
        if not counter.requests:
            self._away[counter.tenant] = self._active.pop(counter.tenant)
            if not self._active or len(self._away) > _REMEMBERED:
                self._away.clear()

    def leads(self) -> dict[TenantCounter, int]:
        """How many allowances each tenant has had more than the least served one. Empty where nobody shares."""
        if len(self._active) < 2:
            return {}
        least = min(counter.tokens for counter in self._active.values())
        return {c: int((c.tokens - least) / self._allowance) for c in self._active.values()}
