"""Opens the store that the `state` setting names."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from penstock.core.errors import StartupError
from penstock.core.machine import state_folder
from penstock.state.memory import MemoryStore
from penstock.state.store import Store

logger = logging.getLogger("penstock.state")

_SQLITE = "sqlite:///"


@asynccontextmanager
async def open_store(state: str | None, *, lasting: bool = False) -> AsyncIterator[Store]:
    """None: a SQLite file in the state folder; where there can be none, memory, unless it must outlast this process."""
    store = _store(state or _default(lasting))
    await store.open()
    try:
        yield store
    finally:
        await store.close()


def sqlite_file(state: str | None) -> Path | None:
    """The file that `open_store` would open, which need not exist. None: it would be another kind of store."""
    if state is None:
        return state_folder() / "penstock.db"
    if state.startswith(_SQLITE):
        return Path(state.removeprefix(_SQLITE)).expanduser()
    return None


def is_shared(state: str | None) -> bool:
    """Whether processes that open it have limits, keys and spend in common."""
    return state is not None and state.startswith(("redis", "unix"))


def _default(lasting: bool) -> str:
    try:
        file = state_folder() / "penstock.db"
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"{error}; name a file with --state sqlite:///PATH, or set XDG_STATE_HOME to a folder"
        if lasting:
            raise StartupError(f"keys and spend cannot be kept: {message}", param="state") from error
        logger.warning(
            "keys and spend are kept in memory, where 'penstock keys' and other servers cannot reach them: %s", message
        )
        return "memory"
    return f"{_SQLITE}{file}"


def _store(state: str) -> Store:
    if state == "memory":
        return MemoryStore()
    if (file := sqlite_file(state)) is not None:
        from penstock.state.sqlite import SqliteStore

        return SqliteStore(file)
    from penstock.state.redis import RedisStore

    return RedisStore(state)
