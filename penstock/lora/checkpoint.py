"""An adapter as PEFT writes it: a folder with adapter_config.json and adapter_model.safetensors.

An adapter is known by its digest, a hash of what determines its result: the bytes of the weights, and of the
configuration ranks and scales. A folder can change at any time, so `read_adapter` computes the digest of the very bytes
that it makes arrays of.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from penstock.checkpoint.safetensors_file import StoredTensor, stored_tensors
from penstock.core.errors import StartupError
from penstock.engine.executor import AdapterWeights
from penstock.lora.config import SUPPORTED, PeftConfig, invalid_adapter, parse_config

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MOST_CONFIG_BYTES = 2**20
MOST_WEIGHT_BYTES = 8 * 2**30
MOST_NAME_CHARS = 128  # of a module
PIECE_BYTES = 2**20  # hashed at a time, by several threads
_THREADS = min(8, os.cpu_count() or 1)
_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
# What a tensor's name says about adapters that are more than A and B.
_OTHER_TENSORS = {
    "lora_embedding_": "an adapter of the embedding",
    "lora_magnitude_vector": "DoRA",
    "lora_B.bias": "a bias of lora_B",
}

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class AdapterModule:
    """What an adapter adds to one linear layer: A is [rank, inputs], B is [outputs, rank]."""

    rank: int
    inputs: int
    outputs: int


@dataclass(frozen=True, slots=True)
class AdapterSummary:
    """What is in an adapter's folder, without its weights."""

    config: PeftConfig
    modules: Mapping[str, AdapterModule]  # by the module's name in the base model's checkpoint
    weight_bytes: int
    dtypes: tuple[str, ...]

    @property
    def rank(self) -> int:
        """The largest of any module."""
        return max(module.rank for module in self.modules.values())


def summarize_adapter(folder: str | Path) -> AdapterSummary:
    """Configuration and header, both checked. Of the weights nothing is read."""
    config = _read_config(Path(folder))
    path = Path(folder) / WEIGHTS
    with open_file(path, MOST_WEIGHT_BYTES) as file:
        size = os.fstat(file.fileno()).st_size
        tensors = _stored(file, size, path)
    pairs = _pairs(tensors, config, path)
    modules = {name: AdapterModule(a.shape[0], a.shape[1], b.shape[0]) for name, (a, b) in pairs.items()}
    return AdapterSummary(config, modules, size, tuple(sorted({tensor.dtype for tensor in tensors})))


def adapter_digest(folder: str | Path) -> str:
    """The digest that `read_adapter` gives for the same content. Streams the file: 80 MB take some 30 ms."""
    config = _read_config(Path(folder))
    with open_file(Path(folder) / WEIGHTS, MOST_WEIGHT_BYTES) as file:
        number = file.fileno()
        return _digest(config, os.fstat(number).st_size, lambda start: os.pread(number, PIECE_BYTES, start))


def read_adapter(folder: str | Path) -> AdapterWeights:
    config = _read_config(Path(folder))
    path = Path(folder) / WEIGHTS
    with open_file(path, MOST_WEIGHT_BYTES) as file:
        data = file.read()
    view = memoryview(data)
    digest = _digest(config, len(data), lambda start: view[start : start + PIECE_BYTES])
    pairs = _pairs(_stored(io.BytesIO(data), len(data), path), config, path)

    def read(name: str) -> tuple[Floats, Floats]:
        a, b = (half.read(data) for half in pairs[name])
        b *= np.float32(config.scale_of(name))
        if not all(np.isfinite([half.min(), half.max()]).all() for half in (a, b)):
            raise invalid_adapter(f"{path}: module {name} has values that are not finite")
        return a, b

    with ThreadPoolExecutor(_THREADS) as pool:
        modules = dict(zip(pairs, pool.map(read, pairs), strict=True))
    return AdapterWeights(digest, max(a.shape[0] for a, _ in modules.values()), modules)


def _digest(config: PeftConfig, size: int, piece: Callable[[int], bytes | memoryview]) -> str:
    """A hash over hashes of pieces: hashlib releases the GIL, so several cores work on one adapter."""
    whole = sha256(config.identity() + b"\0" + str(size).encode())
    with ThreadPoolExecutor(_THREADS) as pool:
        for part in pool.map(lambda start: sha256(piece(start)).digest(), range(0, size, PIECE_BYTES)):
            whole.update(part)
    return whole.hexdigest()[:32]


def _read_config(folder: Path) -> PeftConfig:
    path = folder / CONFIG
    with open_file(path, MOST_CONFIG_BYTES) as file:
        return parse_config(file.read(MOST_CONFIG_BYTES), path)


def open_file(path: Path, most_bytes: int) -> BinaryIO:
    """A regular file of a sane size; a pipe in its place does not block."""
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    except OSError as error:
        pickled = path.name == WEIGHTS and (path.parent / "adapter_model.bin").exists()
        hint = "; adapter_model.bin is not read, save the adapter with safe_serialization=True" if pickled else ""
        raise invalid_adapter(f"cannot read {path}: {error.strerror}{hint}") from error
    status = os.fstat(file.fileno())
    if stat.S_ISREG(status.st_mode) and status.st_size <= most_bytes:
        return file
    file.close()
    raise invalid_adapter(f"{path} must be a file of at most {most_bytes:,} bytes")


def _stored(file: BinaryIO, size: int, path: Path) -> list[StoredTensor]:
    try:
        return stored_tensors(file, size, path)
    except StartupError as error:
        raise invalid_adapter(error.message) from error


def _pairs(tensors: list[StoredTensor], config: PeftConfig, path: Path) -> dict[str, tuple[StoredTensor, StoredTensor]]:
    """A and B of each module, with shapes that belong together and the rank of the configuration."""
    halves: dict[str, dict[str, StoredTensor]] = {_A: {}, _B: {}}
    for tensor in tensors:
        end = next((end for end in halves if tensor.name.endswith(end)), None)
        if end is None or not tensor.name.startswith(_PREFIX):
            part = next((part for mark, part in _OTHER_TENSORS.items() if mark in tensor.name), "no part of LoRA")
            raise invalid_adapter(f"{path}: tensor {tensor.name[:200]} is not supported ({part}); {SUPPORTED}")
        module = tensor.name.removeprefix(_PREFIX).removesuffix(end)
        if len(module) > MOST_NAME_CHARS or len(tensor.shape) != 2:
            raise invalid_adapter(f"{path}: tensor {tensor.name[:200]} has shape {list(tensor.shape)}; {SUPPORTED}")
        halves[end][module] = tensor
    if not tensors:
        raise invalid_adapter(f"{path} has no tensors; {SUPPORTED}")
    for module in sorted(halves[_A].keys() ^ halves[_B].keys()):
        raise invalid_adapter(f"{path}: module {module} has only one of lora_A and lora_B")
    for module, a in halves[_A].items():
        rank, b = config.rank_of(module), halves[_B][module]
        if a.shape[0] != rank or b.shape[1] != rank:
            raise invalid_adapter(
                f"{path}: module {module} has A {list(a.shape)} and B {list(b.shape)}, and {CONFIG} gives it rank "
                f"{rank}: A must be [{rank}, inputs] and B [outputs, {rank}]"
            )
    return {module: (a, halves[_B][module]) for module, a in halves[_A].items()}
