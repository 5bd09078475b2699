"""The disk tier, which survives a restart: one SQLite file, bounded by bytes, on a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from penstock.cache.tier import Reading
from penstock.core.errors import StartupError

log = logging.getLogger(__name__)

T = TypeVar("T")

SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, value BLOB NOT NULL, used INTEGER NOT NULL, expires INTEGER);
CREATE INDEX IF NOT EXISTS by_use ON answers (used);
"""
USED_SECONDS = 60  # how exactly the time of last use is kept: a read within it writes nothing
EVICTED_AT_ONCE = 16
MOST_PENDING = 256  # writes; when the disk is slower than the engine, further answers are not kept
BUSY_SECONDS = 0.2  # another process may write to the same file


class DiskTier:
    """A file that cannot be read is deleted and begun anew; a disk that fails altogether means misses."""

    name = "disk"
    shared = False

    def __init__(self, path: Path, limit: int) -> None:
        self.path = path
        self.limit = limit  # bytes of the file's pages in use
        self.bytes = 0
        self.evictions = 0
        self.errors = 0
        self._pending = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="answer-disk")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._database = self._thread.submit(self._open_or_recreate).result()
        except (OSError, sqlite3.Error) as error:
            raise StartupError(f"cannot keep answers in {path}: {error}", param="cache.disk_path") from error

    async def get(self, key: bytes) -> bytes | None:
        return await self._on_thread(lambda: self._get(key))

    async def put(self, key: bytes, value: bytes, ttl: float) -> None:
        if self._pending < MOST_PENDING and len(value) <= self.limit // 8:
            self._pending += 1
            try:
                await self._on_thread(lambda: self._put(key, value, ttl))
            finally:
                self._pending -= 1

    async def claim(self, key: bytes, seconds: float) -> bool:
        return True

    async def release(self, key: bytes) -> None:
        pass

    async def clear(self) -> None:
        await self._on_thread(self._clear)

    def reading(self) -> Reading:
        return Reading(self.name, self.bytes, self.evictions, self.errors)

    async def close(self) -> None:
        await self._on_thread(lambda: self._database.close())
        self._thread.shutdown(wait=False)

    async def _on_thread(self, work: Callable[[], T]) -> T | None:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._guarded, work)

    def _guarded(self, work: Callable[[], T]) -> T | None:
        try:
            return work()
        except sqlite3.OperationalError as error:  # locked, full: this time without
            self.errors += 1
            log.warning("the answer cache cannot use %s: %s", self.path, error)
        except sqlite3.DatabaseError as error:
            self.errors += 1
            self._database.close()
            try:
                self._database = self._recreate(error)
            except (OSError, sqlite3.Error) as failure:
                log.error("the answer cache cannot recreate %s: %s", self.path, failure)
        return None

    def _open_or_recreate(self) -> sqlite3.Connection:
        try:
            return self._open()
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise
            return self._recreate(error)

    def _open(self) -> sqlite3.Connection:
        self.path.touch(0o600)  # answers are for this user alone; SQLite gives its other files the same mode
        database = sqlite3.connect(self.path, timeout=BUSY_SECONDS, isolation_level=None)
        try:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
            database.executescript(SCHEMA)
            self._evict(database)
        except BaseException:
            database.close()
            raise
        return database

    def _recreate(self, error: Exception) -> sqlite3.Connection:
        log.warning("the answers kept in %s cannot be read (%s) and are given up", self.path, error)
        for suffix in ("", "-wal", "-shm"):
            Path(f"{self.path}{suffix}").unlink(missing_ok=True)
        return self._open()

    def _get(self, key: bytes) -> bytes | None:
        now = int(time.time())
        row = self._database.execute("SELECT value, used, expires FROM answers WHERE key = ?", (key,)).fetchone()
        if row is None or row[2] < now:
            return None
        if now - row[1] >= USED_SECONDS:
            self._database.execute("UPDATE answers SET used = ? WHERE key = ?", (now, key))
        return bytes(row[0])

    def _put(self, key: bytes, value: bytes, ttl: float) -> None:
        now = int(time.time())
        self._database.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?)", (key, value, now, now + int(ttl)))
        self._evict(self._database)

    def _clear(self) -> None:
        self._database.execute("DELETE FROM answers")
        self._evict(self._database)

    def _evict(self, database: sqlite3.Connection) -> None:
        """Free the least recently used until the pages in use fit; SQLite uses them again before the file grows."""
        while (used := _bytes_in_use(database)) > self.limit:
            oldest = "DELETE FROM answers WHERE rowid IN (SELECT rowid FROM answers ORDER BY used, rowid LIMIT ?)"
            count = database.execute(oldest, (EVICTED_AT_ONCE,)).rowcount
            if count == 0:
                break
            self.evictions += count
        self.bytes = used


def _bytes_in_use(database: sqlite3.Connection) -> int:
    pages, free, size = (
        database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * size)
