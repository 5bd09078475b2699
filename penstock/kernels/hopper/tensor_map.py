"""Tensor maps: how boxes of a tensor are copied to shared memory by the tensor memory accelerator."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch

from penstock.kernels.hopper.program import TensorMap, check, driver

# CUtensorMapDataType, CUtensorMapSwizzle
_TYPES = {torch.uint8: 0, torch.float8_e4m3fn: 0, torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_AS_ASKED = 0  # CU_TENSOR_MAP_L2_PROMOTION_NONE: fetching 256 bytes at a time costs 3% of the bandwidth


def tensor_map(tensor: torch.Tensor, box: tuple[int, ...], swizzle: int = 128) -> TensorMap:
    """For boxes of that many elements, dimensions in the tensor's order. What lies outside the tensor reads as zero.

    The last dimension must be contiguous, the other strides multiples of 16 bytes. With a swizzle the last side of the
    box is at most that many bytes.
    """
    return _encoded(tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), box, swizzle)


@lru_cache(1 << 15)  # it holds no more than what it is made from, and CUDA graphs use the same memory again
def _encoded(
    address: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int,
) -> TensorMap:
    rank, size = len(shape), dtype.itemsize
    if strides[-1] != 1 or any(stride * size % 16 for stride in strides[:-1]):
        raise ValueError(f"strides {strides} of {dtype}: not for the tensor memory accelerator")
    made = TensorMap()
    place = (ctypes.c_uint8 * 192)()  # the driver writes to a multiple of 64 bytes
    aligned = (ctypes.addressof(place) + 63) // 64 * 64
    check(
        driver().cuTensorMapEncodeTiled(
            ctypes.c_void_p(aligned),
            _TYPES[dtype],
            rank,
            ctypes.c_void_p(address),
            (ctypes.c_uint64 * rank)(*reversed(shape)),
            (ctypes.c_uint64 * rank)(*(stride * size for stride in reversed(strides[:-1]))),
            (ctypes.c_uint32 * rank)(*reversed(box)),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            0,
            _SWIZZLES[swizzle],
            _AS_ASKED,
            0,
        )
    )
    ctypes.memmove(ctypes.byref(made), aligned, ctypes.sizeof(made))
    return made


def alternating(gate_up: torch.Tensor) -> torch.Tensor:
    """[N / 16, 2, 8, K] of [N, K]: 8 channels of the gate, which is the first half, the same 8 of up, the next 8 ..."""
    return gate_up.view(2, len(gate_up) // 16, 8, -1).transpose(0, 1)
