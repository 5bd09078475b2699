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
from penstock.runner.device_stream import DeviceStream
from penstock.runner.fused_forward import FusedForward, deterministic_problem
from penstock.runner.fused_hidden import FusedHidden
from penstock.runner.largest_step import most_sampled
from penstock.runner.memory import GIB, kv_blocks
from penstock.runner.row_state import RowState

if TYPE_CHECKING:
    from penstock.runner.startup import _Plan as Plan

log = logging.getLogger(__name__)


def fused_executor(plan: Plan, model: Llama) -> CudaRunner:
    config, kv_dtype = plan.engine, _prepare(plan, model)
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


def fused_hidden(plan: Plan, model: Llama) -> FusedHidden:
    """For vectors: nothing is sampled."""
    config, kv_dtype = plan.engine, _prepare(plan, model)
    state = RowState(config.max_seqs + 1, plan.table_blocks, plan.model.vocab_size, plan.device)
    began, block = time.monotonic(), torch_block_bytes(model.attention_spec, config.block_size, kv_dtype)
    try:
        forward, size = _forward(plan, model, kv_dtype), plan.max_step_tokens
        stream = DeviceStream(plan.device)
        hidden = FusedHidden(forward, state, stream, block_size=config.block_size, max_step_tokens=size)
        hidden.compile_all()
        demand = plan.kv_demand(block, 2 * hidden.probe())  # twice: CUDA graphs have memory of their own
        hidden.allocate_cache(kv_blocks(demand, config.kv_memory_gib, plan.device, config.gpu_memory_share))
        graphs = hidden.capture_all()
        log.info("compiled kernels and captured %d CUDA graphs in %.1f s", graphs, time.monotonic() - began)
    except torch.OutOfMemoryError as error:
        raise StartupError(
            f"a step of {plan.max_step_tokens} tokens does not fit beside the weights and a KV cache; set "
            f"max_step_tokens to {plan.max_step_tokens // 2} or less",
            param="engine.max_step_tokens",
        ) from error
    return hidden


def _prepare(plan: Plan, model: Llama) -> torch.dtype:
    """Quantise the weights if asked to. Returns the format of the KV cache."""
    config = plan.engine
    problem = deterministic_problem(model, plan.model) if config.deterministic else None
    if problem:
        raise StartupError(f"deterministic: {problem}; set deterministic to false", param="engine.deterministic")
    if config.quantization == "fp8":
        quantize_model(model)
    torch.cuda.empty_cache()
    return torch.float8_e4m3fn if config.kv_dtype == "fp8" else plan.dtype


def _forward(plan: Plan, model: Llama, kv_dtype: torch.dtype) -> FusedForward:
    """With the smallest cache: how large it may be is found with it."""
    return FusedForward(
        model,
        plan.model,
        num_blocks=1,
        block_size=plan.engine.block_size,
        max_seqs=most_sampled(plan.engine.max_seqs),
        max_model_len=plan.max_model_len,
        kv_dtype=kv_dtype,
        deterministic=plan.engine.deterministic,
    )


def _with_smallest_cache(plan: Plan, model: Llama, kv_dtype: torch.dtype, free: int) -> CudaRunner:
    config = plan.engine
    try:
        forward = _forward(plan, model, kv_dtype)
        return CudaRunner(
            forward,
            DeviceRows(config.max_seqs + 1, plan.table_blocks, plan.model.vocab_size, DeviceStream(plan.device)),
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
