"""A step from the choice of its streams until its result is there. Who is written into it has books as of after the
step."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field

from penstock.core.cost import OUTPUT_TOKEN_COST
from penstock.engine.executor import SAMPLED, Step
from penstock.engine.sequence import Sequence
from penstock.engine.step_time import StepShape, StepTimes
from penstock.engine.urgency import Ranking

# How much of the step under way is left when the next one is planned, at the least.
_PLAN_AHEAD_SHARE = 0.3
_PLAN_AHEAD_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class Choice:
    """What is decided of a step before anything is drafted for it. Until it is scheduled requests may come and end."""

    streams: list[Sequence]  # that get their next token
    background: bool  # whether it may compute prompts that nobody waits for
    prompts: list[Sequence]  # running ones, the most urgent last
    ranking: Ranking
    admit: bool  # whether it may begin with requests that wait


@dataclass(slots=True, eq=False)
class PlannedStep:
    planned: float  # when
    drafting: float = 0.0  # seconds that its streams have waited for drafts
    step: Step = field(default_factory=Step)
    sequences: list[Sequence] = field(default_factory=list)  # that it advances
    drafts: dict[int, list[int]] = field(default_factory=dict)  # by index of the sequence
    shape: StepShape = field(default_factory=StepShape)
    background: bool = True  # whether it may compute prompts that nobody waits for
    limited: bool = False  # whether its length was limited, for streams or for first tokens
    largest: int = 0  # tokens of its largest chunk
    culprit: Sequence | None = None  # whose chunk that is: who is to blame if this step takes long

    def decode(self, sequences: list[Sequence]) -> None:
        """First of all: as `compute` does with one token each, but most of what a busy engine does, so in one go."""
        step, count = self.step, len(sequences)
        self.sequences = sequences
        step.rows = [s.row for s in sequences]
        step.starts = [s.computed for s in sequences]
        step.counts = [1] * count
        step.samples = [1] * count
        step.tokens = [s.tokens[s.computed] if not s.pending else SAMPLED for s in sequences]
        self.shape = StepShape(count, sum(step.starts) + count)
        for s in sequences:
            s.computed += 1
            s.pending += 1
        for counter, number in Counter(s.counter for s in sequences).items():
            counter.charge(OUTPUT_TOKEN_COST * number)

    def verify(self, sequence: Sequence, draft: list[int]) -> None:
        """After those that decode: its next token and a draft of what follows. After each of these it samples."""
        step, count = self.step, 1 + len(draft)
        self.drafts[len(self.sequences)] = draft
        self.sequences.append(sequence)
        step.rows.append(sequence.row)
        step.starts.append(sequence.computed)
        step.counts.append(count)
        step.samples.append(count)
        step.tokens += [sequence.tokens[-1], *draft]
        shape, end = self.shape, sequence.computed + count
        self.shape = StepShape(shape.decodes + 1, shape.context + end, drafted=shape.drafted + len(draft))
        sequence.computed = end
        sequence.pending = count
        sequence.counter.charge(OUTPUT_TOKEN_COST)  # for one token; for more once it is known how many there are

    def compute(self, sequence: Sequence, count: int) -> None:
        """The next so many tokens of a prompt; the last of them is sampled once it has caught up, if it samples."""
        step, start, tokens = self.step, sequence.computed, sequence.tokens
        end = start + count
        self.sequences.append(sequence)
        step.rows.append(sequence.row)
        step.starts.append(start)
        step.counts.append(count)
        chunk = tokens[start:end]
        step.tokens.extend(chunk)
        if len(chunk) < count:
            step.tokens.append(SAMPLED)
        self.shape = self.shape.with_chunk(start, count)
        if count > self.largest:
            self.largest, self.culprit = count, sequence
        sequence.counter.charge(count)
        sequence.computed = end
        samples = int(sequence.sampling and end == len(tokens) + sequence.pending)
        step.samples.append(samples)
        sequence.pending += samples
        if samples and sequence.first_token is not None:
            sequence.counter.charge(OUTPUT_TOKEN_COST - 1)

    def constrain(self) -> None:
        """Last of all: say which sequences must wait for what their grammars allow, and what those forced before."""
        step = self.step
        for index, sequence in enumerate(self.sequences):
            if (constraint := sequence.constraint) is not None:
                if step.samples[index]:
                    step.constrained.append(index)
                if constraint.uncounted:
                    step.forced.append((sequence.row, constraint.uncounted))
                    constraint.uncounted = []

    def check_samples(self, runs_ahead: bool) -> None:
        """Those that had better sample without a mask do, and are looked at afterwards."""
        step, sequences = self.step, self.sequences
        for i in step.constrained:
            constraint = sequences[i].constraint
            if i not in self.drafts and constraint is not None and constraint.samples_unmasked(runs_ahead):
                step.checked.append(i)
        if step.checked:
            step.constrained = [i for i in step.constrained if i not in step.checked]


class StepsInFlight:
    """Steps that were planned and whose results are not there yet. The step-time model learns when they end."""

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._steps: deque[PlannedStep] = deque()
        self._last_end = 0.0

    @property
    def shapes(self) -> list[StepShape]:
        return [planned.shape for planned in self._steps]

    def add(self, planned: PlannedStep) -> None:
        self._steps.append(planned)

    def free_at(self, now: float) -> float:
        """When all of them will have ended."""
        end = self._last_end
        for planned in self._steps:
            end = max(end, planned.planned) + self._times.predict(planned.shape)
        return max(end, now)

    def plan_next_at(self) -> float:
        """When the next step should be planned: early enough to be launched before the one under way ends, but late,
        so that those who arrive meanwhile are in it. A step without a limit is followed at once."""
        if not self._steps or not self._steps[-1].limited:
            return 0.0
        planned = self._steps[-1]
        seconds = self._times.predict(planned.shape)
        return max(self._last_end, planned.planned) + seconds - max(_PLAN_AHEAD_SHARE * seconds, _PLAN_AHEAD_SECONDS)

    def end(self, planned: PlannedStep, now: float) -> tuple[float, float]:
        """Returns how long the step took, and how long it would have taken without its prompts."""
        self._steps.remove(planned)
        shape, seconds = planned.shape, now - max(planned.planned, self._last_end)
        self._times.observe(shape, seconds)
        self._last_end = now
        has_both = shape.prefill and shape.decodes
        return seconds, self._times.predict(shape.without_prefill()) if has_both else math.inf

    def clear(self) -> None:
        """They were lost."""
        self._steps.clear()
