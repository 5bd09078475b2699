"""The models that a gateway serves, each with what its requests are read, classified, metered and answered by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.core.engine import ServedEngine
from penstock.core.errors import StartupError
from penstock.fleet.settings import ModelConfig
from penstock.gateway.api.adapters import AdapterBase
from penstock.gateway.api.bounds import Bounds
from penstock.gateway.api.objectives import Objectives
from penstock.gateway.api.reading import ModelText, model_not_found
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
    adapter_base: AdapterBase | None = None  # None: it takes no LoRA adapters


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
        return Bounds.of(self.engine.info, tenant.max_prompt_tokens)


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


class Entry(NamedTuple):
    """A model as the settings have it."""

    name: str
    config: ModelConfig


class Models:
    """All models that are served. The first one stands in where a request need not name any."""

    def __init__(
        self,
        models: Sequence[Model],
        configs: Mapping[str, ModelConfig] | None = None,
        adapters: Mapping[str, str] | None = None,
    ) -> None:
        """`configs`: the models of the settings, among them the virtual ones. `adapters`: the LoRA adapters of the
        settings, which virtual models may name, with the names of their models."""
        self.all = tuple(models)
        self.by_name: dict[str, Model] = {}
        self.routed: dict[str, Entry] = {}  # by all their names, those whose requests also go to other models
        self.wildcards: list[tuple[str, str]] = []  # aliases with a *, each with the name of its model
        self.groups: list[tuple[str, ...]] = []  # the names of one model each
        for model in models:
            self._add(model.names, model)
        for name, config in (configs or {}).items():
            if config.is_virtual:
                stand_in = _stand_in(config)
                self._add((name, *config.aliases), self.by_name[(adapters or {}).get(stand_in, stand_in)])
        for name, config in (configs or {}).items():
            if config.is_virtual or config.shadow is not None:
                plain = [alias for alias in config.aliases if "*" not in alias]
                self.routed |= dict.fromkeys((name, *plain), Entry(name, config))
        self._names = list(self.by_name)

    def _add(self, names: tuple[str, ...], model: Model) -> None:
        self.wildcards += [(alias, names[0]) for alias in names[1:] if "*" in alias]
        plain = tuple(name for name in names if "*" not in name or name == names[0])
        for name in plain:
            if name in self.by_name:
                raise StartupError(f"two models are served as {name!r}", param="served_model_name")
            self.by_name[name] = model
        self.groups.append(plain)

    def names(self, tenant: Tenant) -> Sequence[str]:
        """The names a tenant may use. Those of one model mean the same, so one that is allowed allows the others."""
        allowed = tenant.models
        if allowed is None:
            return self._names
        return [name for names in self.groups if not set(allowed).isdisjoint(names) for name in names]

    def find(self, tenant: Tenant, name: str) -> Model:
        """The model that a tenant calls by this name. For a virtual one stands the model that most of its requests, or
        the longest, go to."""
        names = self.names(tenant)
        if name not in names:
            raise model_not_found(name, names)
        return self.by_name[name]


def _stand_in(config: ModelConfig) -> str:
    if config.cascade is not None:
        return config.cascade.large
    return max(config.versions, key=lambda model: config.versions[model])
