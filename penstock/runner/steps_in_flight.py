"""Steps that a GPU has in flight, and what the host keeps of each until it is collected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle

import numpy as np
import torch

from penstock.engine.executor import Step, StepResult
from penstock.runner.batch import Ints

# Two steps are in flight at most: the next one is launched before the one before it is collected. And a step is
# compared with the one before it.
_SLOTS = 3


@dataclass(frozen=True, slots=True)
class Slot:
    """Events and pinned memory, which take longer to make than to use: steps take turns with a few."""

    began: torch.cuda.Event
    done: torch.cuda.Event
    inputs: torch.Tensor  # on their way to the device
    tokens: torch.Tensor  # on their way back


class Slots:
    def __init__(self, inputs: Callable[[], torch.Tensor], most: int, device: torch.device) -> None:
        """`inputs` makes the memory for those of a step, which samples `most` tokens at most."""
        self._slots = cycle(
            [
                Slot(
                    torch.cuda.Event(enable_timing=True),
                    torch.cuda.Event(enable_timing=True),
                    inputs(),
                    torch.zeros(most, dtype=torch.int64, pin_memory=device.type == "cuda"),
                )
                for _ in range(_SLOTS)
            ]
        )

    def take(self) -> Slot:
        slot = next(self._slots)
        slot.done.synchronize()  # it has been collected, unless a step failed meanwhile
        return slot


@dataclass(slots=True)
class StepInFlight:
    planned: Step
    step: Step  # what is computed of it
    slot: Slot
    after: torch.cuda.Event | None  # the end of the step before, if this one was launched before that had ended
    sampled: list[int] = field(default_factory=list)  # sequences of the step that sample, once for each token
    rows: Ints = field(default_factory=lambda: np.zeros(0, np.int32))  # theirs
    drafts: list[int] | None = None  # the tokens that those are sampled after, in steps that verify drafts
    scores: list[Callable[[StepResult], None]] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """Those sampled, once the step is done."""
        return self.slot.tokens[: len(self.rows)].tolist()
