"""The executor of decoders that make embeddings: prompts are computed as always, in chunks and with cached prefixes,
and their final hidden states are pooled. Nothing is sampled."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np
import numpy.typing as npt

from penstock.core.errors import EngineFailure
from penstock.core.machine import lower_priority
from penstock.engine.executor import HostMemory, Step, StepResult
from penstock.engine.step_work import KernelProbe
from penstock.kernels.native.model import NativeModel, NativeRows, NativeStep
from penstock.models.pooling import Pooling
from penstock.runner.host_rows import HostRows
from penstock.runner.native_probe import NativeProbe
from penstock.runner.vectors import VectorExecutor, packed_vectors

Floats = npt.NDArray[np.float32]

POOLED_NICENESS = 10  # of threads that compute vectors on the CPU: streams of other models there go first


class Hidden(Protocol):
    """Computes a step, and says what the final hidden states of some of its tokens are."""

    num_blocks: int

    @property
    def kernel_probe(self) -> KernelProbe | None: ...

    @property
    def host_memory(self) -> HostMemory | None: ...

    def enter_thread(self) -> None: ...

    def states(self, step: Step, tokens: Sequence[int]) -> Floats:
        """[N, hidden size], of the tokens with these indices in the step."""
        ...


class NativeHidden:
    def __init__(self, model: NativeModel, state: HostRows) -> None:
        self.num_blocks = model.num_blocks
        self.kernel_probe = NativeProbe(model)
        self._model = model
        self._state = state
        self._rows = NativeRows(state.tables_RM, state.last_token_R, state.sampling)

    @property
    def host_memory(self) -> HostMemory:
        return HostMemory(self._model.weight_bytes, self._model.cache_bytes)

    def enter_thread(self) -> None:
        lower_priority(POOLED_NICENESS)
        self._model.pin_caller()

    def states(self, step: Step, tokens: Sequence[int]) -> Floats:
        self._state.apply(step)
        self._model.forward(NativeStep(step.tokens, step.rows, step.starts, step.counts, ()), self._rows, logits=False)
        return self._model.hidden_states(tokens)


class PooledRunner(VectorExecutor):
    def __init__(self, hidden: Hidden, pooling: Pooling) -> None:
        if pooling.kind == "cls":
            raise EngineFailure("the first token of a decoder has seen no other: pool mean or last")
        self.num_blocks = hidden.num_blocks
        self.kernel_probe = hidden.kernel_probe
        self._hidden = hidden
        self._pooling = pooling
        self._prompts: dict[int, int] = {}  # tokens of the prompt, by row
        self._sums: dict[int, Floats] = {}  # of the hidden states so far, by row

    @property
    def host_memory(self) -> HostMemory | None:
        return self._hidden.host_memory

    def enter_thread(self) -> None:
        self._hidden.enter_thread()

    def collect(self, step: Step) -> StepResult:
        for setup in step.setups:
            self._prompts[setup.row] = len(setup.tokens)
            self._sums.pop(setup.row, None)
        sequences = list(zip(step.rows, step.starts, step.counts, strict=True))
        complete = [i for i, (row, start, count) in enumerate(sequences) if start + count == self._prompts[row]]
        ends = list(accumulate(step.counts))
        if self._pooling.kind == "last":
            vectors_ND = self._hidden.states(step, [ends[i] - 1 for i in complete])
        else:
            vectors_ND = self._means(step, self._hidden.states(step, range(ends[-1])), ends, complete)
        packed = packed_vectors(vectors_ND, normalize=self._pooling.normalize)
        return StepResult([[] for _ in step.rows], vectors=dict(zip(complete, packed, strict=True)))

    def _means(self, step: Step, states_TD: Floats, ends: list[int], complete: list[int]) -> Floats:
        """Of those that are complete; of the others the sums are kept."""
        for row, count, end in zip(step.rows, step.counts, ends, strict=True):
            part = states_TD[end - count : end].sum(axis=0, dtype=np.float64)
            self._sums[row] = self._sums.get(row, 0.0) + part
        means = [self._sums.pop(step.rows[i]) / self._prompts[step.rows[i]] for i in complete]
        return np.array(means, dtype=np.float32).reshape(len(complete), states_TD.shape[1])
