"""The `autoscale` section of a model's settings."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor

from penstock.core.settings import check

BUILT_IN_POLICIES = ("predictive", "reactive", "last_value")


@dataclass(frozen=True, slots=True)
class AutoscaleConfig:
    """Between how many replicas a fleet sizes itself, and how fast."""

    min_replicas: int = 1  # 0: none while nothing is asked; the next request is held until one serves
    max_replicas: int = 4
    policy: str = "predictive"  # reactive, last_value, or a policy of your own as package.module:name
    ttft_ms: float | None = None  # that the fleet is sized for; default: the shortest objective of a class
    itl_ms: float | None = None  # likewise
    interval_seconds: float = 2.0  # between two looks
    margin: float = 1.0  # standard deviations of arriving work above its forecast that there is room for
    hysteresis: float = 0.3  # replicas that must be to spare before one is stopped
    up_cooldown_seconds: float = 0.0  # after replicas were started, before more are
    down_cooldown_seconds: float = 60.0  # for which fewer replicas must have been enough before one is stopped
    idle_seconds: float = 300.0  # without a request, after which the last replica is stopped if min_replicas is 0
    period_seconds: float = 86_400.0  # after which arrivals repeat: a day, or a week
    replica_per_hour: float | None = None  # price of a replica, in the currency of max_per_hour
    max_per_hour: float | None = None  # never more replicas than this pays for

    def __post_init__(self) -> None:
        check(0 <= self.min_replicas <= 1024, "min_replicas", "must be between 0 and 1024")
        check(1 <= self.max_replicas <= 1024, "max_replicas", "must be between 1 and 1024")
        check(self.min_replicas <= self.max_replicas, "min_replicas", "must not exceed max_replicas")
        own = ":" in self.policy and all(self.policy.split(":", 1))
        expected = f"must be one of {', '.join(BUILT_IN_POLICIES)}, or package.module:name, not {self.policy!r}"
        check(self.policy in BUILT_IN_POLICIES or own, "policy", expected)
        for name, value in (("ttft_ms", self.ttft_ms), ("itl_ms", self.itl_ms)):
            check(value is None or 0 < value <= 3.6e6, name, "must be above 0 and at most 3600000")
        check(0.1 <= self.interval_seconds <= 60, "interval_seconds", "must be between 0.1 and 60")
        check(0 <= self.margin <= 10, "margin", "must be between 0 and 10")
        check(0 <= self.hysteresis < 1, "hysteresis", "must be at least 0 and below 1")
        check(0 <= self.up_cooldown_seconds <= 3600, "up_cooldown_seconds", "must be between 0 and 3600")
        check(0 <= self.down_cooldown_seconds <= 86_400, "down_cooldown_seconds", "must be between 0 and 86400")
        check(1 <= self.idle_seconds <= 604_800, "idle_seconds", "must be between 1 and 604800")
        check(60 <= self.period_seconds <= 2_678_400, "period_seconds", "must be between 60 and 2678400")
        self._check_spend()

    def _check_spend(self) -> None:
        price, most = self.replica_per_hour, self.max_per_hour
        check(price is None or 0 < price < 1e6, "replica_per_hour", "must be above 0")
        check(most is None or 0 < most < 1e9, "max_per_hour", "must be above 0")
        check(most is None or price is not None, "max_per_hour", "needs replica_per_hour")
        enough = self.ceiling >= max(1, self.min_replicas)
        check(enough, "max_per_hour", f"must pay for {max(1, self.min_replicas)} replicas at least")

    @property
    def ceiling(self) -> int:
        """The most replicas there may be."""
        if self.max_per_hour is None or self.replica_per_hour is None:
            return self.max_replicas
        return min(self.max_replicas, floor(self.max_per_hour / self.replica_per_hour + 1e-9))
