from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.state import redis
from penstock.state.memory import MemoryStore
from tests.redis_server import RedisServer


@pytest.fixture(scope="package")
def redis_server() -> Iterator[RedisServer]:
    server = RedisServer()
    yield server
    server.stop()


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """To hang, stop and start."""
    server = RedisServer()
    yield server
    server.stop()


@pytest.fixture(scope="package", autouse=True)
def steady() -> Iterator[None]:
    """A slow machine does not pass for a lost Redis, and no test is in two days."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redis, "TIMEOUT_SECONDS", 60.0)
        patch.setattr(redis, "CLOSE_SECONDS", 60.0)
        patch.setattr(MemoryStore, "day", lambda _: "2031-05-06")
        yield
