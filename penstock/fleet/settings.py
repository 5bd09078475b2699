"""The fleet's sections of the settings."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.settings import check


@dataclass(frozen=True, slots=True)
class FailoverConfig:
    wait_seconds: float = 30.0  # how long a request waits for a replica when none is running

    def __post_init__(self) -> None:
        check(0 <= self.wait_seconds <= 3600, "wait_seconds", "must be between 0 and 3600")
