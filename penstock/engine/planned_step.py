"""A step from its planning until its result is there. Who is written into it has books as of after the step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from penstock.core.cost import OUTPUT_TOKEN_COST
from penstock.engine.executor import SAMPLED, Step
from penstock.engine.sequence import Sequence
from penstock.engine.step_time import StepShape


@dataclass(slots=True, eq=False)
class PlannedStep:
    planned: float  # when
    step: Step = field(default_factory=Step)
    sequences: list[Sequence] = field(default_factory=list)  # that it advances
    shape: StepShape = field(default_factory=StepShape)
    limited: bool = False  # whether its length was limited, for streams or for first tokens
    largest: int = 0  # tokens of its largest chunk
    culprit: str = ""  # the request that one belongs to: who is to blame if this step takes long

    def decode(self, sequences: list[Sequence]) -> None:
        """First of all: as `compute` does with one token each, but most of what a busy engine does, so in one go."""
        step, count = self.step, len(sequences)
        self.sequences = sequences
        step.rows = [s.row for s in sequences]
        step.starts = [s.computed for s in sequences]
        step.counts = [1] * count
        step.samples = [True] * count
        step.tokens = [s.tokens[s.computed] if not s.pending else SAMPLED for s in sequences]
        self.shape = StepShape(count, sum(step.starts) + count)
        for s in sequences:
            s.computed += 1
            s.pending += 1
        for account, number in Counter(s.account for s in sequences).items():
            account.charge(OUTPUT_TOKEN_COST * number)

    def compute(self, sequence: Sequence, count: int) -> None:
        """The next so many tokens of a prompt; the last of them is sampled once it has caught up."""
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
            self.largest, self.culprit = count, sequence.request.id
        sequence.account.charge(count)
        sequence.computed = end
        caught_up = end == len(tokens) + sequence.pending
        step.samples.append(caught_up)
        if caught_up:
            sequence.pending += 1
