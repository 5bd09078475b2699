"""A LoRA adapter in native memory, packed as steps read it.

Packing takes tens of milliseconds of a core, on any thread, also while a step runs. A step then uses the adapter by a
pointer.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from penstock.core.errors import EngineFailure
from penstock.core.machine import usable_cpus
from penstock.kernels.native.balancing import Channels, balanced_adapter, channel_counts
from penstock.kernels.native.bindings import Floats
from penstock.kernels.native.model import TENSORS, NativeModel
from penstock.quantization.rotation import split_name

Modules = dict[str, tuple[Floats, Floats]]  # by the name in the layer

_THREADS = 4  # at most, that pack one adapter


class NativeAdapter:
    """`modules`: A [rank, inputs] and B [outputs, rank] of linear modules of at most this rank, by their names in a
    checkpoint without `.weight`."""

    def __init__(self, model: NativeModel, rank: int, modules: Mapping[str, tuple[Floats, Floats]]) -> None:
        self._model = model  # whose library it is freed by
        self.handle = model.library.penstock_adapter_new(model.handle, rank)
        if not self.handle:
            raise EngineFailure(f"there is no memory for an adapter of rank {rank}")
        layers: dict[str, Modules] = {}
        for name, factors in modules.items():
            layer, part = split_name(name)
            layers.setdefault(layer, {})[part] = factors
        with ThreadPoolExecutor(min(_THREADS, usable_cpus())) as pool:
            for _ in pool.map(self._set_layer, layers, layers.values()):
                pass

    def _set_layer(self, prefix: str, modules: Modules) -> None:
        model, number = self._model, int(prefix.split(".")[2])
        channels = _channels(model, number) if model.scheme == "int8" else None
        for part, (a, b) in modules.items():
            if channels is not None:
                a, b = balanced_adapter(part, a, b, channels, model.config.head_dim)
            a, b = np.ascontiguousarray(a, dtype=np.float32), np.ascontiguousarray(b, dtype=np.float32)
            given = (TENSORS.index(f"{part}.weight"), number, a.ctypes.data, b.ctypes.data, len(a))
            _said(model.library.penstock_adapter_set(model.handle, self.handle, *given))

    def use(self, slot: int) -> None:
        """In the steps from now on, until another is used in this slot. Not during a step."""
        _said(self._model.library.penstock_adapter_use(self._model.handle, slot, self.handle))

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._model.library.penstock_adapter_free(self.handle)


def _said(problem: bytes | None) -> None:
    if problem:
        raise EngineFailure(f"native adapter: {problem.decode()}")


def _channels(model: NativeModel, layer: int) -> Channels:
    return Channels(*(model.floats(name, layer, size) for name, size in channel_counts(model.config).items()))
