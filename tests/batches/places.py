"""Where batches are kept, for tests: a folder or a real Redis."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol

import redis

from penstock.batches.files import Contents, FolderContents
from penstock.batches.records import Batch, Job, new_id
from penstock.batches.redis_contents import RedisContents
from penstock.batches.redis_store import RedisBatches
from penstock.batches.redis_work import RedisWork
from penstock.batches.sqlite import SqliteBatches
from penstock.batches.sqlite_work import SqliteWork
from penstock.batches.store import BatchStore, BatchWork, NewLine

MODEL = "m"


def batch_of(tenant: str = "", expires_at: int = 2**40) -> Batch:
    return Batch(new_id("batch_"), tenant, "/v1/completions", "file-1", "24h", int(time.time()), expires_at)


class Place(Protocol):
    """Where a store keeps what it keeps: empty, and the same for all of its processes."""

    contents: Contents

    def process(self) -> BatchStore: ...

    def work(self, process: BatchStore) -> BatchWork: ...

    async def kill(self, process: BatchStore) -> None:
        """As the kernel does it: connections and locks are gone, leases are still written down."""
        ...


class Folder:
    def __init__(self, path: Path) -> None:
        self._path = path
        (path / "files").mkdir()
        self.contents: Contents = FolderContents(path)

    def process(self) -> SqliteBatches:
        return SqliteBatches(self._path)

    def work(self, process: BatchStore) -> SqliteWork:
        return SqliteWork(self._path / "queue.db", process.owner)

    async def kill(self, process: BatchStore) -> None:
        assert isinstance(process, SqliteBatches)
        await process.in_thread(process._lock.close)
        await process.in_thread(process.db.close)


class Redis:
    def __init__(self, url: str) -> None:
        self._url = url
        self.client = redis.Redis.from_url(url)
        self.client.flushdb()
        self.contents: Contents = RedisContents(url)

    def process(self) -> RedisBatches:
        return RedisBatches(self._url)

    def work(self, process: BatchStore) -> RedisWork:
        return RedisWork(self._url, process.owner)

    async def kill(self, process: BatchStore) -> None:
        await process.close()


async def queued(place: Place, store: BatchStore, lines: int, expires_at: int = 2**40) -> Batch:
    """A batch whose lines wait."""
    now = time.time()
    batch = batch_of(expires_at=expires_at)
    await store.add_batch(batch)
    job = await store.claim_job(now)
    assert job == Job("validate", batch)
    work = place.work(store)
    new = [NewLine(number, f"line {number}", MODEL, 0, 2, 2**62 + number) for number in range(1, lines + 1)]
    assert not work.add_lines(batch.id, new)
    work.validated(batch.id, lines, MODEL, (), now)
    await store.end_job(job, now)
    return batch
