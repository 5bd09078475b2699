"""Fills a model from its checkpoint: one stream of named tensors, each copied into its part of a fused parameter."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from penstock.checkpoint.gguf import GGUFFile
from penstock.checkpoint.source import Checkpoint, safetensors_files
from penstock.core.errors import StartupError
from penstock.models.base import CausalLM
from penstock.models.config import ModelConfig
from penstock.models.names import from_gguf, full_name
from penstock.models.registry import build_model

Progress = Callable[[int, int], None]

DUMMY_SEED = 0
DUMMY_SCALE = 0.02
NAMED_AT_MOST = 8
_COPIES = 8  # tensors on their way to a GPU at once: one copy alone waits for the disk, then for the bus


def load_model(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
) -> CausalLM:
    """`progress` is told how many bytes of the loaded model are in place, and of how many."""
    with torch.device("meta"):
        model = build_model(config)
    _allocate(model, dtype, device)
    parts = dict(model.checkpoint_tensors())
    stream = random_weights(parts) if checkpoint.kind == "dummy" else weights(checkpoint, config)
    fill(parts, stream, source=str(checkpoint.path), progress=progress or (lambda done, total: None))
    return model


def _allocate(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Uninitialised memory for every parameter. `Module.to_empty` does this too, but first imports sympy: 3 s."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            memory = torch.empty(parameter.shape, dtype=dtype, device=device)
            setattr(module, name, nn.Parameter(memory, requires_grad=False))


def fill(
    parts: dict[str, torch.Tensor], stream: Iterator[tuple[str, torch.Tensor]], *, source: str, progress: Progress
) -> None:
    """Copy each tensor of the stream to the part of its name: all parts once, and nothing else."""
    missing, unexpected = dict(parts), []
    done, total = 0, sum(part.nbytes for part in parts.values())
    copies: deque[Future[int]] = deque()
    with ThreadPoolExecutor(_COPIES) as threads:
        for name, tensor in stream:
            part = missing.pop(name, None)
            if part is None:
                unexpected.append(name)
                continue
            if part.shape != tensor.shape:
                raise StartupError(f"{source}: {name} has shape {tuple(tensor.shape)}, expected {tuple(part.shape)}")
            if part.device.type == "cuda" and tensor.device.type == "cpu":
                copies.append(threads.submit(_copy, part, tensor))
                done += copies.popleft().result() if len(copies) > _COPIES else 0
            else:
                done += _copy(part, tensor)
            progress(done, total)
        for copy in copies:
            done += copy.result()
            progress(done, total)
    if missing:
        raise StartupError(f"{source} lacks {_some(list(missing))}")
    if unexpected:
        raise StartupError(f"{source} has tensors that its architecture does not know: {_some(unexpected)}")


def _copy(part: torch.Tensor, tensor: torch.Tensor) -> int:
    with torch.inference_mode():
        part.copy_(tensor)
    return part.nbytes


def _some(names: list[str]) -> str:
    rest = len(names) - NAMED_AT_MOST
    return ", ".join(names[:NAMED_AT_MOST]) + (f" and {rest} more" if rest > 0 else "")


def weights(checkpoint: Checkpoint, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight of a checkpoint under its Hugging Face name, one at a time, on the CPU and in the stored precision
    (float32 where it is quantised)."""
    match checkpoint.kind:
        case "gguf":
            stream = _gguf_weights(checkpoint, config)
        case "folder":
            stream = _safetensors_weights(checkpoint)
        case "dummy":
            stream = _dummy_weights(config)
    for name, tensor in stream:
        if not _redundant(name, config):
            yield name, tensor


def _redundant(name: str, config: ModelConfig) -> bool:
    """What some checkpoints store although it follows from the rest."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_embeddings)


def _safetensors_weights(checkpoint: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
    for path in safetensors_files(checkpoint.path):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (not a dict)
                    yield full_name(name), file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise StartupError(f"cannot read {path}: {error}. Download it again.") from error


def _gguf_weights(checkpoint: Checkpoint, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    file = GGUFFile(checkpoint.path)
    for gguf_name in file.tensors:
        for name, array in from_gguf(gguf_name, partial(file.read, gguf_name), config):
            yield name, torch.from_numpy(array)


def _dummy_weights(config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    with torch.device("meta"):
        model = build_model(config)
    for name, part in model.checkpoint_tensors():
        yield from random_weights({name: torch.empty(part.shape)})


def random_weights(parts: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Small values made on the device; norms are 1, so that activations keep a sane size through many layers."""
    generators: dict[torch.device, torch.Generator] = {}
    for name, part in parts.items():
        generator = generators.setdefault(part.device, torch.Generator(part.device).manual_seed(DUMMY_SEED))
        if name.endswith("norm.weight"):
            yield name, torch.ones_like(part)
        else:
            yield name, torch.empty_like(part).normal_(0.0, DUMMY_SCALE, generator=generator)
