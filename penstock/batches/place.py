"""Where files and batches are kept: the store of the queue, and the folder of the files' contents."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from penstock.batches.files import FILES
from penstock.batches.settings import BatchesConfig
from penstock.batches.sqlite import SqliteBatches
from penstock.batches.store import BatchStore
from penstock.core.errors import StartupError
from penstock.core.machine import state_folder

logger = logging.getLogger("penstock.batches")


@dataclass(slots=True)
class Batches:
    store: BatchStore
    folder: Path
    config: BatchesConfig
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


@asynccontextmanager
async def open_batches(config: BatchesConfig, state: str | None) -> AsyncIterator[Batches | None]:
    """None: there is no place for them, or it cannot be used and nobody has asked for it."""
    try:
        folder = batches_folder(config, state)
        if folder is None:
            yield None
            return
        (folder / FILES).mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        if config.folder is not None:
            raise StartupError(f"cannot keep files in {config.folder}: {error}", param="batches.folder") from error
        logger.warning("no files and batches: %s; set batches.folder", error)
        yield None
        return
    store = SqliteBatches(folder)
    await store.open()
    try:
        yield Batches(store, folder, config)
    finally:
        await store.close()
