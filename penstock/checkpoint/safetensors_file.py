"""A safetensors file: tensors as float32 arrays, read from a memory map. numpy has no bfloat16, so the library's own
numpy reader refuses most checkpoints.

Layout: the header's length in 8 bytes, the header as JSON (dtype, shape and byte range of each tensor), the bytes.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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


def read_tensors(
    path: Path, order: Callable[[str], int] | None = None, wanted: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, Floats]]:
    """Every wanted tensor of the file, each as a new array; in an order of their names, or as they lie there."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        header_size = int.from_bytes(data[:8], "little")
        try:
            header = json.loads(data[8 : 8 + header_size])
            entries = [
                (name, *_entry(entry)) for name, entry in header.items() if name != "__metadata__" and wanted(name)
            ]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StartupError(f"cannot read {path}: {error!r}. Download it again.") from error
        if order is not None:
            entries.sort(key=lambda entry: order(entry[0]))
        for name, dtype, shape, begin, end in entries:
            if dtype not in _DTYPES:
                raise StartupError(f"{path}: tensor {name} has dtype {dtype}; supported: {', '.join(_DTYPES)}")
            storage, widen = _DTYPES[dtype]
            at = 8 + header_size + begin
            if 8 + header_size + end > len(data):
                raise StartupError(f"cannot read {path}: it ends before {name} does. Download it again.")
            stored = np.frombuffer(data[at : at + end - begin], dtype=storage)
            yield name, widen(stored).reshape(shape)


def _entry(entry: dict[str, Any]) -> tuple[str, list[int], int, int]:
    begin, end = entry["data_offsets"]
    return str(entry["dtype"]), [int(n) for n in entry["shape"]], int(begin), int(end)
