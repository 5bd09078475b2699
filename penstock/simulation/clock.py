"""A clock that stands still until somebody advances it, and what is to happen at given times on the way."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf


class VirtualClock:
    """Call it for the time, as `time.monotonic`."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], object]]] = []  # heap
        self._added = 0

    def __call__(self) -> float:
        return self.now

    def at(self, time: float, event: Callable[[], object]) -> None:
        """Call `event` when the clock reaches this time. Events of one time are called in the order of their adding."""
        heappush(self._events, (time, self._added, event))
        self._added += 1

    @property
    def next_event(self) -> float:
        """Its time; inf if there is none."""
        return self._events[0][0] if self._events else inf

    def advance(self, time: float) -> None:
        """Move on to this time, by way of all events up to it."""
        while self._events and self._events[0][0] <= time:
            at, _, event = heappop(self._events)
            self.now = max(self.now, at)
            event()
        self.now = max(self.now, time)

    def sleep(self, seconds: float) -> None:
        """As `time.sleep`."""
        self.advance(self.now + seconds)

    def advance_to_next_event(self) -> bool:
        """False if there is none."""
        if not self._events:
            return False
        self.advance(self._events[0][0])
        return True

    def clear(self) -> None:
        """Forget what has not happened yet."""
        self._events.clear()
