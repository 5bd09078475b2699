"""When requests are of no use any more."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from penstock.engine.sequence import Sequence


class Deadlines:
    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []

    def add(self, sequence: Sequence, when: float) -> None:
        heappush(self._heap, (when, sequence.order[2], sequence))

    def passed(self, now: float) -> Iterator[Sequence]:
        """Sequences that have not ended and whose deadlines have passed, each once."""
        while self._heap and (self._heap[0][0] <= now or self._heap[0][2].finished is not None):
            sequence = heappop(self._heap)[2]
            if sequence.finished is None:
                yield sequence
