"""The fleet's sections of the settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Literal

from penstock.autoscaling.settings import AutoscaleConfig
from penstock.core.setting_paths import MODEL, PATH
from penstock.core.settings import check, check_choice
from penstock.engine.settings import EngineConfig
from penstock.fleet.ray.settings import ResourcesConfig
from penstock.fleet.upstream.settings import UpstreamConfig
from penstock.text.reasoning import ReasoningFormatName
from penstock.text.tool_calls.formats import ToolFormatName

_WORKER = re.compile(r"(?:tcp|dns)://(\[[0-9a-fA-F:]+\]|[\w.-]+):([0-9]{1,5})")

ADAPTER_NAME = re.compile(r"[A-Za-z0-9][\w.:@+/-]{0,127}", re.ASCII)

PolicyName = Literal["forecast", "latency", "round_robin"]
AdapterPaths = Literal["folder", "any"]


@dataclass(frozen=True, slots=True)
class CascadeConfig:
    """Requests that look easy go to a small model first; the large one takes over where that one is not sure."""

    small: str = ""  # names of models
    large: str = ""
    max_prompt_tokens: int = 1024  # a longer prompt goes to the large model at once; 0: every prompt does
    max_output_tokens: int | None = None  # so does a request that may have a longer answer; default: any may
    # mean log-probability of the answer's tokens below which the large model takes over; None: only where the small one
    # fails, and then it may be one that tells no log-probabilities
    min_logprob: float | None = -1.0
    confidence_tokens: int = 32  # from the answer's beginning, over which the mean is taken

    def __post_init__(self) -> None:
        check(bool(self.small), "small", "must name a model")
        check(bool(self.large), "large", "must name a model")
        check(self.small != self.large, "large", "must be another model than the small one")
        check(self.max_prompt_tokens >= 0, "max_prompt_tokens", "must not be negative")
        longest = self.max_output_tokens
        check(longest is None or longest >= 1, "max_output_tokens", "must be at least 1")
        least = self.min_logprob
        check(least is None or least <= 0, "min_logprob", "must not be above 0")
        check(1 <= self.confidence_tokens <= 4096, "confidence_tokens", "must be between 1 and 4096")


@dataclass(frozen=True, slots=True)
class ShadowConfig:
    """Some requests are sent to another model, too, and its answers thrown away."""

    model: str = ""
    fraction: float = 0.01  # of the requests

    def __post_init__(self) -> None:
        check(bool(self.model), "model", "must name a model")
        check(0 < self.fraction <= 1, "fraction", "must be above 0 and at most 1")


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """Which of a model's replicas a request goes to."""

    policy: PolicyName = "forecast"
    session_tokens: int = 1024  # prefix hit that a session is believed to find on its own replica; 0: no sessions
    long_prompt_tokens: int | None = None  # longer prompts only go where the KV cache has room now; default: none do

    def __post_init__(self) -> None:
        check_choice(self.policy, PolicyName, "policy")
        check(self.session_tokens >= 0, "session_tokens", "must not be negative")
        long = self.long_prompt_tokens
        check(long is None or long >= 1, "long_prompt_tokens", "must be at least 1")


