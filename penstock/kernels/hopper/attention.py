"""Paged attention of many queries on Hopper: prefill and shared prefixes, in bfloat16 with heads of 128.

The same in Triton: `triton/prefill.py` and `triton/prefix.py`.
"""

from __future__ import annotations

from functools import cache

import torch

from penstock.kernels.hopper import program, tensor_map
from penstock.kernels.hopper.program import TensorMap
from penstock.kernels.triton.paged import LOG2_E

_ROWS = 128
_HALF = 64  # elements of a row of shared memory
_THREADS = 384
_SHARED = 6 * _ROWS * 256 + 512
_SLOTS = 512  # pieces of tiles with many keys
_MOST_SMS = 160  # each has a slot of its own for pieces that it computes in turn
INVARIANT_RANGE = 8  # tiles of 128 keys that are summed apart, where results may not depend on the batch


def suits_hopper(q_THD: torch.Tensor, k_cache: torch.Tensor, window: int = 0) -> bool:
    D, block_size = q_THD.shape[2], k_cache.shape[2]
    return (
        q_THD.dtype == k_cache.dtype == torch.bfloat16
        and (D, block_size, window) == (128, 16, 0)
        and q_THD.shape[1] // k_cache.shape[1] <= _ROWS
        and program.is_hopper(q_THD.device)
    )


def prefill_on_hopper(
    out_THD: torch.Tensor,
    q_THD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tables_SM: torch.Tensor,
    query_starts: torch.Tensor,
    contexts_S: torch.Tensor,
    *,
    scale: float,
    key_range: int = 0,
) -> None:
    """The same as `prefill_attention` in Triton. Only one launch may run at a time: all share one scratch.

    `key_range`: 0, or tiles of keys that are summed apart in every sequence, so that a query has the same bits whatever
    else is computed. Otherwise the keys are divided as the device is busy.
    """
    S, H, K = len(contexts_S), q_THD.shape[1], k_cache.shape[1]
    program.kernel("prefill.cu", "prefill", GROUP=H // K, RANGE=key_range)(
        (_sm_count(),), _THREADS, _SHARED,
        *_maps(q_THD, k_cache, v_cache), out_THD, tables_SM, query_starts, contexts_S, *_scratch(),
        _SLOTS, S, K, scale * LOG2_E, out_THD.stride(0), tables_SM.stride(0),
        pdl=True,
    )  # fmt: skip


def prefix_on_hopper(
    out: torch.Tensor,
    lse: torch.Tensor,
    q_SHD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table_M: torch.Tensor,
    length: torch.Tensor,
    *,
    splits: int,
    scale: float,
    pdl: bool,
) -> None:
    """Every query over the first `length` tokens: float32 [splits, S, H, D] and [splits, S, H], base 2."""
    S, H, K = *q_SHD.shape[:2], k_cache.shape[1]
    items = -(-S // (_ROWS * K // H)) * K
    program.kernel("prefix.cu", "prefix", GROUP=H // K)(
        (min(items * splits, _sm_count()),), _THREADS, _SHARED,
        *_maps(q_SHD, k_cache, v_cache), out, lse, table_M, length, S, K, splits, scale * LOG2_E,
        pdl=pdl,
    )  # fmt: skip


def _maps(q_THD: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> tuple[TensorMap, TensorMap, TensorMap]:
    group = q_THD.shape[1] // k_cache.shape[1]
    B = k_cache.shape[2]
    return (
        tensor_map.tensor_map(q_THD, (_ROWS // group, group, _HALF)),
        tensor_map.tensor_map(_in_halves(k_cache), (1, 1, 1, B, _HALF)),
        tensor_map.tensor_map(_in_halves(v_cache), (1, 1, 2, B, _HALF)),
    )


def _in_halves(cache_NKBD: torch.Tensor) -> torch.Tensor:
    """Columns of a block in two halves, one after the other: the order in which a box is written to shared memory."""
    N, K, B, D = cache_NKBD.shape
    return cache_NKBD.view(N, K, B, D // _HALF, _HALF).transpose(2, 3)


@cache
def _sm_count() -> int:
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


@cache
def _scratch() -> tuple[torch.Tensor, ...]:
    with torch.inference_mode(False):  # whoever comes first: others write to it too
        return new_scratch(torch.device("cuda"))


def clear_counters(device: torch.device) -> None:
    """Zero the counters: launches on several streams at once, as while compiling, may leave them at other values."""
    if program.is_hopper(device):
        _scratch()[2].zero_()


def new_scratch(device: torch.device) -> tuple[torch.Tensor, ...]:
    """Sums and states of pieces, and counters, which are zero between launches."""
    places = _SLOTS + _MOST_SMS
    sums = torch.empty((places, _ROWS, 128), dtype=torch.float32, device=device)
    states = torch.empty((places, 2, 128, 4), dtype=torch.float32, device=device)
    return sums, states, torch.zeros(2 + 2 * _SLOTS, dtype=torch.int32, device=device)
