"""Start-up on a GPU: compile the kernels, try the largest step, size the KV cache by it, capture the CUDA graphs.

What does not fit is found here, before anything is served, and the error names a setting that fits.
"""

from __future__ import annotations

import logging
import time
import traceback
from typing import TYPE_CHECKING

import torch

from penstock.core.errors import StartupError
from penstock.kernels.attention_reference import torch_block_bytes
from penstock.models.llama import Llama
from penstock.quantization.fp8 import quantize_model
from penstock.runner.cuda_runner import CudaRunner
from penstock.runner.device_adapters import DeviceAdapters, no_adapters
from penstock.runner.device_rows import DeviceRows
from penstock.runner.fused_forward import FusedForward, deterministic_problem
from penstock.runner.largest_step import most_sampled
from penstock.runner.memory import GIB, kv_blocks

if TYPE_CHECKING:
    from penstock.runner.startup import _Plan as Plan

log = logging.getLogger(__name__)


def fused_executor(plan: Plan, model: Llama) -> CudaRunner:
    config = plan.engine
    problem = deterministic_problem(model, plan.model) if config.deterministic else None
    if problem:
        raise StartupError(f"deterministic: {problem}; set deterministic to false", param="engine.deterministic")
    if config.quantization == "fp8":
        quantize_model(model)
    kv_dtype = torch.float8_e4m3fn if config.kv_dtype == "fp8" else plan.dtype
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    runner = _with_smallest_cache(plan, model, kv_dtype, free)
    step_bytes = _compile_and_try(plan, runner, free)
    block = torch_block_bytes(model.attention_spec, config.block_size, kv_dtype)
    # Twice: CUDA graphs have memory of their own.
    num_blocks = kv_blocks(
        plan.kv_demand(block, 2 * step_bytes), config.kv_memory_gib, plan.device, config.gpu_memory_share
    )
    began = time.monotonic()
    try:
        runner.allocate_cache(num_blocks)
        sizes = runner.capture_all()
        runner.probe()  # once more, now that everything is in its place
    except torch.OutOfMemoryError as error:
        raise StartupError(
            f"the largest step does not fit beside a KV cache of {num_blocks * block / GIB:.2f} GiB; "
            f"set kv_memory_gib to at most {0.9 * num_blocks * block / GIB:.2f}",
            param="engine.kv_memory_gib",
        ) from error
    log.info("captured %d CUDA graphs in %.1f s", sizes, time.monotonic() - began)
    return runner


def _with_smallest_cache(plan: Plan, model: Llama, kv_dtype: torch.dtype, free: int) -> CudaRunner:
    config = plan.engine
    try:
        forward = FusedForward(
            model,
            plan.model,
            num_blocks=1,
            block_size=config.block_size,
            max_seqs=most_sampled(config.max_seqs),
            max_model_len=plan.max_model_len,
            kv_dtype=kv_dtype,
            deterministic=config.deterministic,
        )
        return CudaRunner(
            forward,
            DeviceRows(config.max_seqs + 1, plan.table_blocks, plan.model.vocab_size, plan.device),
            _adapters(plan, forward),
            block_size=config.block_size,
            vocab_size=plan.model.vocab_size,
            max_step_tokens=plan.max_step_tokens,
        )
    except torch.OutOfMemoryError as error:
        raise _too_many_sequences(plan, free) from error


def _adapters(plan: Plan, forward: FusedForward) -> DeviceAdapters:
    """Slots for LoRA adapters. Not where a step must compute every token alike: those without an adapter would take
    other kernels beside those with one than alone."""
    config = plan.engine
    if config.deterministic or not config.max_adapters:
        return no_adapters(plan.device)
    largest = max(plan.max_step_tokens, most_sampled(config.max_seqs))
    try:
        adapters = DeviceAdapters(
            forward.adapter_shapes,
            slots=config.max_adapters,
            max_rank=config.max_adapter_rank,
            max_tokens=-(-largest // 512) * 512,  # as steps are padded
            dtype=plan.dtype,
            device=plan.device,
        )
    except torch.OutOfMemoryError as error:
        raise StartupError(
            f"{config.max_adapters} LoRA adapters of rank {config.max_adapter_rank} do not fit beside the model; lower "
            "max_adapters or max_adapter_rank, or set max_adapters to 0",
            param="engine.max_adapters",
        ) from error
    log.info(
        "slots for %d LoRA adapters of rank %d: %.2f GiB",
        config.max_adapters,
        config.max_adapter_rank,
        adapters.nbytes / GIB,
    )
    return adapters


def _compile_and_try(plan: Plan, runner: CudaRunner, free: int) -> int:
    """Bytes that the largest step takes; or how large it may be."""
    began = time.monotonic()
    try:
        runner.compile_all()
        compiled = time.monotonic()
        step_bytes = runner.probe()
        log.info(
            "compiled kernels in %.1f s, tried the largest step (%.2f GiB) in %.1f s",
            compiled - began,
            step_bytes / GIB,
            time.monotonic() - compiled,
        )
        return step_bytes
    except torch.OutOfMemoryError as error:
        traceback.clear_frames(error.__traceback__)  # what the step held is free again
        tokens = plan.max_step_tokens // 2
        while tokens > 1 and not _fits(runner, tokens):
            tokens //= 2
        if tokens <= 1:
            raise _too_many_sequences(plan, free) from error
        raise StartupError(
            f"a step of {plan.max_step_tokens} tokens does not fit into the {free / GIB:.2f} GiB that the weights "
            f"leave free; set max_step_tokens to at most {tokens // 2}, which leaves room for a KV cache",
            param="engine.max_step_tokens",
        ) from error


def _fits(runner: CudaRunner, tokens: int) -> bool:
    try:
        runner.probe(tokens)
    except torch.OutOfMemoryError:
        return False
    return True


def _too_many_sequences(plan: Plan, free: int) -> StartupError:
    """A sequence takes its logits several times over: as they are, adjusted, in sampling's lists, as tables."""
    each = 5 * 4 * plan.model.vocab_size
    fitting = max(1, min(plan.engine.max_seqs // 2, int(free / 2 / each)))
    return StartupError(
        f"sampling for {plan.engine.max_seqs} sequences does not fit into the {free / GIB:.2f} GiB that the weights "
        f"leave free; set max_seqs to at most {fitting}",
        param="engine.max_seqs",
    )
