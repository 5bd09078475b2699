"""LoRA adapters in a worker's host memory: each is read from its folder when it is first asked for."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from weakref import WeakValueDictionary

from penstock.core.errors import InvalidRequest
from penstock.core.request import Adapter
from penstock.engine.executor import AdapterWeights, LoadedExecutor
from penstock.lora.checkpoint import read_adapter
from penstock.lora.fit import Projections, check_fit, modules_of


def adapters_of(executor: LoadedExecutor, max_rank: int, memory_gib: float) -> HostAdapters | None:
    """For an engine with this executor; None if that computes without adapters."""
    if not executor.adapter_modules:
        return None
    return HostAdapters(executor.adapter_modules, max_rank, int(memory_gib * 2**30), executor.prepare_adapter)


class HostAdapters:
    """Up to `max_bytes` of the adapters asked for last are kept, and beside them those that requests still use."""

    def __init__(
        self,
        base: Projections,
        max_rank: int,
        max_bytes: int,
        prepare: Callable[[AdapterWeights], None] = lambda weights: None,
    ) -> None:
        """`prepare` is called with every adapter that is asked for, on the thread that asks."""
        self._base = base
        self._max_rank = max_rank
        self._max_bytes = max_bytes
        self._prepare = prepare
        self._lock = threading.Lock()  # of what follows; never held while reading
        self._in_use = WeakValueDictionary[str, AdapterWeights]()
        self._kept = OrderedDict[str, AdapterWeights]()  # the one asked for last comes last
        self._reading: dict[str, threading.Lock] = {}

    def get(self, adapter: Adapter, /) -> AdapterWeights:
        """Raises InvalidRequest if the folder has not this adapter, or it does not fit the model."""
        found = self._get(adapter)
        self._prepare(found)
        return found

    def _get(self, adapter: Adapter) -> AdapterWeights:
        digest = adapter.digest
        with self._lock:
            if (found := self._find(digest)) is not None:
                return found
            reading = self._reading.setdefault(digest, threading.Lock())
        with reading:
            with self._lock:
                if (found := self._find(digest)) is not None:  # another thread has read it meanwhile
                    return found
            try:
                found = self._read(adapter)
            finally:
                with self._lock:
                    self._reading.pop(digest, None)
            with self._lock:
                self._keep(found)
        return found

    def _find(self, digest: str) -> AdapterWeights | None:
        found = self._in_use.get(digest)
        if found is not None:
            self._keep(found)
        return found

    def _keep(self, weights: AdapterWeights) -> None:
        self._in_use[weights.digest] = self._kept[weights.digest] = weights
        self._kept.move_to_end(weights.digest)
        while len(self._kept) > 1 and sum(each.nbytes for each in self._kept.values()) > self._max_bytes:
            self._kept.popitem(last=False)

    def _read(self, adapter: Adapter) -> AdapterWeights:
        weights = read_adapter(adapter.folder)
        if weights.digest != adapter.digest:
            raise InvalidRequest(
                f"{adapter.folder} has another content than when its adapter was loaded: load it again",
                param="model",
                code="adapter_changed",
            )
        check_fit(modules_of(weights), self._base, self._max_rank)
        return weights
