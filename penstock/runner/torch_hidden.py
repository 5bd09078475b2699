"""Hidden states for `PooledRunner` in plain torch, on any device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from penstock.engine.executor import Step
from penstock.runner.batch import build_batch
from penstock.runner.forward import TorchForward
from penstock.runner.row_state import TorchRows


class TorchHidden:
    host_memory = None
    device = "plain torch"
    kernel_probe = None

    def __init__(self, forward: TorchForward, state: TorchRows, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self._forward = forward
        self._state = state
        self._block_size = block_size

    def enter_thread(self) -> None:
        """Nothing to prepare."""

    @torch.inference_mode()
    def states(self, step: Step, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        wanted: npt.NDArray[np.float32] = self._hidden(step)[list(tokens)].float().cpu().numpy()
        return wanted

    @torch.inference_mode()
    def sums(self, step: Step) -> npt.NDArray[np.float32]:
        return summed_by_sequence(self._hidden(step), step)

    def _hidden(self, step: Step) -> torch.Tensor:
        self._state.apply(step)
        return self._forward.hidden(build_batch(step, self._state, self._block_size), self._state)


def summed_by_sequence(states_TD: torch.Tensor, step: Step) -> npt.NDArray[np.float32]:
    lengths_S = torch.tensor(step.counts, device=states_TD.device)
    sums: npt.NDArray[np.float32] = torch.segment_reduce(states_TD.float(), "sum", lengths=lengths_S).cpu().numpy()
    return sums
