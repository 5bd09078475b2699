"""What requests from queues have been answered with, by queue and id, and the tokens of those that are running.

A request that is delivered again, since nobody acknowledged it or since it was sent twice, finds its answer here.
Consumers of other queues and tenants use the same file: an id begins with what it is unique in.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from penstock.batches.sqlite_file import SqliteFile

SCHEMA = """
CREATE TABLE IF NOT EXISTS messages (id TEXT PRIMARY KEY, at REAL NOT NULL, begun INTEGER NOT NULL,
    journal BLOB NOT NULL DEFAULT x'', answer BLOB, published INTEGER NOT NULL DEFAULT 0);
CREATE INDEX IF NOT EXISTS messages_at ON messages (at);
"""


class Known(NamedTuple):
    begun: int  # how often it was begun before, and came to no end and to no new token
    journal: bytes
    answer: bytes | None
    published: bool


class AnswerStore(SqliteFile):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "messages.db", SCHEMA)

    async def begin(self, id: str) -> Known:
        def work() -> Known:
            row = self.db.execute(
                "SELECT begun, journal, answer, published FROM messages WHERE id = ?", (id,)
            ).fetchone()
            self.db.execute(
                "INSERT INTO messages (id, at, begun) VALUES (?, ?, 1) "
                "ON CONFLICT (id) DO UPDATE SET begun = begun + 1",
                (id, time.time()),
            )
            return Known(0, b"", None, False) if row is None else Known(row[0], row[1], row[2], bool(row[3]))

        return await self.do(work)

    async def keep_journals(self, journals: Mapping[str, bytes]) -> None:
        """They have new tokens, so of the times that these were begun only this one counts."""
        rows = [(journal, id) for id, journal in journals.items()]
        await self.do(lambda: self.db.executemany("UPDATE messages SET journal = ?, begun = 1 WHERE id = ?", rows))

    async def keep(self, id: str, answer: bytes) -> None:
        await self.do(
            lambda: self.db.execute("UPDATE messages SET answer = ?, journal = x'' WHERE id = ?", (answer, id))
        )

    async def released(self, id: str) -> None:
        """Nothing was wrong with it, so this time does not count."""
        await self.do(lambda: self.db.execute("UPDATE messages SET begun = begun - 1 WHERE id = ?", (id,)))

    async def published(self, id: str) -> None:
        await self.do(lambda: self.db.execute("UPDATE messages SET published = 1 WHERE id = ?", (id,)))

    async def drop(self, id: str) -> None:
        """Whoever sends it again gets another answer."""
        await self.do(lambda: self.db.execute("DELETE FROM messages WHERE id = ?", (id,)))

    async def forget(self, before: float) -> None:
        await self.do(lambda: self.db.execute("DELETE FROM messages WHERE at < ?", (before,)))
