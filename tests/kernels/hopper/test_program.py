"""What a launch hands to the driver, which is replaced by one that takes notes."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import pytest
import torch

from penstock.kernels.hopper import program
from penstock.kernels.hopper.program import Kernel, TensorMap

KINDS: list[Any] = [ctypes.c_uint64, ctypes.c_int32, ctypes.c_float, TensorMap]


class NotingDriver:
    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.shared: list[int] = []

    def cuFuncSetAttribute(self, function: object, attribute: int, value: int) -> int:
        self.shared.append(value)
        return 0

    def cuLaunchKernelEx(self, launch: Any, function: object, pointers: Any, extra: None) -> int:
        shape = launch._obj
        values = [kind.from_address(pointers[i]) for i, kind in enumerate(KINDS)]
        numbers = (*(value.value for value in values[:3]), values[3].words[0])
        flags = [shape.attributes[i].value[0] for i in range(shape.num_attributes)]
        self.launches.append((*shape.grid, *shape.block, shape.shared, shape.stream, flags, numbers))
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> NotingDriver:
    class Stream:
        cuda_stream = 77

    driver = NotingDriver()
    monkeypatch.setattr(program, "driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    return driver


def a_map(word: int) -> TensorMap:
    return TensorMap((ctypes.c_uint64 * 16)(word))


def test_each_launch_has_its_own_shape_and_arguments(driver: NotingDriver) -> None:
    kernel = Kernel(ctypes.c_void_p(1))
    one, two = torch.zeros(3), torch.zeros(4)
    kernel((5,), 128, 1000, one, 7, 0.5, a_map(11), pdl=True)
    kernel((5,), 128, 1000, two, -8, 0.25, a_map(12), pdl=True)
    kernel((2, 3), 64, 2000, one, 9, 1.0, a_map(13), cluster=2)
    kernel((2, 3), 64, 500, one, 9, 1.0, a_map(13), cluster=2)
    assert driver.launches == [
        (5, 1, 1, 128, 1, 1, 1000, 77, [1], (one.data_ptr(), 7, 0.5, 11)),
        (5, 1, 1, 128, 1, 1, 1000, 77, [1], (two.data_ptr(), -8, 0.25, 12)),
        (2, 3, 1, 64, 1, 1, 2000, 77, [0, 2], (one.data_ptr(), 9, 1.0, 13)),
        (2, 3, 1, 64, 1, 1, 500, 77, [0, 2], (one.data_ptr(), 9, 1.0, 13)),
    ]
    assert driver.shared == [1000, 2000]  # raised only


def test_threads_do_not_mix_their_arguments(driver: NotingDriver) -> None:
    kernel, tensors = Kernel(ctypes.c_void_p(1)), [torch.zeros(i + 1) for i in range(4)]

    def launch(i: int) -> None:
        for _ in range(50):
            kernel((i + 1,), 32, 0, tensors[i], i, float(i), a_map(i))

    threads = [threading.Thread(target=launch, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for launched in driver.launches:
        i = launched[0] - 1
        assert launched[-1] == (tensors[i].data_ptr(), i, float(i), i)
    assert len(driver.launches) == 200


def test_a_kernel_is_compiled_once_whoever_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[str, ...]] = []
    started = threading.Barrier(4)

    def load(file: str, name: str, defines: tuple[str, ...]) -> Kernel:
        compiled.append((file, name, *defines))
        return Kernel(ctypes.c_void_p(1))

    monkeypatch.setattr(program, "_loaded", load)
    monkeypatch.setattr(program, "_kernels", {})
    found: list[Kernel] = []

    def ask() -> None:
        started.wait()
        found.append(program.kernel("x.cu", "x", ROWS=3))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiled == [("x.cu", "x", "-DROWS=3")]
    assert len({id(kernel) for kernel in found}) == 1
