"""From a model's name to something that can run steps: resolve, load, size the cache, put the parts together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from penstock.checkpoint.source import Checkpoint, resolve
from penstock.core.config import EngineConfig
from penstock.core.engine import EngineInfo
from penstock.core.errors import StartupError
from penstock.core.machine import usable_cpus
from penstock.engine.executor import Executor
from penstock.engine.scheduler import Scheduler, SchedulerLimits
from penstock.kernels import native
from penstock.kernels.attention_reference import ReferenceAttention, block_bytes
from penstock.models.base import CausalLM
from penstock.models.config import ModelConfig, read_config
from penstock.models.loader import load_model
from penstock.runner.forward import TorchForward
from penstock.runner.memory import KVDemand, kv_blocks
from penstock.runner.model_runner import ModelRunner
from penstock.runner.row_state import RowState

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is decided before anything is loaded."""

    checkpoint: Checkpoint
    model: ModelConfig
    engine: EngineConfig
    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    max_step_tokens: int
    progress: Progress | None

    @property
    def table_blocks(self) -> int:
        return -(-self.max_model_len // self.engine.block_size)

    def kv_demand(self, bytes_per_block: int, reserve: int = 0) -> KVDemand:
        return KVDemand(bytes_per_block, self.engine.block_size, self.max_model_len, self.engine.max_seqs, reserve)


def start(model: str, config: EngineConfig, progress: Progress | None = None) -> tuple[Scheduler, Executor, EngineInfo]:
    """Load a model and return the two halves of an engine: who decides and who computes."""
    checkpoint = resolve(model)
    model_config = read_config(checkpoint)
    device = _device(config)
    plan = _Plan(
        checkpoint=checkpoint,
        model=model_config,
        engine=config,
        device=device,
        dtype=_dtype(config, device),
        max_model_len=_max_model_len(config, model_config),
        max_step_tokens=config.max_step_tokens or (8192 if device.type == "cuda" else 256),
        progress=progress,
    )
    executor = _cuda_executor(plan) if device.type == "cuda" else _cpu_executor(plan)
    limits = SchedulerLimits(
        num_blocks=executor.num_blocks,
        block_size=config.block_size,
        max_seqs=config.max_seqs,
        max_step_tokens=plan.max_step_tokens,
        max_model_len=plan.max_model_len,
        vocab_size=model_config.vocab_size,
        eos_ids=frozenset(model_config.eos_ids),
        prefix_caching=config.prefix_caching,
    )
    if limits.longest_sequence < plan.max_model_len:
        log.warning("requests are limited to %d tokens, all that the KV cache holds", limits.longest_sequence)
    return Scheduler(limits), executor, EngineInfo(checkpoint.name, limits.longest_sequence, model_config.vocab_size)


def _cpu_executor(plan: _Plan) -> Executor:
    torch.set_num_threads(usable_cpus())
    scheme = _cpu_scheme(plan)
    return _torch_executor(plan, _load(plan)) if scheme is None else _native_executor(plan, scheme)


def _cpu_scheme(plan: _Plan) -> native.Scheme | None:
    """How the native kernels should hold the weights; None for plain torch."""
    config = plan.engine
    if config.quantization == "fp8":
        raise StartupError("quantization fp8 needs a CUDA device; use int8, int4 or none", param="engine.quantization")
    problem = native.unsupported_reason(plan.model, config.block_size)
    if config.quantization in ("int8", "int4"):
        if problem:
            raise StartupError(f"quantization {config.quantization}: {problem}", param="engine.quantization")
        return config.quantization
    if config.dtype in ("float32", "float16"):
        return None
    if problem:
        log.warning("%s; running on plain torch, which is several times slower", problem)
        return None
    return "int8" if config.quantization == "auto" and config.dtype == "auto" else "none"


def _native_executor(plan: _Plan, scheme: native.Scheme) -> Executor:
    from penstock.runner.native_forward import NativeForward, fill, native_model

    config, model = plan.engine, plan.model
    block = 2 * model.num_layers * config.block_size * model.num_kv_heads * model.head_dim * torch.bfloat16.itemsize
    num_blocks = kv_blocks(plan.kv_demand(block), config.kv_memory_gib, plan.device)
    network = native_model(model, scheme, block_size=config.block_size, num_blocks=num_blocks, threads=usable_cpus())
    fill(network, plan.checkpoint, model, plan.progress)
    state = RowState(config.max_seqs, plan.table_blocks, model.vocab_size, plan.device)
    return ModelRunner(NativeForward(network), state, num_blocks=num_blocks, block_size=config.block_size)


def _torch_executor(plan: _Plan, model: CausalLM) -> Executor:
    """The model as it is written down, on any device."""
    config, spec = plan.engine, model.attention_spec
    demand = plan.kv_demand(block_bytes(spec, config.block_size, plan.dtype))
    num_blocks = kv_blocks(demand, config.kv_memory_gib, plan.device)
    attention = ReferenceAttention(spec, num_blocks, config.block_size, plan.dtype, plan.device)
    state = RowState(config.max_seqs, plan.table_blocks, plan.model.vocab_size, plan.device)
    forward = TorchForward(model, attention, plan.device)
    return ModelRunner(forward, state, num_blocks=num_blocks, block_size=config.block_size)


def _cuda_executor(plan: _Plan) -> Executor:
    from penstock.runner.cuda_runner import CudaRunner, working_memory  # Triton comes with torch for CUDA only
    from penstock.runner.fused_forward import FusedForward, quantize_fp8, supports_fused

    config, quantization = plan.engine, plan.engine.quantization
    if quantization in ("int8", "int4"):
        raise StartupError(f"quantization {quantization} runs on CPU; on CUDA use fp8", param="engine.quantization")
    model = _load(plan)
    if not supports_fused(model, plan.model):
        if quantization == "fp8":
            raise StartupError("quantization fp8 covers dense models only", param="engine.quantization")
        return _torch_executor(plan, model)
    if quantization == "fp8":
        quantize_fp8(model)
    reserve = working_memory(plan.model, config.max_seqs, plan.max_step_tokens)
    demand = plan.kv_demand(block_bytes(model.attention_spec, config.block_size, plan.dtype), reserve)
    num_blocks = kv_blocks(demand, config.kv_memory_gib, plan.device)
    forward = FusedForward(
        model,
        plan.model,
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_seqs=config.max_seqs,
        max_model_len=plan.max_model_len,
    )
    state = RowState(config.max_seqs + 1, plan.table_blocks, plan.model.vocab_size, plan.device)
    runner = CudaRunner(
        forward, state, num_blocks=num_blocks, block_size=config.block_size, vocab_size=plan.model.vocab_size
    )
    began = time.monotonic()
    sizes = runner.capture_all()
    log.info("captured decode steps of %d sizes, %.1f s", sizes, time.monotonic() - began)
    return runner


def _load(plan: _Plan) -> CausalLM:
    began = time.monotonic()
    model = load_model(plan.checkpoint, plan.model, dtype=plan.dtype, device=plan.device, progress=plan.progress)
    log.info(
        "loaded %s: %s, %.2f GiB in %s on %s, %.1f s",
        plan.checkpoint.name,
        plan.model.architecture,
        sum(tensor.nbytes for _, tensor in model.checkpoint_tensors()) / 2**30,
        str(plan.dtype).removeprefix("torch."),
        plan.device,
        time.monotonic() - began,
    )
    return model


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
