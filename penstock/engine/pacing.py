"""How long the next step may take beside the streams it advances, and how much of a prompt fits into that."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from penstock.engine.forecast import needed_share, step_limit
from penstock.engine.limits import SchedulerLimits
from penstock.engine.planned_step import PlannedStep
from penstock.engine.sequence import Sequence
from penstock.engine.step_time import StepShape, StepTimes
from penstock.engine.urgency import WaitingQueue, remaining_seconds

# Scoring a prompt takes logits at every position; this many at a time bounds the memory of tokens times vocabulary.
_SCORED_TOKENS = 256
_PACED_PROMPTS = 64  # with more prompts than this at hand there is no point in asking how fast they must be computed


class Pacing:
    def __init__(self, limits: SchedulerLimits, times: StepTimes) -> None:
        self._limits = limits
        self._times = times

    def longest_step(self, streams: Collection[Sequence], decodes: StepShape, drafting: float = 0.0) -> float:
        """Seconds that a step may be planned to take beside these streams, which have waited for drafts before it."""
        longest = self._times.plan_within(min((s.itl for s in streams), default=math.inf)) - drafting
        return min(longest, self._times.pace(decodes)) if any(s.paced for s in streams) else longest

    def step_limit(
        self, planned: PlannedStep, ttft: float, begun: list[Sequence], waiting: WaitingQueue, now: float
    ) -> float:
        """Seconds that a step may take in which streams are planned so far: not too long for these, in time for the
        tightest `ttft` promised, and no longer than the prompts begun and waiting need where all of them have an
        objective."""
        shape, share = planned.shape, math.inf
        longest = self.longest_step(planned.sequences, shape, planned.drafting)
        if longest == ttft == math.inf:
            return math.inf
        prompts = [*begun, *waiting] if len(waiting) <= _PACED_PROMPTS else []
        if prompts and all(s.promised for s in prompts):
            share = needed_share(sorted((s.due, remaining_seconds(s, self._times)) for s in prompts), now)
        return step_limit(longest, ttft, self._times.base_seconds(shape), share)

    def fitting(self, shape: StepShape, sequence: Sequence, start: int, most: int, limit: float) -> int:
        """How many tokens of a prompt from `start` on, `most` at most, still fit into a step of this shape."""
        most = min(sequence.known - start, most)
        if sequence.prompt_logprobs is not None:
            most = min(most, _SCORED_TOKENS)
        count = self._times.tokens_within(shape, start, most, limit)
        if self._limits.whole_prompts:
            whole = most == sequence.known - start and (count == most or not shape.prefill)
            return most if whole else 0
        if count == most:
            return count
        count -= count % self._limits.query_tile
        if not shape.prefill:
            return max(count, min(most, self._limits.least_prefill))
        return count if count >= self._limits.block_size else 0  # crumbs cost a step's overhead each


def decode_shape(running: Iterable[Sequence]) -> StepShape:
    """Of a step that gives each running stream its next token."""
    decoding = [s.computed for s in running if s.sampling and s.known - s.computed <= 1]
    return StepShape(len(decoding), sum(decoding))
