"""A short name for what a checkpoint holds, the same on every machine that has it."""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path

from penstock.checkpoint.source import Checkpoint, safetensors_files

WHOLE_BYTES = 16 * 2**20  # a file up to this size is read whole, of a larger one samples are read
SAMPLE_BYTES = 4096
STRIDE_BYTES = 64 * 1024  # at least, between the beginnings of two samples
MOST_SAMPLES = 8192  # of one file: a quarter of a second of the start for the largest checkpoints


def revision(checkpoint: Checkpoint) -> str:
    """Changes with the configuration and with the weights. Training moves every tensor and is always seen; a change
    by hand to less than a stride of a large file may not be."""
    digest = blake2b(checkpoint.kind.encode(), digest_size=8)
    for path in _files(checkpoint):
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"\n{path.name} {size}\n".encode())
            if size <= WHOLE_BYTES:
                digest.update(file.read())
                continue
            stride = max(STRIDE_BYTES, size // MOST_SAMPLES)
            for start in (*range(0, size - SAMPLE_BYTES, stride), size - SAMPLE_BYTES):
                digest.update(os.pread(file.fileno(), SAMPLE_BYTES, start))
    return digest.hexdigest()


def _files(checkpoint: Checkpoint) -> list[Path]:
    if checkpoint.kind != "folder":
        return [checkpoint.path]
    configs = (checkpoint.path / name for name in ("config.json", "generation_config.json"))
    return [*(path for path in configs if path.is_file()), *safetensors_files(checkpoint.path)]
