"""A checkpoint's weights as numpy arrays, for kernels that need no torch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import numpy.typing as npt

from penstock.checkpoint.gguf import GGUFFile
from penstock.checkpoint.safetensors_file import read_tensors
from penstock.checkpoint.source import Checkpoint, safetensors_files
from penstock.core.errors import StartupError
from penstock.kernels.native.shape import tensor_shapes
from penstock.models.config import ModelConfig
from penstock.models.names import from_gguf, full_name, layer_number

DUMMY_SCALE = 0.02

Floats = npt.NDArray[np.float32]


def host_weights(checkpoint: Checkpoint, config: ModelConfig) -> Iterator[tuple[str, Floats]]:
    """Every weight under its Hugging Face name, one at a time and layer by layer, as float32 arrays of their own."""
    for name, array in _stored(checkpoint, config):
        tied = name == "lm_head.weight" and config.tie_embeddings
        if not tied and not name.endswith("rotary_emb.inv_freq"):
            yield name, array


def _stored(checkpoint: Checkpoint, config: ModelConfig) -> Iterator[tuple[str, Floats]]:
    if checkpoint.kind == "gguf":
        file = GGUFFile(checkpoint.path)
        for gguf_name in sorted(file.tensors, key=layer_number):
            yield from from_gguf(gguf_name, partial(file.read, gguf_name), config)
    elif checkpoint.kind == "folder":
        for path in safetensors_files(checkpoint.path):
            try:
                yield from ((full_name(name), array) for name, array in read_tensors(path, layer_number))
            except (OSError, ValueError) as error:
                raise StartupError(f"cannot read {path}: {error}. Download it again.") from error
    elif checkpoint.kind == "dummy":
        yield from _random(config)


def _random(config: ModelConfig) -> Iterator[tuple[str, Floats]]:
    """Small values; norms are 1, so that activations keep a sane size through many layers."""
    generator = np.random.Generator(np.random.PCG64(0))
    for name, shape in tensor_shapes(config).items():
        if name.endswith("norm.weight"):
            yield name, np.ones(shape, dtype=np.float32)
        else:
            yield name, generator.standard_normal(shape, dtype=np.float32) * np.float32(DUMMY_SCALE)
