"""Builds the answer cache from the settings. What is not used is not imported, so that a gateway starts fast."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.registry import Collector

from penstock.cache.disk_tier import DiskTier
from penstock.cache.engine import CachedEngine
from penstock.cache.memory import MemoryTier
from penstock.cache.metrics import CacheMetrics
from penstock.cache.settings import CacheConfig, SemanticConfig
from penstock.cache.similar import SimilarPrompts
from penstock.cache.tier import Reading, Tier
from penstock.core.engine import ServedEngine
from penstock.core.machine import cache_folder
from penstock.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class CacheView:
    """Of one gateway process since its start."""

    enabled: bool
    requests: dict[str, int]  # by state: hit, similar, shared, miss, bypass
    stored: int
    tiers: list[Reading]


class AnswerCache:
    """Stored answers of all models: the memory, the tiers below it and the metrics are shared."""

    def __init__(self, config: CacheConfig, tiers: Sequence[Tier], similar: SimilarPrompts | None) -> None:
        self._config = config
        self._tiers = tiers
        self._similar = similar
        self._memory = MemoryTier(int(config.memory_mib * 2**20))
        self._engines: list[CachedEngine] = []
        metrics = CacheMetrics(lambda: [self._memory.reading(), *(tier.reading() for tier in tiers)])
        self._metrics = metrics
        self.collectors: Sequence[Collector] = [metrics] if config.enabled else []

    def before(self, engine: ServedEngine, tokenizer: Tokenizer) -> ServedEngine:
        """The engine behind the cache, or as it is where the cache is switched off."""
        if not self._config.enabled:
            return engine
        cached = CachedEngine(
            engine,
            tokenizer,
            self._config,
            tiers=self._tiers,
            similar=self._similar,
            memory=self._memory,
            metrics=self._metrics,
        )
        self._engines.append(cached)
        return cached

    def view(self) -> CacheView:
        states: Counter[str] = Counter()
        for (state, _), count in self._metrics.requests.items():
            states[state] += count
        tiers = [self._memory.reading(), *(tier.reading() for tier in self._tiers)]
        return CacheView(self._config.enabled, dict(states), self._metrics.stored, tiers)

    async def flush(self) -> None:
        """Forget all answers. Those that are being computed now are stored as ever."""
        self._memory.clear()
        for tier in self._tiers:
            await tier.clear()
        if self._similar is not None:
            self._similar.clear()

    async def close(self) -> None:
        for engine in self._engines:
            await engine.close()
        for tier in self._tiers:
            await tier.close()
        if self._similar is not None:
            self._similar.close()


@asynccontextmanager
async def open_cache(config: CacheConfig, state: str | None, shared: Tier | None = None) -> AsyncIterator[AnswerCache]:
    """The `state` of the gateways holds answers too if it is a Redis; else `shared` is a tier that they have in
    common."""
    tiers: list[Tier] = []
    similar = None
    if config.enabled:
        if shared is not None:
            tiers.append(shared)
        if state is not None and state.startswith(("redis", "unix")):
            tiers.append(_redis(state))
        if config.disk_mib > 0:
            tiers.append(await asyncio.to_thread(_disk, config))
        similar = await asyncio.to_thread(_similar, config.semantic) if config.semantic.routes else None
    cache = AnswerCache(config, tiers, similar)
    try:
        yield cache
    finally:
        await cache.close()


def _redis(url: str) -> Tier:
    from penstock.cache.redis_tier import RedisTier, connect

    return RedisTier(connect(url))


def _disk(config: CacheConfig) -> Tier:
    path = Path(config.disk_path).expanduser() if config.disk_path else cache_folder() / "answers.sqlite"
    return DiskTier(path, int(config.disk_mib * 2**20))


def _similar(config: SemanticConfig) -> SimilarPrompts:
    from penstock.cache.encoder import SentenceEncoder, encoder_folder

    encoder = SentenceEncoder(encoder_folder(config.encoder))
    return SimilarPrompts(encoder, config.threshold, config.max_prompts)
