"""How long the phases of an engine's start take: import, load, kernels, calibration."""

from __future__ import annotations

import time
from collections.abc import Mapping


class StartTimes:
    """A stopwatch with laps. `seconds` by phase, in the order in which they first ended."""

    def __init__(self, began: float | None = None) -> None:
        """`began` on the monotonic clock; default: now."""
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic() if began is None else began

    def ended(self, phase: str) -> None:
        """What has passed since the last phase ended was this one."""
        now = time.monotonic()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now


def listed(seconds: Mapping[str, float]) -> str:
    """For a log."""
    return ", ".join(f"{phase} {each:.2f} s" for phase, each in seconds.items())
