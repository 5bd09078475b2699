"""LoRA adapters by name: which adapter a name means, now, at every gateway that shares the state.

Three places may have a name, and the first one decides: `adapters` of the settings, which stay as they are while the
server runs; the store, with what was loaded and unloaded at run time; `adapter_folder`, as it was at the start.

A request is given the digest that its name has when it is read. The store is asked then whether anything has changed,
so once a load has been answered, no gateway reads another request for what the name meant before.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from penstock.core.errors import InvalidRequest, NotFound, PenstockError, StartupError
from penstock.core.request import Adapter
from penstock.fleet.settings import ADAPTER_NAME, AdapterConfig, ModelConfig
from penstock.gateway.tenancy.tenants import Tenant
from penstock.lora.checkpoint import adapter_digest
from penstock.observability.account import AdapterAccount
from penstock.state.store import Store

logger = logging.getLogger("penstock.gateway")

KIND = "adapter"  # of records in the store
MEMORY_SECONDS = 31 * 86400  # that batches are told of an adapter which was unloaded


Source = Literal["settings", "request", "folder"]


class NamedAdapter(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    model: str  # the canonical name of the model that it changes
    adapter: Adapter
    loaded: int  # seconds since 1970
    source: Source

    @property
    def account(self) -> AdapterAccount:
        return AdapterAccount(self.name, self.adapter.digest)


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What the store has of a name."""

    model: str = ""
    adapter: Adapter | None  # None: it was unloaded
    loaded: int
    until: int | None = None  # one that was unloaded, and that `adapter_folder` has not, is remembered so long


@dataclass(frozen=True, slots=True)
class AdapterBase:
    """A model that takes adapters: which ones, and where they may be loaded from at run time."""

    check: Callable[[Path], None]  # raises what of an adapter's folder does not fit the model
    folder: Path | None
    any_path: bool

    def locate(self, path: str) -> Path | None:
        """The folder that a request means, with links followed. None: nothing may be loaded from there."""
        try:
            found = Path(os.path.realpath((self.folder or Path()) / path))
        except ValueError:  # a null byte
            return None
        root = None if self.folder is None else Path(os.path.realpath(self.folder))
        below = root is not None and found != root and found.is_relative_to(root)
        return found if below or self.any_path else None

    def read(self, folder: Path) -> Adapter:
        """Blocks. Raises InvalidRequest, in the words of what does not fit."""
        self.check(folder)
        return Adapter(adapter_digest(folder), str(folder))


def adapters_at_start(
    model: str, config: ModelConfig, base: AdapterBase, refused: dict[str, str]
) -> Iterator[NamedAdapter]:
    """Those of the settings, which must all be right, and those in the folder that can be used. The others go to
    `refused`, by name, with the reason. Blocks."""
    for entry in config.adapters:
        try:
            found = base.read(Path(entry.path).expanduser().resolve())
        except InvalidRequest as error:
            raise not_an_adapter(entry, model, error, "adapters") from None
        for name in (entry.name, *entry.aliases):
            yield NamedAdapter(name=name, model=model, adapter=found, loaded=int(time.time()), source="settings")
    if base.folder is None:
        return
    check_adapter_folder(base.folder)
    for path in sorted(base.folder.iterdir()):
        if not (path / "adapter_config.json").is_file() or path.name in config.adapter_names:
            continue
        try:
            _check_name(path.name)
            found = base.read(path.resolve())
        except InvalidRequest as error:
            refused[path.name] = error.message
            continue
        yield NamedAdapter(name=path.name, model=model, adapter=found, loaded=int(time.time()), source="folder")


def not_an_adapter(entry: AdapterConfig, model: str, problem: InvalidRequest, setting: str) -> StartupError:
    """What is wrong with one of the settings. `model`: its name, if it is known."""
    of = f" of {model}" if model else ""
    return StartupError(f"adapter {entry.name}{of}: {problem.message}", param=setting)


def check_adapter_folder(folder: Path, where: str = "") -> None:
    if not folder.is_dir():
        raise StartupError(f"{where}adapter_folder {folder} is not a folder", param=f"{where}adapter_folder")


