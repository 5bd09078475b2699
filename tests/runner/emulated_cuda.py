"""The runner of a GPU on a CPU: kernels are interpreted, and a CUDA graph that is replayed runs what it would hold."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tests.triton_interpreter  # noqa: F401  isort: skip

from penstock.models.config import ModelConfig
from penstock.models.llama import Llama
from penstock.runner.cuda_runner import CudaRunner
from penstock.runner.device_adapters import DeviceAdapters, no_adapters
from penstock.runner.device_rows import DeviceRows
from penstock.runner.fused_forward import FusedForward
from penstock.runner.largest_step import most_sampled

CPU = torch.device("cpu")


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        pass

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: object) -> float:
        return 0.0


class Replayed(dict[Any, Any]):
    """Graphs by their kind. `used` are those that were replayed."""

    def __init__(self, body: Callable[[Any], None]) -> None:
        self._body = body
        self.used: list[Any] = []

    def __missing__(self, kind: Any) -> Any:
        def replay() -> None:
            self.used.append(kind)
            self._body(kind)

        return SimpleNamespace(replay=replay)


def emulated_runner(
    model: Llama, config: ModelConfig, patch: pytest.MonkeyPatch, *, max_seqs: int, num_blocks: int, block_size: int,
    max_step_tokens: int, adapter_rank: int = 0, **options: Any,
) -> tuple[CudaRunner, Replayed]:  # fmt: skip
    patch.setattr(torch.cuda, "Event", Event)
    patch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    length = config.max_position
    forward = FusedForward(
        model,
        config,
        num_blocks=num_blocks,
        block_size=block_size,
        max_seqs=most_sampled(max_seqs),
        max_model_len=length,
        **options,
    )
    state = DeviceRows(max_seqs + 1, length // block_size, config.vocab_size, CPU)
    adapters = no_adapters(CPU)
    if adapter_rank:
        adapters = DeviceAdapters(
            forward.adapter_shapes, slots=3, max_rank=adapter_rank, max_tokens=512, dtype=torch.float32, device=CPU
        )
    runner = CudaRunner(
        forward, state, adapters, block_size=block_size, vocab_size=config.vocab_size, max_step_tokens=max_step_tokens
    )
    graphs = Replayed(runner._decode_body)
    runner._graphs = graphs
    return runner, graphs
