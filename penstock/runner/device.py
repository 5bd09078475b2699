"""Where a model runs: on a GPU if there is one that can be used, else on the CPU."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
from typing import Literal

from penstock.checkpoint.source import Checkpoint
from penstock.core.errors import StartupError
from penstock.engine.settings import EngineConfig

log = logging.getLogger(__name__)

DeviceKind = Literal["cpu", "cuda"]


def device_of(config: EngineConfig, checkpoint: Checkpoint) -> DeviceKind:
    if checkpoint.kind == "packed" and config.device == "cuda":
        raise StartupError(
            f"{checkpoint.path.parent} is packed for the CPU; serve the original checkpoint", param="engine.device"
        )
    if config.device == "cpu" or checkpoint.kind == "packed":
        return "cpu"
    if config.device == "cuda":
        need("torch", "device cuda", "engine.device", extra="cuda")
    if _cuda_available():
        return "cuda"
    if config.device == "cuda":
        raise StartupError("device is cuda but torch sees no CUDA device; use --device cpu", param="engine.device")
    return "cpu"


def _cuda_available() -> bool:
    """Asks torch only where there is a driver, so that a machine without one never loads torch for this."""
    if not has_cuda_driver():
        return False
    if not _installed("torch"):
        log.warning("running on the CPU; the GPU of this machine needs torch: pip install 'penstock[cuda]'")
        return False
    import torch

    return torch.cuda.is_available()


def has_cuda_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def need(package: str, purpose: str, param: str | None = None, *, extra: str = "torch") -> None:
    if not _installed(package):
        raise StartupError(f"{purpose} needs {package}: pip install 'penstock[{extra}]'", param=param)
