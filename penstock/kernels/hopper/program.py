"""Compiles the CUDA C++ kernels of this folder by NVRTC, caches them on disk, and launches them from Python.

NVRTC comes with torch's CUDA builds, so nothing is needed that torch does not need. A launch costs Python about 20 µs:
these kernels belong into CUDA graphs, or must be long.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
from functools import cache
from pathlib import Path
from typing import Any

import torch

from penstock.core.errors import StartupError
from penstock.core.machine import cache_folder

_FOLDER = Path(__file__).parent
_ARCHITECTURE = "sm_90a"
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_OVERLAP = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


@cache
def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


_Key = tuple[str, str, tuple[tuple[str, int], ...]]
_kernels: dict[_Key, Kernel] = {}
_compiling: dict[_Key, threading.Lock] = {}


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint), ("_pad", ctypes.c_char * 4), ("value", ctypes.c_uint * 16)]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    ]


class TensorMap(ctypes.Structure):
    """How the tensor memory accelerator finds its way in a tensor (CUtensorMap); by `tensor_map.tensor_map`."""

    _fields_ = [("words", ctypes.c_uint64 * 16)]


Argument = torch.Tensor | int | float | ctypes.Structure


class Kernel:
    """A function on the device. All launches use the same memory for their arguments."""

    def __init__(self, function: ctypes.c_void_p) -> None:
        self._function = function
        self._shared = 0
        self._lock = threading.Lock()
        self._shape: tuple[object, ...] = ()
        self._launch = _Launch()
        self._values: list[Any] = []
        self._pointers = (ctypes.c_void_p * 0)()

    def __call__(
        self,
        grid: tuple[int, ...],
        block: int,
        shared: int,
        *arguments: Argument,
        pdl: bool = False,
        cluster: int = 1,
    ) -> None:
        """On torch's current stream. Tensors go as pointers, numbers as int32 and float32, structures by value."""
        with self._lock:
            if self._shape != (grid, block, shared, pdl, cluster):
                self._reshape(grid, block, shared, pdl, cluster)
            if len(self._values) != len(arguments):
                self._values = [c_value(argument) for argument in arguments]
                self._pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, self._values))
            for i, argument in enumerate(arguments):
                if isinstance(argument, torch.Tensor):
                    self._values[i].value = argument.data_ptr()
                elif isinstance(argument, ctypes.Structure):
                    self._pointers[i] = ctypes.addressof(argument)
                else:
                    self._values[i].value = argument
            self._launch.stream = torch.cuda.current_stream().cuda_stream
            check(driver().cuLaunchKernelEx(ctypes.byref(self._launch), self._function, self._pointers, None))

    def _reshape(self, grid: tuple[int, ...], block: int, shared: int, pdl: bool, cluster: int) -> None:
        if shared > self._shared:
            check(driver().cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED, shared))
            self._shared = shared
        launch = self._launch
        launch.grid, launch.block = (*grid, *[1] * (3 - len(grid))), (block, 1, 1)
        launch.shared, launch.attributes = shared, _attributes(pdl, cluster)
        launch.num_attributes = 2 if cluster > 1 else 1
        self._shape = (grid, block, shared, pdl, cluster)


@cache
def _attributes(pdl: bool, cluster: int) -> ctypes.Array[_Attribute]:
    attributes = (_Attribute * 2)()
    attributes[0].id, attributes[0].value[0] = _OVERLAP, int(pdl)
    attributes[1].id, attributes[1].value[:3] = _CLUSTER, [cluster, 1, 1]
    return attributes


def c_value(argument: Argument) -> Any:
    """An argument as the C type that a kernel takes."""
    if isinstance(argument, torch.Tensor):
        return ctypes.c_uint64(argument.data_ptr())
    if isinstance(argument, int):
        return ctypes.c_int32(argument)
    return ctypes.c_float(argument) if isinstance(argument, float) else argument


