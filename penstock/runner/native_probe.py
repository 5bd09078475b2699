"""Times the kernels inside the native steps on the CPU, for profiles."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from penstock.engine.step_work import Gemm, Kernel, KernelRecord, Limits, ModelWork
from penstock.kernels.native.model import NativeModel
from penstock.kernels.native.shape import tensor_shapes
from penstock.kernels.native.timers import (
    KERNELS,
    KernelTimes,
    gemm_speed,
    kernel_times,
    read_bandwidth,
    set_timed,
)

_MODULES = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "out": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
_WEIGHT_BYTES = {"none": 2.0, "int8": 1.0, "int4": 0.5 + 4 / 32}  # int4 has a scale and a minimum for 32 weights


class NativeProbe:
    most_steps = None

    def __init__(self, model: NativeModel) -> None:
        self._model = model
        self._best = (0.0, 0.0)  # bytes and FLOPs a second, of all measurements
        self._steps: list[KernelTimes] = []

    @property
    def work(self) -> ModelWork:
        model, config = self._model, self._model.config
        sizes = {name: shape[0] * shape[1] for name, shape in tensor_shapes(config).items() if len(shape) == 2}
        gemms = {}
        for kernel, modules in _MODULES.items():
            parameters = sum(size for name, size in sizes.items() if name.split(".")[-2] in modules)
            gemms[kernel] = Gemm(parameters, int(parameters * _WEIGHT_BYTES[model.scheme]))
        head = sizes["lm_head.weight"]
        in_head = _WEIGHT_BYTES["int8" if model.scheme == "int4" else model.scheme]
        width = config.num_layers * config.num_heads * config.head_dim
        return ModelWork(gemms, Gemm(head, int(head * in_head)), model.block_bytes / model.block_size, width)

    def limits(self) -> Limits:
        bandwidth, speed = self._best
        self._best = max(bandwidth, read_bandwidth(self._model)), max(speed, gemm_speed(self._model))
        return Limits(*self._best, "measured: all threads read the weights; each computes a GEMM in its cache")

    @contextmanager
    def step(self) -> Iterator[None]:
        set_timed(self._model, True)
        try:
            yield
            self._steps.append(kernel_times(self._model))
        finally:
            set_timed(self._model, False)

    def record(self, begun: Callable[[], None], stop: threading.Event) -> KernelRecord:
        self._steps = []
        begun()
        stop.wait()
        return KernelRecord([kernel for step in self._steps for kernel in _kernels(step)])


def _kernels(step: KernelTimes) -> Iterator[Kernel]:
    began = int(step.began * 1e9)
    ended = began
    for end, kernel, layer in zip(step.ends.tolist(), step.kernels.tolist(), step.layers.tolist(), strict=True):
        name = KERNELS[kernel]
        yield Kernel(name, name if layer < 0 else f"{name} {layer}", ended, began + end)
        ended = began + end
