"""Steps that a GPU has in flight, and what the host keeps of each until it is collected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle

import numpy as np
import torch

from penstock.engine.executor import Step, StepResult
from penstock.runner.batch import Ints
from penstock.runner.device_stream import DeviceStream, Pinned
from penstock.runner.scoring import Asked
from penstock.runner.step_inputs import FEW_BLOCKS

# Two steps are in flight at most: the next one is launched before the one before it is collected. And a step is
# compared with the one before it.
_SLOTS = 3


@dataclass(slots=True)
class Slot:
    """Events and pinned memory, which take longer to make than to use: steps take turns with a few."""

    began: torch.cuda.Event
    done: torch.cuda.Event
    inputs: Pinned  # on their way to the device
    mixed: Pinned  # likewise, of steps with prompts in them
    params: Pinned  # likewise, of rows
    blocks: Pinned  # likewise
    tokens: Pinned  # on their way back
    used: bool = False  # by a step that has not been collected

    def collect(self) -> None:
        """Wait until that step is done."""
        self.done.synchronize()
        self.used = False


class Slots:
    def __init__(self, stream: DeviceStream, *, inputs: int, mixed: int, params: int, tokens: int) -> None:
        """How many values of each a step has at most."""

        def integers(count: int) -> Pinned:
            return Pinned((count,), torch.int32, stream.device)

        self._slots = cycle(
            [
                Slot(
                    began=stream.event(),
                    done=stream.event(),
                    inputs=integers(inputs),
                    mixed=integers(mixed),
                    params=integers(params),
                    blocks=integers(FEW_BLOCKS),
                    tokens=Pinned((tokens,), torch.int64, stream.device),
                )
                for _ in range(_SLOTS)
            ]
        )

    def take(self) -> Slot:
        slot = next(self._slots)
        if slot.used:  # a step failed, and the one after it was not collected
            slot.collect()
        slot.used = True
        return slot


@dataclass(slots=True)
class StepInFlight:
    planned: Step
    step: Step  # what is computed of it
    slot: Slot
    after: torch.cuda.Event | None  # the end of the step before, if this one was launched before that had ended
    sampled: list[int] = field(default_factory=list)  # sequences of the step that sample, once for each token
    rows: Ints = field(default_factory=lambda: np.zeros(0, np.int32))  # theirs
    asked: Asked = field(default_factory=Asked)  # by these
    drafts: list[int] | None = None  # the tokens that those are sampled after, in steps that verify drafts
    scores: list[Callable[[StepResult], None]] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """Those sampled, once the step is done."""
        found: list[int] = self.slot.tokens.values[: len(self.rows)].tolist()
        return found
