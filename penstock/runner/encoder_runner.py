"""The executor of encoders: a step is some whole prompts, and its result their vectors. There is no KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from penstock.core.machine import lower_priority
from penstock.engine.executor import HostMemory, Step, StepResult
from penstock.kernels.native.encoder import NativeEncoder
from penstock.runner.vectors import VectorExecutor, packed_vectors


class TextEncoder(Protocol):
    device: str  # what computes, for people

    def encode(
        self, tokens: Sequence[int], counts: Sequence[int], seconds: Sequence[int] = ()
    ) -> npt.NDArray[np.float32]:
        """Vectors [N, width] of sequences that follow each other, with so many tokens each. `seconds`: where the second
        of two texts begins in each."""
        ...


class EncoderRunner(VectorExecutor):
    def __init__(
        self, encoder: TextEncoder, num_blocks: int, *, normalize: bool, sigmoid: bool, niceness: int = 0
    ) -> None:
        self.num_blocks = num_blocks
        self.device = encoder.device
        self._encoder = encoder
        self._normalize, self._sigmoid = normalize, sigmoid
        self._niceness = niceness
        self._second_texts: dict[int, int] = {}  # by row

    @property
    def host_memory(self) -> HostMemory | None:
        return HostMemory(self._encoder.weight_bytes, 0) if isinstance(self._encoder, NativeEncoder) else None

    def enter_thread(self) -> None:
        if self._niceness:
            lower_priority(self._niceness)
        if isinstance(self._encoder, NativeEncoder):
            self._encoder.pin_caller()

    def collect(self, step: Step) -> StepResult:
        for setup in step.setups:
            self._second_texts[setup.row] = setup.second_text or len(setup.tokens)
        seconds = [self._second_texts[row] for row in step.rows]
        vectors_ND = self._encoder.encode(step.tokens, step.counts, seconds)
        packed = packed_vectors(vectors_ND, normalize=self._normalize, sigmoid=self._sigmoid)
        return StepResult([[] for _ in step.rows], vectors=dict(enumerate(packed)))
