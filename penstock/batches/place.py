"""Where files and batches are kept: in a folder, for the gateway processes of one machine, or in Redis, for all that
share its state."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from penstock.batches.files import FILES, Contents, FolderContents
from penstock.batches.settings import BatchesConfig
from penstock.batches.sqlite import SqliteBatches
from penstock.batches.store import BatchStore
from penstock.core.errors import StartupError
from penstock.core.machine import state_folder

logger = logging.getLogger("penstock.batches")


@dataclass(slots=True)
class Batches:
    store: BatchStore
    contents: Contents  # for clients, who are told soon that they cannot be had
    work_contents: Contents  # the same for work that nobody waits for
    config: BatchesConfig
    folder: Path | None  # of this machine; has files and batches unless they are in Redis
    redis: str | None = None  # the URL of the Redis that has them
    wake: Callable[[], None] = field(default=lambda: None)  # tells the runner that there is something to do


def batches_folder(config: BatchesConfig, state: str | None) -> Path | None:
    """Of the settings, or beside the state. None: what is kept in memory has no place for files."""
    if config.folder is not None:
        return Path(config.folder).expanduser()
    if state == "memory":
        return None
    if state is not None and state.startswith("sqlite:///"):
        return Path(state.removeprefix("sqlite:///")).expanduser().with_suffix(".batches")
    return state_folder() / "batches"


def check_batches_folder(config: BatchesConfig, state: str | None) -> None:
    """Whether files can be kept in the folder that the settings name. Leaves nothing there: it may be another user who
    serves. Raises StartupError."""
    if config.folder is None or _is_shared(state):
        return
    made: list[Path] = []
    try:
        folder = Path(config.folder).expanduser()
        made = [each for each in (folder, *folder.parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder):
            pass
    except (OSError, RuntimeError) as error:
        raise _cannot_keep(config.folder, error) from error
    finally:
        for each in made:
            with suppress(OSError):  # it could not be made, or somebody uses it by now
                each.rmdir()


def _is_shared(state: str | None) -> bool:
    return state is not None and state.startswith(("redis", "unix"))


def _cannot_keep(folder: str, error: Exception) -> StartupError:
    return StartupError(f"cannot keep files in {folder}: {error}", param="batches.folder")


@asynccontextmanager
async def open_batches(config: BatchesConfig, state: str | None) -> AsyncIterator[Batches | None]:
    """None: there is no place for them, or it cannot be used and nobody has asked for it."""
    batches = _place(config, state)
    if batches is None:
        yield None
        return
    await batches.store.open()
    try:
        yield batches
    finally:
        await batches.store.close()


def _place(config: BatchesConfig, state: str | None) -> Batches | None:
    shared = _is_shared(state)
    try:
        folder = batches_folder(config, state)
        if folder is not None and not shared:
            (folder / FILES).mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: a `~` without a home
        if config.folder is not None:
            raise _cannot_keep(config.folder, error) from error
        if not shared:
            logger.warning("no files and batches: %s; set batches.folder", error)
        folder = None
    if shared:
        from penstock.batches.redis_contents import RedisContents
        from penstock.batches.redis_queue import CLIENT_SECONDS
        from penstock.batches.redis_store import RedisBatches

        assert state is not None
        return Batches(
            RedisBatches(state), RedisContents(state, CLIENT_SECONDS), RedisContents(state), config, folder, state
        )
    if folder is None:
        return None
    contents = FolderContents(folder)
    return Batches(SqliteBatches(folder), contents, contents, config, folder)
