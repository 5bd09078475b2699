"""How many blocks the KV cache gets, from the setting or from free memory, with one log line that says why."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.core.errors import StartupError
from penstock.core.machine import free_memory

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

GIB = 2**30
# On a GPU the rest is for the allocator and CUDA graphs; on a CPU the machine has other tenants.
_GPU_SHARE = 0.95
_CUDA_CONTEXT = 2**29  # bytes that a process takes of the GPU before it allocates anything, about
_CPU_SHARE = 0.5
_CPU_FLOOR = 2**28  # 256 MiB: a server that shares a laptop should stay small until told otherwise
_CPU_FULL_REQUESTS = 1.25  # but one request of full length, and others beside it, must fit


@dataclass(frozen=True, slots=True)
class KVDemand:
    block_bytes: int
    block_size: int
    max_model_len: int
    max_seqs: int
    reserve: int = 0  # bytes that steps need beside the cache


def kv_blocks(
    demand: KVDemand, kv_memory_gib: float | None, device: torch.device | None = None, gpu_share: float | None = None
) -> int:
    """Blocks to allocate, from the setting or from free memory; never more than all rows could use. `gpu_share` is what
    this process may have of the GPU."""
    per_sequence = -(-demand.max_model_len // demand.block_size)
    on_gpu = device is not None and device.type == "cuda"
    free = _free_on_gpu(device, gpu_share) if on_gpu else free_memory()
    if kv_memory_gib is not None:
        budget, reason = int(kv_memory_gib * GIB), "as set by kv_memory_gib"
    elif on_gpu:
        budget = int((free - demand.reserve) * _GPU_SHARE)
        reason = f"{_GPU_SHARE:.0%} of {free / GIB:.1f} GiB free on the GPU less {demand.reserve / GIB:.1f} for steps"
    else:
        full = _CPU_FULL_REQUESTS * per_sequence * demand.block_bytes
        budget = int(min(free * _CPU_SHARE, max(_CPU_FLOOR, full)))
        reason = f"of {free / GIB:.1f} GiB free; --kv-memory-gib for more"
    room = int((free - demand.reserve) * (_GPU_SHARE if on_gpu else 1))
    if budget > room > 0:
        raise StartupError(
            f"kv_memory_gib is {budget / GIB:.2f} GiB but only {room / GIB:.2f} GiB are left beside the model and its "
            f"steps; set kv_memory_gib to at most {room / GIB:.2f}",
            param="engine.kv_memory_gib",
        )
    blocks = min(budget // demand.block_bytes, demand.max_seqs * per_sequence)
    if blocks < 2:
        raise StartupError(
            f"no room for a KV cache: {budget / GIB:.3f} GiB ({reason}), one block of {demand.block_size} tokens "
            f"takes {demand.block_bytes / 2**20:.1f} MiB; raise kv_memory_gib, lower max_step_tokens or max_seqs, "
            "or use a smaller model",
            param="engine.kv_memory_gib",
        )
    tokens = blocks * demand.block_size
    log.info(
        "KV cache: %.2f GiB (%s) = %d blocks of %d tokens, %.1f KiB per token: "
        "%d tokens in all, %.1f requests of the full %d tokens at once",
        blocks * demand.block_bytes / GIB,
        reason,
        blocks,
        demand.block_size,
        demand.block_bytes / demand.block_size / 1024,
        tokens,
        tokens / demand.max_model_len,
        demand.max_model_len,
    )
    return blocks


def _free_on_gpu(device: torch.device | None, share: float | None) -> int:
    import torch  # the native CPU path does without it

    free, total = torch.cuda.mem_get_info(device)
    if share is None:
        return free
    return min(free, int(total * share) - torch.cuda.memory_reserved(device) - _CUDA_CONTEXT)
