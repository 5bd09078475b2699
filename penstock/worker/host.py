"""What a worker uses of its machine: CPU time, memory, and the GPU that it computes on."""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

from penstock.core.engine import GpuStats, HostStats

log = logging.getLogger(__name__)


class Host:
    """Reads without a wait of more than a few milliseconds."""

    def __init__(self) -> None:
        self._nvml, self._device = _open_gpu()

    def read(self) -> HostStats:
        return HostStats(time.process_time(), resident_bytes("self"), self._gpu())

    def _gpu(self) -> GpuStats | None:
        nvml, device = self._nvml, self._device
        if nvml is None:
            return None
        try:
            memory = nvml.nvmlDeviceGetMemoryInfo(device)
            return GpuStats(
                name=_text(nvml.nvmlDeviceGetUUID(device)),
                utilisation=nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100,
                memory_bytes=memory.total,
                memory_used_bytes=memory.used,
                temperature_celsius=nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU),
                power_watts=nvml.nvmlDeviceGetPowerUsage(device) / 1000,
                power_limit_watts=nvml.nvmlDeviceGetEnforcedPowerLimit(device) / 1000,
                clock_hertz=nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM) * 1e6,
                clock_limit_hertz=nvml.nvmlDeviceGetMaxClockInfo(device, nvml.NVML_CLOCK_SM) * 1e6,
                energy_joules=nvml.nvmlDeviceGetTotalEnergyConsumption(device) / 1000,
            )
        except nvml.NVMLError as error:
            log.warning("the GPU can no longer be read: %s", error)
            self._nvml = None
            return None


def resident_bytes(process: str) -> int:
    """Of a process by its number, or `self`; 0 where the system does not say."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except OSError:  # no /proc (macOS)
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _open_gpu() -> tuple[Any, Any]:
    """NVML and the GPU that torch computes on; (None, None) without one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None, None
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except ImportError:
        log.info("no metrics of the GPU: nvidia-ml-py is not installed")
    except Exception as error:  # NVML's own error, and torch's for a device without a UUID (MIG)
        log.warning("no metrics of the GPU: %s", error)
    return None, None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
