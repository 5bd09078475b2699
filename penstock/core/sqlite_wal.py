"""Opening a SQLite file that several processes write to."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from typing import Any


def open_wal(path: Path, schema: str, busy_seconds: float, **options: Any) -> sqlite3.Connection:
    """With a write-ahead log. Others that write to it are waited for, also those that make it one at this moment, for
    which SQLite itself does not wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    db: sqlite3.Connection = sqlite3.connect(path, timeout=busy_seconds, **options)
    until = time.monotonic() + busy_seconds
    while True:
        try:
            db.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL;" + schema)
            return db
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                db.close()
                raise
        time.sleep(0.01)
