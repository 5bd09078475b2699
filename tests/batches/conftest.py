from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.batches.places import Folder, Place, Redis
from tests.redis_server import RedisServer


@pytest.fixture(scope="package")
def redis_server() -> Iterator[RedisServer]:
    server = RedisServer()
    yield server
    server.stop()


@pytest.fixture(params=["sqlite", "redis"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Folder(tmp_path) if request.param == "sqlite" else Redis(request.getfixturevalue("redis_server").url)
