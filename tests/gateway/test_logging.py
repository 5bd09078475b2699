"""What lines look like, and when they are written."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.observability import logging as module
from penstock.observability.logging import JsonFormat, LineHandler, TextFormat, log, with_fields


def lines(stream: io.StringIO) -> list[str]:
    return [line.rpartition(" ")[2] for line in stream.getvalue().splitlines()]


def logger_to(stream: io.StringIO, line: TextFormat | JsonFormat) -> logging.Logger:
    logger = logging.Logger("test")
    logger.addHandler(LineHandler(stream, line))
    return logger


def test_lines_of_a_loop_wait_for_each_other_but_none_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WRITE_SECONDS", 3600.0)  # longer than this test takes anywhere
    stream = io.StringIO()
    logger = logger_to(stream, TextFormat())

    async def work(last: int) -> None:
        logger.log(last, "two")
        logger.info("three")

    logger.info("one")
    assert lines(stream) == ["one"], "nobody would write it later"
    asyncio.run(work(logging.INFO))
    assert lines(stream) == ["one"]
    asyncio.run(work(logging.WARNING))
    assert lines(stream) == ["one", "two", "three", "two"], "a warning brings the others with it"
    logger.handlers[0].flush()
    assert lines(stream)[-1] == "three"


def test_a_stream_that_is_gone_does_not_end_what_is_logged() -> None:
    stream = io.StringIO()
    logger = logger_to(stream, TextFormat())
    stream.close()
    logger.warning("lost")


def test_a_json_line_has_the_fields_as_keys_and_the_traceback_in_one() -> None:
    stream = io.StringIO()
    logger = logger_to(stream, JsonFormat())
    before = datetime.now(UTC)
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        log(logger, logging.ERROR, "failed", path='/x "y"\n\ud800é', ms=1.23456, status=500, tenant=None, error=error)
    logger.warning("%d of %s", 3, "library")
    failed, of_library = map(json.loads, stream.getvalue().splitlines())
    assert before.timestamp() - 0.001 <= datetime.fromisoformat(failed.pop("timestamp")).timestamp()
    trace = failed.pop("exception")
    assert trace.startswith("Traceback")
    assert trace.endswith("ValueError: two\nlines")
    fields = {"path": '/x "y"\n\\ud800é', "ms": 1.235, "status": 500}
    assert failed == {"level": "error", "logger": "test", "message": "failed", **fields}
    assert (of_library["level"], of_library["message"]) == ("warning", "3 of library")


def test_text_cannot_be_mistaken_for_other_fields() -> None:
    stream = io.StringIO()
    log(logger_to(stream, TextFormat()), logging.INFO, "request", path="/x status=200\n", ms=1.23, status=404, why=None)
    assert stream.getvalue().endswith(" INFO request path='/x status=200\\n' ms=1.2 status=404\n")


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.sampled_from("ab= '\n%é/"), max_size=6)


@given(st.dictionaries(st.sampled_from(["path", "ms", "status", "why"]), VALUES))
def test_a_line_reads_back_as_its_fields(fields: dict[str, object]) -> None:
    """Whether or not all of them can be formatted at once."""

    def shown(value: object) -> str:
        return f"{value:.1f}" if isinstance(value, float) else str(value)

    line = with_fields("request", fields)
    assert line.splitlines() == [line]
    rest = line.removeprefix("request")
    for key, value in fields.items():
        if value is None:
            continue
        plain, quoted = f" {key}={shown(value)}", f" {key}={shown(value)!a}"
        must_quote = isinstance(value, str) and (not value or not value.isascii() or bool(set(value) & set("= '\n")))
        written = quoted if must_quote else plain
        assert rest.startswith(written)
        rest = rest.removeprefix(written)
    assert not rest
