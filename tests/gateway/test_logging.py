"""What lines look like, and when they are written."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from http.client import HTTPConnection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.observability import logging as module
from penstock.observability.logging import JsonFormat, LineHandler, TextFormat, log, with_fields


@dataclass
class Log:
    """A logger whose lines go into a pipe."""

    logger: logging.Logger
    handler: LineHandler
    end: int  # to read at

    def read(self) -> list[str]:
        """All lines, once the last of them has been written."""
        self.handler.close()
        self.handler.flush()
        os.set_blocking(self.end, False)
        pieces = []
        with suppress(BlockingIOError):
            while piece := os.read(self.end, 1 << 20):
                pieces.append(piece)
        return b"".join(pieces).decode().splitlines()

    def next(self) -> str:
        """As soon as it has been written."""
        return os.read(self.end, 1 << 20).decode()


@contextmanager
def log_with(line: TextFormat | JsonFormat) -> Iterator[Log]:
    reading, writing = os.pipe()
    logger, handler = logging.Logger("test"), LineHandler(writing, line)
    logger.addHandler(handler)
    yield Log(logger, handler, reading)
    handler.close()
    with suppress(OSError):  # a test may have closed it
        os.close(reading)
    os.close(writing)


def last_words(text: str | list[str]) -> list[str]:
    return [line.rpartition(" ")[2] for line in (text.splitlines() if isinstance(text, str) else text)]


def test_lines_wait_for_each_other_but_none_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WRITE_SECONDS", 3600.0)  # longer than this test takes anywhere
    with log_with(TextFormat()) as log:
        log.logger.info("one")
        log.logger.info("two")
        log.logger.warning("three")
        assert last_words(log.next()) == ["one", "two", "three"], "a warning brings the others with it"
        log.logger.info("four")
        log.handler.flush()
        assert last_words(log.next()) == ["four"]
        log.logger.info("five")
        assert last_words(log.read()) == ["five"]


def test_a_line_alone_is_written_soon() -> None:
    with log_with(TextFormat()) as log:
        log.logger.info("one")
        assert last_words(log.next()) == ["one"]


def test_a_reader_that_stalls_stops_nobody_and_is_told_what_was_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FLUSH_SECONDS", 0.1)
    with log_with(TextFormat()) as log:
        text = "x" * 1000
        for number in range(15_000):
            log.logger.warning("%s %d", text, number)
        log.handler.flush()  # returns, though nobody reads
        dropped = log.handler.dropped
        assert 15_000 - 2 * module.MAX_UNWRITTEN // 1000 - 200 < dropped < 15_000
        read = b""
        while not (read.endswith(b"\n") and b"dropped" in read[-200:]):
            read += os.read(log.end, 1 << 20)
        *kept, told = read.decode().splitlines()
        assert last_words(kept) == [str(number) for number in range(15_000 - dropped)]
        assert told.endswith(f" WARNING lines of the log were dropped: nobody read it lines={dropped}")
        log.logger.warning("on")
        assert last_words(log.next()) == ["on"]


def test_a_pipe_that_somebody_made_non_blocking_gets_every_line() -> None:
    with log_with(TextFormat()) as log:
        os.set_blocking(log.handler._descriptor, False)
        for number in range(300):
            log.logger.warning("%s %d", "x" * 1000, number)
        read = b""
        while not read.endswith(b" 299\n"):
            read += os.read(log.end, 1 << 20)
    assert last_words(read.decode()) == [str(number) for number in range(300)]


def test_a_reader_that_is_gone_does_not_end_what_is_logged() -> None:
    with log_with(TextFormat()) as log:
        os.close(log.end)
        log.logger.warning("lost")
        log.handler.flush()
        assert log.handler.dropped == 1


@pytest.mark.parametrize("ending", ["", "raise SystemExit(3)", "raise ValueError", "logging.shutdown(); os._exit(1)"])
def test_a_process_that_ends_has_written_all_of_its_log(ending: str) -> None:
    """The crash that it logged, too."""
    code = f"""
import logging, os
from penstock.observability.logging import configure_logging
configure_logging()
for number in range(1000):
    logging.getLogger("penstock").info("%s %d", "x" * 500, number)
{ending}
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr
    assert last_words([line for line in said.splitlines() if " INFO " in line]) == [str(n) for n in range(1000)]


def test_a_server_whose_log_nobody_reads_goes_on() -> None:
    """Its standard error is a pipe that is full."""
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "tests.gateway.tenancy.tenant_server", "{}"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=writing)
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        os.set_blocking(writing, False)
        with suppress(BlockingIOError):
            while True:
                os.write(writing, b".")
        os.set_blocking(writing, True)
        with closing(HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
            until = time.monotonic() + 4 * module.WRITE_SECONDS  # lines have been written by then
            while time.monotonic() < until:
                connection.request("GET", "/v1/models")
                assert connection.getresponse().read()
            connection.request("GET", "/health")
            assert connection.getresponse().status == 200
    finally:
        server.kill()
        server.communicate()
        os.close(reading)
        os.close(writing)


def test_a_json_line_has_the_fields_as_keys_and_the_traceback_in_one() -> None:
    before = datetime.now(UTC)
    with log_with(JsonFormat()) as lines:
        try:
            raise ValueError("two\nlines")
        except ValueError as error:
            fields = {"path": '/x "y"\n\ud800é', "ms": 1.23456, "status": 500, "tenant": None}
            log(lines.logger, logging.ERROR, "failed", error=error, **fields)
        lines.logger.warning("%d of %s", 3, "library")
        failed, of_library = map(json.loads, lines.read())
    assert before.timestamp() - 0.001 <= datetime.fromisoformat(failed.pop("timestamp")).timestamp()
    trace = failed.pop("exception")
    assert trace.startswith("Traceback")
    assert trace.endswith("ValueError: two\nlines")
    fields = {"path": '/x "y"\n\\ud800é', "ms": 1.235, "status": 500}
    assert failed == {"level": "error", "logger": "test", "message": "failed", **fields}
    assert (of_library["level"], of_library["message"]) == ("warning", "3 of library")


def test_text_cannot_be_mistaken_for_other_fields() -> None:
    with log_with(TextFormat()) as lines:
        log(lines.logger, logging.INFO, "request", path="/x status=200\n", ms=1.23, status=404, why=None)
        (line,) = lines.read()
    assert line.endswith(" INFO request path='/x status=200\\n' ms=1.2 status=404")


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
