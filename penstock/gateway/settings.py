"""The gateway's sections of the settings: `server`, `responses`, `classes`, `tenants`, `jwt` and `prices`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol

from penstock.cache.settings import CacheConfig
from penstock.core.setting_paths import PATH
from penstock.core.settings import check, convert_section
from penstock.engine.settings import EngineConfig
from penstock.fleet.settings import ModelConfig
from penstock.observability.settings import LogConfig, LogFormat, LogLevel, ObservabilityConfig

BUILT_IN_CLASSES = ("interactive", "standard", "batch")
TENANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SAFE_URL = re.compile(r"https://[^/?#]|http://(localhost|127\.0\.0\.1|\[::1\])(:[0-9]+)?(/|$)")
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#\s]+")
_HOST_NAME = re.compile(r"\*|[\w.-]+")


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """Files in PEM: the certificate with those of its issuers below the root, and its private key, not encrypted. Both
    are read again within seconds of a change."""

    cert: str = field(default="", metadata=PATH)
    key: str = field(default="", metadata=PATH)

    def __post_init__(self) -> None:
        for name in ("cert", "key"):
            check(bool(getattr(self, name)), name, "must be given")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Where the HTTP server listens, and which requests it accepts."""

    host: str = "127.0.0.1"
    port: int = 8000
    processes: int = 1  # that share the port: one relays some ten thousand chunks a second
    served_model_name: str | None = None  # default: the model's short name
    max_body_mib: float = 16.0
    body_seconds: float = 30.0  # how long a client may take to send the body of a request
    open: bool = False  # need no key, on whatever host, while no tenant is configured
    allowed_hosts: tuple[str, ...] | None = None  # names for use without keys, beside localhost and host; *: any
    cors: tuple[str, ...] | None = None  # origins of web pages that may use the server, as https://example.com; *: any
    tls: TlsConfig | None = None  # default: HTTP without TLS
    drain_seconds: float = 30.0  # how long running requests may finish after SIGTERM
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"  # json: an object a line
    unknown_fields: Literal["refuse", "ignore"] = "refuse"  # of requests; ignore: as if they had not been sent

    def __post_init__(self) -> None:
        check(0 <= self.port <= 65535, "port", "must be between 0 and 65535")
        check(1 <= self.processes <= 256, "processes", "must be between 1 and 256")
        check(self.max_body_mib > 0, "max_body_mib", "must be above 0")
        check(self.body_seconds > 0, "body_seconds", "must be above 0")
        check(self.drain_seconds >= 0, "drain_seconds", "must not be negative")
        for name in self.allowed_hosts or ():
            plain = _HOST_NAME.fullmatch(name) is not None
            check(plain, "allowed_hosts", f"must hold names as llm.example.com, without a port, or '*', not {name!r}")
        for origin in self.cors or ():
            plain = _ORIGIN.fullmatch(origin) is not None
            check(plain, "cors", f"must hold origins as https://example.com, without a path, or '*', not {origin!r}")

    @property
    def logs(self) -> LogConfig:
        """Of this process, and of those that it starts."""
        return LogConfig(self.log_level, self.log_format)


@dataclass(frozen=True, slots=True)
class ResponsesConfig:
    """How many answers of /v1/responses are kept for each tenant, so that others can follow them: the newest."""

    max_count: int = 1000
    max_mib: float = 256.0
    max_hours: float = 720.0

    def __post_init__(self) -> None:
        check(1 <= self.max_count <= 10**6, "max_count", "must be between 1 and 1000000")
        check(0 < self.max_mib <= 2**20, "max_mib", "must be above 0 and at most 1048576")
        check(0 < self.max_hours <= 1e5, "max_hours", "must be above 0 and at most 100000")


@dataclass(frozen=True, slots=True)
class ClassConfig:
    """A class of requests and what they are promised. Without ttft_ms it is never refused: its requests wait. Without
    itl_ms, unless it ranks behind others, long prompts make its streams no more than about twice as slow."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    rank: int = 0  # classes of a smaller rank go first

    def __post_init__(self) -> None:
        check(self.ttft_ms is None or self.ttft_ms > 0, "ttft_ms", "must be above 0")
        check(self.itl_ms is None or self.itl_ms > 0, "itl_ms", "must be above 0")


@dataclass(frozen=True, slots=True)
class LimitConfig:
    """Limits that are counted for each tenant and model. None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # prompt plus output
    concurrent: int | None = None  # requests running at once

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, int | float):
                check(0 < value < float("inf"), f.name, "must be above 0")


ModelLimits = Mapping[str, Mapping[str, int | None]]  # by model: fields of LimitConfig, as far as they are given


@dataclass(frozen=True, slots=True)
class TenantConfig(LimitConfig):
    """What a tenant may use. None: without limit. The limits are those of each model that has none of its own."""

    model_limits: ModelLimits = field(default_factory=dict)
    weight: float = 1.0  # its share of the engine, relative to other tenants
    default_class: str | None = None  # of requests that name none
    models: tuple[str, ...] | None = None  # those it may use; default: all
    budget_per_day: float | None = None  # in the currency of the prices; days and months are UTC
    budget_per_month: float | None = None
    max_tokens: int | None = None  # more output than this is not generated, whatever a request asks for
    max_prompt_tokens: int | None = None
    max_body_mib: float | None = None  # default: that of the server
    timeout_seconds: float | None = None  # work on a request stops after this; a shorter deadline_ms wins

    def limits_of(self, names: Sequence[str]) -> LimitConfig:
        """The limits of a model, by the first of its names that has its own; what those leave open is as for all."""
        for name in names:
            if (own := self.model_limits.get(name)) is not None:
                general = {f.name: getattr(self, f.name) for f in fields(LimitConfig)}
                return LimitConfig(**{**general, **own})
        return self


