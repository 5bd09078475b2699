"""How many replicas there should be: what a policy needs, within limits, and without flapping."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import ceil

from penstock.autoscaling.arrivals import Arrivals
from penstock.autoscaling.load import Load
from penstock.autoscaling.policies import policy_named
from penstock.autoscaling.policy import Need, Policy
from penstock.autoscaling.settings import AutoscaleConfig

_ROUNDING = 1e-6  # replicas


@dataclass(frozen=True, slots=True)
class Decision:
    """The number of replicas there should be from now on."""

    replicas: int
    reason: str  # in words, for logs and status
    need: float  # replicas, as the policy says
    arriving: float  # seconds of work a second


class Scaler:
    """One for each fleet. Ask it at every look, and at once when the first request is held.

    Up: as soon as more replicas are needed. Down: when fewer replicas would have been enough at every look of the
    cool-down, with the hysteresis to spare. So after a step down nothing but load that exceeds all load of that time
    by the hysteresis at least leads up again. Where less usually arrives now than then, a need of the cool-down counts
    for as much less: the end of what ends every day is not waited for.
    """

    def __init__(self, config: AutoscaleConfig, policy: Policy | None = None) -> None:
        self.config = config
        self.arrivals = Arrivals(config.period_seconds)
        self._policy = policy or policy_named(config.policy)
        self._replicas: int | None = None  # decided last
        self._needs: deque[tuple[float, float, float]] = deque()  # of the cool-down: time, replicas, usual work
        self._began: float | None = None
        self._raised = float("-inf")  # when it was last raised
        self._requests = 0.0
        self._asked = float("-inf")  # when something was last asked for or in flight

    def look(self, load: Load) -> Decision:
        config, now = self.config, load.now
        self.arrivals.observe(now, load.work, load.warmup_seconds)
        need = self._policy(load, self.arrivals, config)
        self._remember(load, need)
        current = load.replicas if self._replicas is None else self._replicas
        wanted, reason = self._wanted(load, need, current)
        replicas = min(config.ceiling, max(config.min_replicas, wanted))
        if replicas < wanted:
            reason += f"; {wanted} needed, {replicas} allowed"
        elif replicas > wanted:
            reason = f"at least {replicas}"
        if replicas > current:
            self._raised = now
        self._replicas = replicas
        return Decision(replicas, reason, need.replicas, self.arrivals.level)

    def _remember(self, load: Load, need: Need) -> None:
        now = load.now
        if self._began is None:
            self._began = self._asked = now
        if load.held or load.in_flight or load.requests != self._requests:
            self._asked, self._requests = now, load.requests
        needs, replicas, usual = self._needs, max(need.replicas, need.keep), need.usual
        while needs and needs[-1][1] <= replicas and needs[-1][1] * usual <= replicas * needs[-1][2]:
            needs.pop()  # whatever is usual later, it will count for less than this one
        needs.append((now, replicas, usual))
        while needs[0][0] < now - self.config.down_cooldown_seconds:
            needs.popleft()

    def _cooling(self, usual: float) -> float:
        """The most that was needed during the cool-down, less where less is usual now."""
        return max(need * min(1.0, usual / then if usual and then else 1.0) for _, need, then in self._needs)

    def _wanted(self, load: Load, need: Need, current: int) -> tuple[int, str]:
        config, now = self.config, load.now
        idle = now - self._asked >= config.idle_seconds
        if config.min_replicas == 0 and idle and need.replicas < 1:
            return 0, f"nothing asked for {now - self._asked:.0f} s"
        up = max(1, ceil(need.replicas - _ROUNDING))
        if up > current:
            if current and now < self._raised + config.up_cooldown_seconds:
                return current, f"{need.reason}; cooling down"
            return up, need.reason
        assert self._began is not None
        down = max(1, ceil(self._cooling(need.usual) + config.hysteresis - _ROUNDING))
        if down < current and now >= self._began + config.down_cooldown_seconds:
            return down, f"{need.reason}; fewer were enough for {config.down_cooldown_seconds:.0f} s"
        return current, need.reason
