"""oneDNN, torch's kernels for CPUs, on machines that advertise AMX but do not execute it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from penstock.core.machine import cache_folder

VARIABLE = "ONEDNN_MAX_CPU_ISA"
WITHOUT_AMX = "AVX512_CORE_FP16"  # AVX512_CORE_BF16 would take the fp8 matmul away too

CPUINFO = Path("/proc/cpuinfo")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

# Large enough for oneDNN to take AMX.
PROBE = """
import torch
x = torch.ones(256, 256)
x.bfloat16() @ x.bfloat16()
torch._int_mm(x.char(), x.char())
"""


def cap_onednn(cpuinfo: Path = CPUINFO, probe: str = PROBE) -> str | None:
    """Before torch computes: where AMX kills the process, keep oneDNN from it and return a line that says so.

    Some virtual machines advertise AMX and answer its instructions with SIGILL. A child process finds out, once per
    boot and version of torch, and only where AMX is advertised. A variable that is set already is left as it is.
    """
    if VARIABLE in os.environ or not _advertises_amx(cpuinfo):
        return None
    fault = _fault_of(probe)
    if fault is None:
        return None
    os.environ[VARIABLE] = WITHOUT_AMX
    return f"torch's AMX kernels die of {fault} on this machine: {VARIABLE}={WITHOUT_AMX} keeps it from them"


def _advertises_amx(cpuinfo: Path) -> bool:
    try:
        return "amx_tile" in cpuinfo.read_text()
    except OSError:  # no /proc (macOS)
        return False


def _fault_of(probe: str) -> str | None:
    """The signal that ends the probe. What is found is kept in the cache folder, for this boot and this torch."""
    import importlib.metadata  # 10 ms of every start, for few machines

    try:
        circumstances = f"{BOOT_ID.read_text().strip()} torch {importlib.metadata.version('torch')}"
    except (OSError, importlib.metadata.PackageNotFoundError):  # without torch nothing can die
        return None
    kept = cache_folder() / "onednn_probe"
    try:
        known, status = kept.read_text().splitlines()
    except (OSError, ValueError):
        known, status = "", ""
    if known != circumstances:
        status = str(subprocess.run([sys.executable, "-c", probe], capture_output=True).returncode)
        _keep(kept, f"{circumstances}\n{status}\n")
    return signal.Signals(-int(status)).name if status.startswith("-") else None


def _keep(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")  # two processes may probe at once
        temporary.write_text(text)
        temporary.replace(path)
    except OSError:
        return  # a read-only cache folder: the next process probes again
