"""A safetensors file: tensors as float32 arrays. numpy has no bfloat16, so the library's own numpy reader refuses most
checkpoints.

Layout: the header's length in 8 bytes, the header as JSON (dtype, shape and byte range of each tensor), the bytes.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from penstock.core.errors import StartupError

Floats = npt.NDArray[np.float32]


def _widen_bfloat16(stored: npt.NDArray[Any]) -> Floats:
    widened: Floats = np.left_shift(stored, 16, dtype=np.uint32).view(np.float32)
    return widened


# By the name the header gives: how it is stored, and how that becomes float32.
_DTYPES: dict[str, tuple[str, Callable[[npt.NDArray[Any]], Floats]]] = {
    "F32": ("<f4", lambda stored: stored.astype(np.float32)),
    "F16": ("<f2", lambda stored: stored.astype(np.float32)),
    "BF16": ("<u2", _widen_bfloat16),
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One entry of the header, checked: it lies in the file, and its bytes are as many as its shape says."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int  # in the file

    def read(self, data: bytes | mmap.mmap) -> Floats:
        """A new array, of the whole file's bytes."""
        storage, widen = _DTYPES[self.dtype]
        return widen(np.frombuffer(data, storage, prod(self.shape), self.start)).reshape(self.shape)


def read_tensors(
    path: Path, order: Callable[[str], int] | None = None, wanted: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, Floats]]:
    """Every wanted tensor of the file, each as a new array; in an order of their names, or as they lie there."""
    with path.open("rb") as file:
        tensors = stored_tensors(file, os.fstat(file.fileno()).st_size, path, wanted)
        if order is not None:
            tensors.sort(key=lambda tensor: order(tensor.name))
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for tensor in tensors:
                yield tensor.name, tensor.read(data)


def stored_tensors(
    file: BinaryIO, size: int, path: Path, wanted: Callable[[str], bool] = lambda name: True
) -> list[StoredTensor]:
    """The wanted tensors in a file of so many bytes, by the header at its beginning, of which nothing is believed."""
    header_size = int.from_bytes(file.read(8), "little")
    try:
        header = json.loads(file.read(min(header_size, size)))
        named = [(name, entry) for name, entry in header.items() if name != "__metadata__" and wanted(name)]
        entries = [(name, *_entry(entry)) for name, entry in named]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StartupError(f"cannot read {path}: {error!r}. Download it again.") from error
    return [_checked(*entry, 8 + header_size, size, path) for entry in entries]


def _entry(entry: dict[str, Any]) -> tuple[str, tuple[int, ...], int, int]:
    begin, end = entry["data_offsets"]
    return str(entry["dtype"]), tuple(int(n) for n in entry["shape"]), int(begin), int(end)


def _checked(
    name: str, dtype: str, shape: tuple[int, ...], begin: int, end: int, data_start: int, size: int, path: Path
) -> StoredTensor:
    if dtype not in _DTYPES:
        raise StartupError(f"{path}: tensor {name} has dtype {dtype}; supported: {', '.join(_DTYPES)}")
    if data_start + end > size:
        raise StartupError(f"cannot read {path}: it ends before {name} does. Download it again.")
    needed = prod(shape) * np.dtype(_DTYPES[dtype][0]).itemsize
    if begin < 0 or min(shape, default=0) < 0 or end - begin != needed:
        raise StartupError(f"cannot read {path}: {name} has {end - begin} bytes, and its shape {list(shape)} {needed}")
    return StoredTensor(name, dtype, shape, data_start + begin)