class Adapters:
    def __init__(
        self,
        store: Store,
        bases: Mapping[str, AdapterBase],
        at_start: Sequence[NamedAdapter] = (),
        taken: Collection[str] = (),
    ) -> None:
        """`bases` by the canonical names of the models that take adapters. `taken`: the names of all models."""
        self._store = store
        self._bases = bases
        self._at_start = {each.name: each for each in at_start}
        self._taken = frozenset(taken)
        self._version = -1
        self._failing = False
        for each in at_start:
            if each.name in self._taken:
                raise StartupError(f"a model and an adapter are both served as {each.name!r}", param="adapters")
        self._set({})

    def _set(self, records: Mapping[str, str]) -> None:
        known = dict(self._at_start)
        self.unloaded: dict[str, str] = {}  # with the names of their models
        for name, value in records.items():
            if name in self._taken or self._is_fixed(name):
                continue
            record = msgspec.json.decode(value, type=Record)
            known.pop(name, None)
            if record.adapter is not None and record.model in self._bases:
                known[name] = _loaded(name, record.model, record.adapter, record.loaded)
            elif record.adapter is None and record.model in self._bases:
                self.unloaded[name] = record.model
        self._known = known
        self._models = {name: each.model for name, each in known.items()}

    async def refresh(self) -> None:
        """Learn what has changed. Without the store, what is known stays valid."""
        try:
            version = await self._store.version()
            if version == self._version:
                return
            records = await self._store.records(KIND)
            self._set(records)
        except (PenstockError, msgspec.MsgspecError) as error:
            if not self._failing:
                logger.warning("cannot look up adapters: %s", error)
            self._failing = True
            return
        self._version, self._failing = version, False

    def __bool__(self) -> bool:
        """Whether any model here takes adapters."""
        return bool(self._bases)

    def get(self, name: str) -> NamedAdapter | None:
        """As of the last `refresh`."""
        return self._known.get(name)

    def models(self, tenant: Tenant) -> Mapping[str, str]:
        """The adapters that a tenant may use, with the names of their models. A tenant that is limited to some models
        may use those adapters that are named among them."""
        if tenant.models is None:
            return self._models
        return {name: self._models[name] for name in tenant.models if name in self._models}

    def all(self) -> list[NamedAdapter]:
        return list(self._known.values())

    async def load(self, name: str, path: str, model: str | None) -> NamedAdapter:
        """From now on the name means what is in this folder. `model`: which one it is for; None: the one that it
        fits."""
        _check_name(name)
        if name in self._taken:
            raise InvalidRequest(f"{name!r} is the name of a model", param="lora_name")
        self._check_changeable(name)
        base, found = await asyncio.to_thread(self._read, path, model)
        record = Record(model=base, adapter=found, loaded=int(time.time()))
        await self._store.put(KIND, name, msgspec.json.encode(record).decode())
        await self.refresh()
        logger.info("loaded adapter %s for %s: %s", name, base, found.digest)
        return _loaded(name, base, found, record.loaded)

    def _read(self, path: str, model: str | None) -> tuple[str, Adapter]:
        """Of the models whose folder has it, the one that it fits."""
        if model is not None and model not in self._bases:
            served = ", ".join(self._bases) or "none"
            raise InvalidRequest(f"base_model must be one of {served}, not {model[:200]!r}", param="base_model")
        bases = self._bases if model is None else {model: self._bases[model]}
        located = {name: folder for name, base in bases.items() if (folder := base.locate(path)) is not None}
        if not located:
            folders = sorted({str(base.folder) for base in bases.values() if base.folder is not None})
            allowed = f"must be below {' or '.join(folders)}" if folders else "needs adapter_folder in the settings"
            raise InvalidRequest(f"lora_path {allowed}", param="lora_path")
        fitting, misfit = [], None
        for name, folder in located.items():
            try:
                bases[name].check(folder)
                fitting.append(name)
            except InvalidRequest as error:
                misfit = misfit or error
        if len(fitting) > 1:
            raise InvalidRequest(f"the adapter fits {', '.join(fitting)}: say which as base_model", param="base_model")
        if not fitting:
            assert misfit is not None
            raise InvalidRequest(misfit.message, param="lora_path", code=misfit.code)
        folder = located[fitting[0]]
        return fitting[0], Adapter(adapter_digest(folder), str(folder))

    async def unload(self, name: str) -> None:
        """From now on the name means nothing. Requests that were read before go on."""
        await self.refresh()
        if name not in self._known:
            raise NotFound(f"no adapter {name[:200]!r}", param="lora_name", code="adapter_not_found")
        self._check_changeable(name)
        now = int(time.time())
        until = None if name in self._at_start else now + MEMORY_SECONDS
        gone = Record(model=self._known[name].model, adapter=None, loaded=now, until=until)
        await self._store.put(KIND, name, msgspec.json.encode(gone).decode())
        for old, value in (await self._store.records(KIND)).items():
            if (msgspec.json.decode(value, type=Record).until or now) < now:
                await self._store.delete(KIND, old)
        await self.refresh()
        logger.info("unloaded adapter %s", name)

    def _is_fixed(self, name: str) -> bool:
        given = self._at_start.get(name)
        return given is not None and given.source == "settings"

    def _check_changeable(self, name: str) -> None:
        if self._is_fixed(name):
            raise InvalidRequest(f"adapter {name!r} is in the settings: change it there", param="lora_name")


def _loaded(name: str, model: str, adapter: Adapter, loaded: int) -> NamedAdapter:
    return NamedAdapter(name=name, model=model, adapter=adapter, loaded=loaded, source="request")


def _check_name(name: str) -> None:
    if ADAPTER_NAME.fullmatch(name) is None:
        allowed = "must be up to 128 letters, digits and any of . _ : @ + / -"
        raise InvalidRequest(f"lora_name {allowed}, not {name[:200]!r}", param="lora_name")
