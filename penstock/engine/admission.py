"""Whether a promise can be kept, decided on arrival from a forecast of the first token."""

from __future__ import annotations

import math
from collections.abc import Sequence as Collection
from dataclasses import dataclass

from penstock.core.errors import DeadlineTooShort, Overloaded
from penstock.core.request import Objective
from penstock.engine.bookkeeping import Counts
from penstock.engine.forecast import Arrivals, Backlog, Calibration, needed_share, step_limit
from penstock.engine.pacing import Pacing, decode_shape
from penstock.engine.sequence import Sequence
from penstock.engine.step_time import StepShape, StepTimes
from penstock.engine.urgency import Behind, Ranking, WaitingQueue, remaining_seconds

_LEADER_SHARE = 0.7  # of the ITL objective that decoding may take up for streams of a tenant that leads


@dataclass(frozen=True, slots=True)
class Load:
    """What the engine is busy with when a request arrives."""

    ranking: Ranking
    prompts: Collection[Sequence]  # waiting, or not computed to their end
    behind: Collection[Behind]  # what waits besides and is less urgent than the request
    decodes: StepShape
    longest_step: float  # that running streams allow
    free_at: float  # when the steps under way will have ended


def load_beside(
    sequence: Sequence,
    waiting: WaitingQueue,
    running: Collection[Sequence],
    ranking: Ranking,
    pacing: Pacing,
    free_at: float,
) -> Load:
    """Among what this one arrives."""
    first, behind = waiting.split(sequence, ranking)
    prompts = [*first, *(s for s in running if s.known - s.computed > s.sampling)]
    decodes = decode_shape(s for s in running if not s.background)
    return Load(ranking, prompts, behind, decodes, pacing.longest_step(running, decodes), free_at)


class Admission:
    def __init__(self, times: StepTimes, counts: Counts) -> None:
        self._times = times
        self._counts = counts
        self._promises = Arrivals()
        self._calibration = Calibration()

    def tightest_ttft(self, now: float) -> float:
        """The shortest time to first token promised of late."""
        return self._promises.tightest(now)

    def check_queue(self, waiting: WaitingQueue, most: int) -> None:
        """Raises Overloaded where as many wait already, with the time that it takes to prefill all of them."""
        count = len(waiting)
        if count >= most:
            self._counts.refused += 1
            seconds = Behind(0.0, count, waiting.tokens).seconds(self._times)
            raise Overloaded(f"{count} requests are waiting already", retry_after=max(1.0, seconds))

    def admit(self, sequence: Sequence, objective: Objective, load: Load) -> None:
        """Forecast the first token, and refuse what would miss its objective or its deadline."""
        ttft = math.inf if objective.ttft is None else objective.ttft
        deadline = sequence.request.deadline or math.inf
        allowed = min(ttft, deadline)
        own = self._times.chunk_seconds(sequence.given - sequence.to_compute, sequence.to_compute)
        if own:
            forecast = self._forecast(sequence, own, allowed, load)
            spared = 1.0 - self._calibration.margin(objective.name)
            late = forecast * self._times.slowdown - allowed * spared
            if late > 0:
                idle = (own + self._times.base_seconds(StepShape())) * self._times.slowdown
                why = _why(sequence, forecast, allowed, own if idle > allowed * spared else 0.0)
                kind = DeadlineTooShort if deadline * spared < idle and forecast < math.inf else Overloaded
                self._counts.refused += kind is Overloaded  # the other one has nothing to do with load
                raise kind(why, retry_after=min(60.0, late))
        if ttft < math.inf:
            self._promises.add(ttft, own, load.ranking.now)

    def _forecast(self, sequence: Sequence, own: float, allowed: float, load: Load) -> float:
        """Seconds to the first token if everything goes at full speed. The ledger keeps what is expected to happen."""
        times, ranking = self._times, load.ranking
        now, mine = ranking.now, ranking.of(sequence)
        lead = mine[1]
        before = after = 0.0
        joining, context = 0, 0  # streams that begin before its own, and the tokens they bring along
        work = [(sequence.due, own)]
        for other in load.prompts:
            seconds = remaining_seconds(other, times)
            work.append((other.due, seconds))
            if ranking.of(other) < mine:
                before += seconds
                joining += 1
                context += other.given
            else:
                after += seconds
        for less in load.behind:
            seconds = less.seconds(times)
            work.append((less.due, seconds))
            after += seconds
        decodes = load.decodes
        decode = times.base_seconds(StepShape(decodes.decodes + joining // 2, decodes.context + context // 2))
        longest = sequence.itl * _LEADER_SHARE if lead else times.plan_within(sequence.itl)
        if decode > longest:
            return math.inf
        longest = min(load.longest_step, times.plan_within(sequence.itl))
        soonest = load.free_at - now + decode + own  # no step is made shorter for a promise that cannot be kept
        tightest = min(self._promises.tightest(now), max(allowed, soonest))
        arriving = min(0.9, self._promises.more_urgent_than(allowed, now))
        factor = self._calibration.factor(sequence.request.objective.name)

        def first_token(share: float) -> float:
            limit = step_limit(longest, tightest, decode, share)
            return factor * Backlog(load.free_at - now, decode, limit, before, after, arriving).first_token(own)

        sequence.ledger.predicted_ttft = first_token(needed_share(sorted(work), now))
        return first_token(math.inf)

    def learn(self, sequence: Sequence, now: float) -> None:
        """Its first token has come."""
        forecast, objective = sequence.ledger.predicted_ttft, sequence.request.objective
        if forecast and objective.ttft is not None:
            self._calibration.learn(objective.name, forecast, now - sequence.arrival, objective.ttft)


def _why(sequence: Sequence, forecast: float, allowed: float, alone: float) -> str:
    """For whoever is refused. `alone`: seconds of prefill, if they are too many at full speed; else 0."""
    if forecast == math.inf:
        return f"with one more stream inter-token latency would be over its objective of {sequence.itl:.2g} s"
    why = f"the first token is forecast after {forecast:.2g} s, which with the margin that forecasts need is too late "
    why += f"for {allowed:.2g} s"
    if alone:
        why += f"; prefill of {sequence.to_compute} tokens takes {alone:.2g} s by itself, so waiting does not help"
    return why
