"""A broker that goes away and comes back, under a consumer at work."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from pathlib import Path

import pytest

from penstock.core.request import GenerateRequest
from penstock.queues import consumer
from penstock.simulation.scripted_engine import Action
from penstock.text.tokenizer import Tokenizer
from tests.gateway.conftest import serving
from tests.queues.conftest import SECONDS, Queue
from tests.queues.test_consumer import asked, settings
from tests.redis_server import RedisServer

COUNT = 10


def until_said(caplog: pytest.LogCaptureFixture, text: str) -> None:
    deadline = time.monotonic() + SECONDS
    while text not in caplog.text:
        assert time.monotonic() < deadline, caplog.text
        time.sleep(0.01)


def test_nothing_is_lost_with_the_broker_away(
    tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes while requests are being answered, and comes back with what it had."""
    monkeypatch.setattr(consumer, "RETRY_SECONDS", 0.1)
    caplog.set_level(logging.INFO, "penstock.queues")
    is_away = threading.Event()
    begun = threading.Semaphore(0)
    server = RedisServer(tmp_path)
    before, after = Queue(server.url), Queue(server.url)
    after.config = before.config
    try:
        with serving(tokenizer, settings(tmp_path, before.config)) as gateway:
            answer = gateway.engine.script

            def script(request: GenerateRequest) -> list[Action]:
                async def until_away() -> None:
                    begun.release()
                    assert await asyncio.to_thread(is_away.wait, SECONDS)

                return [until_away, *answer(request)]

            gateway.runs(script)
            before.send(*(asked(f"r{n}") for n in range(COUNT)))
            assert begun.acquire(timeout=SECONDS)
            server.stop()
            is_away.set()
            until_said(caplog, "the queue waits: Redis does not answer")
            server.start()
            until_said(caplog, "the queue goes on: the broker is back")
            after.send(asked("late"))
            answers = after.take(COUNT + 1)
            assert {each["custom_id"] for each in answers} == {*(f"r{n}" for n in range(COUNT)), "late"}
            assert {each["response"]["status_code"] for each in answers} == {200}
            assert len(answers) == COUNT + 1
            with gateway.http() as http:
                assert http.get("/health").status_code == 200
        assert caplog.text.count("the queue waits") == 1
    finally:
        before.close()
        after.close()
        server.stop()
