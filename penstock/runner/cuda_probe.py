"""Records the kernels that run on a GPU, by torch's profiler (CUPTI), for profiles."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import ProfilerActivity, profile, supported_activities

from penstock.engine.step_work import Gemm, Kernel, KernelRecord, Limits, ModelWork
from penstock.runner.fused_forward import FusedForward
from penstock.runner.fused_layers import Dense

# Bytes and dense bfloat16 FLOPs a second, from NVIDIA's data sheets. The first name that a device's contains counts.
_PEAKS = {
    "B200": (8.0e12, 2250e12),
    "H200": (4.8e12, 989e12),
    "H100 PCIe": (2.0e12, 756e12),
    "H100 NVL": (3.9e12, 835e12),
    "H100": (3.35e12, 989e12),
    "A100-SXM4-40GB": (1.555e12, 312e12),
    "A100": (2.0e12, 312e12),
    "L40S": (0.864e12, 362e12),
    "L4": (0.3e12, 121e12),
}
# Kernels by what they do, those of this package by their names. The first pattern that is found counts.
_PARTS = {
    "copies": r"Memcpy|Memset",
    "attention": r"attention|flash|^(_?(decode|prefill|prefix))(_kernel)?$",
    "lora": r"shrink|expand|residual_kernel|swiglu_kernel",
    "experts": r"grouped_kernel|combine_kernel|place_kernel|^_choose_kernel",
    "gemm": r"^layers$|gemm|gemv|skinny|cutlass|cublas|nvjet|xmma|splitK",
    "norm": r"norm|e4m3|quantize",
    "rope": r"rope",
    "activation": r"silu|add_scaled",
    "sampling": r"argmax|choose|sampl|accept|adjust|mask|softmax|scatter",
    "inputs": r"gather|plan_kernel|embedding|index|copy",
}
_PATTERNS = {part: re.compile(pattern) for part, pattern in _PARTS.items()}
_NO_CUPTI = "no kernels: this build of torch cannot record them (CUPTI is missing)"
_NOTHING_CAME = (
    "no kernels: CUPTI gave none; it may need permission (NVreg_RestrictProfilingToAdminUsers=0, or CAP_SYS_ADMIN)"
)


class CudaProbe:
    # Torch's profiler holds the GIL while it ends, some microseconds for every kernel it has recorded, of which a step
    # has some hundred. A worker that says nothing for two seconds is taken for dead.
    most_steps = 100

    def __init__(self, forward: FusedForward) -> None:
        self._forward = forward

    @property
    def device(self) -> str:
        return torch.cuda.get_device_name(self._forward.device)

    @property
    def work(self) -> ModelWork:
        """GEMMs are one part here: their names do not say which matrix they multiply by. To it belongs the persistent
        kernel that computes all layers, with their attention, for one sequence."""
        forward = self._forward
        dense, experts, used = [], [], 1.0
        for layer in forward._layers:
            dense += [layer.qkv.weight, layer.out.weight]
            if isinstance(layer.mlp, Dense):
                dense += [layer.mlp.gate_up.weight, layer.mlp.down.weight]
            else:
                experts += [layer.mlp.experts.gate_up, layer.mlp.experts.down]
                used = layer.mlp.experts.choices / len(layer.mlp.experts.down)
        gemms = {"gemm": _gemm(dense)} | ({"experts": _gemm(experts, used)} if experts else {})
        layers, blocks, _, block_size, head_dim = forward.attention.keys.shape
        kv_bytes = 2 * forward.attention.keys.nbytes / (blocks * block_size)
        return ModelWork(gemms, _gemm([forward._head]), kv_bytes, layers * forward.num_heads * head_dim, "gemm")

    def limits(self) -> Limits:
        found = next((peak for name, peak in _PEAKS.items() if name in self.device), None)
        if found is None:
            return Limits(None, None, f"not known for {self.device}")
        flops = found[1] * (2 if self._forward._layers[0].qkv.scales is not None else 1)
        return Limits(found[0], flops, "NVIDIA's data sheet")

    def step(self) -> AbstractContextManager[None]:
        return nullcontext()  # kernels are recorded whoever launches them

    def record(self, begun: Callable[[], None], stop: threading.Event) -> KernelRecord:
        if ProfilerActivity.CUDA not in supported_activities():
            begun()
            stop.wait()
            return KernelRecord(notes=[_NO_CUPTI])
        wall = time.time_ns() - time.monotonic_ns()  # the profiler gives times of day
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            begun()
            stop.wait()
            torch.cuda.synchronize(self._forward.device)
        events = profiler.profiler.kineto_results.events()
        kernels = list(kernels_of(events, wall))
        return KernelRecord(kernels, [] if kernels else [_NOTHING_CAME])


def _gemm(weights: Iterable[torch.Tensor], share: float = 1.0) -> Gemm:
    weights = list(weights)
    return Gemm(sum(w.numel() for w in weights), sum(w.nbytes for w in weights), share)


def kernels_of(events: Iterable[torch._C._autograd._KinetoEvent], wall: int) -> Iterator[Kernel]:
    for event in events:
        if event.device_type() == torch._C._autograd.DeviceType.CUDA:
            name, began = event.name(), event.start_ns() - wall
            yield Kernel(part_of(name), name, began, began + event.duration_ns(), event.device_resource_id())


def part_of(kernel: str) -> str:
    return next((part for part, pattern in _PATTERNS.items() if pattern.search(kernel)), "other")
