"""Who goes first: a better class, then tenants that have had less than their share, then whose token is due first.

Without an objective a first token is due in proportion to the prefill it takes. An objective that can no longer be met
gives way to those that can, once; what has waited far too long goes first among its tenant's whatever its class. So
nothing waits for ever, and the late do not make the others late.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter

from penstock.engine.fairness import TenantCounter
from penstock.engine.sequence import Sequence
from penstock.engine.step_time import StepTimes

SLOWDOWN = 4.0  # without an objective: a first token is due after this many times the prefill it takes
LEAST_PATIENCE = 0.2  # seconds, for what takes hardly any
AGING_SECONDS = 30.0  # past due: from then on class and priority no longer count against a request

Urgency = tuple[int, int, int, float, int]  # smaller goes first


@dataclass(frozen=True, slots=True)
class Ranking:
    """What urgency depends on besides the request, the same for a whole step."""

    now: float
    leads: Mapping[TenantCounter, int]
    best_class: tuple[int, int]  # (rank, priority) of the best request there is

    def of(self, sequence: Sequence) -> Urgency:
        rank, priority, number = sequence.order
        if self.now > sequence.due + AGING_SECONDS:
            rank, priority = self.best_class
        return rank, priority, self.leads.get(sequence.counter, 0), sequence.due, number

    def giving_way(self, head: Sequence, running: Iterable[Sequence]) -> list[Sequence]:
        """Running sequences that may wait for this one, those with the least work to lose first."""
        rank, priority, lead, _, _ = self.of(head)
        found = [
            s
            for s in running
            if s.order[:2] > (rank, priority)
            or (head.promised and s.order[:2] == (rank, priority) and self.leads.get(s.counter, 0) > lead)
        ]
        return sorted(found, key=attrgetter("computed"))


def demote_if_late(sequence: Sequence, now: float, times: StepTimes) -> bool:
    """An objective that cannot be met any more gives way to those that can: it is due in as much time again."""
    if not sequence.promised:
        return False
    start = max(sequence.computed, sequence.given - sequence.to_compute)
    if now + times.chunk_seconds(start, sequence.given - start) <= sequence.due:
        return False
    sequence.promised = False
    sequence.due = now + (sequence.due - sequence.arrival)
    return True


def patience(prefill_seconds: float) -> float:
    """Seconds until a first token is due that nobody was promised: in proportion to the work, so that a short prompt
    overtakes a long one, and the long one, whose due time comes too, is slowed down by a bounded factor."""
    return max(LEAST_PATIENCE, SLOWDOWN * prefill_seconds)


class WaitingQueue:
    """Requests that hold no memory. A heap by due time for each class and tenant: only their heads compete."""

    def __init__(self) -> None:
        self._heaps: dict[tuple[int, int, TenantCounter], list[tuple[float, int, Sequence]]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        for heap in self._heaps.values():
            for _, _, sequence in heap:
                yield sequence

    def push(self, sequence: Sequence) -> None:
        rank, priority, number = sequence.order
        heap = self._heaps.setdefault((rank, priority, sequence.counter), [])
        heapq.heappush(heap, (sequence.due, number, sequence))
        self._size += 1

    def remove(self, sequence: Sequence) -> None:
        key = (*sequence.order[:2], sequence.counter)
        heap = self._heaps[key]
        if heap[0][2] is sequence:
            heapq.heappop(heap)
        else:
            heap.remove((sequence.due, sequence.order[2], sequence))
            heapq.heapify(heap)
        if not heap:
            del self._heaps[key]
        self._size -= 1

    @property
    def best_class(self) -> tuple[int, int] | None:
        return min(((rank, priority) for rank, priority, _ in self._heaps), default=None)

    def first(self, ranking: Ranking, times: StepTimes) -> Sequence | None:
        """The most urgent request. Those found late on the way fall back."""
        for heap in self._heaps.values():
            while demote_if_late(heap[0][2], ranking.now, times):
                _, number, sequence = heap[0]
                heapq.heapreplace(heap, (sequence.due, number, sequence))
        return min((heap[0][2] for heap in self._heaps.values()), key=ranking.of, default=None)
