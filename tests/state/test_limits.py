"""Limits on a virtual clock, in memory and in a real Redis, against a model that remembers everything."""

from __future__ import annotations

import asyncio
import itertools
import math
from dataclasses import dataclass, field

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.state.memory import MemoryStore
from penstock.state.redis import LEASE_SECONDS, RedisStore
from penstock.state.store import Claim, Grant, Store, TenantUsage
from tests.redis_server import RedisServer

_numbers = itertools.count()


@dataclass
class Admitted:
    time: float
    tokens: int
    running: bool = True


@dataclass
class Model:
    """What must hold, from the list of all that was ever admitted."""

    requests: int
    tokens: int
    concurrent: int
    lease: float = math.inf  # seconds after which a running request is taken for dead
    admitted: list[Admitted] = field(default_factory=list)

    def refusal(self, now: float, tokens: int) -> str | None:
        counted = [a for a in self.admitted if math.floor(a.time) >= math.floor(now) - 60]
        if sum(a.running and a.time + self.lease > now for a in self.admitted) >= self.concurrent:
            return "concurrent"
        if len(counted) + 1 > self.requests:
            return "requests"
        return "tokens" if sum(a.tokens for a in counted) + tokens > self.tokens else None

    def check(self) -> None:
        """No minute, wherever it begins, holds more requests than the limit."""
        for first in self.admitted:
            assert sum(first.time <= a.time < first.time + 60 for a in self.admitted) <= self.requests


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("wait"), st.one_of(st.floats(0, 5), st.floats(50, 70))),
        st.tuples(st.just("reserve"), st.integers(0, 40)),
        st.tuples(st.just("settle"), st.integers(0, 40)),
    ),
    max_size=40,
)


async def follow(store: Store, clock: list[float], model: Model, actions: list[tuple[str, float]]) -> None:
    running: list[tuple[Grant, Admitted]] = []
    for action, amount in actions:
        if action == "wait":
            clock[0] += amount
        elif action == "settle" and running:
            grant, admitted = running.pop(0)
            store.settle(grant, TenantUsage(1, 0, 0, int(amount), 0))
            admitted.tokens, admitted.running = int(amount), False
        elif action == "reserve":
            tokens = int(amount)
            claim = Claim(str(next(_numbers)), "t", "m", tokens, model.requests, model.tokens, model.concurrent)
            expected = model.refusal(clock[0], tokens)
            grant = await store.reserve(claim)
            assert grant.refused == expected
            if expected is None:
                model.admitted.append(Admitted(clock[0], tokens))
                running.append((grant, model.admitted[-1]))
            elif expected != "concurrent":
                check_retry(model, clock[0], tokens, grant.retry_after, expected)
            check_room(model, clock[0], grant)
    model.check()


def check_retry(model: Model, now: float, tokens: int, retry_after: float, refused: str) -> None:
    """Waiting as long as told helps, and a second less would not."""
    assert 0 < retry_after <= 61.001
    if tokens <= model.tokens:
        assert model.refusal(now + retry_after + 0.002, tokens) != refused
    if retry_after > 1:
        assert model.refusal(now + retry_after - 1.001, tokens) is not None


def check_room(model: Model, now: float, grant: Grant) -> None:
    counted = [a for a in model.admitted if math.floor(a.time) >= math.floor(now) - 60]
    assert grant.requests is not None
    assert grant.tokens is not None
    assert grant.requests.left == model.requests - len(counted)
    assert grant.tokens.left == max(0, model.tokens - sum(a.tokens for a in counted))


LIMITS = {"requests": st.integers(1, 6), "tokens": st.integers(1, 100), "concurrent": st.integers(1, 6)}


@given(model=st.builds(Model, **LIMITS, admitted=st.builds(list)), actions=ACTIONS, start=st.floats(1e6, 1e6 + 2))
def test_memory_limits_follow_the_model(model: Model, actions: list[tuple[str, float]], start: float) -> None:
    clock = [start]
    asyncio.run(follow(MemoryStore(lambda: clock[0]), clock, model, actions))


@given(model=st.builds(Model, **LIMITS, admitted=st.builds(list)), actions=ACTIONS, start=st.floats(1e6, 1e6 + 2))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_redis_limits_follow_the_model(
    redis_server: RedisServer, model: Model, actions: list[tuple[str, float]], start: float
) -> None:
    clock = [start]

    async def run() -> None:
        model.lease = LEASE_SECONDS
        store = RedisStore(redis_server.url, f"test{next(_numbers)}", lambda: clock[0])
        await store.open()
        await follow(store, clock, model, actions)
        assert store.online
        await store.close()

    asyncio.run(run())
