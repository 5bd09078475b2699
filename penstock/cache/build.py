"""Builds the answer cache from the settings. What is not used is not imported, so that a gateway starts fast."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from prometheus_client.registry import Collector

from penstock.cache.disk_tier import DiskTier
from penstock.cache.engine import CachedEngine
from penstock.cache.settings import CacheConfig, SemanticConfig
from penstock.cache.similar import SimilarPrompts
from penstock.cache.tier import Tier
from penstock.core.engine import ServedEngine
from penstock.core.machine import cache_folder
from penstock.text.tokenizer import Tokenizer


@asynccontextmanager
async def open_cache(
    engine: ServedEngine, tokenizer: Tokenizer, config: CacheConfig, state: str | None
) -> AsyncIterator[tuple[ServedEngine, Sequence[Collector]]]:
    """The engine behind a cache, and its metrics; or the engine as it is, where the cache is switched off. The `state`
    of the gateways holds answers too if it is a Redis."""
    if not config.enabled:
        yield engine, ()
        return
    tiers: list[Tier] = []
    if state is not None and state.startswith(("redis", "unix")):
        tiers.append(_redis(state))
    if config.disk_mib > 0:
        tiers.append(await asyncio.to_thread(_disk, config))
    similar = await asyncio.to_thread(_similar, config.semantic) if config.semantic.routes else None
    cached = CachedEngine(engine, tokenizer, config, tiers=tiers, similar=similar)
    try:
        yield cached, (cached.metrics,)
    finally:
        await cached.close()


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
