"""The parts of a multipart/form-data body as they arrive, whatever their size."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from penstock.core.errors import InvalidRequest
from penstock.gateway.errors import UnsupportedMediaType
from penstock.gateway.http.request import Request

MAX_FIELD = 4096  # bytes of a field that is no file
MAX_FIELDS = 32
MAX_PART_HEAD = 8192  # bytes of the headers of a part

_BOUNDARY = re.compile(rb"[\x21-\x7e ]{1,70}")


class FormReader:
    """Fields are kept, and the contents of the one file go to `write` as they come."""

    def __init__(self, request: Request, write: Callable[[bytes], Awaitable[None]]) -> None:
        kind, options = parse_options_header(request.headers.get(b"content-type", b""))
        if kind != b"multipart/form-data":
            found = repr(kind[:200].decode("latin-1")) if kind else "missing"
            raise UnsupportedMediaType(f"Content-Type is {found}: send the file as multipart/form-data")
        boundary = options.get(b"boundary", b"")
        if _BOUNDARY.fullmatch(boundary) is None:
            raise _broken("its Content-Type names no boundary")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None  # None: no file has come
        self._write = write
        self._events: list[tuple[str, bytes]] = []
        self._name = self._value = b""
        self._head: dict[bytes, bytes] = {}
        self._head_bytes = 0
        self._field: str | None = None  # the field whose value is being read; None: the file
        self._ended = False
        parts = ("part_begin", "part_end", "header_begin", "header_end", "headers_finished", "end")
        data = ("part_data", "header_field", "header_value")
        callbacks: dict[str, Any] = {f"on_{name}": self._noted(name) for name in parts}
        callbacks |= {f"on_{name}": self._noted_data(name) for name in data}
        self._parser = MultipartParser(boundary, callbacks)  # type: ignore[arg-type]

    def _noted(self, name: str) -> Callable[[], None]:
        return lambda: self._events.append((name, b""))

    def _noted_data(self, name: str) -> Callable[[bytes, int, int], None]:
        return lambda data, start, end: self._events.append((name, data[start:end]))

    async def read(self, parts: AsyncIterator[bytes]) -> None:
        async for part in parts:
            try:
                self._parser.write(part)
            except MultipartParseError as error:
                raise _broken(str(error)) from None
            events, self._events = self._events, []
            for name, data in events:
                await self._take(name, data)
        if not self._ended:
            raise _broken("it ends before its last boundary")

    async def _take(self, name: str, data: bytes) -> None:
        if name == "part_data":
            if self._field is None:
                await self._write(data)
            else:
                self._add_to_field(self._field, data)
        elif name == "part_begin":
            self._head, self._head_bytes = {}, 0
        elif name in ("header_field", "header_value"):
            self._add_to_head(name, data)
        elif name == "header_begin":
            self._name = self._value = b""
        elif name == "header_end":
            self._head[self._name.lower()] = self._value
        elif name == "headers_finished":
            self._begin_part()
        elif name == "end":
            self._ended = True

    def _add_to_head(self, name: str, data: bytes) -> None:
        self._head_bytes += len(data)
        if self._head_bytes > MAX_PART_HEAD:
            raise _broken(f"a part has headers of more than {MAX_PART_HEAD} bytes")
        if name == "header_field":
            self._name += data
        else:
            self._value += data

    def _add_to_field(self, field: str, data: bytes) -> None:
        value = self.fields[field] + data.decode("utf-8", "replace")
        if len(value) > MAX_FIELD:
            raise InvalidRequest(f"{field} has more than {MAX_FIELD} bytes", param=field)
        self.fields[field] = value

    def _begin_part(self) -> None:
        kind, options = parse_options_header(self._head.get(b"content-disposition", b""))
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if kind != b"form-data" or not name:
            raise _broken("a part has no name")
        if b"filename" not in options:
            if len(self.fields) >= MAX_FIELDS:
                raise _broken(f"it has more than {MAX_FIELDS} fields")
            self._field = name
            self.fields[name] = ""
            return
        if name != "file" or self.filename is not None:
            raise InvalidRequest("send one file, in the field `file`", param="file")
        self._field = None
        self.filename = options[b"filename"].decode("utf-8", "replace")


def _broken(why: str) -> InvalidRequest:
    return InvalidRequest(f"the body is not valid multipart/form-data: {why}", code="invalid_multipart")
