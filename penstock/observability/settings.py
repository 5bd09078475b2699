"""The `observability` section of the settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.core.settings import check

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]


@dataclass(frozen=True, slots=True)
class LogConfig:
    """How a process logs. Every process of a server is told the same."""

    level: LogLevel = "info"
    format: LogFormat = "text"


@dataclass(frozen=True, slots=True)
class ObservabilityConfig:
    """Where traces are sent."""

    otlp_endpoint: str | None = None  # root of an OTLP/HTTP collector, http://HOST:4318; default: no traces

    def __post_init__(self) -> None:
        given = self.otlp_endpoint is None or self.otlp_endpoint.startswith(("http://", "https://"))
        check(given, "otlp_endpoint", "must look like http://HOST:4318")
