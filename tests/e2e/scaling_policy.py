"""An autoscaling policy for servers under test. It forecasts nothing, so no replica stays for what may come."""

from __future__ import annotations

from penstock.autoscaling.arrivals import Arrivals
from penstock.autoscaling.load import Load
from penstock.autoscaling.policy import Need
from penstock.autoscaling.settings import AutoscaleConfig


def by_streams(load: Load, arrivals: Arrivals, config: AutoscaleConfig) -> Need:
    """Eight streams a replica."""
    return Need(load.in_flight / 8, f"{load.in_flight} streams")
