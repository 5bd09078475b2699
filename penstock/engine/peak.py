"""How large an error may get: the largest of the recent past."""

from __future__ import annotations

from collections import deque


class RecentPeak:
    """The largest value of the latest `windows` windows of `size` values each, so that a peak is forgotten in time.

    A maximum, not a percentile: a stream of a hundred tokens misses its objective if one step in a hundred is late.
    """

    def __init__(self, windows: int, size: int) -> None:
        self._peaks: deque[float] = deque([0.0], maxlen=windows)
        self._size = size
        self.count = 0  # of values there ever were

    def add(self, value: float) -> None:
        if self.count and self.count % self._size == 0:
            self._peaks.append(0.0)
        self.count += 1
        self._peaks[-1] = max(self._peaks[-1], value)

    def scale(self, factor: float) -> None:
        """Express what was added in another unit."""
        for at, peak in enumerate(self._peaks):
            self._peaks[at] = peak * factor

    @property
    def value(self) -> float:
        """At least 0."""
        return max(self._peaks)
