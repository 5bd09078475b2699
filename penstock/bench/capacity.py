"""Searches the highest arrival rate at which enough requests meet their objectives: double until it fails, then bisect.

It decides what to try next and leaves the trying to its caller, so a thread and an event loop can share it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_HALVINGS = 4  # below a sixteenth of the first rate there is nothing worth finding


@dataclass(slots=True)
class CapacitySearch:
    first: float
    probes: int = 10
    precision: float = 0.05  # the answer is known to this share of itself
    held: float | None = None  # the highest rate that held
    failed: float | None = None  # the lowest that did not
    tried: int = 0

    def next_rate(self) -> float | None:
        """None when the answer is known well enough, the probes are spent, or there is no hope."""
        if self.tried >= self.probes:
            return None
        if self.held is None:
            if self.failed is None:
                return self.first
            return self.failed / 2 if self.tried <= MAX_HALVINGS else None
        if self.failed is None:
            return self.held * 2
        # Between two rates that differ by a factor, the geometric mean halves the uncertainty.
        close = self.failed <= self.held * (1 + self.precision)
        return None if close else _rounded(math.sqrt(self.held * self.failed))

    def record(self, rate: float, held: bool) -> None:
        self.tried += 1
        if held:
            self.held = rate
        else:
            self.failed = rate


def holds(share_met: float | None, attainment: float) -> bool:
    """`share_met` of the requests with an objective. None: there was none of them, as may be where they are few."""
    return share_met is None or share_met >= attainment


def allowed_misses(requests: int, attainment: float) -> int:
    return int((1 - attainment) * requests + 1e-9)


def _rounded(rate: float) -> float:
    """To three digits, for people."""
    return float(f"{rate:.3g}")
