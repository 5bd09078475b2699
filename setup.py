"""Build the native CPU kernels as a plain shared library in penstock/kernels/native.

They are optional: without a C++20 compiler the installation succeeds, and the engine needs torch to run.
Each file of SHARED is compiled once, KERNELS once per instruction set that the compiler knows; the library picks one at
run time. The library is kept in build/ under a digest of all that it is made of, so that it is compiled once.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from tempfile import TemporaryDirectory

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FOLDER = Path("penstock/kernels/native")
KEPT = Path("build/native")
SHARED = ("adapters", "api", "encoder", "model", "pack", "sampling", "threadpool", "weights")
KERNELS = "kernels_isa"
FLAGS = ["-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-pthread", "-Wall", "-Wno-psabi"]
AVX512 = [f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "vnni")]
LEVELS: dict[str, list[str]] = {"portable": []}
if platform.machine() in ("x86_64", "AMD64"):
    LEVELS["portable"] = ["-O2"]  # for CPUs from before 2013; no slower, and -O3 takes GCC 13 s instead of 5
    LEVELS["avx2"] = ["-mavx2", "-mfma"]
    LEVELS["avxvnni"] = [*LEVELS["avx2"], "-mavxvnni"]
    LEVELS["avx512vnni"] = [*AVX512, "-mfma", "-mprefer-vector-width=512"]
    LEVELS["avx512bf16"] = [*LEVELS["avx512vnni"], "-mavx512bf16"]
    LEVELS["amx"] = [*LEVELS["avx512bf16"], "-mamx-tile", "-mamx-int8", "-mamx-bf16"]

Jobs = dict[str, list[str]]  # the compiler's arguments for each object


def knows(compiler: str, flags: list[str]) -> bool:
    probe = [compiler, *flags, "-fsyntax-only", "-x", "c++", os.devnull]
    return subprocess.run(probe, stderr=subprocess.DEVNULL).returncode == 0


def jobs_for(compiler: str) -> Jobs:
    """What is to be compiled, the longest first."""
    jobs: Jobs = {}
    for level, flags in reversed(LEVELS.items()):
        if knows(compiler, flags):
            jobs[f"kernels for {level}"] = [*flags, f"-DPENSTOCK_ISA={level}", str(FOLDER / f"{KERNELS}.cpp")]
        else:
            print(f"note: {compiler} is too old for the {level} kernels; they are left out")
    return jobs | {name: [str(FOLDER / f"{name}.cpp")] for name in SHARED}


def digest(compiler: str, jobs: Jobs) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    facts = hashlib.sha256(version + repr((platform.machine(), FLAGS, jobs)).encode())
    for path in sorted((*FOLDER.glob("*.cpp"), *FOLDER.glob("*.h"))):
        facts.update(path.name.encode() + path.read_bytes())
    return facts.hexdigest()[:24]


def compile_library(compiler: str, jobs: Jobs, target: Path) -> None:
    with TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = {name: f"{folder}/{number}.o" for number, name in enumerate(jobs)}
        running = {
            pool.submit(subprocess.run, [compiler, *FLAGS, "-c", *arguments, "-o", objects[name]], check=True): name
            for name, arguments in jobs.items()
        }
        for number, done in enumerate(as_completed(running), 1):
            done.result()
            print(f"  compiled {number} of {len(jobs)}: {running[done]}", flush=True)
        linked = Path(folder) / target.name
        subprocess.run([compiler, "-shared", "-pthread", *objects.values(), "-o", str(linked)], check=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(linked, target)


class BuildNative(build_ext):  # type: ignore[misc]
    def build_extension(self, ext: Extension) -> None:
        compiler = os.environ.get("CXX", "g++")
        try:
            jobs = jobs_for(compiler)
            library = KEPT / f"{digest(compiler, jobs)}.so"
            if not library.exists():
                compile_library(compiler, jobs, library)
        except (OSError, subprocess.CalledProcessError) as error:
            print(
                f"warning: the native CPU kernels were not built ({error}); without them Penstock runs on torch, "
                "several times slower: install g++ 11 or newer and Penstock again, or pip install 'penstock[torch]'",
                flush=True,
            )
        else:
            target = self.get_ext_fullpath(ext.name)
            self.mkpath(str(Path(target).parent))
            self.force = True  # copy it also where a library of other sources is newer
            self.copy_file(str(library), target)

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"  # loaded by ctypes: no Python ABI in the name


class PlatformWheel(bdist_wheel):  # type: ignore[misc]
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]  # the library is of a platform, but of no Python version


SOURCES = [str(FOLDER / f"{name}.cpp") for name in (*SHARED, KERNELS)]
HEADERS = sorted(str(path) for path in FOLDER.glob("*.h"))
setup(
    ext_modules=[Extension("penstock.kernels.native._native", SOURCES, depends=HEADERS, optional=True)],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": PlatformWheel},
)
