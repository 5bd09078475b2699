"""Copies of small arrays to and from a device that do not wait for it."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch


def to_device(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """On a GPU the copy is queued behind the work before it; it leaves from pinned memory, which the host may drop."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """To be read once the stream has reached this point."""
    if tensor.device.type != "cuda":
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
