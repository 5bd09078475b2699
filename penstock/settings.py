"""All settings: the sections of the components, put together. Each component owns its section, in its `settings.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from penstock.autoscaling.settings import AutoscaleConfig
from penstock.batches.settings import BatchesConfig
from penstock.cache.settings import CacheConfig
from penstock.checkpoint.source import DEFAULT_MODEL
from penstock.core.setting_paths import MODEL, PATH, STATE
from penstock.core.settings import check, convert_section
from penstock.core.suggest import did_you_mean
from penstock.engine.settings import EngineConfig
from penstock.fleet.ray.settings import RayConfig, ResourcesConfig
from penstock.fleet.settings import AdapterConfig, AdapterPaths, FailoverConfig, ModelConfig, RoutingConfig
from penstock.gateway.settings import (
    ClassConfig,
    JwtConfig,
    PriceConfig,
    ResponsesConfig,
    ServerConfig,
    TenantConfig,
    check_class,
    convert_tenant,
    convert_tenants,
)
from penstock.observability.settings import ObservabilityConfig
from penstock.queues.settings import ConsumeConfig
from penstock.state import settings as state_settings

OF_ONE_MODEL = ("model", "replicas")  # settings that cannot be given beside `models`


@dataclass(frozen=True, slots=True)
class Settings:
    """What a settings file holds, with the defaults of what it leaves out."""

    model: str = field(default=DEFAULT_MODEL, metadata=MODEL)
    replicas: int = 1  # worker processes that serve it
    standby: int = 0  # worker processes kept prepared, for each model
    adapters: tuple[AdapterConfig, ...] = ()  # LoRA adapters of the one model
    adapter_folder: str | None = field(default=None, metadata=PATH)  # these two: of every model that does not say
    adapter_paths: AdapterPaths = "folder"
    models: Mapping[str, ModelConfig] = field(  # in place of `model`, several of them by name
        default_factory=dict, metadata={"expected": "a mapping of names to models"}
    )
    engine: EngineConfig = field(default_factory=EngineConfig)  # these four: of every model that does not say
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    failover: FailoverConfig = field(default_factory=FailoverConfig)
    resources: ResourcesConfig = field(default_factory=ResourcesConfig)
    autoscale: AutoscaleConfig | None = None  # of every model that says neither this nor how many replicas it has
    ray: RayConfig = field(default_factory=RayConfig)  # the cluster of `penstock serve --on ray`
    server: ServerConfig = field(default_factory=ServerConfig)
    classes: Mapping[str, ClassConfig] = field(  # empty: interactive, standard and batch, derived
        default_factory=dict, metadata={"expected": "a mapping of names to objectives"}
    )
    default_class: str | None = None  # of requests that name none; default: standard
    cache: CacheConfig = field(default_factory=CacheConfig)
    state: str | None = field(  # default: SQLite in the state folder
        default=None, metadata={**STATE, "expected": state_settings.EXPECTED}
    )
    batches: BatchesConfig = field(default_factory=BatchesConfig)
    consume: ConsumeConfig | None = None  # a queue that requests come from
    tenants: Mapping[str, TenantConfig] = field(default_factory=dict)
    tenant_defaults: TenantConfig = field(default_factory=TenantConfig)  # also of requests in open mode
    jwt: JwtConfig | None = None
    prices: Mapping[str, PriceConfig] = field(  # by model
        default_factory=dict, metadata={"expected": "a mapping of model names to prices"}
    )
    machine_per_hour: float | None = None  # price of the machine; for models without a price of their own
    responses: ResponsesConfig = field(default_factory=ResponsesConfig)
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)

    def __post_init__(self) -> None:
        check(bool(self.model), "model", "must be a name or a path")
        check(1 <= self.replicas <= 1024, "replicas", "must be between 1 and 1024")
        one = self.autoscale is None or self.replicas == 1
        check(one, "replicas", "must not be given beside autoscale, which has min_replicas")
        check(0 <= self.standby <= 64, "standby", "must be between 0 and 64")
        named = not self.models or self.server.served_model_name is None
        check(named, "server.served_model_name", "is for one model; `models` are named by their keys and aliases")
        state_settings.check_state(self.state)
        price = self.machine_per_hour
        check(price is None or 0 < price < 1e6, "machine_per_hour", "must be above 0")
        check_class("default_class", self.default_class, self.classes)
        check_class("tenant_defaults.default_class", self.tenant_defaults.default_class, self.classes)
        self._check_names()
        for name, config in self.models.items():
            for setting, other in config.named_models().items():
                self._check_named(f"models.{name}.{setting}", name, other)
        for name, tenant in self.tenants.items():
            check_class(f"tenants.{name}.default_class", tenant.default_class, self.classes)

    def _check_names(self) -> None:
        """What clients may call a model or adapter is the name of one."""
        check(not (self.models and self.adapters), "adapters", "belongs to one of the models beside models")
        taken = {*self.models, self.server.served_model_name}

        def take(where: str, names: Iterable[str]) -> None:
            for name in names:
                check(name not in taken, where, f"has {name!r}, which names a model or adapter already")
                taken.add(name)

        for model, config in self.models.items():
            take(f"models.{model}.aliases", (alias for alias in config.aliases if "*" not in alias))
        for model, config in self.served.items():
            take(f"models.{model}.adapters" if self.models else "adapters", config.adapter_names)

    def _check_named(self, where: str, entry: str, named: str) -> None:
        """An adapter of the settings is as good as a model."""
        served = [(name, config) for name, config in self.models.items() if not config.is_virtual]
        adapters = [name for _, config in served for name in config.adapter_names]
        if named in adapters:
            return
        real = [*(name for name, _ in served), *adapters]
        hint = f"{did_you_mean(named, real)}; there are: {', '.join(real)}"
        check(named in self.models, where, f"names {named!r}, which is not one of the models{hint}")
        check(named in real, where, f"must name a model with replicas, and {named!r} has versions or a cascade")
        check(named != entry, where, "must name another model than the one it belongs to")

    @property
    def served(self) -> Mapping[str, ModelConfig]:
        """All models that have replicas, by what clients call them. The name is empty where it is to be that of the
        checkpoint."""
        if self.models:
            return {name: config for name, config in self.models.items() if not config.is_virtual}
        name = self.server.served_model_name or ""
        one = ModelConfig(
            self.model,
            adapters=self.adapters,
            adapter_folder=self.adapter_folder,
            adapter_paths=self.adapter_paths,
            replicas=self.replicas if self.autoscale is None else None,
            autoscale=self.autoscale,
            standby=self.standby,
            resources=self.resources,
            engine=self.engine,
            routing=self.routing,
            failover=self.failover,
        )
        return {name: one}


def settings_from_mapping(values: Any) -> Settings:
    """Convert what a YAML file holds: `model`, `engine: {...}`, `server: {...}`, `classes: {NAME: {...}}` and so on."""
    names = ", ".join(f.name for f in fields(Settings))
    check(isinstance(values, dict), "settings", f"must be a mapping with {names}")
    given = {name: value for name, value in values.items() if name not in ("tenants", "tenant_defaults")}
    if isinstance(given.get("prices"), dict):  # to YAML, the name of a model can look like a number
        given["prices"] = {str(name): price or {} for name, price in given["prices"].items()}
    if isinstance(given.get("models"), dict) and given["models"]:
        for name in OF_ONE_MODEL:
            check(name not in given, name, "must not be given beside models, each of which has its own")
        given["models"] = {str(name): _with_defaults(model or {}, given) for name, model in given["models"].items()}
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


def _with_defaults(model: Any, values: Mapping[str, Any]) -> Any:
    """A model's sections over those that all models have, unless it is virtual and has no replicas. What is no mapping
    is left to the conversion."""
    if not isinstance(model, dict) or model.get("versions") or model.get("cascade"):
        return model
    fixed = model.get("replicas") is not None or model.get("workers") or model.get("upstreams")
    sections = ["engine", "routing", "failover", "resources"]
    if model.get("autoscale") is not None or (values.get("autoscale") is not None and not fixed):
        sections.append("autoscale")
    common = ["standby", "adapter_paths", *([] if model.get("upstreams") else ["adapter_folder"])]
    merged = {**{name: values[name] for name in common if name in values}, **model}
    for section in sections:
        of_all, own = values.get(section) or {}, model.get(section) or {}
        if isinstance(of_all, dict) and isinstance(own, dict):
            merged[section] = {**of_all, **own}
    return merged
