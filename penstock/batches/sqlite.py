"""Batches in a SQLite file, for all gateway processes of one machine.

A process holds a lock on a file while it lives, so leases of a process that was killed are free as soon as another one
looks; those of one that hangs end by time.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import sqlite3
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from penstock.batches.decisions import LEASE_SECONDS, SERVED_SECONDS, cancelled, check_limits, in_use, next_status
from penstock.batches.records import (
    Answered,
    Batch,
    FileLimits,
    Job,
    Line,
    Page,
    StoredFile,
    batch_of,
    new_id,
    record_of,
)
from penstock.batches.sqlite_file import SqliteFile
from penstock.batches.store import Kept

PENDING, LEASED, COMPLETED, FAILED = range(4)

SCHEMA = f"""
CREATE TABLE IF NOT EXISTS files (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created_at INTEGER NOT NULL,
    bytes INTEGER NOT NULL, expires_at INTEGER, purpose TEXT NOT NULL, filename TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS files_of ON files (tenant);
CREATE TABLE IF NOT EXISTS batches (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created_at INTEGER NOT NULL,
    status TEXT NOT NULL, input_file_id TEXT NOT NULL, completed INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0, owner TEXT, lease_until REAL, record TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS batches_of ON batches (tenant);
CREATE INDEX IF NOT EXISTS batches_by ON batches (status);
CREATE TABLE IF NOT EXISTS lines (batch TEXT, number INTEGER, custom_id TEXT NOT NULL, model TEXT NOT NULL,
    start INTEGER NOT NULL, size INTEGER NOT NULL, seed INTEGER NOT NULL, state INTEGER NOT NULL DEFAULT {PENDING},
    attempts INTEGER NOT NULL DEFAULT 0, losses INTEGER NOT NULL DEFAULT 0, not_before REAL NOT NULL DEFAULT 0,
    owner TEXT, lease_until REAL, journal BLOB, status INTEGER, request_id TEXT, body BLOB,
    PRIMARY KEY (batch, number)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS served (names TEXT PRIMARY KEY, until REAL NOT NULL);
CREATE UNIQUE INDEX IF NOT EXISTS lines_named ON lines (batch, custom_id);
CREATE INDEX IF NOT EXISTS lines_pending ON lines (batch, not_before, number) WHERE state = {PENDING};
CREATE INDEX IF NOT EXISTS lines_leased ON lines (batch, owner) WHERE state = {LEASED};
"""
_MINE = f"WHERE batch = ? AND number = ? AND state = {LEASED} AND owner = ?"
_RUNNING = "EXISTS (SELECT 1 FROM batches WHERE id = batch AND status = 'in_progress')"
# Also what is nobody's since its lease has ended: whoever had it still works on it.
_MINE_OR_FREE = (
    f"WHERE batch = ? AND number = ? AND (state = {LEASED} AND owner = ? OR state = {PENDING} AND {_RUNNING})"
)
_LOST = f"state = {PENDING}, owner = NULL, losses = losses + 1"


_BATCH = "SELECT record, status, completed, failed FROM batches "
_FILE = f"SELECT {', '.join(f.name for f in fields(StoredFile))} FROM files "


def load_batch(db: sqlite3.Connection, id: str) -> Batch | None:
    row = db.execute(_BATCH + "WHERE id = ?", (id,)).fetchone()
    return None if row is None else batch_of(*row)


def save_batch(db: sqlite3.Connection, batch: Batch) -> None:
    """Its record and status. The counts are changed where lines are answered."""
    db.execute("UPDATE batches SET record = ?, status = ? WHERE id = ?", (record_of(batch), batch.status, batch.id))


class SqliteBatches(SqliteFile):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "queue.db", SCHEMA)
        self._owners = folder / "owners"
        self.owner = new_id("")

    async def open(self) -> None:
        await super().open()
        await self.in_thread(self._lock_owner)

    def _lock_owner(self) -> None:
        self._owners.mkdir(exist_ok=True)
        self._lock = (self._owners / self.owner).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    async def close(self) -> None:
        def unlock() -> None:
            (self._owners / self.owner).unlink(missing_ok=True)
            self._lock.close()

        await self.in_thread(unlock)
        await super().close()

    # ------------------------------------------------------------ files

    async def add_file(self, file: StoredFile, limits: FileLimits | None) -> None:
        def work() -> None:
            if limits is not None:
                count, size = self.db.execute(
                    "SELECT COUNT(*), COALESCE(SUM(bytes), 0) FROM files WHERE tenant = ?", (file.tenant,)
                ).fetchone()
                check_limits(limits, count, size, file.bytes)
            self.db.execute(
                f"INSERT INTO files ({', '.join(f.name for f in fields(file))}) VALUES (?, ?, ?, ?, ?, ?, ?)",
                tuple(asdict(file).values()),
            )

        await self.do(work)

    async def file(self, tenant: str, id: str) -> StoredFile | None:
        row = await self.do(lambda: self.db.execute(_FILE + "WHERE id = ? AND tenant = ?", (id, tenant)).fetchone())
        return None if row is None else StoredFile(*row)

    async def files(self, tenant: str, page: Page) -> list[StoredFile]:
        return [StoredFile(*row) for row in await self.do(lambda: self._page("files", _FILE, tenant, page))]

    async def delete_file(self, tenant: str, id: str) -> bool:
        def work() -> bool:
            using = self.db.execute(
                "SELECT id FROM batches WHERE input_file_id = ? AND tenant = ? "
                "AND status IN ('validating', 'in_progress', 'finalizing', 'cancelling')",
                (id, tenant),
            ).fetchone()
            if using is not None:
                raise in_use(id, using[0])
            return self.db.execute("DELETE FROM files WHERE id = ? AND tenant = ?", (id, tenant)).rowcount > 0

        return await self.do(work)

    async def unknown_files(self, ids: Collection[str]) -> list[str]:
        def work() -> list[str]:
            return [id for id in ids if self.db.execute("SELECT 1 FROM files WHERE id = ?", (id,)).fetchone() is None]

        return await self.do(work)

    async def expired_files(self, now: float) -> list[str]:
        return await self.do(
            lambda: [
                row[0]
                for row in self.db.execute(
                    "DELETE FROM files WHERE expires_at <= ? AND id NOT IN (SELECT input_file_id FROM batches "
                    "WHERE status IN ('validating', 'in_progress', 'finalizing', 'cancelling')) RETURNING id",
                    (int(now),),
                )
            ]
        )

    def _page(self, table: str, select: str, tenant: str, page: Page) -> list[tuple[Any, ...]]:
        """By rowid, the order in which they were added: many are created in one second."""
        where, values = "WHERE tenant = ?", [tenant]
        for column, value in page.extra.items():
            where += f" AND {column} = ?"
            values.append(value)
        order, beyond = ("ASC", ">") if page.ascending else ("DESC", "<")
        if page.after is not None:
            where += f" AND rowid {beyond} (SELECT rowid FROM {table} WHERE id = ? AND tenant = ?)"
            values += [page.after, tenant]
        return self.db.execute(f"{select}{where} ORDER BY rowid {order} LIMIT {page.limit:d}", values).fetchall()

    # ------------------------------------------------------------ batches

    async def add_batch(self, batch: Batch) -> None:
        await self.do(
            lambda: self.db.execute(
                "INSERT INTO batches (id, tenant, created_at, status, input_file_id, record) VALUES (?, ?, ?, ?, ?, ?)",
                (batch.id, batch.tenant, batch.created_at, batch.status, batch.input_file_id, record_of(batch)),
            )
        )

    async def batch(self, tenant: str, id: str) -> Batch | None:
        found = await self.do(lambda: load_batch(self.db, id))
        return found if found is not None and found.tenant == tenant else None

    async def batches(self, tenant: str, page: Page) -> list[Batch]:
        return [batch_of(*row) for row in await self.do(lambda: self._page("batches", _BATCH, tenant, page))]

    async def cancel(self, tenant: str, id: str, now: float) -> Batch | None:
        def work() -> Batch | None:
            batch = load_batch(self.db, id)
            if batch is None or batch.tenant != tenant:
                return None
            batch = cancelled(batch, now)
            save_batch(self.db, batch)
            return batch

        return await self.do(work)

    async def advance(self, now: float) -> Mapping[str, int]:
        def work() -> Mapping[str, int]:
            self._free_leases(now)
            active = self.db.execute(_BATCH + "WHERE status IN ('in_progress', 'cancelling')").fetchall()
            lines = {}
            for batch in itertools.starmap(batch_of, active):
                leased = self._leased(batch.id)
                unanswered = batch.total - batch.completed - batch.failed
                found = next_status(batch, unanswered, leased, now)
                if found is not None:
                    status, ending = found
                    save_batch(self.db, replace(batch, status=status, ending=ending, finalizing_at=int(now)))
                elif batch.status == "in_progress":
                    lines[batch.id] = unanswered
            return lines

        return await self.do(work)

    def _leased(self, batch: str) -> int:
        query = f"SELECT COUNT(*) FROM lines INDEXED BY lines_leased WHERE batch = ? AND state = {LEASED}"
        return int(self.db.execute(query, (batch,)).fetchone()[0])

    def _free_leases(self, now: float) -> None:
        """Of processes that are dead, and those whose time has passed."""
        holders = {row[0] for row in self.db.execute(f"SELECT DISTINCT owner FROM lines WHERE state = {LEASED}")}
        holders |= {row[0] for row in self.db.execute("SELECT owner FROM batches WHERE owner IS NOT NULL")}
        for owner in holders - {self.owner}:
            if self._is_dead(owner):
                self.db.execute(f"UPDATE lines SET {_LOST} WHERE state = {LEASED} AND owner = ?", (owner,))
                self.db.execute("UPDATE batches SET owner = NULL WHERE owner = ?", (owner,))
        self.db.execute(f"UPDATE lines SET {_LOST} WHERE state = {LEASED} AND lease_until <= ?", (now,))
        self.db.execute("UPDATE batches SET owner = NULL WHERE lease_until <= ?", (now,))

    def _is_dead(self, owner: str) -> bool:
        try:
            with (self._owners / owner).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                (self._owners / owner).unlink(missing_ok=True)
        except FileNotFoundError:
            return True
        except BlockingIOError:
            return False
        return True

    async def claim_job(self, now: float) -> Job | None:
        def work() -> Job | None:
            query = _BATCH + (
                "WHERE owner IS NULL AND (status IN ('validating', 'finalizing') "
                "OR status = 'cancelling' AND json_extract(record, '$.ending') IS NOT NULL) ORDER BY rowid LIMIT 1"
            )
            row = self.db.execute(query).fetchone()
            if row is None:
                return None
            batch = batch_of(*row)
            lease = "UPDATE batches SET owner = ?, lease_until = ? WHERE id = ?"
            self.db.execute(lease, (self.owner, now + LEASE_SECONDS, batch.id))
            return Job("validate" if batch.status == "validating" else "assemble", batch)

        return await self.do(work)

    async def renew_job(self, job: Job, now: float) -> None:
        """Unless another process has it by now."""
        await self.do(
            lambda: self.db.execute(
                "UPDATE batches SET lease_until = ? WHERE id = ? AND owner = ?",
                (now + LEASE_SECONDS, job.batch.id, self.owner),
            )
        )

    async def end_job(self, job: Job, retry_at: float) -> None:
        """Whatever became of it, nobody works on it now. If it is still to be done, not before then."""
        await self.do(
            lambda: self.db.execute(
                "UPDATE batches SET owner = CASE WHEN status IN ('validating', 'finalizing', 'cancelling') "
                "THEN owner END, lease_until = ? WHERE id = ? AND owner = ?",
                (retry_at, job.batch.id, self.owner),
            )
        )

    async def announce(self, models: Sequence[Sequence[str]], now: float) -> list[list[str]]:
        def work() -> list[list[str]]:
            self.db.execute("DELETE FROM served WHERE until <= ?", (now,))
            self.db.executemany(
                "INSERT OR REPLACE INTO served (names, until) VALUES (?, ?)",
                [(json.dumps(list(names)), now + SERVED_SECONDS) for names in models],
            )
            return [json.loads(names) for (names,) in self.db.execute("SELECT names FROM served").fetchall()]

        return await self.do(work)

    # ------------------------------------------------------------ lines

    async def lease(self, models: Collection[str], count: int, now: float) -> list[Line]:
        def work() -> list[Line]:
            active = self.db.execute(_BATCH + "WHERE status = 'in_progress' ORDER BY rowid").fetchall()
            found: list[Line] = []
            for left, batch in zip(range(len(active), 0, -1), itertools.starmap(batch_of, active), strict=True):
                share = -(-(count - len(found)) // left)
                found += self._lease_of(batch, models, share, now)
            return found

        return await self.do(work)

    def _lease_of(self, batch: Batch, models: Collection[str], count: int, now: float) -> list[Line]:
        names = ", ".join("?" * len(models))
        rows = self.db.execute(
            f"UPDATE lines SET state = {LEASED}, owner = ?, lease_until = ? WHERE batch = ? AND number IN "
            f"(SELECT number FROM lines INDEXED BY lines_pending WHERE batch = ? AND state = {PENDING} "
            f"AND not_before <= ? AND model IN ({names}) ORDER BY not_before, number LIMIT ?) "
            "RETURNING number, custom_id, model, start, size, seed, attempts, losses, COALESCE(journal, x'')",
            (self.owner, now + LEASE_SECONDS, batch.id, batch.id, now, *models, count),
        ).fetchall()
        return [
            Line(
                *(batch.id, number, name, batch.tenant, batch.endpoint, model, start, size, batch.input_file_id),
                *(*rest, batch.expires_at),
            )
            for number, name, model, start, size, *rest in sorted(rows)
        ]

    async def renew(self, lines: Sequence[Kept], now: float) -> set[tuple[str, int]]:
        def work() -> set[tuple[str, int]]:
            lost = set()
            for line, journal in lines:
                kept = self.db.execute(
                    f"UPDATE lines SET state = {LEASED}, lease_until = ?1, journal = COALESCE(?2, journal), "
                    "owner = ?3, "
                    f"losses = CASE WHEN ?2 IS NULL THEN losses ELSE 0 END {_MINE_OR_FREE}",
                    (now + LEASE_SECONDS, journal, self.owner, line.batch, line.number, self.owner),
                ).rowcount
                if not kept:
                    lost.add((line.batch, line.number))
            return lost

        return await self.do(work)

    async def answer(self, line: Line, answer: Answered, *, failed: bool) -> bool:
        def work() -> bool:
            state, count = (FAILED, "failed") if failed else (COMPLETED, "completed")
            taken = self.db.execute(
                f"UPDATE lines SET state = {state}, owner = NULL, journal = NULL, status = ?, request_id = ?, body = ? "
                + _MINE_OR_FREE
                + " AND EXISTS (SELECT 1 FROM batches WHERE id = batch AND status IN ('in_progress', 'cancelling'))",
                (answer.status, answer.request_id, answer.body, line.batch, line.number, self.owner),
            ).rowcount
            if taken:
                self.db.execute(f"UPDATE batches SET {count} = {count} + 1 WHERE id = ?", (line.batch,))
            return bool(taken)

        return await self.do(work)

    async def release(self, line: Line, not_before: float, *, counts: bool, journal: bytes | None) -> None:
        await self.do(
            lambda: self.db.execute(
                f"UPDATE lines SET state = {PENDING}, owner = NULL, not_before = ?, attempts = attempts + ?, "
                f"journal = COALESCE(?, journal) {_MINE}",
                (not_before, int(counts), journal, line.batch, line.number, self.owner),
            )
        )
