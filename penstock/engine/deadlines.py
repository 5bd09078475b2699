"""When requests are of no use any more."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from penstock.engine.sequence import Sequence

_LEAST_CLEANED = 64


class Deadlines:
    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []
        self._clean_at = _LEAST_CLEANED

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, sequence: Sequence, when: float) -> None:
        """Those that have ended go when they are as many as the others: a deadline may be a day away."""
        heappush(self._heap, (when, sequence.order[2], sequence))
        if len(self._heap) > self._clean_at:
            self._heap = [entry for entry in self._heap if entry[2].finished is None]
            heapify(self._heap)
            self._clean_at = max(_LEAST_CLEANED, 2 * len(self._heap))

    def passed(self, now: float) -> Iterator[Sequence]:
        """Sequences that have not ended and whose deadlines have passed, each once."""
        while self._heap and (self._heap[0][0] <= now or self._heap[0][2].finished is not None):
            sequence = heappop(self._heap)[2]
            if sequence.finished is None:
                yield sequence
