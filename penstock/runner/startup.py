"""Starts an engine from a model's name: resolve and load the checkpoint, size the KV cache, build the engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

from penstock.checkpoint.revision import revision
from penstock.checkpoint.source import Checkpoint, is_on_hub, resolve
from penstock.core.engine import EngineInfo
from penstock.core.errors import StartupError
from penstock.core.machine import keep_compiled, keep_kernels, usable_cpus, with_niceness
from penstock.core.onednn import cap_onednn
from penstock.core.start_times import StartTimes
from penstock.engine.executor import HostMemory, LoadedExecutor
from penstock.engine.limits import SchedulerLimits
from penstock.engine.scheduler import Scheduler
from penstock.engine.settings import EngineConfig
from penstock.engine.step_time import kept_step_times
from penstock.kernels.native.bindings import KVFormat, Scheme, isa
from penstock.kernels.native.shape import native_block_bytes, unsupported_reason
from penstock.models.config import ModelConfig, read_config, sampling_defaults
from penstock.models.context_length import max_model_len
from penstock.models.encoder_config import encoder_architecture
from penstock.models.pooling import Pooling
from penstock.runner.device import DeviceKind, device_of, need
from penstock.runner.drafting import drafter_of, spare_blocks, speculation_by
from penstock.runner.encoder_startup import decoder_pooling, start_encoder
from penstock.runner.memory import KVDemand, kv_blocks
from penstock.runner.pooled_runner import POOLED_NICENESS, NativeHidden, PooledRunner

if TYPE_CHECKING:  # the native CPU path does without torch: 0.2 GiB and a second or two
    import torch

    from penstock.models.base import CausalLM

log = logging.getLogger(__name__)

_TILE_ROWS = 128  # of attention of prompts on a GPU: queries times the heads that share their keys

_NOT_ON_TORCH = "deterministic is not there for models that run on plain torch; set deterministic to false"

Progress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is decided before anything is loaded."""

    checkpoint: Checkpoint
    model: ModelConfig
    engine: EngineConfig
    device_kind: DeviceKind
    max_model_len: int
    max_step_tokens: int
    progress: Progress | None
    times: StartTimes
    pooling: Pooling | None = None  # how embeddings are made of hidden states; None: it generates text

    @property
    def device(self) -> torch.device:
        import torch

        return torch.device(self.device_kind)

    @property
    def dtype_name(self) -> str:
        default = "bfloat16" if self.device_kind == "cuda" else "float32"
        return default if self.engine.dtype == "auto" else self.engine.dtype

    @property
    def dtype(self) -> torch.dtype:
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype_name)
        return dtype

    @property
    def machine(self) -> str:
        """What step times depend on."""
        if self.device_kind == "cpu":
            return f"cpu-{usable_cpus()}"
        import torch

        return torch.cuda.get_device_name(self.device)

    @property
    def table_blocks(self) -> int:
        return -(-self.max_model_len // self.engine.block_size)

    def kv_demand(self, bytes_per_block: int, reserve: int = 0) -> KVDemand:
        return KVDemand(bytes_per_block, self.engine.block_size, self.max_model_len, self.engine.max_seqs, reserve)


def planned(
    checkpoint: Checkpoint,
    config: EngineConfig,
    device: DeviceKind,
    progress: Progress | None,
    times: StartTimes,
) -> _Plan:
    model, pooling = read_config(checkpoint), decoder_pooling(checkpoint, config)
    return _Plan(
        checkpoint=checkpoint,
        model=model,
        engine=config,
        device_kind=device,
        max_model_len=max_model_len(config.max_model_len, model.max_position),
        max_step_tokens=config.max_step_tokens or (8192 if device == "cuda" else 256),
        progress=progress,
        times=times,
        pooling=pooling,
    )


def start(
    model: str, config: EngineConfig, progress: Progress | None = None, times: StartTimes | None = None
) -> tuple[Scheduler, LoadedExecutor, EngineInfo]:
    """Load a model and return the two halves of an engine: who decides and who computes."""
    keep_compiled("torch")
    times = times or StartTimes()
    times.ended("import")
    checkpoint = resolve(model)
    if is_on_hub(model):
        times.ended("download")
    device = device_of(config, checkpoint)
    if encoder_architecture(checkpoint) is not None:
        return start_encoder(checkpoint, config, device, times)
    plan = planned(checkpoint, config, device, progress, times)
    model_config = plan.model
    sampling = sampling_defaults(checkpoint.name, model_config, config.sampling_defaults)
    # First: what it leaves of the memory is the KV cache's.
    native, drafter = device == "cpu" and cpu_scheme(plan) is not None, None
    if plan.pooling is None:
        drafter = drafter_of(checkpoint, model_config, config, plan.max_model_len, native=native)
    niceness = POOLED_NICENESS if plan.pooling is not None else 0
    load = partial(_cuda_executor if device == "cuda" else _cpu_executor, plan)
    executor = with_niceness(niceness, load) if niceness and device == "cpu" else load()
    limits = _limits(plan, executor)
    if limits.longest_sequence < plan.max_model_len:
        log.warning("requests are limited to %d tokens, all that the KV cache holds", limits.longest_sequence)
    step_times = kept_step_times(
        plan.machine,
        checkpoint.name,
        config.quantization,
        config.dtype,
        config.kv_dtype,
        *(["deterministic"] if config.deterministic else []),
        padded=executor.padded_tokens,
    )
    speculation = speculation_by(drafter, executor, step_times, model_config, config, plan.max_model_len)
    info = EngineInfo(
        checkpoint.name,
        limits.longest_sequence,
        model_config.vocab_size,
        f"{revision(checkpoint)}-{_precision(plan)}",
        sampling,
        block_size=limits.block_size,
        task="generate" if plan.pooling is None else "embed",
        width=0 if plan.pooling is None else model_config.hidden_size,
        normalized=plan.pooling is not None and plan.pooling.normalize,
    )
    return Scheduler(limits, step_times, speculation), executor, info


def _limits(plan: _Plan, executor: LoadedExecutor) -> SchedulerLimits:
    config, model, pooling = plan.engine, plan.model, plan.pooling
    memory = executor.host_memory or HostMemory(0, 0)
    return SchedulerLimits(
        num_blocks=executor.num_blocks,
        block_size=config.block_size,
        max_seqs=config.max_seqs,
        max_step_tokens=plan.max_step_tokens,
        max_model_len=plan.max_model_len,
        vocab_size=model.vocab_size,
        eos_ids=frozenset(token for token in model.eos_ids if token < model.vocab_size),
        prefix_caching=config.prefix_caching and (pooling is None or pooling.kind != "mean"),
        max_waiting=config.max_waiting,
        fcfs=config.scheduling == "fcfs",
        max_adapters=config.max_adapters if executor.adapter_modules else 0,
        pools=pooling is not None,
        weight_bytes=memory.weights,
        kv_token_bytes=memory.cache // (executor.num_blocks * config.block_size),
        query_tile=_TILE_ROWS * model.num_kv_heads // model.num_heads if plan.device_kind == "cuda" else 1,
    )


def _cpu_executor(plan: _Plan) -> LoadedExecutor:
    scheme = cpu_scheme(plan)
    if plan.engine.deterministic and (problem := _varies_on_cpu(scheme)):
        raise StartupError(problem, param="engine.deterministic")
    if scheme is not None:
        return _native_executor(plan, scheme)
    kind = plan.engine.kv_dtype
    if kind == "int8" or (kind == "bf16" and plan.dtype_name != "bfloat16"):
        raise StartupError(
            f"kv_dtype {kind} needs the native kernels; plain torch, which this runs on, keeps the cache in "
            f"{plan.dtype_name}: leave kv_dtype out",
            param="engine.kv_dtype",
        )
    if line := cap_onednn():
        log.warning(line)
    import torch

    torch.set_num_threads(usable_cpus())
    return _torch_executor(plan, _load(plan))


def _varies_on_cpu(scheme: Scheme | None) -> str | None:
    """Why logits depend on the batch with weights in this scheme; None if they do not."""
    if scheme is None:
        return _NOT_ON_TORCH
    if scheme == "none" and isa() == "amx":
        return "deterministic needs int8 or int4: AMX sums bf16 weights in other orders for few rows than for many"
    return None


def cpu_scheme(plan: _Plan) -> Scheme | None:
    """How the native kernels should hold the weights; None for plain torch."""
    config = plan.engine
    if config.quantization == "fp8":
        raise StartupError("quantization fp8 needs a CUDA device; use int8, int4 or none", param="engine.quantization")
    if config.kv_dtype == "fp8":
        raise StartupError("kv_dtype fp8 needs a CUDA device; use int8 or leave it out", param="engine.kv_dtype")
    problem = unsupported_reason(plan.model, config.block_size)
    if plan.checkpoint.kind == "packed":
        return _packed_scheme(plan, problem)
    if config.quantization in ("int8", "int4"):
        if problem:
            raise StartupError(f"quantization {config.quantization}: {problem}", param="engine.quantization")
        return config.quantization
    if config.dtype in ("float32", "float16"):
        need("torch", f"dtype {config.dtype} on a CPU", "engine.dtype")
        return None
    if problem:
        need("torch", f"{problem}; running without the native kernels")
        log.warning("%s; running on plain torch, which is several times slower", problem)
        return None
    return "int8" if config.quantization == "auto" and config.dtype == "auto" else "none"


def _packed_scheme(plan: _Plan, problem: str | None) -> Scheme:
    config, scheme = plan.engine, plan.model.dtype
    if problem:
        raise StartupError(f"{plan.checkpoint.path.parent} is packed for the native kernels, but {problem}")
    if config.quantization not in ("auto", scheme):
        raise StartupError(
            f"{plan.checkpoint.path.parent} holds {scheme} weights, not {config.quantization}; leave quantization out",
            param="engine.quantization",
        )
    if config.dtype in ("float32", "float16"):
        raise StartupError(f"the checkpoint is packed in {scheme}; leave dtype out", param="engine.dtype")
    return "int4" if scheme == "int4" else "int8"


def _native_executor(plan: _Plan, scheme: Scheme) -> LoadedExecutor:
    from penstock.runner.host_rows import HostRows
    from penstock.runner.native_runner import NativeRunner
    from penstock.runner.packed import fill, native_model, usual_kv

    plan.times.ended("import")
    config, model = plan.engine, plan.model
    kv = usual_kv(scheme) if config.kv_dtype == "auto" else cast(KVFormat, config.kv_dtype)
    demand = plan.kv_demand(native_block_bytes(model, config.block_size, kv))
    num_blocks = kv_blocks(demand, config.kv_memory_gib)
    spare = spare_blocks(model, config) if plan.pooling is None else 0
    network = native_model(
        model, scheme, block_size=config.block_size, num_blocks=num_blocks + spare, threads=usable_cpus(), kv=kv
    )
    plan.times.ended("kernels")
    fill(network, plan.checkpoint, model, plan.progress)
    plan.times.ended("load")
    rows = HostRows(config.max_seqs, plan.table_blocks, model.vocab_size)
    if plan.pooling is not None:
        return PooledRunner(NativeHidden(network, rows), plan.pooling)
    return NativeRunner(network, rows, spare_blocks=spare)


def _torch_executor(plan: _Plan, model: CausalLM) -> LoadedExecutor:
    """The model as it is written down, on any device."""
    from penstock.kernels.attention_reference import ReferenceAttention, torch_block_bytes
    from penstock.runner.forward import TorchForward
    from penstock.runner.model_runner import ModelRunner
    from penstock.runner.row_state import TorchRows
    from penstock.runner.torch_adapters import adapters_of
    from penstock.runner.torch_hidden import TorchHidden

    plan.times.ended("import")
    config, spec = plan.engine, model.attention_spec
    demand = plan.kv_demand(torch_block_bytes(spec, config.block_size, plan.dtype))
    num_blocks = kv_blocks(demand, config.kv_memory_gib, plan.device, config.gpu_memory_share)
    attention = ReferenceAttention(spec, num_blocks, config.block_size, plan.dtype, plan.device)
    state = TorchRows(config.max_seqs, plan.table_blocks, plan.model.vocab_size, plan.device)
    forward = TorchForward(model, attention, plan.device)
    plan.times.ended("kernels")
    if plan.pooling is not None:
        return PooledRunner(TorchHidden(forward, state, num_blocks, config.block_size), plan.pooling)
    adapters = adapters_of(model, plan.device)
    return ModelRunner(forward, state, adapters, num_blocks=num_blocks, block_size=config.block_size)


def _cuda_executor(plan: _Plan) -> LoadedExecutor:
    need("triton", "device cuda", "engine.device", extra="cuda")
    keep_kernels()
    import torch

    from penstock.runner.cuda_startup import fused_executor, fused_hidden  # Triton comes with torch for CUDA only
    from penstock.runner.fused_forward import supports_fused

    config = plan.engine
    if config.quantization in ("int8", "int4"):
        raise StartupError(
            f"quantization {config.quantization} runs on CPU; on CUDA use fp8", param="engine.quantization"
        )
    if config.kv_dtype == "int8":
        raise StartupError("kv_dtype int8 runs on CPU; on CUDA use fp8", param="engine.kv_dtype")
    try:
        model = _load(plan)
    except torch.OutOfMemoryError as error:
        total = torch.cuda.mem_get_info(plan.device)[1] / 2**30
        raise StartupError(
            f"the weights of {plan.checkpoint.name} do not fit into what is free of the GPU's {total:.0f} GiB; use a "
            "smaller model, or free the memory that other processes hold"
        ) from error
    if supports_fused(model, plan.model):
        pooling = plan.pooling
        runner = fused_executor(plan, model) if pooling is None else PooledRunner(fused_hidden(plan, model), pooling)
        plan.times.ended("kernels")
        return runner
    if config.deterministic:
        raise StartupError(_NOT_ON_TORCH, param="engine.deterministic")
    if config.quantization == "fp8" or config.kv_dtype == "fp8":
        raise StartupError("fp8 is not there for models with biases in their MLP", param="engine.quantization")
    return _torch_executor(plan, model)


def _precision(plan: _Plan) -> str:
    """Names everything but the weights that decides the logits; batches and instruction sets move them less."""
    native_runs = plan.device_kind == "cpu" and not unsupported_reason(plan.model, plan.engine.block_size)
    kind = f"{plan.device_kind}-{'native' if native_runs else 'torch'}"
    mode = "-deterministic" if plan.engine.deterministic else ""
    mode += f"-{plan.pooling.kind}-{plan.pooling.normalize}" if plan.pooling is not None else ""
    return f"{kind}-{plan.dtype_name}-{plan.engine.quantization}-{plan.engine.kv_dtype}{mode}"


def _load(plan: _Plan) -> CausalLM:
    from penstock.models.loader import load_model

    plan.times.ended("import")
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
    plan.times.ended("load")
    return model
