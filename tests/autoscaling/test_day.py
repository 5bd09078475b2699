"""Part of the day of `benchmarks/autoscaling.py`: the real scheduler, router and policies on a virtual clock."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from autoscaling import day_of
from virtual_day import clairvoyant_plan, learnt_times, planned, scaled


def test_a_night_is_served_with_little_more_than_it_needs() -> None:
    """The load falls by half, with a job on the way."""
    scenario, times = replace(day_of("consumer", seed=5, peak=10.0), seconds=900.0), learnt_times()
    result = scaled(scenario, times, "predictive")
    plan = planned(scenario, times, clairvoyant_plan(scenario, capacity=0.5, price=8.0))
    assert result.attainment >= 0.985
    assert result.replica_seconds < 1.6 * plan.replica_seconds  # of two replicas, one more is half as many again
    assert result.flaps(scenario.config.down_cooldown_seconds) <= 1
