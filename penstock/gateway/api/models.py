"""The models that a gateway serves, each with what its requests are read, classified, metered and answered by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.core.engine import ServedEngine
from penstock.core.errors import StartupError
from penstock.gateway.api.objectives import Objectives
from penstock.gateway.api.reading import Bounds, ModelText, model_not_found
from penstock.gateway.tenancy.limits import Metering
from penstock.gateway.tenancy.prefixes import Prefixes
from penstock.gateway.tenancy.tenants import Tenant
from penstock.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a gateway is given to serve one model."""

    names: Sequence[str]  # what clients may put in `model`; the first is the canonical one, the others are aliases
    tokenizer: Tokenizer
    engine: ServedEngine


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    names: tuple[str, ...]  # the first one is canonical
    text: ModelText
    engine: ServedEngine
    objectives: Objectives
    metering: Metering
    prefixes: Prefixes

    @property
    def name(self) -> str:
        """The canonical one, under which everything is counted."""
        return self.names[0]

    def bounds(self, tenant: Tenant) -> Bounds:
        """What a tenant's prompt for this model may be."""
        info, most = self.engine.info, tenant.max_prompt_tokens
        room = info.max_model_len - 1
        return Bounds(room if most is None else min(room, most), info.max_model_len, info.vocab_size)


class TenantBounds(Mapping[str, Bounds]):
    """What a tenant's prompt may be, by every name of every model. Most requests ask for one model only, so each is
    computed when it is looked up."""

    __slots__ = ("_models", "_tenant")

    def __init__(self, models: Models, tenant: Tenant) -> None:
        self._models = models.by_name
        self._tenant = tenant

    def __getitem__(self, name: str) -> Bounds:
        return self._models[name].bounds(self._tenant)

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    def __reduce__(self) -> tuple[Any, ...]:
        """To be sent to another process."""
        return dict, (dict(self),)


class Models:
    """All models that are served. The first one stands in where a request need not name any."""

    def __init__(self, models: Sequence[Model]) -> None:
        self.all = tuple(models)
        self.by_name: dict[str, Model] = {}
        for model in models:
            for name in model.names:
                if name in self.by_name:
                    raise StartupError(f"two models are served as {name!r}", param="served_model_name")
                self.by_name[name] = model
        self._names = list(self.by_name)

    def names(self, tenant: Tenant) -> Sequence[str]:
        """The names a tenant may use. Those of one model mean the same, so one that is allowed allows the others."""
        allowed = tenant.models
        if allowed is None:
            return self._names
        return [name for model in self.all if not set(allowed).isdisjoint(model.names) for name in model.names]

    def find(self, tenant: Tenant, name: str) -> Model:
        """The model that a tenant calls by this name."""
        names = self.names(tenant)
        if name not in names:
            raise model_not_found(name, names)
        return self.by_name[name]
