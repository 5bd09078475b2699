"""Readable one-line logs: `time level message key=value ...`. Used by the gateway and the worker alike."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import time
from contextlib import suppress
from typing import TextIO

WRITE_SECONDS = 0.05  # for how long a line may wait for others

_formatter = logging.Formatter()
_is_plain = re.compile(r"[\w\-.,:;/+@%#~*\[\](){}<>!?&|^$]+", re.ASCII).fullmatch


class LineHandler(logging.Handler):
    """`2031-05-06 07:08:09.123 INFO message`; a traceback follows on its own lines.

    Lines of an event loop are written some times a second, all at once: a write for each would take longer than all
    the rest of it. Warnings, and lines from elsewhere, are written at once.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._lines: list[str] = []
        self._due_in: asyncio.AbstractEventLoop | None = None
        self._second, self._time = -1, ""  # the latest second that a line had, as text

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + _formatter.formatException(record.exc_info)
        self.add(record.created, record.levelno, text)

    def add(self, seconds: float, level: int, text: str) -> None:
        second = int(seconds)
        self.acquire()
        try:
            if second != self._second:
                self._second = second
                self._time = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second))
            milliseconds = int((seconds - second) * 1000)
            self._lines.append(f"{self._time}.{milliseconds:03d} {logging.getLevelName(level)} {text}")
            loop = asyncio._get_running_loop() if level < logging.WARNING else None
            if loop is None:
                self.flush()
            elif loop is not self._due_in:
                self._due_in = loop
                loop.call_later(WRITE_SECONDS, self.flush)
        finally:
            self.release()

    def flush(self) -> None:
        """Also at the end of the process. A log that cannot be written must not end what it tells of."""
        self.acquire()
        try:
            lines, self._lines, self._due_in = self._lines, [], None
            with suppress(OSError, ValueError):
                if lines:
                    self._stream.write("\n".join(lines) + "\n")
                    self._stream.flush()
        finally:
            self.release()


def configure_logging(level: str = "info", stream: TextIO | None = None) -> None:
    """Send every logger of the process to one stream (stderr unless told), replacing what was set up before."""
    logging.basicConfig(level=level.upper(), handlers=[LineHandler(stream or sys.stderr)], force=True)
    # None of these is in a line, and finding them out takes half of the time of a record.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging.getLogger("asyncio").setLevel(max(logging.WARNING, logging.getLogger().level))


def quoted(value: object) -> str:
    """A value that cannot break the line or pass for another key, whatever a client put in it."""
    text = str(value)
    return text if _is_plain(text) else ascii(text)


def log(
    logger: logging.Logger, level: int, message: str, *, error: BaseException | None = None, **fields: object
) -> None:
    """Log `message` with `fields` as key=value; `error` adds its traceback. `message` must not hold client input."""
    if logger.isEnabledFor(level):
        words = [message]
        for key, value in fields.items():
            if isinstance(value, float):
                words.append(f"{key}={value:.1f}")
            elif isinstance(value, int):
                words.append(f"{key}={value}")
            elif value is not None:
                words.append(f"{key}={quoted(value)}")
        log_line(logger, level, " ".join(words), error)


def log_line(logger: logging.Logger, level: int, line: str, error: BaseException | None = None) -> None:
    """Not logger.log(): it walks the stack to find its caller, which costs more than all the rest. Where our handler is
    the only one, a line needs no LogRecord either."""
    handlers = logging.root.handlers
    if error is None and len(handlers) == 1 and type(handlers[0]) is LineHandler and not logger.handlers:
        handlers[0].add(time.time(), level, line)
        return
    trace = None if error is None else (type(error), error, error.__traceback__)
    logger.handle(logging.LogRecord(logger.name, level, "", 0, line, (), trace))
