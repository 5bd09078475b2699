"""Work that nobody waits for, such as batches, beside requests that somebody waits for.

It fills what those leave over. It sits out steps that compute a reader's prompt. While readers come, it adds at most
some milliseconds to a step, so that whoever comes next hardly waits for it; sequences that are too many for that take
turns. Without readers steps are as large as ever.
"""

from __future__ import annotations

import math

from penstock.engine.sequence import Sequence
from penstock.engine.step_time import StepShape, StepTimes
from penstock.engine.urgency import Ranking

STEP_SECONDS = 0.005  # that such work may add to a step
_ATTENTION_SECONDS = 30.0  # after a reader came, the next one is expected for so long
_LONGEST_PAUSE = 1.0  # seconds; then it gets a step even if readers' prompts never end


class Background:
    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._readers_until = -math.inf
        self._arrived = -math.inf
        self._advanced = -math.inf  # when it was last in a step
        self._turn = 0

    def arrived(self, sequence: Sequence, now: float) -> None:
        if sequence.background:
            self._arrived = now
        else:
            self._readers_until = now + _ATTENTION_SECONDS

    def present(self, now: float) -> bool:
        """Whether there may be any. It never pauses for long, so it is known from when it was last seen."""
        return now < max(self._arrived, self._advanced) + _ATTENTION_SECONDS

    def pauses_for(self, prompts: list[Sequence], ranking: Ranking) -> bool:
        """Whether it sits out a step that may compute these: one of a reader is the most urgent."""
        first = min(prompts, key=ranking.of, default=None)
        return first is not None and not first.background and ranking.now < self._advanced + _LONGEST_PAUSE

    def beside_readers(self, decodes: list[Sequence], now: float, *, pauses: bool) -> list[Sequence]:
        """Those of the decoding sequences that the next step advances."""
        others = [s for s in decodes if s.background]
        if not others:
            return decodes
        readers = [s for s in decodes if not s.background]
        if pauses:
            return readers
        self._advanced = now
        if now > self._readers_until and not readers:
            return decodes
        shape = StepShape(len(readers), sum(s.computed + 1 for s in readers))
        limit, first = self._times.predict(shape) + STEP_SECONDS, self._turn % len(others)
        chosen: list[Sequence] = []
        for s in others[first:] + others[:first]:
            shape = StepShape(shape.decodes + 1, shape.context + s.computed + 1)
            if chosen and self._times.predict(shape) > limit:
                break
            chosen.append(s)
        self._turn = first + len(chosen)
        return readers + chosen

    def step_limit(self, shape: StepShape, now: float) -> float:
        """Seconds that a step of this shape may take with prompts that nobody waits for."""
        self._advanced = now
        return math.inf if now > self._readers_until else self._times.base_seconds(shape) + STEP_SECONDS
