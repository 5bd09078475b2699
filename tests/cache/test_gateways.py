"""Two gateways with a tier in common compute an answer once between them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from penstock.cache import engine as cached_engine
from penstock.cache.brokered import BrokeredTier, answer_handlers
from penstock.cache.build import open_cache
from penstock.cache.engine import CachedEngine
from penstock.cache.settings import CacheConfig
from penstock.core.errors import EngineFailure
from penstock.core.request import Objective
from penstock.fleet.channel import Channel
from penstock.simulation.scripted_engine import ScriptedEngine
from penstock.text.tokenizer import Tokenizer
from tests.cache.conftest import answer, request, state, text_of
from tests.cache.test_cached_engine import ANSWER, gated
from tests.redis_server import RedisServer


@pytest.fixture(params=["redis", "process"])
async def gateways(
    request: pytest.FixtureRequest, engine: ScriptedEngine, tokenizer: Tokenizer, redis_process: RedisServer
) -> AsyncIterator[tuple[CachedEngine, CachedEngine]]:
    async with AsyncExitStack() as stack:
        found = []
        handlers = answer_handlers(1.0)
        for _ in range(2):
            if request.param == "redis":
                caching = open_cache(CacheConfig(), redis_process.url)
            else:
                tier = await stack.enter_async_context(brokered(handlers))
                caching = open_cache(CacheConfig(), None, tier)
            cached = (await stack.enter_async_context(caching)).before(engine, tokenizer)
            assert isinstance(cached, CachedEngine)
            found.append(cached)
        yield found[0], found[1]


@asynccontextmanager
async def brokered(handlers: dict) -> AsyncIterator[BrokeredTier]:  # type: ignore[type-arg]
    ours, theirs = socket.socketpair()
    here, there = Channel(ours, {}), Channel(theirs, handlers)
    yield BrokeredTier(here)
    here.close()
    there.close()


def refusal_of(gateway: CachedEngine) -> asyncio.Event:
    """Set when the gateway has learnt that another one computes what it is asked for."""
    refused, tier = asyncio.Event(), gateway._shared
    assert tier is not None
    claim = tier.claim

    async def watched(key: bytes, seconds: float) -> bool:
        granted = await claim(key, seconds)
        if not granted:
            refused.set()
        return granted

    tier.claim = watched  # type: ignore[method-assign]
    return refused


async def test_the_second_waits_for_the_first(
    gateways: tuple[CachedEngine, CachedEngine], engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    gate = gated(engine)
    first, second = (request(prompt=[3, 1, 4]) for _ in range(2))
    leading = asyncio.create_task(answer(gateways[0], first))
    await gate.reached.wait()
    refused = refusal_of(gateways[1])
    following = asyncio.create_task(answer(gateways[1], second))
    await refused.wait()
    gate.open.set()
    assert (state(await leading), state(await following)) == ("miss", "shared")
    assert text_of(tokenizer, second, await following) == ANSWER
    assert len(engine.requests) == 1


async def test_if_the_first_fails_the_second_computes(
    gateways: tuple[CachedEngine, CachedEngine], engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    whole, gate = engine.script, gated(engine)
    engine.script = lambda asked: [gate, EngineFailure("lost")] if len(engine.requests) == 1 else whole(asked)
    leading = asyncio.create_task(answer(gateways[0], request(prompt=[1, 5, 9])))
    await gate.reached.wait()
    second = request(prompt=[1, 5, 9])
    following = asyncio.create_task(answer(gateways[1], second))
    gate.open.set()
    with pytest.raises(EngineFailure):
        await leading
    assert text_of(tokenizer, second, await following) == ANSWER
    assert len(engine.requests) == 2


async def test_who_leaves_while_it_claims_an_answer_leaves_it_to_others(
    gateways: tuple[CachedEngine, CachedEngine], engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    tier = gateways[0]._shared
    assert tier is not None
    claim, claimed, hear = tier.claim, asyncio.Event(), asyncio.Event()

    async def heard_late(key: bytes, seconds: float) -> bool:
        granted = await claim(key, seconds)
        claimed.set()
        await hear.wait()
        return granted

    tier.claim = heard_late  # type: ignore[method-assign]
    leaving = asyncio.create_task(answer(gateways[0], request(prompt=[9, 2, 6])))
    await claimed.wait()
    refused = refusal_of(gateways[1])
    asked = request(prompt=[9, 2, 6])
    following = asyncio.create_task(answer(gateways[1], asked))
    await refused.wait()
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    hear.set()
    async with asyncio.timeout(cached_engine.CLAIM_SECONDS / 2):
        assert text_of(tokenizer, asked, await following) == ANSWER
    assert len(engine.requests) == 1


async def test_a_promised_first_token_is_not_waited_for(
    gateways: tuple[CachedEngine, CachedEngine], engine: ScriptedEngine
) -> None:
    plain, gate = engine.script, gated(engine)
    waiting = engine.script
    engine.script = lambda asked: waiting(asked) if len(engine.requests) == 1 else plain(asked)
    leading = asyncio.create_task(answer(gateways[0], request(prompt=[2, 6, 5])))
    await gate.reached.wait()
    urgent = request(prompt=[2, 6, 5], objective=Objective("urgent", ttft=0.1))
    assert state(await answer(gateways[1], urgent)) == "miss"
    gate.open.set()
    await leading
    assert len(engine.requests) == 2
