"""All settings: the sections of the components, put together. Each component owns its section, in its `settings.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from penstock.cache.settings import CacheConfig
from penstock.checkpoint.source import DEFAULT_MODEL
from penstock.core.settings import check, convert_section
from penstock.engine.settings import EngineConfig
from penstock.gateway.settings import (
    ClassConfig,
    JwtConfig,
    PriceConfig,
    ServerConfig,
    TenantConfig,
    check_class,
    convert_tenant,
    convert_tenants,
)
from penstock.observability.settings import ObservabilityConfig
from penstock.state import settings as state_settings


@dataclass(frozen=True, slots=True)
class Settings:
    """What a settings file holds, with the defaults of what it leaves out."""

    model: str = field(default=DEFAULT_MODEL, metadata={"expected": "a name or a path"})
    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    classes: Mapping[str, ClassConfig] = field(  # empty: interactive, standard and batch, derived
        default_factory=dict, metadata={"expected": "a mapping of names to objectives"}
    )
    default_class: str | None = None  # of requests that name none; default: standard
    cache: CacheConfig = field(default_factory=CacheConfig)
    state: str | None = field(  # default: SQLite in the state folder
        default=None, metadata={"expected": state_settings.EXPECTED}
    )
    tenants: Mapping[str, TenantConfig] = field(default_factory=dict)
    tenant_defaults: TenantConfig = field(default_factory=TenantConfig)  # also of requests in open mode
    jwt: JwtConfig | None = None
    prices: Mapping[str, PriceConfig] = field(  # by model
        default_factory=dict, metadata={"expected": "a mapping of model names to prices"}
    )
    machine_per_hour: float | None = None  # price of the machine; for models without a price of their own
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)

    def __post_init__(self) -> None:
        check(bool(self.model), "model", "must be a name or a path")
        state_settings.check_state(self.state)
        price = self.machine_per_hour
        check(price is None or 0 < price < 1e6, "machine_per_hour", "must be above 0")
        check_class("default_class", self.default_class, self.classes)
        check_class("tenant_defaults.default_class", self.tenant_defaults.default_class, self.classes)
        for name, tenant in self.tenants.items():
            check_class(f"tenants.{name}.default_class", tenant.default_class, self.classes)


def settings_from_mapping(values: Any) -> Settings:
    """Convert what a YAML file holds: `model`, `engine: {...}`, `server: {...}`, `classes: {NAME: {...}}` and so on."""
    names = ", ".join(f.name for f in fields(Settings))
    check(isinstance(values, dict), "settings", f"must be a mapping with {names}")
    given = {name: value for name, value in values.items() if name not in ("tenants", "tenant_defaults")}
    if isinstance(given.get("prices"), dict):  # to YAML, the name of a model can look like a number
        given["prices"] = {str(name): price or {} for name, price in given["prices"].items()}
    settings = convert_section(Settings, "", given)
    defaults = {} if values.get("tenant_defaults") is None else values["tenant_defaults"]
    classes, default_class = settings.classes, settings.default_class
    if default_class is None and classes and "standard" not in classes:
        default_class = next(iter(classes))
    return replace(
        settings,
        default_class=default_class,
        tenant_defaults=convert_tenant("tenant_defaults", defaults, {}),
        tenants=convert_tenants(values.get("tenants"), defaults),
    )
