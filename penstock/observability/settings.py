"""The `observability` section of the settings."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.settings import check


@dataclass(frozen=True, slots=True)
class ObservabilityConfig:
    """Where traces are sent."""

    otlp_endpoint: str | None = None  # root of an OTLP/HTTP collector, http://HOST:4318; default: no traces

    def __post_init__(self) -> None:
        given = self.otlp_endpoint is None or self.otlp_endpoint.startswith(("http://", "https://"))
        check(given, "otlp_endpoint", "must look like http://HOST:4318")
