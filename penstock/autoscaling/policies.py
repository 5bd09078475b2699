"""The policies that come with the fleet. Each is a pure function of a look at the fleet and of what arrived before.

reactive    what has arrived lately, what waits, and the forecast time to first token of a request sent now
predictive  the forecast of what will arrive by the time that a replica started now serves, as a floor under reactive
last_value  as predictive, with the latest value in place of a forecast: to compare with
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import sqrt

from penstock.autoscaling.arrivals import Arrivals, Expected
from penstock.autoscaling.load import Load
from penstock.autoscaling.policy import Need, Policy, imported_policy
from penstock.autoscaling.settings import BUILT_IN_POLICIES, AutoscaleConfig

_MOST_LATENESS = 0.5  # of a request sent now, before there are too few replicas


def replicas_for(load: Load, rate: float, spread: float, config: AutoscaleConfig) -> float:
    """For so much work a second, whose forecast is off by `spread` as a standard deviation. Beside that requests come
    at random: within the TTFT objective, for which they can wait, their work deviates as that of a Poisson process."""
    random = load.request_work * rate / load.ttft_objective if load.ttft_objective else 0.0
    return (rate + config.margin * sqrt(spread**2 + random)) / load.capacity


def reactive(load: Load, arrivals: Arrivals, config: AutoscaleConfig) -> Need:
    busy = 1.0 if load.held or load.in_flight else 0.0
    if not load.capacity:
        return Need(busy, "speed not known yet")
    needs = [Need(busy, "requests in flight" if busy else "no requests")]
    needs.append(Need(replicas_for(load, arrivals.level, 0.0, config), f"work of {arrivals.level:.2f} s/s arrives"))
    if load.ttft_objective is not None:
        queue = load.queued / load.ttft_objective / load.capacity
        needs.append(Need(queue, f"queue of {load.queued:.1f} s"))
        late = load.lateness - _MOST_LATENESS
        if late > 0:
            needs.append(Need(load.ready * min(2.0, 1 + late), f"forecast TTFT {load.ttft * 1e3:.0f} ms"))
    return max(needs, key=lambda need: need.replicas)


def _with_floor(
    forecast: Callable[[Arrivals, float, float], Expected], load: Load, arrivals: Arrivals, config: AutoscaleConfig
) -> Need:
    need = reactive(load, arrivals, config)
    if not load.capacity:
        return need
    ahead = load.warmup_seconds + config.interval_seconds
    soon = forecast(arrivals, load.now, ahead)
    later = forecast(arrivals, load.now, ahead + config.down_cooldown_seconds)
    floor = replicas_for(load, soon.mean, soon.spread, config)
    keep = replicas_for(load, later.mean, later.spread, config)
    if floor > need.replicas:
        need = Need(floor, f"work of {soon.mean:.2f} ± {soon.spread:.2f} s/s is forecast for the next {ahead:.0f} s")
    return replace(need, keep=keep, usual=later.usual)


predictive: Policy = partial(_with_floor, Arrivals.expected)
last_value: Policy = partial(_with_floor, Arrivals.last_value)

POLICIES: dict[str, Policy] = {"predictive": predictive, "reactive": reactive, "last_value": last_value}
assert set(POLICIES) == set(BUILT_IN_POLICIES)


def policy_named(name: str) -> Policy:
    """A built-in one, or one of your own by import path. Raises StartupError if that cannot be imported."""
    return POLICIES.get(name) or imported_policy(name)
