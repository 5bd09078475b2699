"""The stream that the steps of an engine run on, by the functions of the driver.

A decode step takes a few copies and events besides the launch of its CUDA graph. By torch each takes 10 to 20 µs
and releases the GIL, which another thread may keep for longer: together more than a small model computes for a token.
Here they take 1 to 2 µs and keep it.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from penstock.kernels.hopper.program import check


class Pinned:
    """Memory of the host that a device reads or writes while the host goes on."""

    __slots__ = ("_tensor", "address", "values")

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._tensor = torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
        self.values = self._tensor.numpy()
        self.address = self._tensor.data_ptr()


class DeviceStream:
    """Torch's default stream, which threads use unless they say otherwise, and one beside it for copies. Addresses are
    those of tensors of the device and of `Pinned` memory, sizes are in bytes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._thread: int | None = None  # that used it last
        self._stream = torch.cuda.default_stream(device).cuda_stream
        self._beside = torch.cuda.Stream(device)
        self._sent = self.event(timed=False)
        driver = ctypes.PyDLL("libcuda.so.1")  # unlike CDLL it keeps the GIL
        address, size, handle = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
        self._copy_in = _function(driver.cuMemcpyHtoDAsync_v2, address, address, size, handle)
        self._copy_out = _function(driver.cuMemcpyDtoHAsync_v2, address, address, size, handle)
        self._launch = _function(driver.cuGraphLaunch, handle, handle)
        self._record = _function(driver.cuEventRecord, handle, handle)
        self._wait = _function(driver.cuStreamWaitEvent, handle, handle, ctypes.c_uint)

    def enter(self) -> None:
        """Before a thread uses it: the device's context must be current there."""
        if self._thread != threading.get_ident():
            torch.cuda.default_stream(self.device).synchronize()  # a call of the runtime makes it so
            self._thread = threading.get_ident()

    def event(self, *, timed: bool = True) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=timed)
        event.record()  # torch makes it when it is first recorded
        return event

    def launch(self, graph: int) -> None:
        check(self._launch(graph, self._stream))

    def send(self, to: int, source: int, size: int) -> None:
        check(self._copy_in(to, source, size, self._stream))

    def send_beside(self, to: int, source: int, size: int) -> None:
        """The copy overlaps what was launched before; what is launched from now on comes after it."""
        beside = self._beside.cuda_stream
        check(self._copy_in(to, source, size, beside))
        check(self._record(self._sent.cuda_event, beside))
        check(self._wait(self._stream, self._sent.cuda_event, 0))

    def receive(self, to: int, source: int, size: int) -> None:
        if size:  # a step that samples nothing has nothing to send back
            check(self._copy_out(to, source, size, self._stream))

    def record(self, event: torch.cuda.Event) -> None:
        check(self._record(event.cuda_event, self._stream))


class Graph:
    """A CUDA graph, launched on a stream as often as need be."""

    def __init__(self, graph: torch.cuda.CUDAGraph, stream: DeviceStream) -> None:
        self._graph = graph
        self.replay: Callable[[], None] = graph.replay
        if hasattr(graph, "raw_cuda_graph_exec"):  # not in old versions of torch
            self.replay = partial(stream.launch, graph.raw_cuda_graph_exec())


def captured(body: Callable[[], None], pool: Any, stream: DeviceStream) -> Graph:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        body()
    return Graph(graph, stream)


def _function(function: Any, *types: Any) -> Any:
    function.argtypes, function.restype = types, ctypes.c_int
    return function
