"""What a standby does ahead of a start: import the code, and map the weights, so that they are in the page cache.

It takes no memory of its own for weights and KV cache and does not touch a GPU, so it costs little while it waits.
"""

from __future__ import annotations

import mmap
from importlib import import_module
from pathlib import Path

from penstock.checkpoint.source import Checkpoint, resolve, safetensors_files
from penstock.core.machine import keep_compiled, keep_kernels
from penstock.core.start_times import StartTimes
from penstock.engine.settings import EngineConfig
from penstock.kernels.native.bindings import available
from penstock.models.encoder_config import encoder_architecture
from penstock.runner.device import has_cuda_driver
from penstock.runner.startup import cpu_scheme, planned

_POPULATE = getattr(mmap, "MAP_POPULATE", 0)  # read it in now; only on Linux


def prepare_start(model: str, config: EngineConfig) -> list[mmap.mmap]:
    """The maps keep the weights in memory that the system may take back. Raises what `start` would."""
    keep_compiled("torch")
    checkpoint = resolve(model)
    on_cpu = config.device == "cpu" or checkpoint.kind == "packed" or not has_cuda_driver()
    files = _prepare_cpu(checkpoint, config) if on_cpu else _prepare_cuda(checkpoint)
    return [_mapped(file) for file in files if file.is_file()]


def _prepare_cpu(checkpoint: Checkpoint, config: EngineConfig) -> list[Path]:
    if encoder_architecture(checkpoint) is not None:
        import_module("penstock.runner.encoder_runner")
        available()
        return _weights(checkpoint)
    scheme = cpu_scheme(planned(checkpoint, config, "cpu", None, StartTimes()))
    if scheme is None:
        import_module("penstock.models.loader")
        import_module("penstock.runner.model_runner")
        return _weights(checkpoint)
    from penstock.runner.packed import packed_file

    import_module("penstock.runner.native_runner")
    available()  # loads the library
    return [packed_file(checkpoint, scheme)]


def _prepare_cuda(checkpoint: Checkpoint) -> list[Path]:
    keep_kernels()
    for module in ("penstock.models.loader", "penstock.runner.cuda_startup"):
        import_module(module)
    return _weights(checkpoint)


def _weights(checkpoint: Checkpoint) -> list[Path]:
    return safetensors_files(checkpoint.path) if checkpoint.kind == "folder" else [checkpoint.path]


def _mapped(file: Path) -> mmap.mmap:
    with file.open("rb") as opened:
        return mmap.mmap(opened.fileno(), 0, flags=mmap.MAP_SHARED | _POPULATE, prot=mmap.PROT_READ)
