"""A kernel measured at one size, in several variants, and the device it is measured against."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

DEVICE = torch.device("cuda")
COPY_BYTES = 4.28e12  # measured bytes per second of the H200
MATRIX_FLOPS = {torch.bfloat16: 791e12, torch.float8_e4m3fn: 1448e12}
ROTATE_BYTES = 300e6  # five times the L2 cache
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


@dataclass(slots=True)
class Variant:
    label: str
    run: Callable[[int], object]  # takes the index of the input set
    error: Callable[[], float] | None = (
        None  # relative error after run(0); None: timed only. A label with * is a peer's
    )


@dataclass(slots=True)
class Case:
    name: str
    floor_s: float  # what the device's limits allow
    sets: int
    variants: list[Variant]


def randn(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device=DEVICE, dtype=BF16 if dtype == FP8 else dtype) * scale).to(dtype)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    error = float((actual.double() - expected.double()).norm() / expected.double().norm())
    return error if math.isfinite(error) else math.inf


def sets_for(size: float) -> int:
    """How many input sets of `size` bytes outgrow the cache."""
    return int(min(64, max(1, math.ceil(ROTATE_BYTES / size))))


def short(dtype: torch.dtype) -> str:
    return {BF16: "bf16", FP8: "fp8", torch.float32: "fp32"}[dtype]