@dataclass(frozen=True, slots=True)
class PriceConfig:
    """Prices of a million tokens. Cached tokens are prompt tokens whose KV was in the prefix cache."""

    input: float = 0.0
    output: float = 0.0
    cached: float | None = None  # default: as input

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            check(value is None or 0 <= value < 1e6, f.name, "must be between 0 and 1,000,000")


@dataclass(frozen=True, slots=True)
class JwtConfig:
    """Bearer tokens of an identity provider, beside Penstock's own keys."""

    # PEM public key for RS and ES algorithms, the shared secret for HS
    key_file: str = field(default="", metadata=PATH)
    jwks_url: str = ""  # instead: where the issuer publishes its public keys
    issuer: str = ""
    audience: str = ""
    algorithms: tuple[str, ...] = ("RS256",)
    tenant_claim: str = "sub"  # holds the tenant's name
    leeway_seconds: float = 10.0  # by which the clocks may differ

    def __post_init__(self) -> None:
        for name in ("issuer", "audience", "tenant_claim"):
            check(bool(getattr(self, name)), name, "must be given")
        one = bool(self.key_file) != bool(self.jwks_url)
        check(one, "key_file", "must be given, or jwt.jwks_url, but not both")
        safe = not self.jwks_url or _SAFE_URL.match(self.jwks_url) is not None
        check(safe, "jwks_url", "must begin with https://, or on this machine with http://127.0.0.1 or //localhost")
        known = tuple(f"{kind}{bits}" for kind in ("HS", "RS", "ES") for bits in (256, 384, 512))
        for name in self.algorithms:
            check(name in known, "algorithms", f"must be of {', '.join(known)}, not {name!r}")
        kinds = {name[:2] for name in self.algorithms}
        # With both, a public key could be presented as the shared secret.
        check(len(kinds) == 1, "algorithms", "must be of one kind: all HS, all RS or all ES")
        check(not self.jwks_url or kinds != {"HS"}, "algorithms", "must be RS or ES with jwt.jwks_url")
        check(0 <= self.leeway_seconds <= 300, "leeway_seconds", "must be between 0 and 300")


class GatewaySettings(Protocol):
    """What the gateway reads of all settings."""

    @property
    def engine(self) -> EngineConfig: ...
    @property
    def server(self) -> ServerConfig: ...
    @property
    def models(self) -> Mapping[str, ModelConfig]: ...
    @property
    def classes(self) -> Mapping[str, ClassConfig]: ...
    @property
    def default_class(self) -> str | None: ...
    @property
    def cache(self) -> CacheConfig: ...
    @property
    def tenants(self) -> Mapping[str, TenantConfig]: ...
    @property
    def tenant_defaults(self) -> TenantConfig: ...
    @property
    def jwt(self) -> JwtConfig | None: ...
    @property
    def prices(self) -> Mapping[str, PriceConfig]: ...
    @property
    def machine_per_hour(self) -> float | None: ...
    @property
    def responses(self) -> ResponsesConfig: ...
    @property
    def observability(self) -> ObservabilityConfig: ...


def check_class(where: str, name: str | None, classes: Mapping[str, ClassConfig]) -> None:
    """Check that a class is one of those given, or of the built-in ones where none is given."""
    known = list(classes) or BUILT_IN_CLASSES
    check(name is None or name in known, where, f"must be one of {', '.join(known)}")


def convert_tenants(values: Any, defaults: Mapping[str, Any]) -> dict[str, TenantConfig]:
    """Convert all tenants of a settings file."""
    named = {} if values is None else values
    check(isinstance(named, dict), "tenants", "must be a mapping of names to limits")
    return {name: tenant_config(name, given, defaults) for name, given in named.items()}


def tenant_config(name: Any, values: Any, defaults: Mapping[str, Any]) -> TenantConfig:
    """Convert one tenant, of a settings file, of the store or of the admin API."""
    check(isinstance(name, str), f"tenants.{name!s:.80}", "must be named by text: put quotes around the name")
    check(
        TENANT_NAME.fullmatch(name) is not None,
        f"tenants.{name!s:.80}",
        "must be named by up to 64 letters, digits, dots, dashes and underscores",
    )
    return convert_tenant(f"tenants.{name}", {} if values is None else values, defaults)


def convert_tenant(where: str, values: Any, defaults: Mapping[str, Any]) -> TenantConfig:
    """Convert what a tenant is given on top of the defaults. A model's limits replace those that they give for it."""
    check(isinstance(values, dict), where, "must be a mapping")
    limits = _model_limits("tenant_defaults", defaults) | _model_limits(where, values)
    return convert_section(TenantConfig, where, {**defaults, **values, "model_limits": limits})


def _model_limits(where: str, values: Mapping[str, Any]) -> dict[str, Any]:
    where, limits = f"{where}.model_limits", values.get("model_limits")
    if limits is None:
        return {}
    check(isinstance(limits, dict), where, "must be a mapping of model names to limits")
    for model, given in limits.items():
        check(isinstance(model, str), where, f"must be by names of models, not {model!r}")
        convert_section(LimitConfig, f"{where}.{model}", given)
    return dict(limits)
