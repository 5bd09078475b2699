"""The native code under the address and undefined-behaviour sanitizers, as a program of its own."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from penstock.kernels.native import bindings

SOURCES = Path(bindings.__file__).parent
DRIVER = Path(__file__).with_name("driver.cpp")
FLAGS = ["-std=c++20", "-O1", "-g", "-pthread", "-Wno-psabi", f"-I{SOURCES}"]
# Scopes of temporaries are not watched: there is one for every operation on vectors wider than a register.
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-sanitize-address-use-after-scope"]
AVX512 = [f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "vnni")]
LEVELS: dict[str, list[str]] = {"portable": [], "avx2": ["-mavx2", "-mfma"], "avx512vnni": [*AVX512, "-mfma"]}
if "avx512_bf16" in Path("/proc/cpuinfo").read_text():
    LEVELS["avx512bf16"] = [*LEVELS["avx512vnni"], "-mavx512bf16"]
    # Of real tiles' loads and stores sanitizers would see nothing.
    LEVELS["amx"] = [*LEVELS["avx512bf16"], "-include", str(DRIVER.with_name("emulated_amx.h"))]


@pytest.mark.skipif(shutil.which("g++") is None or not bindings.available(), reason="needs g++")
@pytest.mark.timeout(900)  # it compiles all kernels, which takes minutes on a busy machine
def test_steps_of_all_kernels_are_clean(tmp_path: Path) -> None:
    builds: list[tuple[list[str], Path]] = [
        ([], source)
        for source in (
            DRIVER,
            *(SOURCES / f"{n}.cpp" for n in ("adapters", "model", "pack", "sampling", "threadpool", "weights")),
        )
    ]
    builds += [([*flags, f"-DPENSTOCK_ISA={level}"], SOURCES / "kernels_isa.cpp") for level, flags in LEVELS.items()]
    running = []
    for index, (flags, source) in enumerate(builds):
        command = ["g++", *FLAGS, *SANITIZERS, *flags, "-c", str(source), "-o", str(tmp_path / f"{index}.o")]
        running.append(subprocess.Popen(command))
    assert [process.wait() for process in running] == [0] * len(running)
    program = tmp_path / "driver"
    objects = [str(tmp_path / f"{index}.o") for index in range(len(builds))]
    subprocess.run(["g++", "-pthread", *SANITIZERS, *objects, "-o", str(program)], check=True)
    outcome = subprocess.run([str(program)], capture_output=True, text=True, timeout=240)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert outcome.stdout == "clean\n"