def kernel(file: str, name: str, **defines: int) -> Kernel:
    """The `extern "C"` function of that file, compiled with those macros, by whichever thread asks first."""
    key = (file, name, tuple(defines.items()))
    if key not in _kernels:
        with _compiling.setdefault(key, threading.Lock()):
            if key not in _kernels:
                _kernels[key] = _loaded(file, name, tuple(f"-D{macro}={value}" for macro, value in defines.items()))
    return _kernels[key]


def _loaded(file: str, name: str, defines: tuple[str, ...]) -> Kernel:
    image = _compiled(file, defines)
    torch.cuda.current_stream().synchronize()  # the context must be current in this thread
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    check(driver().cuModuleLoadData(ctypes.byref(module), image))
    check(driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
    return Kernel(function)


def _compiled(file: str, defines: tuple[str, ...]) -> bytes:
    """A cubin, from the cache folder if it was compiled before from the same text for the same values."""
    source, headers = (_FOLDER / file).read_text(), _headers()
    text = "\0".join((source, *headers.values(), *defines, _ARCHITECTURE))
    kept = cache_folder() / "cuda" / f"{Path(file).stem}-{hashlib.sha256(text.encode()).hexdigest()[:24]}.cubin"
    if kept.is_file():
        return kept.read_bytes()
    image = compile_source(source, file, headers, defines)
    kept.parent.mkdir(parents=True, exist_ok=True)
    unfinished = kept.with_suffix(f".{os.getpid()}-{id(image)}")
    unfinished.write_bytes(image)
    unfinished.replace(kept)
    return image


@cache
def _headers() -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(_FOLDER.glob("*.cuh"))}


def compile_source(source: str, name: str, headers: dict[str, str], options: tuple[str, ...]) -> bytes:
    library, program = _nvrtc(), ctypes.c_void_p()
    texts = (ctypes.c_char_p * len(headers))(*(text.encode() for text in headers.values()))
    names = (ctypes.c_char_p * len(headers))(*(name.encode() for name in headers))
    created = library.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), name.encode(), len(headers), texts, names
    )
    if created != 0:
        raise RuntimeError(f"NVRTC took no program (error {created})")
    try:
        options = (f"-arch={_ARCHITECTURE}", "-std=c++17", "-default-device", *options)
        flags = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if library.nvrtcCompileProgram(program, len(options), flags) != 0:
            raise RuntimeError(f"{name} does not compile with {' '.join(options)}:\n{_log(library, program)}")
        size = ctypes.c_size_t()
        library.nvrtcGetCUBINSize(program, ctypes.byref(size))
        image = ctypes.create_string_buffer(size.value)
        library.nvrtcGetCUBIN(program, image)
        return image.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _log(library: ctypes.CDLL, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    return log.value.decode(errors="replace")


@cache
def _nvrtc() -> ctypes.CDLL:
    """The one that torch brings, which is beside torch or in a package of NVIDIA's; else that of the system."""
    packages, major = Path(torch.__file__).parent.parent, (torch.version.cuda or "13").split(".")[0]
    places = [*packages.glob("nvidia/*/lib/libnvrtc.so.*"), *packages.glob("torch/lib/libnvrtc*.so*")]
    found = [str(place) for place in places if "builtins" not in place.name and ".alt." not in place.name]
    found.sort(key=lambda place: not place.endswith(f".{major}"))
    for name in (*found, f"libnvrtc.so.{major}", "libnvrtc.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    package = "nvidia-cuda-nvrtc" if int(major) >= 13 else f"nvidia-cuda-nvrtc-cu{major}"
    raise StartupError(f"libnvrtc, which compiles kernels for this GPU, is not installed: pip install {package}")


@cache
def driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def check(error: int) -> None:
    if error != 0:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(error, ctypes.byref(text))
        raise RuntimeError(f"CUDA: {text.value.decode() if text.value else error}")
