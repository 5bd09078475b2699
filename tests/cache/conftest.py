"""A cache before an engine that answers from a script, and a real Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest

from penstock.cache import engine as cached_engine
from penstock.cache import redis_tier
from penstock.cache.engine import CachedEngine
from penstock.cache.settings import CacheConfig
from penstock.core.request import Chunk, GenerateRequest, SamplingParams
from penstock.simulation.scripted_engine import ScriptedEngine, says
from penstock.text.stream import TextStream
from penstock.text.tokenizer import Tokenizer
from tests.gateway.scripted_server import load_built_in_tokenizer
from tests.redis_server import RedisServer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_built_in_tokenizer()


@pytest.fixture(scope="session")
def redis_process() -> Iterator[RedisServer]:
    server = RedisServer()
    yield server
    server.stop()


@pytest.fixture(scope="package", autouse=True)
def patient() -> Iterator[None]:
    """A slow machine does not pass for a lost Redis, and has the time to write."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redis_tier, "TIMEOUT_SECONDS", 60.0)
        patch.setattr(cached_engine, "CLOSE_SECONDS", 60.0)
        yield


@pytest.fixture
def engine(tokenizer: Tokenizer) -> ScriptedEngine:
    """Says the same whatever it is asked; `requests` counts how often it was."""
    (script,) = says(tokenizer, "The answer is forty-two, friend.")
    return ScriptedEngine(tokenizer, lambda request: [[token_id] for token_id in script])


@pytest.fixture
async def cached(engine: ScriptedEngine, tokenizer: Tokenizer) -> AsyncIterator[CachedEngine]:
    cache = CachedEngine(engine, tokenizer, CacheConfig())
    yield cache
    await cache.close()


GREEDY = SamplingParams(temperature=0, max_tokens=64)
_count = 0


def request(**changes: Any) -> GenerateRequest:
    """A deterministic one with an id of its own."""
    global _count
    _count += 1
    return replace(GenerateRequest(f"request-{_count}", [1, 2, 3], GREEDY), **changes)


async def answer(engine: CachedEngine, asked: GenerateRequest) -> list[Chunk]:
    return [chunk async for chunk in engine.submit(asked)]


def text_of(tokenizer: Tokenizer, asked: GenerateRequest, chunks: list[Chunk]) -> str:
    stream = TextStream(tokenizer, asked.params)
    for chunk in chunks:
        stream.push(chunk)
    return stream.text


def state(chunks: list[Chunk]) -> str:
    assert chunks[0].cache is not None
    return chunks[0].cache.state
