"""From a model's name to something that can run steps: resolve, load, size the cache, put the parts together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from penstock.checkpoint.source import Checkpoint, resolve
from penstock.core.config import EngineConfig
from penstock.core.engine import EngineInfo
from penstock.core.errors import StartupError
from penstock.core.machine import usable_cpus
from penstock.engine.executor import Executor
from penstock.engine.scheduler import Scheduler, SchedulerLimits
from penstock.kernels.attention_reference import ReferenceAttention, block_bytes
from penstock.models.config import ModelConfig, read_config
from penstock.models.loader import load_model
from penstock.runner.forward import TorchForward
from penstock.runner.memory import KVDemand, kv_blocks
from penstock.runner.model_runner import ModelRunner
from penstock.runner.row_state import RowState

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # bytes done, bytes in all


def start(model: str, config: EngineConfig, progress: Progress | None = None) -> tuple[Scheduler, Executor, EngineInfo]:
    """Load a model and return the two halves of an engine: who decides and who computes."""
    checkpoint = resolve(model)
    model_config = read_config(checkpoint)
    device = _device(config)
    torch.set_num_threads(usable_cpus())
    max_model_len = _max_model_len(config, model_config)
    runner = _load_runner(checkpoint, model_config, config, device, max_model_len, progress)
    limits = SchedulerLimits(
        num_blocks=runner.num_blocks,
        block_size=config.block_size,
        max_seqs=config.max_seqs,
        max_step_tokens=config.max_step_tokens or (8192 if device.type == "cuda" else 512),
        max_model_len=max_model_len,
        vocab_size=model_config.vocab_size,
        eos_ids=frozenset(model_config.eos_ids),
        prefix_caching=config.prefix_caching,
    )
    if limits.longest_sequence < max_model_len:
        log.warning("requests are limited to %d tokens, all that the KV cache holds", limits.longest_sequence)
    return Scheduler(limits), runner, EngineInfo(checkpoint.name, limits.longest_sequence, model_config.vocab_size)


def _load_runner(
    checkpoint: Checkpoint,
    model_config: ModelConfig,
    config: EngineConfig,
    device: torch.device,
    max_model_len: int,
    progress: Progress | None,
) -> ModelRunner:
    dtype = _dtype(config, device)
    began = time.monotonic()
    model = load_model(checkpoint, model_config, dtype=dtype, device=device, progress=progress)
    size = sum(tensor.nbytes for _, tensor in model.checkpoint_tensors())
    log.info(
        "loaded %s: %s, %.2f GiB in %s on %s, %.1f s",
        checkpoint.name,
        model_config.architecture,
        size / 2**30,
        str(dtype).removeprefix("torch."),
        device,
        time.monotonic() - began,
    )
    spec = model.attention_spec
    demand = KVDemand(block_bytes(spec, config.block_size, dtype), config.block_size, max_model_len, config.max_seqs)
    num_blocks = kv_blocks(demand, config.kv_memory_gib, device)
    attention = ReferenceAttention(spec, num_blocks, config.block_size, dtype, device)
    table_blocks = -(-max_model_len // config.block_size)
    state = RowState(config.max_seqs, table_blocks, model_config.vocab_size, device)
    forward = TorchForward(model, attention, device)
    return ModelRunner(forward, state, num_blocks=num_blocks, block_size=config.block_size)


def _device(config: EngineConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise StartupError("device is cuda but torch sees no CUDA device; use --device cpu", param="engine.device")
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def _dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype


def _max_model_len(config: EngineConfig, model_config: ModelConfig) -> int:
    if config.max_model_len is None:
        return model_config.max_position
    if config.max_model_len > model_config.max_position:
        raise StartupError(
            f"max_model_len is {config.max_model_len}, but the model was made for at most "
            f"{model_config.max_position} tokens; lower max_model_len",
            param="engine.max_model_len",
        )
    return config.max_model_len
