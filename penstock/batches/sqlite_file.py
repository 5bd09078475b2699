"""A SQLite file that several processes write to: every operation is one transaction, on a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from penstock.core.errors import StartupError, StorageFull, Unavailable
from penstock.core.sqlite_wal import open_wal

T = TypeVar("T")

BUSY_SECONDS = 20.0  # for others that write to the file


def connect(path: Path, schema: str) -> sqlite3.Connection:
    return open_wal(path, schema, BUSY_SECONDS, isolation_level=None, check_same_thread=False)


@contextlib.contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:  # a full disk has rolled it back already
            db.execute("ROLLBACK")
        raise


class SqliteFile:
    db: sqlite3.Connection

    def __init__(self, path: Path, schema: str) -> None:
        self.path = path
        self._schema = schema
        self._thread = ThreadPoolExecutor(1, "batches")

    async def open(self) -> None:
        try:
            self.db = await self.in_thread(lambda: connect(self.path, self._schema))
        except (OSError, sqlite3.Error) as error:
            raise StartupError(
                f"cannot keep batches in {self.path}: {error}; set batches.folder to another folder",
                param="batches.folder",
            ) from error

    async def close(self) -> None:
        await self.in_thread(lambda: self.db.close())
        self._thread.shutdown()

    async def in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def do(self, work: Callable[[], T]) -> T:
        """In a transaction. What cannot be written changes nothing."""

        def whole() -> T:
            with transaction(self.db):
                return work()

        try:
            return await self.in_thread(whole)
        except sqlite3.Error as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
                raise StorageFull(f"there is no room left for {self.path}: make some, and try again") from error
            raise Unavailable(f"cannot use {self.path}: {error}", code="store_unavailable") from error
