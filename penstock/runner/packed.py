"""Load a checkpoint for the native CPU kernels: weights are quantised and packed, and cached on disk between starts."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from pathlib import Path

from penstock.checkpoint.source import PACKED_WEIGHTS, Checkpoint
from penstock.core.errors import StartupError
from penstock.core.machine import cache_folder
from penstock.kernels.native.bindings import Floats, KVFormat, Scheme, isa
from penstock.kernels.native.model import NativeModel
from penstock.kernels.native.shape import tensor_shapes
from penstock.models.config import ModelConfig
from penstock.models.frequencies import inverse_frequencies, rope_magnitude
from penstock.models.host_weights import host_weights
from penstock.models.packed_config import write_packed_config

log = logging.getLogger(__name__)

_MOVABLE = "a checkpoint of its own"  # instead of the fingerprint of files that weights were packed from

Progress = Callable[[int, int], None]  # bytes done, bytes in all


def usual_kv(scheme: Scheme) -> KVFormat:
    """Whoever rounds the weights has no use for a more exact cache."""
    return "bf16" if scheme == "none" else "int8"


def native_model(
    config: ModelConfig, scheme: Scheme, *, block_size: int, num_blocks: int, threads: int, kv: KVFormat | None = None
) -> NativeModel:
    return NativeModel(
        config,
        inverse_frequencies(config),
        scheme=scheme,
        block_size=block_size,
        num_blocks=num_blocks,
        threads=threads,
        kv=kv or usual_kv(scheme),
        rope_magnitude=rope_magnitude(config),
    )


def fill(model: NativeModel, checkpoint: Checkpoint, config: ModelConfig, progress: Progress | None) -> Path:
    """Quantise and pack the checkpoint's tensors, or read them as they were packed before; returns where they are."""
    began = time.monotonic()
    if checkpoint.kind == "packed":
        path, packed = checkpoint.path, model.load_packed(checkpoint.path, _MOVABLE)
        if not packed:
            raise StartupError(
                f"{path} was packed for other kernels; write it again with this version's `penstock quantize --output`",
                param="model",
            )
    else:
        fingerprint, path = _fingerprint(checkpoint), packed_file(checkpoint, model.scheme)
        packed = _load_kept(model, path, fingerprint)
        if not packed:
            stream = host_weights(checkpoint, config)
            model.load(_reported(stream, config, progress) if progress is not None else stream)
            if checkpoint.kind != "dummy":
                _keep(model, path, fingerprint)
            _return_memory()
    log.info(
        "%s %s: %s, %.2f GiB in %s with %s kernels, %.1f s",
        "read packed" if packed else "loaded and packed",
        checkpoint.name,
        config.architecture,
        model.weight_bytes / 2**30,
        model.scheme,
        isa(),
        time.monotonic() - began,
    )
    return path


def packed_file(checkpoint: Checkpoint, scheme: Scheme) -> Path:
    """Where its packed weights are, once they have been packed."""
    if checkpoint.kind == "packed":
        return checkpoint.path
    name = hashlib.sha256(f"{_fingerprint(checkpoint)}/{scheme}".encode()).hexdigest()[:24]
    return cache_folder() / "packed" / f"{name}.bin"


def write_checkpoint(model: NativeModel, config: ModelConfig, folder: Path) -> None:
    """Weights and configuration as a folder that can be moved to another machine; its tokenizer is not written here."""
    model.save_packed(folder / PACKED_WEIGHTS, _MOVABLE)
    write_packed_config(folder, replace(config, dtype=model.scheme))


def _reported(
    stream: Iterator[tuple[str, Floats]], config: ModelConfig, progress: Progress
) -> Iterator[tuple[str, Floats]]:
    """Tell how many of the model's weights have been packed; as many bytes in int8."""
    stored = {n: prod(shape) for n, shape in tensor_shapes(config).items()}
    total = sum(stored.values()) - (stored["lm_head.weight"] if config.tie_embeddings else 0)
    done = 0
    for name, array in stream:
        yield name, array
        done += array.size
        progress(done, total)


def _return_memory() -> None:
    """What quantising has freed goes back to the system; glibc would keep it."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)


def _load_kept(model: NativeModel, path: Path, fingerprint: str) -> bool:
    try:
        return model.load_packed(path, fingerprint)
    except StartupError as error:
        log.warning("%s; they are packed again", error)
        return False


def _keep(model: NativeModel, path: Path, fingerprint: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        model.save_packed(path, fingerprint)
    except OSError as error:
        log.warning("cannot keep packed weights in %s: %s; the next start packs them again", path.parent, error)


def _fingerprint(checkpoint: Checkpoint) -> str:
    """Changes whenever a file of the checkpoint does."""
    path = checkpoint.path
    files = sorted(path.glob("*")) if path.is_dir() else [path]
    facts = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return f"{checkpoint.kind}:{path.resolve()}:{facts}"
