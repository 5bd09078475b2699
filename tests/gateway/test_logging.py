"""When lines are written."""

from __future__ import annotations

import asyncio
import io
import logging

import pytest

from penstock.observability import logging as module
from penstock.observability.logging import LineHandler


def lines(stream: io.StringIO) -> list[str]:
    return [line.rpartition(" ")[2] for line in stream.getvalue().splitlines()]


def test_lines_of_a_loop_wait_for_each_other_but_none_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WRITE_SECONDS", 3600.0)  # longer than this test takes anywhere
    stream = io.StringIO()
    logger = logging.Logger("test")
    logger.addHandler(handler := LineHandler(stream))

    async def work(last: int) -> None:
        logger.log(last, "two")
        logger.info("three")

    logger.info("one")
    assert lines(stream) == ["one"], "nobody would write it later"
    asyncio.run(work(logging.INFO))
    assert lines(stream) == ["one"]
    asyncio.run(work(logging.WARNING))
    assert lines(stream) == ["one", "two", "three", "two"], "a warning brings the others with it"
    handler.flush()
    assert lines(stream)[-1] == "three"


def test_a_stream_that_is_gone_does_not_end_what_is_logged() -> None:
    stream = io.StringIO()
    logger = logging.Logger("test")
    logger.addHandler(LineHandler(stream))
    stream.close()
    logger.warning("lost")
