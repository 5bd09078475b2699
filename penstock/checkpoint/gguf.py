"""A GGUF file: metadata as Python values and tensors as float32 arrays, read from a memory map.

Layout: magic, version, tensor count, metadata count; the metadata; the tensor table; padding; the tensors' bytes.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.checkpoint.block_formats import FORMATS, BlockFormat
from penstock.core.errors import StartupError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4

# Metadata value types by number; strings and arrays are variable in size.
SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
STRING, ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    name: str
    shape: tuple[int, ...]  # row-major, as numpy has it; the file stores the reverse
    format: BlockFormat
    offset: int  # bytes from the start of the file

    @property
    def nbytes(self) -> int:
        return prod(self.shape) // self.format.values * self.format.nbytes


class GGUFFile:
    """Opens and checks the file; tensors are read on demand."""

    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        try:
            with open(self.path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise StartupError(f"cannot open {self.path}: {error}") from error
        reader = _Reader(self._map, self.path)
        tensor_count, metadata_count = reader.header()
        self.metadata = {reader.string(): reader.value(reader.u32()) for _ in range(metadata_count)}
        if self.metadata.get("split.count", 1) not in (0, 1):
            raise StartupError(f"{self.path} is one part of a split file; join them with llama-gguf-split --merge")
        self.tensors = reader.tensor_table(tensor_count, self.metadata.get("general.alignment", DEFAULT_ALIGNMENT))

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor dequantised, as a new array."""
        tensor = self.tensors[name]
        data = np.frombuffer(self._map, dtype=np.uint8, count=tensor.nbytes, offset=tensor.offset)
        return tensor.format.dequantise(data).reshape(tensor.shape)


class _Reader:
    """A position in the file that moves forward; whatever does not fit becomes a StartupError."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.position = 0

    def corrupt(self, what: str) -> StartupError:
        return StartupError(f"{self.path} is not a usable GGUF file: {what}. Download it again.")

    def advance(self, nbytes: int) -> int:
        """Step over so many bytes and return where they begin."""
        start = self.position
        if nbytes > len(self.data) - start:
            raise self.corrupt(f"it ends after {len(self.data)} bytes, {nbytes} more were announced at {start}")
        self.position = start + nbytes
        return start

    def u32(self) -> int:
        return int(struct.unpack_from("<I", self.data, self.advance(4))[0])

    def u64(self) -> int:
        return int(struct.unpack_from("<Q", self.data, self.advance(8))[0])

    def text(self, start: int, end: int) -> str:
        try:
            return self.data[start:end].decode()
        except UnicodeDecodeError as error:
            raise self.corrupt(f"the text at byte {start} is not UTF-8") from error

    def string(self) -> str:
        length = self.u64()
        start = self.advance(length)
        return self.text(start, start + length)

    def header(self) -> tuple[int, int]:
        if self.data[:4] != MAGIC:
            raise self.corrupt(f"it begins with {self.data[:4]!r} instead of {MAGIC!r}")
        self.advance(4)
        version = self.u32()
        if version not in VERSIONS:
            raise StartupError(f"{self.path} has GGUF version {version}; supported: {VERSIONS} (little-endian)")
        return self.u64(), self.u64()

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self.array(self.u32(), self.u64())
        return self.array(kind, 1)[0]

    def array(self, kind: int, count: int) -> list[Any]:
        if kind == STRING:
            return self.strings(count)
        if kind not in SCALARS:
            raise self.corrupt(f"unknown metadata type {kind} at byte {self.position}")
        dtype = np.dtype(SCALARS[kind])
        start = self.advance(count * dtype.itemsize)
        values: list[Any] = np.frombuffer(self.data, dtype, count, start).tolist()
        return values

    def strings(self, count: int) -> list[str]:
        """Vocabularies have 10^5 of them, hence one plain loop and one check of the bounds at its end."""
        data, position, size = self.data, self.position, len(self.data)
        length_at = struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):
            if position + 8 > size:
                raise self.corrupt(f"it ends within a list of {count} strings")
            start = position + 8
            position = start + length_at(data, position)[0]
            strings.append(self.text(start, position))
        self.advance(position - self.position)
        return strings

    def tensor_table(self, count: int, alignment: Any) -> dict[str, GGUFTensor]:
        if not isinstance(alignment, int) or alignment < 1:
            raise self.corrupt(f"general.alignment is {alignment!r}")
        entries = [self.tensor_entry() for _ in range(count)]
        base = -(-self.position // alignment) * alignment
        tensors = {name: GGUFTensor(name, shape, format, base + offset) for name, shape, format, offset in entries}
        end = max((tensor.offset + tensor.nbytes for tensor in tensors.values()), default=0)
        if end > len(self.data):
            raise self.corrupt(f"it has {len(self.data)} bytes where its tensors need {end}")
        return tensors

    def tensor_entry(self) -> tuple[str, tuple[int, ...], BlockFormat, int]:
        name = self.string()
        dimensions = self.u32()
        if dimensions > MAX_DIMENSIONS:
            raise self.corrupt(f"tensor {name} has {dimensions} dimensions")
        shape = tuple(reversed([self.u64() for _ in range(dimensions)]))
        kind = self.u32()
        if kind not in FORMATS:
            known = ", ".join(format.name for format in FORMATS.values())
            raise StartupError(f"{self.path}: tensor {name} has ggml type {kind}; supported: {known}")
        format = FORMATS[kind]
        if shape and shape[-1] % format.values:
            raise self.corrupt(f"rows of {name} have {shape[-1]} values, not a multiple of {format.values}")
        return name, shape, format, self.u64()
