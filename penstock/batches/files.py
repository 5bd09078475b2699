"""The contents of files, whole or not at all: the `Contents` protocol, and those in a folder, each under its id."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar

from penstock.batches.records import new_id
from penstock.core.errors import PenstockError, StorageFull, Unavailable

T = TypeVar("T")

FILES = "files"
PART = ".part"  # ends the name of a file that is not whole
WRITE_BYTES = 2**20  # collected before they are written
READ_BYTES = 2**18

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Writer(Protocol):
    """A file in the making. Until `finish` it is not there, and after `abandon` nothing is left of it."""

    def write(self, data: bytes) -> None: ...

    def finish(self) -> None: ...

    def abandon(self) -> None: ...


class Contents(Protocol):
    """What is in the files. Synchronous: the gateway calls it on threads."""

    def create(self, id: str) -> Writer: ...

    def size(self, id: str) -> int | None:
        """None: it is not there."""
        ...

    def read(self, id: str, start: int, size: int) -> bytes | None:
        """Some bytes of a file, fewer at its end; None: it is not there."""
        ...

    def delete(self, ids: Iterable[str]) -> None: ...

    def clear_parts(self, older_than: float) -> None:
        """Delete what processes that died have left of files in the making."""
        ...

    def finished(self, older_than: float) -> list[str]:
        """Ids of files that were finished before then: if one has no record, its process died before it wrote that."""
        ...


def is_full(error: BaseException) -> bool:
    """Whether it says that there is no room on disk."""
    if isinstance(error, sqlite3.Error):
        return error.sqlite_errorcode == sqlite3.SQLITE_FULL
    return isinstance(error, StorageFull) or (isinstance(error, OSError) and error.errno in _FULL)


def storage_error(error: OSError) -> PenstockError:
    if is_full(error):
        return StorageFull(f"there is no room left for files ({error.strerror}); make some, and try again")
    return Unavailable(f"cannot write files: {error.strerror or error}", code="store_unavailable")


class FolderContents:
    def __init__(self, folder: Path) -> None:
        self._files = folder / FILES

    def create(self, id: str) -> FolderWriter:
        return FolderWriter(self._files / id)

    def size(self, id: str) -> int | None:
        try:
            return (self._files / id).stat().st_size
        except OSError:
            return None

    def read(self, id: str, start: int, size: int) -> bytes | None:
        with suppress(FileNotFoundError), (self._files / id).open("rb") as file:
            file.seek(start)
            return file.read(size)
        return None

    def delete(self, ids: Iterable[str]) -> None:
        for id in ids:
            (self._files / id).unlink(missing_ok=True)

    def clear_parts(self, older_than: float) -> None:
        for path in self._files.glob(f"*{PART}"):
            with suppress(OSError):
                if path.stat().st_mtime < older_than:
                    path.unlink()

    def finished(self, older_than: float) -> list[str]:
        found = []
        for path in self._files.iterdir():
            with suppress(OSError):
                if not path.name.endswith(PART) and path.stat().st_mtime < older_than:
                    found.append(path.name)
        return found


class FolderWriter:
    """Two processes may write the same file: what is there is always what one of them has finished."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._part = path.with_name(f"{path.name}.{new_id('')}{PART}")
        self._file: int | None = None
        self._finished = False

    def write(self, data: bytes) -> None:
        left = memoryview(data)
        file = self._opened()
        while left:
            left = left[os.write(file, left) :]

    def _opened(self) -> int:
        if self._file is None:
            self._part.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        return self._file

    def finish(self) -> None:
        os.fsync(self._opened())
        self._close()
        self._part.rename(self._path)
        self._finished = True

    def abandon(self) -> None:
        self._close()
        (self._path if self._finished else self._part).unlink(missing_ok=True)

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def write_lines(contents: Contents, id: str, lines: Iterable[bytes]) -> int:
    """A file of these lines, or none if there are none. Returns its bytes."""
    writer = contents.create(id)
    size, waiting = 0, bytearray()
    try:
        for line in lines:
            waiting += line
            size += len(line)
            if len(waiting) >= WRITE_BYTES:
                writer.write(bytes(waiting))
                waiting.clear()
        writer.write(bytes(waiting))
        if size:
            writer.finish()
        else:
            writer.abandon()
    except BaseException:
        writer.abandon()
        raise
    return size


class Upload:
    """Writes a file on threads, in large parts."""

    def __init__(self, contents: Contents, id: str) -> None:
        self.id = id
        self.size = 0
        self._writer = contents.create(id)
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0

    async def write(self, data: bytes) -> None:
        self._waiting.append(data)
        self._waiting_bytes += len(data)
        self.size += len(data)
        if self._waiting_bytes >= WRITE_BYTES:
            await self._in_thread(self._flush)

    def _flush(self) -> None:
        data = b"".join(self._waiting)
        self._waiting.clear()
        self._waiting_bytes = 0
        self._writer.write(data)

    async def finish(self) -> None:
        def finish() -> None:
            self._flush()
            self._writer.finish()

        await self._in_thread(finish)

    async def abandon(self) -> None:
        await self._in_thread(self._writer.abandon)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.to_thread(work)
        except OSError as error:
            raise storage_error(error) from error


class ContentReader(io.RawIOBase):
    """A file as Python reads files, for whoever goes through all of it line by line."""

    def __init__(self, contents: Contents, id: str) -> None:
        self._contents = contents
        self._id = id
        self._at = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self._contents.read(self._id, self._at, len(buffer)) or b""
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
