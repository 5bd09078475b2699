"""An emulated GPU: runs the CUDA kernels of `penstock/kernels/hopper` on the CPU, compiled by g++."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from penstock.kernels.hopper import program
from penstock.kernels.hopper.program import Argument, TensorMap

_FOLDER = Path(__file__).parent / "emulated_gpu"
_SOURCES = Path(program.__file__).parent
available = shutil.which("g++") is not None


class EmulatedKernel:
    """Launched as `program.Kernel` is. `resident` CTAs run at once: all, where a kernel waits for its grid."""

    def __init__(self, library: ctypes.CDLL, resident: int) -> None:
        self._launch = library.launch
        self._launch.restype = ctypes.c_char_p
        self._resident = resident

    def __call__(
        self,
        grid: tuple[int, ...],
        block: int,
        shared: int,
        *arguments: Argument,
        pdl: bool = False,
        cluster: int = 1,
    ) -> None:
        values = [program.c_value(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        shape = (ctypes.c_uint * 6)(*grid, *[1] * (3 - len(grid)), block, shared, cluster)
        error = self._launch(shape, self._resident, pointers)
        if error:
            raise RuntimeError(error.decode())


def emulated_kernel(folder: Path, resident: int = 1, sources: Path = _SOURCES) -> Callable[..., EmulatedKernel]:
    """A stand-in for `program.kernel` that compiles into `folder`."""

    @cache
    def kernel(file: str, name: str, **defines: int) -> EmulatedKernel:
        macros = "".join(f"#define {key} {value}\n" for key, value in sorted(defines.items()))
        tag = hashlib.sha256((file + name + macros).encode()).hexdigest()[:16]
        place = folder / tag
        place.mkdir(parents=True, exist_ok=True)
        for path in (*sources.glob("*.cu"), *sources.glob("*.cuh"), *_FOLDER.glob("*.cuh")):  # ours come last
            shutil.copy(path, place / path.name)
        (place / "unit.cpp").write_text(f'#include "device.cuh"\n{macros}#include "{file}"\nEMULATED({name})\n')
        compiler = ["g++", "-std=c++17", "-O1", "-fno-strict-aliasing", "-shared", "-fPIC", "-w"]
        made = subprocess.run([*compiler, "unit.cpp", "-o", "unit.so"], cwd=place, capture_output=True, text=True)
        if made.returncode != 0:
            raise RuntimeError(made.stderr[:4000])
        return EmulatedKernel(ctypes.CDLL(str(place / "unit.so")), resident)

    return kernel


def emulated_tensor_map(tensor: torch.Tensor, box: tuple[int, ...], swizzle: int = 128) -> TensorMap:
    rank = tensor.dim()
    words = [tensor.data_ptr(), rank | tensor.itemsize << 8 | swizzle << 16]
    for values, room in (
        (reversed(tensor.shape), 5),
        ((stride * tensor.itemsize for stride in reversed(tensor.stride()[:-1])), 4),
        (reversed(box), 5),
    ):
        filled = list(values)
        words += filled + [0] * (room - len(filled))
    return TensorMap((ctypes.c_uint64 * 16)(*words))
