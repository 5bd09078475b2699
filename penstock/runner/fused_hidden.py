"""Hidden states for `PooledRunner` on a GPU: steps replay the CUDA graphs of `mixed_steps.py`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from penstock.engine.executor import NO_ADAPTER, Step
from penstock.runner.batch import build_batch
from penstock.runner.cuda_probe import CudaProbe
from penstock.runner.device_adapters import no_adapters
from penstock.runner.device_stream import DeviceStream, Pinned
from penstock.runner.fused_forward import FusedForward
from penstock.runner.largest_step import largest_step
from penstock.runner.mixed_steps import MixedSteps
from penstock.runner.parallel_tasks import run_in_parallel
from penstock.runner.row_state import RowState
from penstock.runner.step_inputs import send_blocks
from penstock.runner.torch_hidden import summed_by_sequence
from penstock.runner.transfer import to_device


class FusedHidden:
    host_memory = None

    def __init__(
        self, forward: FusedForward, state: RowState, stream: DeviceStream, *, block_size: int, max_step_tokens: int
    ) -> None:
        """The last row of `state` is spare."""
        rows, table_blocks = state.tables_RM.shape
        self._stream = stream
        self.kernel_probe = CudaProbe(forward)
        self._forward = forward
        self._state = state
        self._block_size = block_size
        self._max_step_tokens = max_step_tokens
        self._tables = torch.zeros((rows, table_blocks), dtype=torch.int32, device=forward.device)
        self._steps = MixedSteps(
            forward,
            self._tables,
            self._finish,
            no_adapters(forward.device),
            stream,
            most_sampled=rows - 1,
            max_tokens=max_step_tokens,
        )
        self._staged = Pinned((self._steps.size,), torch.int32, forward.device)
        padded, width = self._steps.padded(max_step_tokens), forward.embedding.shape[1]
        self._states_TC = torch.empty((padded, width), dtype=forward.embedding.dtype, device=forward.device)

    @property
    def device(self) -> str:
        return self.kernel_probe.device

    @property
    def num_blocks(self) -> int:
        return self._forward.attention.num_blocks

    def enter_thread(self) -> None:
        """Nothing to prepare."""

    @torch.inference_mode()
    def states(self, step: Step, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        self._run(step)
        wanted = to_device(np.fromiter(tokens, np.int64), self._states_TC.device)
        states: npt.NDArray[np.float32] = self._states_TC[wanted].float().cpu().numpy()
        return states

    @torch.inference_mode()
    def sums(self, step: Step) -> npt.NDArray[np.float32]:
        self._run(step)
        return summed_by_sequence(self._states_TC[: len(step.tokens)], step)

    def _run(self, step: Step) -> None:
        self._stream.enter()
        self._state.apply(step)
        send_blocks(step, self._tables)
        self._steps.run(build_batch(step, self._state, self._block_size), self._state, self._staged)

    def _finish(self, hidden_TC: torch.Tensor, last_N: torch.Tensor, rows_N: torch.Tensor, state: RowState) -> None:
        self._forward.final_norm(hidden_TC, self._states_TC[: len(hidden_TC)])

    # -- start ---------------------------------------------------------------------------------------------------------

    def compile_all(self) -> None:
        """Compile all kernels that no cache on disk has yet. Raises torch.OutOfMemoryError."""
        layouts = [
            partial(self._steps.compile, layout, adapted, self._state) for layout, adapted in self._steps.layouts
        ]
        self._steps.pad()
        run_in_parallel([*self._forward.compile_tasks, *layouts])
        self._forward.clear_scratch()

    def probe(self) -> int:
        """Run the largest step there can be; bytes that it took at its peak. It writes block 0 of the cache. Raises
        torch.OutOfMemoryError."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step = largest_step(self._state, self._max_step_tokens, self._block_size, NO_ADAPTER)
        self.sums(step)
        taken = torch.cuda.max_memory_allocated() - before
        torch.cuda.empty_cache()
        return taken

    def allocate_cache(self, num_blocks: int) -> None:
        """Call it before capturing: graphs hold addresses in the cache."""
        self._forward.attention.allocate(num_blocks)

    def capture_all(self) -> int:
        """Capture all CUDA graphs over the KV cache that stays. Returns how many there are."""
        with torch.inference_mode():
            return self._steps.capture_all(self._state, torch.cuda.graph_pool_handle())
