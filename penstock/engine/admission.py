"""Whether a promise can be kept, decided on arrival from a forecast of the first token."""

from __future__ import annotations

import math
from collections.abc import Sequence as Collection
from dataclasses import dataclass

from penstock.core.errors import Overloaded
from penstock.core.request import Objective
from penstock.engine.forecast import Arrivals, Backlog, Calibration, needed_share, step_limit
from penstock.engine.sequence import Sequence
from penstock.engine.step_time import StepShape, StepTimes
from penstock.engine.urgency import Ranking

_CAUTION = 1.1  # what is promised must be forecast to come this much sooner than owed
_LEADER_SHARE = 0.7  # of the gap owed that decoding may take up for streams of a tenant that leads: others find room


@dataclass(frozen=True, slots=True)
class Load:
    """What the engine is busy with when a request arrives."""

    ranking: Ranking
    prompts: Collection[Sequence]  # waiting, or not computed to their end
    decodes: StepShape
    tightest_gap: float  # owed to running streams
    free_at: float  # when the steps under way will have ended


class Admission:
    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._promises = Arrivals()
        self._calibration = Calibration()

    def tightest_ttft(self, now: float) -> float:
        """The shortest time to first token promised of late."""
        return self._promises.tightest(now)

    def admit(self, sequence: Sequence, objective: Objective, load: Load) -> None:
        """Forecast the first token, and refuse what would miss its objective or its deadline."""
        ttft = math.inf if objective.ttft is None else objective.ttft
        allowed = min(ttft, sequence.request.deadline or math.inf)
        own = self._times.chunk_seconds(sequence.prompt_len - sequence.to_compute, sequence.to_compute)
        if own:
            forecast = self._forecast(sequence, own, allowed, load)
            if forecast * _CAUTION > allowed:
                raise Overloaded(
                    f"the first token would come after {forecast:.2f} s, too late for the {allowed:.2f} s owed",
                    retry_after=min(60.0, forecast * _CAUTION - allowed),
                )
        if ttft < math.inf:
            self._promises.add(ttft, own, load.ranking.now)

    def _forecast(self, sequence: Sequence, own: float, allowed: float, load: Load) -> float:
        """Seconds to the first token if everything goes at full speed. The ledger keeps what is expected to happen."""
        times, ranking = self._times, load.ranking
        now, mine = ranking.now, ranking.of(sequence)
        before = after = 0.0
        work = [(sequence.due, own)]
        for other in load.prompts:
            seconds = remaining_seconds(other, times)
            work.append((other.due, seconds))
            if ranking.of(other) < mine:
                before += seconds
            else:
                after += seconds
        decode = times.base_seconds(load.decodes)
        if decode > sequence.gap * (_LEADER_SHARE if mine[2] else 1.0 - times.margin):
            return math.inf
        gap = min(load.tightest_gap, sequence.gap) * (1.0 - times.margin)
        tightest = min(self._promises.tightest(now), allowed)
        arriving = min(0.9, self._promises.more_urgent_than(allowed, now))
        factor = self._calibration.factor(sequence.request.objective.name)

        def first_token(share: float) -> float:
            limit = step_limit(gap, tightest, decode, share)
            return factor * Backlog(load.free_at - now, decode, limit, before, after, arriving).first_token(own)

        sequence.ledger.predicted_ttft = first_token(needed_share(sorted(work), now))
        return first_token(math.inf)

    def learn(self, sequence: Sequence, now: float) -> None:
        """Its first token has come."""
        forecast = sequence.ledger.predicted_ttft
        if forecast:
            self._calibration.learn(sequence.request.objective.name, forecast, now - sequence.arrival)


def remaining_seconds(sequence: Sequence, times: StepTimes) -> float:
    """Of prefill, not counting what was in the cache on arrival."""
    start = max(sequence.computed, sequence.prompt_len - sequence.to_compute)
    return times.chunk_seconds(start, sequence.known - start)
