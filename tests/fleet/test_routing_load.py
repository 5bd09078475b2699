"""The forecast policy over four virtual engines, with the load of `benchmarks/routing.py` for CPUs. The clock is
virtual, so the figures are the same on every machine."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from routing import ON_CPUS, one_cache, routed


def test_forecast_beside_one_cache_and_round_robin() -> None:
    load = replace(ON_CPUS, warmup=40.0, seconds=30.0)
    one, robin, forecast = one_cache(load), routed(load, "round_robin"), routed(load, "forecast")
    assert 0.5 < robin.hit_ratio < 0.7  # else the caches were too large or too small to tell anything
    assert forecast.hit_ratio >= 0.95 * one.hit_ratio
    assert forecast.output_per_second >= 1.8 * robin.output_per_second
    assert forecast.busiest <= 1.15