@dataclass(frozen=True, slots=True)
class FailoverConfig:
    wait_seconds: float = 30.0  # how long a request waits for a replica when none is running
    hedge_ms: float | None = None  # without a first token after this, a second replica is asked too; default: never

    def __post_init__(self) -> None:
        check(self.hedge_ms is None or 1 <= self.hedge_ms <= 3.6e6, "hedge_ms", "must be between 1 and 3600000")
        check(0 <= self.wait_seconds <= 3600, "wait_seconds", "must be between 0 and 3600")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """A LoRA adapter of a model, which clients name in `model` as they do the model itself."""

    name: str = ""
    path: str = field(default="", metadata=PATH)  # the folder that PEFT wrote
    aliases: tuple[str, ...] = ()  # other names that clients may use

    def __post_init__(self) -> None:
        for name in (self.name, *self.aliases):
            known = ADAPTER_NAME.fullmatch(name) is not None
            check(known, "name", f"must be up to 128 letters, digits and any of . _ : @ + / -, not {name!r}")
        check(bool(self.path), "path", "must be the adapter's folder")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model, and the replicas that serve it: worker processes here, workers on other machines, other servers. Or a
    virtual model, with `versions` or a `cascade` in place of all that: its requests go to other models."""

    model: str | None = field(default=None, metadata=MODEL)  # default: its key in `models`
    aliases: tuple[str, ...] = ()  # other names that clients may use; with a *, as claude-*, all that match
    replicas: int | None = None  # worker processes here; default: one, or none beside workers and upstreams
    autoscale: AutoscaleConfig | None = None  # in place of `replicas`: as many as the load needs
    standby: int = 0  # worker processes kept prepared: they serve in less than half a second when a replica is needed
    # On other machines, see `penstock worker`: one as tcp://HOST:PORT, as many as a name has addresses as dns://NAME:PORT
    workers: tuple[str, ...] = ()
    upstreams: tuple[UpstreamConfig, ...] = ()  # other servers that have the same model
    devices: tuple[str, ...] = ()  # GPUs or MIG instances by id, for one replica after the other; default: all
    resources: ResourcesConfig = field(default_factory=ResourcesConfig)  # of each replica on a Ray cluster
    adapters: tuple[AdapterConfig, ...] = ()  # LoRA adapters, served from the start
    # Every folder in it is an adapter of its name; more are loaded from there.
    adapter_folder: str | None = field(default=None, metadata=PATH)
    adapter_paths: AdapterPaths = "folder"  # what may be loaded at run time; any: from wherever a request says
    tool_parser: ToolFormatName | Literal["auto", "none"] = "auto"  # of its tool calls; auto: as its template has them
    reasoning_parser: ReasoningFormatName | Literal["auto", "none"] = "auto"
    engine: EngineConfig = field(default_factory=EngineConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    failover: FailoverConfig = field(default_factory=FailoverConfig)
    versions: Mapping[str, float] = field(  # models and their weights: each user gets one of them
        default_factory=dict, metadata={"expected": "a mapping of models to weights"}
    )
    cascade: CascadeConfig | None = None
    shadow: ShadowConfig | None = None

    def __post_init__(self) -> None:
        if self.is_virtual:
            self._check_virtual()
        check(self.model is None or bool(self.model), "model", "must be a name or a path")
        check(self.replicas is None or 0 <= self.replicas <= 1024, "replicas", "must be between 0 and 1024")
        check(0 <= self.standby <= 64, "standby", "must be between 0 and 64")
        if self.autoscale is not None:
            check(self.replicas is None, "replicas", "must not be given beside autoscale, which has min_replicas")
            fixed = self.workers or self.upstreams
            check(not fixed, "autoscale", "must not be given beside workers and upstreams, whose number is fixed")
        for worker in self.workers:
            known = _WORKER.fullmatch(worker) is not None
            check(known, "workers", f"must be as tcp://HOST:PORT or dns://NAME:PORT, not {worker!r}")
        some = self.local_replicas or self.workers or self.upstreams
        check(bool(some), "replicas", "must be at least 1 where there are no workers and no upstreams")
        check_choice(self.adapter_paths, AdapterPaths, "adapter_paths")
        if self.adapters or self.adapter_folder is not None:
            setting = "adapters" if self.adapters else "adapter_folder"
            check(bool(self.local_replicas or self.workers), setting, "needs workers: upstreams serve no adapters")
            check(self.engine.max_adapters > 0, setting, "needs engine.max_adapters to be above 0")

    def _check_virtual(self) -> None:
        kind = "versions" if self.versions else "cascade"
        check(not self.versions or self.cascade is None, "cascade", "must not be given beside versions")
        for other in fields(self):
            of_replicas = other.name not in ("aliases", "versions", "cascade", "shadow")
            default = other.default if other.default_factory is MISSING else other.default_factory()
            given = of_replicas and getattr(self, other.name) != default
            check(not given, other.name, f"must not be given beside {kind}")
        for model, weight in self.versions.items():
            check(0 <= weight < float("inf"), f"versions.{model}", "must not be negative")
        check(not self.versions or sum(self.versions.values()) > 0, "versions", "must have a weight above 0")

    @property
    def adapter_names(self) -> list[str]:
        """Of the adapters that it lists."""
        return [name for adapter in self.adapters for name in (adapter.name, *adapter.aliases)]

    @property
    def is_virtual(self) -> bool:
        return bool(self.versions) or self.cascade is not None

    def named_models(self) -> dict[str, str]:
        """The models that it names, by the setting that names them."""
        named = {f"versions.{model}": model for model in self.versions}
        if self.cascade is not None:
            named |= {"cascade.small": self.cascade.small, "cascade.large": self.cascade.large}
        if self.shadow is not None:
            named["shadow.model"] = self.shadow.model
        return named

    @property
    def most_replicas(self) -> int:
        """Worker processes here, at any time."""
        return self.local_replicas if self.autoscale is None else self.autoscale.ceiling

    @property
    def local_replicas(self) -> int:
        """Worker processes here, to begin with. Of one that may have none, too: it shows that the model can be
        served."""
        if self.autoscale is not None:
            return max(1, self.autoscale.min_replicas)
        if self.replicas is not None:
            return self.replicas
        return 0 if self.workers or self.upstreams else 1
