"""Who goes first: a better class, then tenants that have had less than their share, then a better priority, then whose
token is due first.

Without an objective a first token is due in proportion to the prefill it takes. An objective that can no longer be met
gives way to those that can, once; of what has waited far too long some at a time are promoted to the best class, until
they end. So nothing waits for ever, and the late do not make the others late.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter

from penstock.engine.fairness import TenantCounter
from penstock.engine.sequence import Sequence
from penstock.engine.step_time import StepTimes

SLOWDOWN = 4.0  # without an objective: a first token is due after this many times the prefill it takes
LEAST_PATIENCE = 0.2  # seconds, for what takes hardly any
AGING_SECONDS = 30.0  # past due: from then on a request may be promoted
# Of the sequences computed together so many are promoted ones, one at least. With all that is late in the best class
# the late would displace each other, and whom somebody waits for would displace nobody.
PROMOTED_SHARE = 1 / 16

Urgency = tuple[int, int, int, float, int]  # rank, lead, priority, due, arrival; smaller goes first


@dataclass(frozen=True, slots=True)
class Ranking:
    """What urgency depends on besides the request, the same for a whole step."""

    now: float
    leads: Mapping[TenantCounter, int]
    best_class: tuple[int, int]  # (rank, priority) of the best request there is
    promoting: bool = True  # whether there may be another promoted one

    def of(self, sequence: Sequence) -> Urgency:
        rank, priority, number = sequence.order
        if self.promotes(sequence):
            rank, priority = self.best_class
        return rank, self.leads.get(sequence.counter, 0), priority, sequence.due, number

    def promotes(self, sequence: Sequence) -> bool:
        """Whether it goes as one of the best class, and stays one once it runs."""
        return self.promoting and self.now > sequence.due + AGING_SECONDS and sequence.order[:2] > self.best_class

    def giving_way(self, head: Sequence, running: Iterable[Sequence]) -> list[Sequence]:
        """Running sequences that may wait for this one, those with the least work to lose first."""
        rank, lead, priority, _, _ = self.of(head)
        leads = lead if head.promised else math.inf
        found = [
            s
            for s in running
            if is_worse(s, rank, priority, head.counter)
            or (s.order[0] == rank and self.leads.get(s.counter, 0) > leads)
        ]
        return sorted(found, key=attrgetter("computed"))


class Promotions:
    """Of the requests there are."""

    def __init__(self, max_seqs: int) -> None:
        self._most = max(1, int(PROMOTED_SHARE * max_seqs))
        self._count = 0

    @property
    def has_room(self) -> bool:
        return self._count < self._most

    def begins(self, sequence: Sequence, ranking: Ranking) -> bool:
        """Returns whether it is promoted by that: then there is another ranking from now on."""
        if promoted := ranking.promotes(sequence):
            sequence.order, sequence.promoted = (*ranking.best_class, sequence.order[2]), True
            self._count += 1
        return promoted

    def ended(self, sequence: Sequence) -> None:
        self._count -= sequence.promoted


def is_worse(sequence: Sequence, rank: int, priority: int, counter: TenantCounter) -> bool:
    """Of a worse class or, of the same tenant, of a worse priority: no tenant says how urgent the work of others is."""
    own, own_priority, _ = sequence.order
    return own > rank or (own == rank and own_priority > priority and sequence.counter is counter)


def comes_later(sequence: Sequence, other: Sequence) -> bool:
    """Whether it gives way to the other one when memory is short."""
    rank, priority, number = other.order
    own, own_priority, own_number = sequence.order
    if is_worse(sequence, rank, priority, other.counter):
        return True
    return own_number > number and not is_worse(other, own, own_priority, sequence.counter)


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


def patience(sequence: Sequence, times: StepTimes) -> float:
    """Seconds until a first token is due that nobody was promised: in proportion to the work, so that a short prompt
    overtakes a long one, and the long one, whose due time comes too, is slowed down by a bounded factor."""
    return max(LEAST_PATIENCE, SLOWDOWN * remaining_seconds(sequence, times))


def remaining_seconds(sequence: Sequence, times: StepTimes) -> float:
    """Of prefill, not counting what was in the cache on arrival."""
    start = max(sequence.computed, sequence.given - sequence.to_compute)
    return times.chunk_seconds(start, sequence.known - start)


class WaitingQueue:
    """Requests that hold no memory. A heap by due time for each class, priority and tenant: its head competes."""

    def __init__(self) -> None:
        self._heaps: dict[tuple[int, int, TenantCounter], list[tuple[float, int, Sequence]]] = {}
        self._tokens: dict[tuple[int, int, TenantCounter], int] = {}  # to compute, of each heap
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        for heap in self._heaps.values():
            for _, _, sequence in heap:
                yield sequence

    def push(self, sequence: Sequence) -> None:
        rank, priority, number = sequence.order
        key = rank, priority, sequence.counter
        heapq.heappush(self._heaps.setdefault(key, []), (sequence.due, number, sequence))
        self._tokens[key] = self._tokens.get(key, 0) + sequence.to_compute
        self._size += 1

    def remove(self, sequence: Sequence) -> None:
        key = (*sequence.order[:2], sequence.counter)
        heap = self._heaps[key]
        if heap[0][2] is sequence:
            heapq.heappop(heap)
        else:
            heap.remove((sequence.due, sequence.order[2], sequence))
            heapq.heapify(heap)
        self._tokens[key] -= sequence.to_compute
        if not heap:
            del self._heaps[key], self._tokens[key]
        self._size -= 1

    @property
    def tokens(self) -> int:
        """To compute, of all of them."""
        return sum(self._tokens.values())

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

    def split(self, sequence: Sequence, ranking: Ranking) -> tuple[list[Sequence], list[Behind]]:
        """Those that may go before this one; and whole heaps that come after it, however long they are."""
        mine, before, behind = ranking.of(sequence)[:3], list[Sequence](), list[Behind]()
        for (rank, priority, counter), heap in self._heaps.items():
            first = heap[0][2]
            if (rank, ranking.leads.get(counter, 0), priority) > mine and not ranking.promotes(first):
                behind.append(Behind(first.due, len(heap), self._tokens[rank, priority, counter]))
            else:
                before += [waiting for _, _, waiting in heap]
        return before, behind


@dataclass(frozen=True, slots=True)
class Behind:
    """Requests that wait and come after another one."""

    due: float  # the first of them
    count: int
    tokens: int  # to compute

    def seconds(self, times: StepTimes) -> float:
        """Of prefill, as if all were equally long."""
        return self.count * times.chunk_seconds(0, round(self.tokens / self.count))
