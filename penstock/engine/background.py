"""Work that nobody waits for, such as batches, beside requests that somebody waits for.

It fills what those leave over. It sits out steps that compute a reader's prompt, and beside readers' streams it takes a
fifth of the time at most. While readers come, a step has either its streams or its prompts and is longer by some
milliseconds at most, so that whoever comes next hardly waits for it. Without readers steps are as large as ever.
"""

from __future__ import annotations

import math

from penstock.engine.planned_step import PlannedStep
from penstock.engine.sequence import Sequence
from penstock.engine.step_time import StepShape, StepTimes
from penstock.engine.urgency import Ranking

STEP_SECONDS = 0.005  # that such work may add to a step
_SHARE = 0.2  # of the time, beside readers' streams
_ATTENTION_SECONDS = 30.0  # after a reader came, the next one is expected for so long
_LONGEST_PAUSE = 1.0  # seconds; then it gets a step even if readers' prompts never end


class Background:
    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self.present = 0  # sequences that have not ended
        self._readers_until = -math.inf
        self._advanced = -math.inf  # when it was last in a step
        self._rests_until = -math.inf  # beside readers' streams
        self._streams_next = False  # rather than its prompts
        self._turn = 0  # among its streams

    def arrived(self, sequence: Sequence, now: float) -> None:
        if sequence.background:
            self.present += 1
        else:
            self._readers_until = now + _ATTENTION_SECONDS

    def ended(self, sequence: Sequence) -> None:
        self.present -= sequence.background

    def admit(self, decodes: list[Sequence], prompts: list[Sequence], ranking: Ranking) -> tuple[list[Sequence], bool]:
        """Those of the decoding sequences that the next step advances, and whether it may compute prompts that nobody
        waits for. The most urgent of the prompts there are is among `prompts`."""
        if not self.present:
            return decodes, False
        now, first = ranking.now, min(prompts, key=ranking.of, default=None)
        readers, others = [s for s in decodes if not s.background], [s for s in decodes if s.background]
        if not readers and now > self._readers_until:
            return decodes, True
        waited_for = first is not None and not first.background
        if (waited_for and now < self._advanced + _LONGEST_PAUSE) or (readers and now < self._rests_until):
            return readers, False
        if others and (self._streams_next or first is None or waited_for):
            self._streams_next = False
            return readers + self._in_turn(others, readers), False
        self._streams_next = True
        return readers, True

    def _in_turn(self, others: list[Sequence], readers: list[Sequence]) -> list[Sequence]:
        """As many as a step has time for; at least one."""
        shape, first = _shape(readers), self._turn % len(others)
        limit = self._times.predict(shape if readers else _shape(others[first : first + 1])) + STEP_SECONDS
        chosen: list[Sequence] = []
        for s in others[first:] + others[:first]:
            shape = StepShape(shape.decodes + 1, shape.context + s.computed + 1)
            if chosen and self._times.predict(shape) > limit:
                break
            chosen.append(s)
        self._turn = first + len(chosen)
        return chosen

    def step_limit(self, shape: StepShape, now: float) -> float:
        """Seconds that a step of this shape may take with prompts that nobody waits for."""
        return math.inf if now > self._readers_until else self._times.base_seconds(shape) + STEP_SECONDS

    def planned(self, planned: PlannedStep) -> None:
        """What it adds to a step of readers' streams is made up for by steps that it sits out."""
        if not self.present or not any(s.background for s in planned.sequences):
            return
        self._advanced = planned.planned
        counts = zip(planned.sequences, planned.step.counts, strict=True)
        readers = {s: count for s, count in counts if not s.background}
        if readers and max(readers.values()) == 1:  # in a step with a reader's prompt it is once a second at most
            added = self._times.predict(planned.shape) - self._times.predict(_shape([*readers]))
            self._rests_until = planned.planned + added / _SHARE


def _shape(decodes: list[Sequence]) -> StepShape:
    return StepShape(len(decodes), sum(s.computed + 1 for s in decodes))
