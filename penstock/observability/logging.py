"""Logs of gateway and worker, a line for each event: `time level message key=value ...`, or a JSON object."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from types import NoneType
from typing import Any, NamedTuple, TextIO

import msgspec

from penstock.observability.settings import LogConfig

WRITE_SECONDS = 0.05  # for how long a line may wait for others

Fields = Mapping[str, object]

_formatter = logging.Formatter()
_PLAIN = r"[\w\-.,:;/+@%#~*\[\](){}<>!?&|^$]+"
_is_plain = re.compile(_PLAIN, re.ASCII).fullmatch
_are_plain = re.compile(rf"( \w+={_PLAIN})*", re.ASCII).fullmatch
_encode = msgspec.json.Encoder().encode


class Event(NamedTuple):
    seconds: float  # since 1970
    level: int
    logger: str
    message: str
    fields: Fields
    exception: str  # with its traceback; empty: none


class _Timestamps:
    """Seconds as text, to the millisecond. Most lines have the second of the line before."""

    def __init__(self, format: str, in_zone: Callable[[float], time.struct_time]) -> None:
        self._format = format
        self._in_zone = in_zone
        self._second, self._text = -1, ""

    def __call__(self, seconds: float) -> str:
        second = int(seconds)
        if second != self._second:
            self._second, self._text = second, time.strftime(self._format, self._in_zone(second))
        return f"{self._text}.{int((seconds - second) * 1000):03d}"


class TextFormat:
    """`2031-05-06 07:08:09.123 INFO message key=value`; a traceback follows on its own lines."""

    def __init__(self) -> None:
        self._timestamp = _Timestamps("%Y-%m-%d %H:%M:%S", time.localtime)

    def __call__(self, event: Event) -> str:
        text = with_fields(event.message, event.fields)
        line = f"{self._timestamp(event.seconds)} {logging.getLevelName(event.level)} {text}"
        return f"{line}\n{event.exception}" if event.exception else line


class JsonFormat:
    """`{"timestamp":"2031-05-06T07:08:09.123Z","level":"info","logger":"penstock.gateway","message":...,"key":value}`;
    a traceback is the text of `exception`."""

    def __init__(self) -> None:
        self._timestamp = _Timestamps("%Y-%m-%dT%H:%M:%S", time.gmtime)

    def __call__(self, event: Event) -> str:
        values: dict[str, Any] = {
            "timestamp": self._timestamp(event.seconds) + "Z",
            "level": logging.getLevelName(event.level).lower(),
            "logger": event.logger,
            "message": _unicode(event.message),
        }
        for key, value in event.fields.items():
            if isinstance(value, float):
                values[key] = round(value, 3)
            elif isinstance(value, int):
                values[key] = value
            elif value is not None:
                values[key] = _unicode(str(value))
        if event.exception:
            values["exception"] = _unicode(event.exception)
        return _encode(values).decode()


def _unicode(text: str) -> str:
    """Without lone surrogates, which JSON in UTF-8 cannot hold."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


class LineHandler(logging.Handler):
    """Lines of an event loop are written some times a second, all at once: a write for each would take longer than all
    the rest of it. Warnings, and lines from elsewhere, are written at once."""

    def __init__(self, stream: TextIO, line: Callable[[Event], str]) -> None:
        super().__init__()
        self._stream = stream
        self._line = line
        self._lines: list[str] = []
        self._due_in: asyncio.AbstractEventLoop | None = None

    def emit(self, record: logging.LogRecord) -> None:
        message, fields = getattr(record, "structured", None) or (record.getMessage(), {})
        exception = _formatter.formatException(record.exc_info) if record.exc_info else ""
        self.add(Event(record.created, record.levelno, record.name, message, fields, exception))

    def add(self, event: Event) -> None:
        self.acquire()
        try:
            self._lines.append(self._line(event))
            loop = asyncio._get_running_loop() if event.level < logging.WARNING else None
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


_DEFAULT = LogConfig()


def configure_logging(logs: LogConfig = _DEFAULT, stream: TextIO | None = None) -> None:
    """Send every logger of the process to one stream (stderr unless told), replacing what was set up before. Libraries
    only warn, unless everything is asked for: one of them has a line for each of the dozens of requests of a
    download."""
    line = JsonFormat() if logs.format == "json" else TextFormat()
    level = logging.getLevelNamesMapping()[logs.level.upper()]
    others = level if level == logging.DEBUG else max(level, logging.WARNING)
    logging.basicConfig(level=others, handlers=[LineHandler(stream or sys.stderr, line)], force=True)
    logging.getLogger("penstock").setLevel(level)
    logging.captureWarnings(logs.format == "json")  # otherwise lines of their own
    # None of these is in a line, and finding them out takes half of the time of a record.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging.getLogger("asyncio").setLevel(max(logging.WARNING, logging.getLogger().level))


def with_fields(message: str, fields: Fields) -> str:
    """`message key=value ...`. No value can break the line or pass for another key, whatever a client put in it."""
    values = tuple(fields.values())
    pattern, pairs = _pattern(tuple(fields), tuple(map(type, values)))
    text = pattern % values
    if _are_plain(text) and text.count("=") == pairs:
        return message + text
    for key, value in fields.items():
        if isinstance(value, float):
            message += f" {key}={value:.1f}"
        elif isinstance(value, int):
            message += f" {key}={value}"
        elif value is not None:
            text = str(value)
            message += f" {key}={text if _is_plain(text) else ascii(text)}"
    return message


@lru_cache(256)
def _pattern(keys: tuple[str, ...], types: tuple[type, ...]) -> tuple[str, int]:
    """By which values of these types are formatted all at once, and how many of them are shown."""
    formats = [
        "%.0s" if kind is NoneType else f" {key}=%{'.1f' if issubclass(kind, float) else 's'}"
        for key, kind in zip(keys, types, strict=True)
    ]
    return "".join(formats), len(types) - types.count(NoneType)


def log(
    logger: logging.Logger, level: int, message: str, *, error: BaseException | None = None, **fields: object
) -> None:
    """Log `message` with those of `fields` that are not None; `error` adds its traceback. `message` must not hold
    client input."""
    if logger.isEnabledFor(level):
        log_event(logger, level, message, fields, error)


def log_event(
    logger: logging.Logger, level: int, message: str, fields: Fields, error: BaseException | None = None
) -> None:
    """Not logger.log(): it walks the stack to find its caller, which costs more than all the rest. Where our handler is
    the only one, a line needs no LogRecord either."""
    handlers = logging.root.handlers
    if error is None and len(handlers) == 1 and type(handlers[0]) is LineHandler and not logger.handlers:
        handlers[0].add(Event(time.time(), level, logger.name, message, fields, ""))
        return
    trace = None if error is None else (type(error), error, error.__traceback__)
    record = logging.LogRecord(logger.name, level, "", 0, with_fields(message, fields), (), trace)
    record.structured = (message, fields)  # for `LineHandler.emit`; other handlers have the text
    logger.handle(record)
