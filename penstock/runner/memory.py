"""How many KV blocks fit, and why, in one line."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from penstock.core.errors import StartupError
from penstock.core.machine import free_memory

log = logging.getLogger(__name__)

GIB = 2**30
# On a GPU the rest is for the allocator and captured graphs; on a CPU the machine has other tenants.
_GPU_SHARE = 0.95
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


def kv_blocks(demand: KVDemand, kv_memory_gib: float | None, device: torch.device) -> int:
    """Blocks to allocate, from the setting or from free memory; never more than all rows could use."""
    per_sequence = -(-demand.max_model_len // demand.block_size)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
    if kv_memory_gib is not None:
        budget, reason = int(kv_memory_gib * GIB), "as set by kv_memory_gib"
    elif device.type == "cuda":
        budget = int((free - demand.reserve) * _GPU_SHARE)
        reason = f"{_GPU_SHARE:.0%} of {free / GIB:.1f} GiB free on the GPU less {demand.reserve / GIB:.1f} for steps"
    else:
        full = _CPU_FULL_REQUESTS * per_sequence * demand.block_bytes
        budget = int(min(free * _CPU_SHARE, max(_CPU_FLOOR, full)))
        reason = f"of {free / GIB:.1f} GiB free; --kv-memory-gib for more"
    if budget > free - demand.reserve:
        raise StartupError(
            f"kv_memory_gib is {budget / GIB:.2f} GiB but only {(free - demand.reserve) / GIB:.2f} GiB are left after "
            "loading the model; lower kv_memory_gib",
            param="engine.kv_memory_gib",
        )
    blocks = min(budget // demand.block_bytes, demand.max_seqs * per_sequence)
    if blocks < 2:
        raise StartupError(
            f"no room for a KV cache: {budget / GIB:.3f} GiB ({reason}), one block of {demand.block_size} tokens "
            f"takes {demand.block_bytes / 2**20:.1f} MiB; raise kv_memory_gib or use a smaller model",
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
