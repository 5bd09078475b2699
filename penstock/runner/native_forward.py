"""The native CPU kernels as a `Forward`, their packed weights kept on disk between starts."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from penstock.checkpoint.source import Checkpoint
from penstock.core.machine import cache_folder
from penstock.kernels import native
from penstock.kernels.native import NativeModel, Scheme, StepArrays
from penstock.models.config import ModelConfig, YarnScaling
from penstock.models.loader import Progress, weights
from penstock.models.registry import build_model
from penstock.models.rope import inverse_frequencies
from penstock.runner.batch import Batch
from penstock.runner.row_state import RowState

log = logging.getLogger(__name__)


class NativeForward:
    def __init__(self, model: NativeModel) -> None:
        self._model = model

    def __call__(
        self, batch: Batch, state: RowState, logit_rows: npt.NDArray[np.int32]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        last_R = state.last_token_R.numpy()
        tokens_T = np.where(batch.tokens_T < 0, last_R[batch.rows_T], batch.tokens_T)
        logits_RV, likeliest_R = self._model.forward(
            StepArrays(
                tokens_T=tokens_T.astype(np.int32, copy=False),
                positions_T=batch.positions_T,
                slots_T=batch.slots_T,
                tables_SM=batch.tables_SM,
                query_starts=batch.query_starts,
                contexts_S=batch.contexts_S,
                logit_rows_R=logit_rows,
            )
        )
        return torch.from_numpy(logits_RV), torch.from_numpy(likeliest_R).long()


def native_model(config: ModelConfig, scheme: Scheme, *, block_size: int, num_blocks: int, threads: int) -> NativeModel:
    scaling = config.rope_scaling
    return NativeModel(
        config,
        inverse_frequencies(config).numpy(),
        scheme=scheme,
        block_size=block_size,
        num_blocks=num_blocks,
        threads=threads,
        rope_magnitude=scaling.attention_factor if isinstance(scaling, YarnScaling) else 1.0,
    )


def fill(model: NativeModel, checkpoint: Checkpoint, config: ModelConfig, progress: Progress | None) -> Path:
    """Quantise and pack the checkpoint's tensors, or read them as an earlier start packed them; returns where."""
    began = time.monotonic()
    fingerprint = _fingerprint(checkpoint)
    name = hashlib.sha256(f"{fingerprint}/{model.scheme}".encode()).hexdigest()[:24]
    path = cache_folder() / "packed" / f"{name}.bin"
    packed = model.load_packed(path, fingerprint)
    if not packed:
        stream = weights(checkpoint, config)
        model.load(_reported(stream, config, progress) if progress is not None else stream)
        if checkpoint.kind != "dummy":
            _keep(model, path, fingerprint)
    log.info(
        "%s %s: %s, %.2f GiB in %s with %s kernels, %.1f s",
        "read packed" if packed else "loaded and packed",
        checkpoint.name,
        config.architecture,
        model.weight_bytes / 2**30,
        model.scheme,
        native.isa(),
        time.monotonic() - began,
    )
    return path


def _reported(
    stream: Iterator[tuple[str, torch.Tensor]], config: ModelConfig, progress: Progress
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tell how many of the model's weights have been packed; as many bytes in int8."""
    with torch.device("meta"):
        total = sum(tensor.numel() for _, tensor in build_model(config).checkpoint_tensors())
    done = 0
    for name, tensor in stream:
        yield name, tensor
        done += tensor.numel()
        progress(done, total)


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
