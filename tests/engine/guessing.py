"""A drafter for tests: it knows how outputs go on, and says so or something else."""

from __future__ import annotations

import random
from collections.abc import Callable

from penstock.core.request import GenerateRequest
from penstock.engine.sequence import Sequence
from penstock.engine.speculation import Drafter, Speculation
from penstock.engine.step_time import StepShape, StepTimes
from penstock.simulation.paged_executor import VOCAB


class FreeDrafts(StepTimes):
    """A machine on which drafted tokens cost nothing, so that every draft pays."""

    def predict(self, shape: StepShape) -> float:
        return 1.0


def tried_whenever_possible(drafter: Drafter, max_tokens: int) -> Speculation:
    """Drafts by a rule that no clock has a part in: neither drafted tokens nor asking for them cost any time."""
    return Speculation(drafter, FreeDrafts(), max_tokens, clock=lambda: 0.0, cpu_clock=lambda: 0.0)


class Guesser:
    """`output_of`: the whole output of a request. `right`: the share of guesses that are right; None: drawn, and how
    sure it is of them as well."""

    def __init__(
        self, output_of: Callable[[GenerateRequest], list[int]], seed: int, right: float | None = None
    ) -> None:
        self._output_of = output_of
        self._random = random.Random(seed)
        self._right = self._random.choice([0.0, 0.5, 0.9, 1.0]) if right is None else right
        self._outlooks = [0.0, 0.5, 0.9, 1.0] if right is None else [0.9, 1.0]

    def outlook(self, sequence: Sequence) -> float:
        return self._random.choice(self._outlooks)

    def behind(self, sequence: Sequence) -> float | None:
        return None

    def catch_up(self, sequence: Sequence, decodes: list[Sequence], seconds: float) -> bool:
        return True

    def seconds(self, sequences: int) -> float:
        return 0.0

    def propose(self, sequences: list[Sequence], depths: list[int]) -> list[list[int]]:
        drafts = []
        for sequence, depth in zip(sequences, depths, strict=True):
            right = self._output_of(sequence.request)[sequence.outputs :][: self._random.randint(0, depth)]
            drafts.append([t if self._random.random() < self._right else self._random.randrange(VOCAB) for t in right])
        return drafts

    def forget(self, sequence: Sequence) -> None:
        pass
