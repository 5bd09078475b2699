"""The `routing` section of the settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from penstock.core.settings import check, check_choice

PolicyName = Literal["forecast", "latency", "round_robin"]


@dataclass(frozen=True, slots=True)
class CascadeConfig:
    """Requests that look easy go to a small model first; the large one takes over where that one is not sure."""

    small: str = ""  # names of models
    large: str = ""
    max_prompt_tokens: int = 1024  # a longer prompt goes to the large model at once; 0: every prompt does
    max_output_tokens: int | None = None  # so does a request that may have a longer answer; default: any may
    min_logprob: float = -1.0  # mean log-probability of the answer's tokens below which the large model takes over
    confidence_tokens: int = 32  # from the answer's beginning, over which the mean is taken

    def __post_init__(self) -> None:
        check(bool(self.small), "small", "must name a model")
        check(bool(self.large), "large", "must name a model")
        check(self.small != self.large, "large", "must be another model than the small one")
        check(self.max_prompt_tokens >= 0, "max_prompt_tokens", "must not be negative")
        longest = self.max_output_tokens
        check(longest is None or longest >= 1, "max_output_tokens", "must be at least 1")
        check(self.min_logprob <= 0, "min_logprob", "must not be above 0")
        check(1 <= self.confidence_tokens <= 4096, "confidence_tokens", "must be between 1 and 4096")


@dataclass(frozen=True, slots=True)
class ShadowConfig:
    """Some requests are sent to another version, too, and its answers thrown away."""

    version: str = ""
    fraction: float = 0.01  # of the requests

    def __post_init__(self) -> None:
        check(bool(self.version), "version", "must name a version")
        check(0 < self.fraction <= 1, "fraction", "must be above 0 and at most 1")


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """Which of a model's replicas a request goes to."""

    policy: PolicyName = "forecast"
    session_tokens: int = 1024  # prefix hit that a session is believed to find on its own replica; 0: no sessions
    long_prompt_tokens: int | None = None  # longer prompts only go where the KV cache has room now; default: none do
    versions: Mapping[str, float] = field(  # weights; empty: any version
        default_factory=dict, metadata={"expected": "a mapping of versions to weights"}
    )
    shadow: ShadowConfig | None = None

    def __post_init__(self) -> None:
        check_choice(self.policy, PolicyName, "policy")
        check(self.session_tokens >= 0, "session_tokens", "must not be negative")
        long = self.long_prompt_tokens
        check(long is None or long >= 1, "long_prompt_tokens", "must be at least 1")
        for version, weight in self.versions.items():
            check(0 <= weight < float("inf"), f"versions.{version}", "must not be negative")
        check(not self.versions or sum(self.versions.values()) > 0, "versions", "must have a weight above 0")
