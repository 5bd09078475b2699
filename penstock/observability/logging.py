"""Logs of gateway and worker, a line for each event: `time level message key=value ...`, or a JSON object."""

from __future__ import annotations

import logging
import os
import re
import select
import threading
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import NoneType
from typing import Any, NamedTuple

import msgspec

from penstock.observability.settings import LogConfig

WRITE_SECONDS = 0.05  # for how long a line may wait for others
FLUSH_SECONDS = 2.0  # for how long a process that ends waits for whoever reads its log
MAX_UNWRITTEN = 2**22  # characters of lines
STANDARD_ERROR = 2

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
    """Lines are written by a thread of their own, in order: whoever logs does not wait for who reads the log, be it a
    pipe whose reader hangs or a terminal after Ctrl-S. They are written some times a second, all at once: a write for
    each would take longer than all the rest of it. Warnings are written at once.

    What finds no room while nobody reads is dropped and counted; a line tells how many, once the reader goes on."""

    def __init__(self, descriptor: int, line: Callable[[Event], str]) -> None:
        """`descriptor` to write to: `sys.stderr` has a lock, which the thread may hold when Python wants to exit."""
        super().__init__()
        self.dropped = 0  # lines
        self._descriptor = descriptor
        self._line = line
        self._lines: list[str] = []  # to be written
        self._characters = 0  # of them
        self._untold = 0  # lines that were dropped, of which the log does not tell yet
        self._urgent = self._writing = self._closed = False
        self._changed = threading.Condition(self.lock)
        threading.Thread(target=self._write_lines, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        message, fields = getattr(record, "structured", None) or (record.getMessage(), {})
        exception = _formatter.formatException(record.exc_info) if record.exc_info else ""
        self.add(Event(record.created, record.levelno, record.name, message, fields, exception))

    def add(self, event: Event) -> None:
        self.acquire()
        try:
            line = self._line(event)
            if self._characters + len(line) > MAX_UNWRITTEN:
                self.dropped += 1
                self._untold += 1
                return
            self._lines.append(line)
            self._characters += len(line)
            if event.level >= logging.WARNING:
                self._urgent = True
            elif len(self._lines) > 1:
                return  # the thread knows
            self._changed.notify_all()
        finally:
            self.release()

    def _write_lines(self) -> None:
        """The thread's work."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or self._closed)
                self._changed.wait_for(lambda: self._urgent or self._closed, WRITE_SECONDS)
                if not self._lines:
                    return
                lines, self._lines, self._characters, self._urgent = self._lines, [], 0, False
                self._writing = True
                if self._untold:
                    lines.append(self._line(_dropped(self._untold)))
                    self._untold = 0
            written = self._write("\n".join(lines) + "\n")
            with self._changed:
                self._writing = False
                self.dropped += 0 if written else len(lines)
                self._changed.notify_all()

    def _write(self, text: str) -> bool:
        """A log that cannot be written must not end what it tells of."""
        unwritten = memoryview(text.encode("utf-8", "backslashreplace"))
        try:
            while unwritten:
                try:
                    unwritten = unwritten[os.write(self._descriptor, unwritten) :]
                except BlockingIOError:  # somebody else has made the terminal or the pipe non-blocking
                    select.select([], [self._descriptor], [])
        except OSError:
            return False
        return True

    def flush(self) -> None:
        """Wait until what was logged is written, as at the end of the process, but not for ever."""
        with self._changed:
            self._urgent = bool(self._lines)
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._lines and not self._writing, FLUSH_SECONDS)

    def close(self) -> None:
        """What was logged is still written."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        super().close()


def _dropped(lines: int) -> Event:
    message = "lines of the log were dropped: nobody read it"
    return Event(time.time(), logging.WARNING, __name__, message, {"lines": lines}, "")


def dropped_lines() -> int:
    """Lines of this process that nobody has read in time."""
    return sum(handler.dropped for handler in logging.root.handlers if isinstance(handler, LineHandler))


_DEFAULT = LogConfig()


def configure_logging(logs: LogConfig = _DEFAULT) -> None:
    """Send every logger of the process to standard error, replacing what was set up before. Libraries only warn, unless
    everything is asked for: one of them has a line for each of the dozens of requests of a download."""
    line = JsonFormat() if logs.format == "json" else TextFormat()
    level = logging.getLevelNamesMapping()[logs.level.upper()]
    others = level if level == logging.DEBUG else max(level, logging.WARNING)
    logging.basicConfig(level=others, handlers=[LineHandler(STANDARD_ERROR, line)], force=True)
    logging.getLogger("penstock").setLevel(level)
    logging.captureWarnings(True)  # otherwise lines of their own, which wait for the reader
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
