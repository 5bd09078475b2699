"""From the `state` setting to a store."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from penstock.core.machine import state_folder
from penstock.state.memory import MemoryStore
from penstock.state.store import Store

logger = logging.getLogger("penstock.state")


@asynccontextmanager
async def open_store(state: str | None) -> AsyncIterator[Store]:
    """None: a SQLite file in the state folder; memory where there can be none."""
    store = _store(state or _default())
    await store.open()
    try:
        yield store
    finally:
        await store.close()


def _default() -> str:
    file = state_folder() / "penstock.db"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logger.warning("spend is kept in memory only, as %s cannot be made: %s", file.parent, error.strerror)
        return "memory"
    return f"sqlite:///{file}"


def _store(state: str) -> Store:
    if state == "memory":
        return MemoryStore()
    if state.startswith("sqlite:///"):
        from penstock.state.sqlite import SqliteStore

        return SqliteStore(Path(state.removeprefix("sqlite:///")).expanduser())
    from penstock.state.redis import RedisStore

    return RedisStore(state)
