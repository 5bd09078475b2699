"""The runner of a GPU on a CPU: kernels are interpreted, and a CUDA graph that is replayed runs what it would hold."""

from __future__ import annotations

import ctypes
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
from penstock.runner.device_stream import DeviceStream
from penstock.runner.fused_forward import FusedForward
from penstock.runner.largest_step import most_sampled

CPU = torch.device("cpu")


class Event:
    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: object) -> float:
        return 0.0


class HostStream(DeviceStream):
    """Does at once what a stream does in order."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def enter(self) -> None:
        pass

    def event(self, *, timed: bool = True) -> Any:
        return Event()

    def send(self, to: int, source: int, size: int) -> None:
        ctypes.memmove(to, source, size)

    def send_beside(self, to: int, source: int, size: int) -> None:
        ctypes.memmove(to, source, size)

    def receive(self, to: int, source: int, size: int) -> None:
        ctypes.memmove(to, source, size)

    def record(self, event: Any) -> None:
        pass


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
    patch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    patch.setattr(torch.cuda, "get_device_name", lambda _: "none")
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
    state = DeviceRows(max_seqs + 1, length // block_size, config.vocab_size, HostStream(CPU))
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
