from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.redis_server import RedisServer


@pytest.fixture(scope="package")
def redis_server() -> Iterator[RedisServer]:
    server = RedisServer()
    yield server
    server.stop()
