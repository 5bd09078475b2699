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
from penstock.kernels.native.bindings import device_name
from penstock.kernels.native.model import NativeModel, NativeRows, NativeStep
from penstock.kernels.native.timers import thread_count
from penstock.models.pooling import Pooling
from penstock.runner.host_rows import HostRows
from penstock.runner.native_probe import NativeProbe
from penstock.runner.vectors import VectorExecutor, packed_vectors

Floats = npt.NDArray[np.float32]

POOLED_NICENESS = 10  # of threads that compute vectors on the CPU: streams of other models there go first


class Hidden(Protocol):
    """Computes a step, and says what the final hidden states of some of its tokens are."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def device(self) -> str: ...

    @property
    def kernel_probe(self) -> KernelProbe | None: ...

    @property
    def host_memory(self) -> HostMemory | None: ...

    def enter_thread(self) -> None: ...

    def states(self, step: Step, tokens: Sequence[int]) -> Floats:
        """[N, hidden size], of the tokens with these indices in the step."""
        ...

    def sums(self, step: Step) -> Floats:
        """[S, hidden size], over the tokens of each sequence in the step."""
        ...


class NativeHidden:
    def __init__(self, model: NativeModel, state: HostRows) -> None:
        self.num_blocks = model.num_blocks
        self.kernel_probe = NativeProbe(model)
        self.device = device_name(thread_count(model), model.scheme)
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

    def sums(self, step: Step) -> Floats:
        states_TD = self.states(step, range(len(step.tokens)))
        firsts = np.cumsum([0, *step.counts[:-1]])
        return np.add.reduceat(states_TD, firsts, axis=0, dtype=np.float64).astype(np.float32)


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
    def device(self) -> str:
        return self._hidden.device

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
        if self._pooling.kind == "last":
            ends = list(accumulate(step.counts))
            vectors_ND = self._hidden.states(step, [ends[i] - 1 for i in complete])
        else:
            vectors_ND = self._means(step, self._hidden.sums(step), complete)
        packed = packed_vectors(vectors_ND, normalize=self._pooling.normalize)
        return StepResult([[] for _ in step.rows], vectors=dict(zip(complete, packed, strict=True)))

    def _means(self, step: Step, sums_SD: Floats, complete: list[int]) -> Floats:
        """Of those that are complete; of the others the sums are kept."""
        for row, part in zip(step.rows, sums_SD, strict=True):
            self._sums[row] = self._sums.get(row, 0.0) + part
        means = [self._sums.pop(step.rows[i]) / self._prompts[step.rows[i]] for i in complete]
        return np.array(means, dtype=np.float32).reshape(len(complete), sums_SD.shape[1])
