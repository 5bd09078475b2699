"""Records, documents and spend in a SQLite file; limits in memory. Several gateways on one machine may share the file:
budgets and keys are then common, limits are not."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, TypeVar

from penstock.core.errors import StartupError, Unavailable
from penstock.core.sqlite_wal import open_wal
from penstock.state.memory import MemoryStore
from penstock.state.store import Keep, UsageKey, UsageRecord

logger = logging.getLogger("penstock.state")

T = TypeVar("T")

SYNC_SECONDS = 0.5  # a crash loses the spend of at most this long

SCHEMA = """
CREATE TABLE IF NOT EXISTS records (kind TEXT, name TEXT, value TEXT NOT NULL, PRIMARY KEY (kind, name)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS usage (
    day TEXT, tenant TEXT, model TEXT,
    requests INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL, cost INTEGER NOT NULL,
    PRIMARY KEY (day, tenant, model)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS version (only_row INTEGER PRIMARY KEY CHECK (only_row = 1), number INTEGER NOT NULL);
INSERT OR IGNORE INTO version VALUES (1, 0);
CREATE TABLE IF NOT EXISTS documents (
    kind TEXT, tenant TEXT, name TEXT, saved REAL NOT NULL, expires REAL NOT NULL, bytes INTEGER NOT NULL,
    document BLOB NOT NULL, PRIMARY KEY (kind, tenant, name)
);
CREATE INDEX IF NOT EXISTS documents_by_age ON documents (kind, tenant, saved, bytes);
CREATE INDEX IF NOT EXISTS documents_by_expiry ON documents (expires);
"""
DROP_OLDEST = """
DELETE FROM documents WHERE rowid IN (
    SELECT rowid FROM (
        SELECT rowid, ROW_NUMBER() OVER newest AS number, SUM(bytes) OVER newest AS total
        FROM documents WHERE kind = ? AND tenant = ? WINDOW newest AS (ORDER BY saved DESC, rowid DESC)
    ) WHERE number > ? OR total > ?
)
"""
DELETE_EXACTLY = "DELETE FROM documents WHERE kind = ? AND tenant = ? AND name = ? AND document = ? AND expires > ?"
ADD_USAGE = """
INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (day, tenant, model) DO UPDATE SET
    requests = requests + excluded.requests, prompt_tokens = prompt_tokens + excluded.prompt_tokens,
    cached_tokens = cached_tokens + excluded.cached_tokens, output_tokens = output_tokens + excluded.output_tokens,
    cost = cost + excluded.cost
"""
CHANGED = "UPDATE version SET number = number + 1"


def may_have_records(path: Path, kind: str) -> bool:
    """Without opening the store, which would create the file. A file that cannot be read may have any."""
    if not path.exists():
        return False
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            return database.execute("SELECT 1 FROM records WHERE kind = ?", (kind,)).fetchone() is not None
    except sqlite3.Error:
        return True


class SqliteStore(MemoryStore):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._thread = ThreadPoolExecutor(1, "sqlite")  # a connection belongs to one thread
        self._syncing: asyncio.Task[None] | None = None
        self._sync_lock = asyncio.Lock()

    async def open(self) -> None:
        try:
            await self._in_thread(self._connect)
            await self.sync()
        except (OSError, sqlite3.Error) as error:
            raise StartupError(
                f"cannot use {self.path} for keys and spend: {error}; set state to another file (--state "
                "sqlite:///PATH), to memory, or to redis://HOST:PORT/DB",
                param="state",
            ) from error
        self._syncing = asyncio.create_task(self._keep_syncing())

    def _connect(self) -> None:
        self._db = open_wal(self.path, SCHEMA, busy_seconds=5)

    async def close(self) -> None:
        if self._syncing is not None:
            self._syncing.cancel()
            await asyncio.gather(self._syncing, return_exceptions=True)
            await self.sync()
            await self._in_thread(self._db.close)
        self._thread.shutdown()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _keep_syncing(self) -> None:
        failing = False
        while True:
            await asyncio.sleep(SYNC_SECONDS)
            try:
                await self.sync()
                failing = False
            except sqlite3.Error as error:
                if not failing:
                    logger.warning("cannot write spend to %s, going on in memory: %s", self.path, error)
                failing = True

    async def sync(self) -> None:
        """Write the spend of this gateway and read the spend of all. Whoever asks for it may be cancelled: it goes on,
        since memory no longer has what is written."""
        await asyncio.shield(self._sync())

    async def _sync(self) -> None:
        async with self._sync_lock:
            await self._write_pending()

    async def _write_pending(self) -> None:
        pending, self._usage = self._usage, {}  # what memory holds is what the file has not
        day = self.day()
        try:
            spent = await self._in_thread(lambda: self._write_and_read(pending, day))
        except sqlite3.Error:
            for key, used in pending.items():
                self._usage[key] = self._usage.get(key, UsageRecord()).plus(used)
            raise
        for key, used in self._usage.items():
            for period in (key.day, key.day[:7]):
                spent[key.tenant, period] = spent.get((key.tenant, period), 0) + used.cost
        self.spent = spent

    def _write_and_read(self, pending: dict[UsageKey, UsageRecord], day: str) -> dict[tuple[str, str], int]:
        with self._db:
            self._db.executemany(
                ADD_USAGE,
                [
                    (k.day, k.tenant, k.model, u.requests, u.prompt_tokens, u.cached_tokens, u.output_tokens, u.cost)
                    for k, u in pending.items()
                ],
            )
        spent: dict[tuple[str, str], int] = {}
        month = day[:7]
        rows = self._db.execute("SELECT tenant, day, SUM(cost) FROM usage WHERE day >= ? GROUP BY 1, 2", (month,))
        for tenant, of_day, cost in rows:
            spent[tenant, of_day] = cost
            spent[tenant, month] = spent.get((tenant, month), 0) + cost
        return spent

    async def usage(self, first_day: str, last_day: str) -> dict[UsageKey, UsageRecord]:
        with suppress(sqlite3.Error):
            await self.sync()
        rows = await self._read("SELECT * FROM usage WHERE day BETWEEN ? AND ?", first_day, last_day)
        return {UsageKey(*row[:3]): UsageRecord(*row[3:]) for row in rows}

    async def put(self, kind: str, name: str, value: str) -> None:
        await self._write("INSERT OR REPLACE INTO records VALUES (?, ?, ?)", (kind, name, value))

    async def delete(self, kind: str, name: str) -> bool:
        return await self._write("DELETE FROM records WHERE kind = ? AND name = ?", (kind, name)) > 0

    async def _write(self, statement: str, values: tuple[str, ...]) -> int:
        def work() -> int:
            with self._db:
                self._db.execute(CHANGED)
                return self._db.execute(statement, values).rowcount

        return await self._ask(work)

    async def records(self, kind: str) -> dict[str, str]:
        return dict(await self._read("SELECT name, value FROM records WHERE kind = ?", kind))

    async def save(
        self, kind: str, tenant: str, name: str, document: bytes, keep: Keep, instead_of: bytes | None = None
    ) -> bool:
        if len(document) > keep.bytes:
            return False

        def work() -> bool:
            now = time.time()
            with self._db:
                if instead_of is not None:  # deleting first takes the lock on the file that other processes wait for
                    replaced = self._db.execute(DELETE_EXACTLY, (kind, tenant, name, instead_of, now)).rowcount
                    if not replaced:
                        return False
                row = (kind, tenant, name, now, now + keep.seconds, len(document), document)
                self._db.execute("INSERT OR REPLACE INTO documents VALUES (?, ?, ?, ?, ?, ?, ?)", row)
                self._db.execute("DELETE FROM documents WHERE expires <= ?", (now,))
                self._db.execute(DROP_OLDEST, (kind, tenant, keep.documents, keep.bytes))
            return True

        return await self._ask(work)

    async def load(self, kind: str, tenant: str, name: str) -> bytes | None:
        query = "SELECT document FROM documents WHERE kind = ? AND tenant = ? AND name = ? AND expires > ?"
        rows = await self._read(query, kind, tenant, name, time.time())
        return rows[0][0] if rows else None

    async def discard(self, kind: str, tenant: str, name: str) -> bool:
        def work() -> int:
            with self._db:
                query = "DELETE FROM documents WHERE kind = ? AND tenant = ? AND name = ?"
                return self._db.execute(query, (kind, tenant, name)).rowcount

        return await self._ask(work) > 0

    async def version(self) -> int:
        ((number,),) = await self._read("SELECT number FROM version")
        return int(number)

    async def _read(self, query: str, *values: str | float) -> list[Any]:
        return await self._ask(lambda: self._db.execute(query, values).fetchall())

    async def _ask(self, work: Callable[[], T]) -> T:
        try:
            return await self._in_thread(work)
        except sqlite3.Error as error:
            raise Unavailable(f"cannot use {self.path}: {error}", code="store_unavailable") from error
