"""Torch on a machine that advertises AMX and does not execute it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.core.onednn import PROBE

SCRIPT = """
import os, sys
from pathlib import Path
from penstock.core.onednn import cap_onednn
print(cap_onednn(Path(sys.argv[1]), sys.argv[2]))
print(os.environ.get("ONEDNN_MAX_CPU_ISA"))
"""
TRAPPED = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
COUNTED = "open({path!r}, 'a').write('probed\\n')"


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    (tmp_path / "cpuinfo").write_text("flags\t\t: fpu avx512f amx_bf16 avx512_fp16 amx_tile amx_int8\n")
    return tmp_path


def cap(machine: Path, probe: str, **variables: str) -> list[str]:
    """What a process on that machine says, and the cap that it then runs under."""
    environment = {key: value for key, value in os.environ.items() if key != "ONEDNN_MAX_CPU_ISA"}
    environment |= {"XDG_CACHE_HOME": str(machine / "cache"), "PYTHONPATH": os.pathsep.join(sys.path), **variables}
    command = [sys.executable, "-c", SCRIPT, str(machine / "cpuinfo"), probe]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.splitlines()


def test_where_amx_kills_torch_onednn_does_without(machine: Path) -> None:
    line, isa = cap(machine, TRAPPED)
    assert isa == "AVX512_CORE_FP16"
    assert "SIGILL" in line
    assert f"ONEDNN_MAX_CPU_ISA={isa}" in line


@pytest.mark.parametrize("probe", ["pass", "raise ImportError"])  # which says nothing of AMX
def test_where_amx_runs_nothing_changes(machine: Path, probe: str) -> None:
    assert cap(machine, probe) == ["None", "None"]


def test_the_probe_runs_once(machine: Path) -> None:
    probes = machine / "probes"
    count = COUNTED.format(path=str(probes))
    first = cap(machine, f"{count}; {TRAPPED}")
    assert cap(machine, f"{count}; {TRAPPED}") == first
    assert probes.read_text() == "probed\n"
    (machine / "cache/penstock/onednn_probe").write_text("another boot torch 2.0\n0\n")
    assert cap(machine, f"{count}; {TRAPPED}") == first
    assert probes.read_text() == "probed\nprobed\n"


def test_other_machines_and_whoever_chose_a_cap_are_left_alone(machine: Path) -> None:
    assert cap(machine, TRAPPED, ONEDNN_MAX_CPU_ISA="AVX2") == ["None", "AVX2"]
    (machine / "cpuinfo").write_text("flags\t\t: fpu avx512f avx512_bf16\n")
    assert cap(machine, TRAPPED) == ["None", "None"]


@pytest.mark.skipif(
    not Path("/proc/cpuinfo").exists() or " avx512f" not in Path("/proc/cpuinfo").read_text(),
    reason="without AVX-512 torch does not ask oneDNN for these products",
)
def test_the_cap_reaches_torch() -> None:
    """It is read when torch first computes, so a process may set it for itself."""
    script = "import os; os.environ['ONEDNN_MAX_CPU_ISA'] = 'AVX2'\n" + PROBE
    environment = {**os.environ, "ONEDNN_VERBOSE": "1"}
    run = subprocess.run([sys.executable, "-c", script], env=environment, check=True, capture_output=True, text=True)
    assert "isa:Intel AVX2\n" in run.stdout
