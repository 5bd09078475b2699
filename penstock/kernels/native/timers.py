"""Times of the kernels inside a native step, and what the machine can do at best, for profiles."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.kernels.native.bindings import library, timed_matmul
from penstock.kernels.native.model import NativeModel

# In the order of the enum Kernel in model.h.
KERNELS = (
    *("plan", "embedding", "norm", "quantize", "qkv", "rope", "attention", "out", "gate_up", "down"),
    *("lm_head", "sampling"),
)
_TIME = np.dtype([("end", np.int64), ("kernel", np.int32), ("layer", np.int32)])
_MOST_READ = 2**28  # bytes of the weights: some tens of milliseconds
_READINGS = 3  # of which the fastest counts: others use the machine too
_GEMM = 240, 512, 512  # rows, outputs, inputs: as large as a step computes them, and in the cache


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """Of one step. Kernels follow one another: each began when the one before it had ended, the first with the call."""

    began: float  # of the call, by time.perf_counter
    ends: npt.NDArray[np.int64]  # nanoseconds since then
    kernels: npt.NDArray[np.int32]  # indices of KERNELS
    layers: npt.NDArray[np.int32]  # -1: of none


def set_timed(model: NativeModel, timed: bool) -> None:
    """Whether the steps from now on are timed. By the thread that runs them."""
    library().penstock_model_set_timed(model.handle, timed)


def kernel_times(model: NativeModel) -> KernelTimes:
    """Of the last step, if it was timed."""
    count = ctypes.c_uint64()
    address = library().penstock_model_times(model.handle, ctypes.byref(count))
    raw = ctypes.string_at(address, count.value * _TIME.itemsize) if count.value else b""
    times = np.frombuffer(raw, dtype=_TIME)
    return KernelTimes(model.call_began, times["end"], times["kernel"], times["layer"])


def read_bandwidth(model: NativeModel) -> float:
    """Bytes a second at which all threads together read the weights."""
    size = min(model.weight_bytes, _MOST_READ)
    return size / min(float(library().penstock_model_read_seconds(model.handle, size)) for _ in range(_READINGS))


def gemm_speed(model: NativeModel) -> float:
    """FLOPs a second of all threads, each as fast as one is in a GEMM whose operands are in its cache."""
    rows, outputs, inputs = _GEMM
    random = np.random.default_rng(0)
    x, w = (random.standard_normal((n, inputs), dtype=np.float32) for n in (rows, outputs))
    _, seconds = timed_matmul(x, w, model.scheme, times=_READINGS)
    return 2 * rows * outputs * inputs / seconds * thread_count(model)


def thread_count(model: NativeModel) -> int:
    return int(model._spec.threads)
