"""Build the native CPU kernels as a plain shared library beside penstock/kernels/native.py.

They are optional: without a C++20 compiler the installation succeeds and the engine falls back to torch.
Each file of SHARED is compiled once, KERNELS once per instruction set that the compiler knows; the library picks one at
run time.
"""

from __future__ import annotations

import os
import platform
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = Path("penstock/kernels/native")
SHARED = ("api", "model", "pack", "sampling", "threadpool", "weights")
KERNELS = "kernels_isa"
FLAGS = ["-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-pthread", "-Wall", "-Wno-psabi"]
AVX512 = [f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "vnni")]
LEVELS: dict[str, list[str]] = {"portable": []}
if platform.machine() in ("x86_64", "AMD64"):
    LEVELS["avx2"] = ["-mavx2", "-mfma"]
    LEVELS["avx512vnni"] = [*AVX512, "-mfma", "-mprefer-vector-width=512"]
    LEVELS["avx512bf16"] = [*LEVELS["avx512vnni"], "-mavx512bf16"]
    LEVELS["amx"] = [*LEVELS["avx512bf16"], "-mamx-tile", "-mamx-int8", "-mamx-bf16"]


def knows(compiler: str, flags: list[str]) -> bool:
    probe = [compiler, *flags, "-fsyntax-only", "-x", "c++", os.devnull]
    return subprocess.run(probe, stderr=subprocess.DEVNULL).returncode == 0


class BuildNative(build_ext):  # type: ignore[misc]
    def build_extension(self, ext: Extension) -> None:
        folder, target = Path(self.build_temp), Path(self.get_ext_fullpath(ext.name))
        folder.mkdir(parents=True, exist_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        compiler = os.environ.get("CXX", "g++")
        jobs: list[tuple[str, list[str]]] = [(name, []) for name in SHARED]

        def compile_one(job: tuple[str, list[str]]) -> str:
            name, flags = job
            output = str(folder / f"{'_'.join([name, *flags[-1:]])}.o")
            subprocess.run([compiler, *FLAGS, *flags, "-c", str(FOLDER / f"{name}.cpp"), "-o", output], check=True)
            return output

        try:
            unknown = {level for level, flags in LEVELS.items() if not knows(compiler, flags)}
            if unknown:
                print(f"note: {compiler} is too old for the {', '.join(sorted(unknown))} kernels; they are left out")
            known = {level: flags for level, flags in LEVELS.items() if level not in unknown}
            jobs += [(KERNELS, [*flags, f"-DPENSTOCK_ISA={level}"]) for level, flags in known.items()]
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = list(pool.map(compile_one, jobs))
            subprocess.run([compiler, "-shared", "-pthread", *objects, "-o", str(target)], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"warning: the native CPU kernels were not built ({error}); Penstock will use torch")

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"  # loaded by ctypes: no Python ABI in the name


SOURCES = [str(FOLDER / f"{name}.cpp") for name in (*SHARED, KERNELS)]
HEADERS = sorted(str(path) for path in FOLDER.glob("*.h"))
setup(
    ext_modules=[Extension("penstock.kernels._native", SOURCES, depends=HEADERS, optional=True)],
    cmdclass={"build_ext": BuildNative},
)
