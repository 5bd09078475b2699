"""Server-sent events as the HTML standard has them: a BOM may come first, and lines end in CR LF, LF or CR."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Iterator


class EventParser:
    def __init__(self) -> None:
        self._data: list[bytes] = []  # lines of the event that has begun
        self._rest = b""  # of a line
        self._begun = False
        self._after_cr = False  # that has ended a line; an LF that follows belongs to it

    def feed(self, part: bytes) -> Iterator[str]:
        """The data of the events that end in this part of the body."""
        if not part:
            return
        received = self._rest + (part.removeprefix(b"\n") if self._after_cr else part)
        self._after_cr = received.endswith(b"\r")
        lines = received.splitlines()
        self._rest = lines.pop() if lines and not received.endswith((b"\r", b"\n")) else b""
        for line in lines:
            if not self._begun:
                line, self._begun = line.removeprefix(BOM_UTF8), True
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data).decode("utf-8", "replace")
                self._data.clear()
