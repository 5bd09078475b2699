"""Programmatic dependent launch: a kernel starts while its predecessor still drains, and waits before reading from it.

Each kernel takes a constexpr `PDL`. With it set the kernel lets its successor start at once, and calls `gdc_wait`
before it touches anything an earlier kernel wrote or reads. Kernels without it are ordered as usual.
"""

from __future__ import annotations

from functools import cache

import torch
import triton


@cache
def overlaps_launches() -> bool:
    """Hopper and later; never in Triton's interpreter, which runs on the CPU."""
    if triton.knobs.runtime.interpret or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability() >= (9, 0)
