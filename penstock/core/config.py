"""Settings: frozen, nested, validated. One YAML file or a handful of flags; everything else is derived."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar, get_args

from penstock.core.errors import StartupError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
Quantization = Literal["auto", "none", "int8", "int4", "fp8"]
Scheduling = Literal["deadline", "fcfs"]

T = TypeVar("T")

DEFAULT_MODEL = "smollm2-135m"


def _check(condition: bool, name: str, message: str) -> None:
    if not condition:
        raise StartupError(f"{name} {message}", param=name)


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
    block_size: int = 16
    prefix_caching: bool = True
    scheduling: Scheduling = "deadline"  # fcfs: first come, first served, objectives and tenants ignored
    max_waiting: int = 4096  # requests queued in the engine; more are refused

    def __post_init__(self) -> None:
        _check(self.device in get_args(Device), "device", f"must be one of {', '.join(get_args(Device))}")
        _check(self.dtype in get_args(Dtype), "dtype", f"must be one of {', '.join(get_args(Dtype))}")
        known = get_args(Quantization)
        _check(self.quantization in known, "quantization", f"must be one of {', '.join(known)}")
        _check(self.max_model_len is None or self.max_model_len >= 2, "max_model_len", "must be at least 2")
        _check(1 <= self.max_seqs <= 4096, "max_seqs", "must be between 1 and 4096")
        _check(self.max_step_tokens is None or self.max_step_tokens >= 1, "max_step_tokens", "must be at least 1")
        _check(self.kv_memory_gib is None or self.kv_memory_gib > 0, "kv_memory_gib", "must be above 0")
        _check(
            1 <= self.block_size <= 256 and self.block_size & (self.block_size - 1) == 0,
            "block_size",
            "must be a power of two up to 256",
        )
        modes = get_args(Scheduling)
        _check(self.scheduling in modes, "scheduling", f"must be one of {', '.join(modes)}")
        _check(self.max_waiting >= 1, "max_waiting", "must be at least 1")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The HTTP side."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None  # default: the model's short name
    max_body_mib: float = 16.0
    drain_seconds: float = 30.0  # how long running requests may finish after SIGTERM
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    def __post_init__(self) -> None:
        _check(0 <= self.port <= 65535, "port", "must be between 0 and 65535")
        _check(self.max_body_mib > 0, "max_body_mib", "must be above 0")
        _check(self.drain_seconds >= 0, "drain_seconds", "must not be negative")
        levels = ("debug", "info", "warning", "error")
        _check(self.log_level in levels, "log_level", f"must be one of {', '.join(levels)}")


@dataclass(frozen=True, slots=True)
class ClassConfig:
    """A class of requests and what they are owed. A class without ttft_ms is never refused: its requests wait."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    rank: int = 0  # classes of a smaller rank go first

    def __post_init__(self) -> None:
        _check(self.ttft_ms is None or self.ttft_ms > 0, "ttft_ms", "must be above 0")
        _check(self.itl_ms is None or self.itl_ms > 0, "itl_ms", "must be above 0")


@dataclass(frozen=True, slots=True)
class Settings:
    model: str = DEFAULT_MODEL
    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    classes: Mapping[str, ClassConfig] = field(default_factory=dict)  # empty: interactive, standard and batch, derived
    default_class: str | None = None  # of requests that name none; default: standard


def _typed(name: str, annotation: str, value: Any) -> Any:
    """Accept exactly what YAML should give for a field; an int stands for a float, nothing else is converted."""
    options = [part.strip() for part in annotation.split("|")]
    if value is None:
        _check("None" in options, name, "must not be empty")
        return None
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
        "Scheduling": str,
    }
    kinds = tuple(expected.get(o, str) for o in options if o != "None")
    _check(isinstance(value, kinds), name, f"must be {annotation}, not {value!r}")
    return value


def _section(cls: type[T], name: str, values: Any) -> T:
    _check(isinstance(values, dict), name, "must be a mapping")
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    for key in values:
        _check(key in known, f"{name}.{key}", f"is not a setting; known: {', '.join(known)}")
    return cls(**{k: _typed(f"{name}.{k}", str(known[k].type), v) for k, v in values.items()})


def _given(values: dict[str, Any], section: str) -> Any:
    """A section left empty in YAML is None."""
    found = values.get(section)
    return {} if found is None else found


SECTIONS = ("model", "engine", "server", "classes", "default_class")


def settings_from_mapping(values: Any) -> Settings:
    """Parse what a YAML file holds: `model`, `engine: {...}`, `server: {...}`, `classes: {NAME: {...}}` and so on."""
    _check(isinstance(values, dict), "settings", f"must be a mapping with {', '.join(SECTIONS)}")
    for key in values:
        _check(key in SECTIONS, key, f"is not a setting; known: {', '.join(SECTIONS)}")
    model = values.get("model", DEFAULT_MODEL)
    _check(isinstance(model, str) and bool(model), "model", "must be a name or a path")
    return Settings(
        model=model,
        engine=_section(EngineConfig, "engine", _given(values, "engine")),
        server=_section(ServerConfig, "server", _given(values, "server")),
        classes=_classes(_given(values, "classes")),
        default_class=_default_class(values.get("default_class"), _given(values, "classes")),
    )


def _classes(values: Any) -> dict[str, ClassConfig]:
    _check(isinstance(values, dict), "classes", "must be a mapping of names to objectives")
    for name in values:
        _check(isinstance(name, str) and bool(name), "classes", f"must be named by words, not {name!r}")
    return {name: _section(ClassConfig, f"classes.{name}", {} if v is None else v) for name, v in values.items()}


def _default_class(name: Any, classes: Mapping[str, Any]) -> str | None:
    known = list(classes) or ["interactive", "standard", "batch"]
    _check(name is None or name in known, "default_class", f"must be one of {', '.join(known)}")
    if name is None and classes and "standard" not in classes:
        return str(known[0])
    return None if name is None else str(name)
