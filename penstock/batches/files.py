"""The contents of files, on disk: each under its id in the folder `files`, whole or not at all."""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from penstock.core.errors import PenstockError, StorageFull, Unavailable

T = TypeVar("T")

FILES = "files"
PART = ".part"  # ends the name of a file that is not whole
WRITE_BYTES = 2**20  # collected before they are written
READ_BYTES = 2**18

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_full(error: BaseException) -> bool:
    """Whether it says that there is no room on disk."""
    if isinstance(error, sqlite3.Error):
        return error.sqlite_errorcode == sqlite3.SQLITE_FULL
    return isinstance(error, OSError) and error.errno in _FULL


def storage_error(folder: Path, error: OSError) -> PenstockError:
    if is_full(error):
        return StorageFull(f"there is no room left for files ({error.strerror}); make some, and try again")
    return Unavailable(f"cannot write files: {error.strerror or error}", code="store_unavailable")


def write_lines(path: Path, lines: Iterable[bytes]) -> int:
    """A file of these lines, whole. Returns its bytes."""
    part = path.with_name(path.name + PART)
    try:
        with part.open("wb", buffering=WRITE_BYTES) as file:
            for line in lines:
                file.write(line)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        part.rename(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return size


class Upload:
    """A file in the making. Until `finish` it is not there, and after `abandon` nothing is left of it."""

    def __init__(self, folder: Path, id: str) -> None:
        self.id = id
        self.size = 0
        self._folder = folder
        self._path = folder / FILES / id
        self._part = self._path.with_name(id + PART)
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._file: int | None = None

    async def write(self, data: bytes) -> None:
        self._waiting.append(data)
        self._waiting_bytes += len(data)
        self.size += len(data)
        if self._waiting_bytes >= WRITE_BYTES:
            await self._on_disk(self._flush)

    def _flush(self) -> None:
        if self._file is None:
            self._part.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        data = memoryview(b"".join(self._waiting))
        self._waiting.clear()
        self._waiting_bytes = 0
        while data:
            data = data[os.write(self._file, data) :]

    async def finish(self) -> None:
        def finish() -> None:
            self._flush()
            assert self._file is not None
            os.fsync(self._file)
            os.close(self._file)
            self._file = None
            self._part.rename(self._path)

        await self._on_disk(finish)

    async def abandon(self) -> None:
        def abandon() -> None:
            if self._file is not None:
                os.close(self._file)
                self._file = None
            self._part.unlink(missing_ok=True)
            self._path.unlink(missing_ok=True)

        await asyncio.to_thread(abandon)

    async def _on_disk(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.to_thread(work)
        except OSError as error:
            raise storage_error(self._folder, error) from error


def delete(folder: Path, ids: Iterable[str]) -> None:
    for id in ids:
        (folder / FILES / id).unlink(missing_ok=True)


def read_part(folder: Path, id: str, start: int, size: int) -> bytes | None:
    """Some bytes of a file; None: it is not there."""
    with suppress(FileNotFoundError), (folder / FILES / id).open("rb") as file:
        file.seek(start)
        return file.read(size)
    return None


def clear_parts(folder: Path, older_than: float) -> None:
    """What uploads of processes that died have left."""
    for path in (folder / FILES).glob(f"*{PART}"):
        with suppress(OSError):
            if path.stat().st_mtime < older_than:
                path.unlink()
