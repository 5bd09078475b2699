"""A BERT-family encoder in native memory, run by one C++ call for all texts of a step."""

from __future__ import annotations

import ctypes
import re
from array import array
from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

import numpy as np

from penstock.core.errors import EngineFailure, StartupError
from penstock.core.machine import usable_cpus
from penstock.core.model_sizes import TransformerSizes
from penstock.kernels.native.bindings import (
    SCHEMES,
    EncoderScheme,
    Floats,
    device_name,
    library,
    transform_blocks,
    unavailable_reason,
)
from penstock.quantization.rotation import hadamard_block

POOLING = {"cls": 0, "mean": 1, "last": 2}

# In the order of the enum in encoder.h.
TENSORS = (
    "embeddings.word_embeddings.weight",
    "embeddings.position_embeddings.weight",
    "embeddings.token_type_embeddings.weight",
    "embeddings.LayerNorm.weight",
    "embeddings.LayerNorm.bias",
    *(f"attention.self.{name}.{part}" for name in ("query", "key", "value") for part in ("weight", "bias")),
    *(f"attention.output.{name}.{part}" for name in ("dense", "LayerNorm") for part in ("weight", "bias")),
    *(f"intermediate.dense.{part}" for part in ("weight", "bias")),
    *(f"output.{name}.{part}" for name in ("dense", "LayerNorm") for part in ("weight", "bias")),
    *(f"head.{name}.{part}" for name in ("dense", "out") for part in ("weight", "bias")),
)
_LAYER = re.compile(r"^encoder\.layer\.(\d+)\.")
# Matrices of a layer, by what they read.
_READS_HIDDEN = ("attention.self.query", "attention.self.key", "attention.self.value", "intermediate.dense")


class EncoderShape(TransformerSizes, Protocol):
    """The part of an encoder's configuration that the kernels need."""

    @property
    def max_position(self) -> int: ...
    @property
    def types(self) -> int: ...
    @property
    def labels(self) -> int: ...
    @property
    def pooling(self) -> Literal["cls", "mean", "last"]: ...


class CEncoderSpec(ctypes.Structure):
    """struct EncoderSpec of encoder.h."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("layers", "hidden", "heads", "intermediate", "vocab", "positions")),
        *((name, ctypes.c_int32) for name in ("types", "scheme", "transform", "inner", "pooling", "labels", "threads")),
        ("eps", ctypes.c_float),
    ]


class CEncoderStep(ctypes.Structure):
    """struct EncoderStep of encoder.h."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("num_tokens", "num_sequences")),
        *((name, ctypes.c_void_p) for name in ("tokens", "counts", "seconds", "out")),
    ]


def unsupported_encoder(config: EncoderShape) -> str | None:
    """Why this encoder cannot run on the native kernels, if it cannot."""
    for name, size in (("hidden size", config.hidden_size), ("head size", config.hidden_size // config.num_heads)):
        if size % 16:
            return f"the native kernels need a {name} that is a multiple of 16, not {size}"
    return unavailable_reason()


class NativeEncoder:
    """Not for use by two threads at once."""

    def __init__(self, config: EncoderShape, scheme: EncoderScheme, threads: int | None = None) -> None:
        if reason := unsupported_encoder(config):
            raise StartupError(reason)
        self.config, self.scheme = config, scheme
        self.width = config.labels or config.hidden_size
        threads = threads or usable_cpus()
        self.device = device_name(threads, scheme)
        self._library = library()
        self._transform, self._inner = (
            hadamard_block(size) if scheme == "int8" else 0 for size in (config.hidden_size, config.intermediate_size)
        )
        spec = CEncoderSpec(
            layers=config.num_layers,
            hidden=config.hidden_size,
            heads=config.num_heads,
            intermediate=config.intermediate_size,
            vocab=config.vocab_size,
            positions=config.max_position,
            types=config.types,
            scheme=SCHEMES[scheme],
            transform=self._transform,
            inner=self._inner,
            pooling=POOLING[config.pooling],
            labels=config.labels,
            threads=threads,
            eps=config.norm_eps,
        )
        error = ctypes.c_char_p()
        self._handle: int | None = self._library.penstock_encoder_new(ctypes.byref(spec), ctypes.byref(error))
        if not self._handle:
            raise StartupError(f"cannot allocate the encoder: {(error.value or b'').decode()}")

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.penstock_encoder_free(self._handle)
            self._handle = None

    def pin_caller(self) -> None:
        """Keep the calling thread, which is to call `encode`, on a CPU of its own among the computing threads."""
        self._library.penstock_encoder_pin_caller(self._handle)

    @property
    def weight_bytes(self) -> int:
        return int(self._library.penstock_encoder_weight_bytes(self._handle))

    def load(self, weights: Iterator[tuple[str, Floats]]) -> None:
        """Quantise and pack tensors, given in any order by their Hugging Face names."""
        missing = set(TENSORS[:5]) | set(TENSORS[-4:] if self.config.labels else ())
        layers = range(self.config.num_layers)
        missing |= {f"encoder.layer.{number}.{name}" for number in layers for name in TENSORS[5:-4]}
        for name, tensor in weights:
            if name not in missing:
                raise StartupError(f"tensor {name} is not part of an encoder with this configuration")
            found = _LAYER.match(name)
            part = name[found.end() :] if found else name
            if name == "embeddings.position_embeddings.weight":
                tensor = tensor[: self.config.max_position]
            values = self._transformed(part, tensor) if tensor.ndim == 2 else tensor
            values = np.ascontiguousarray(values, dtype=np.float32)
            rows, columns = values.shape if values.ndim == 2 else (values.shape[0], 1)
            problem = self._library.penstock_encoder_set(
                self._handle, TENSORS.index(part), int(found[1]) if found else 0, values.ctypes.data, rows, columns
            )
            if problem:
                raise StartupError(f"tensor {name} {problem.decode()}")
            missing.discard(name)
        if missing:
            raise StartupError(f"the checkpoint lacks {len(missing)} tensors, such as {min(missing)}")

    def _transformed(self, part: str, weight: Floats) -> Floats:
        """A matrix as it is multiplied with what the Hadamard transform makes of its input."""
        module = part.removesuffix(".weight")
        block = self._inner if module == "output.dense" else self._transform if module in _READS_HIDDEN else 0
        return transform_blocks(weight.copy(), block) if block else weight

    def encode(self, tokens: Sequence[int], counts: Sequence[int], seconds: Sequence[int] = ()) -> Floats:
        """The vector of each sequence, [N, width]. `counts`: tokens of each; `seconds`: where a second text begins."""
        out = np.empty((len(counts), self.width), dtype=np.float32)
        ids, lengths = array("i", tokens), array("i", counts)
        starts = array("i", seconds or counts)
        if len(starts) != len(lengths):
            raise EngineFailure("native encoder: seconds must describe the same sequences as counts")
        addresses = [values.buffer_info()[0] for values in (ids, lengths, starts)]
        step = CEncoderStep(len(ids), len(lengths), *addresses, out.ctypes.data)
        problem = self._library.penstock_encoder_encode(self._handle, ctypes.byref(step))
        if problem:
            raise EngineFailure(f"native encoder: {problem.decode()}")
        return out
