"""Whole batches in a SQLite file: what the process that validates and assembles them does there.

It works for the gateway process that has the lease of the batch's job. When another one has it, since the first was
killed, every change is refused.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path

from penstock.batches import decisions
from penstock.batches.decisions import lost_job, repeated
from penstock.batches.records import Answered, Batch, LineError, StoredFile
from penstock.batches.sqlite import COMPLETED, FAILED, SCHEMA, load_batch, save_batch
from penstock.batches.sqlite_file import connect, transaction
from penstock.batches.store import NewLine, Row

_SLICE = 10_000  # lines deleted, or read, in one transaction: others write in between


class SqliteWork:
    def __init__(self, path: Path, owner: str) -> None:
        self._db = connect(path, SCHEMA)
        self._owner = owner

    def _owns(self, batch: str) -> bool:
        row = self._db.execute("SELECT owner FROM batches WHERE id = ?", (batch,)).fetchone()
        return bool(row == (self._owner,))

    def _check_owner(self, batch: str) -> None:
        if not self._owns(batch):
            raise lost_job()

    def forget_lines(self, batch: str) -> None:
        gone = 1
        while gone:
            with transaction(self._db):
                found = load_batch(self._db, batch)
                if found is None or not found.over:  # lines of one that is over are nobody's
                    self._check_owner(batch)
                gone = self._db.execute(
                    "DELETE FROM lines WHERE batch = ? AND number IN "
                    "(SELECT number FROM lines WHERE batch = ? LIMIT ?)",
                    (batch, batch, _SLICE),
                ).rowcount

    def add_lines(self, batch: str, lines: Sequence[NewLine]) -> list[LineError]:
        errors = []
        with transaction(self._db):
            self._check_owner(batch)
            for line in lines:
                try:
                    self._db.execute(
                        "INSERT INTO lines (batch, number, custom_id, model, start, size, seed) "
                        "VALUES (?, ?, ?, ?, ?, ?, ?)",
                        (batch, *line),
                    )
                except sqlite3.IntegrityError:
                    errors.append(repeated(line.custom_id, line.number))
        return errors

    def validated(self, batch: str, total: int, model: str | None, errors: Sequence[LineError], now: float) -> None:
        with transaction(self._db):
            found = load_batch(self._db, batch)
            if found is None or found.status != "validating" or not self._owns(batch):  # cancelled meanwhile, or lost
                return
            save_batch(self._db, decisions.validated(found, total, model, errors, now))
        if errors:
            self.forget_lines(batch)

    def batch(self, id: str) -> Batch | None:
        return load_batch(self._db, id)

    def rows(self, batch: str) -> Iterator[Row]:
        """Raises Unavailable at the end if another process has the job by then, and so may have forgotten lines."""
        last = 0
        while True:
            rows = self._db.execute(
                "SELECT number, custom_id, state, status, request_id, body FROM lines WHERE batch = ? AND number > ? "
                "ORDER BY number LIMIT ?",
                (batch, last, 100),
            ).fetchall()
            if not rows:
                self._check_owner(batch)
                return
            for number, custom_id, state, status, request_id, body in rows:
                answered = state in (COMPLETED, FAILED)
                yield Row(number, custom_id, Answered(status, request_id, body) if answered else None)
            last = rows[-1][0]

    def assembled(self, batch: str, files: Sequence[StoredFile], now: float) -> None:
        with transaction(self._db):
            found = load_batch(self._db, batch)
            assert found is not None
            self._check_owner(batch)
            for file in files:
                names = ", ".join(f.name for f in fields(file))
                values = tuple(asdict(file).values())
                self._db.execute(f"INSERT OR REPLACE INTO files ({names}) VALUES (?, ?, ?, ?, ?, ?, ?)", values)
            save_batch(self._db, decisions.ended(found, files, now))
        self.forget_lines(batch)

    def close(self) -> None:
        self._db.close()
