"""Batches in Redis, for gateways on several machines.

Every operation is one script, so it is whole or not at all. Leases end by time only: those of a gateway that was killed
are free after `LEASE_SECONDS`. `redis_scripts.py` says what is kept under which key.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from penstock.batches import redis_scripts as scripts
from penstock.batches.decisions import LEASE_SECONDS, SERVED_SECONDS, cancelled, check_limits, in_use, next_status
from penstock.batches.records import Answered, Batch, FileLimits, Job, Line, Page, StoredFile, new_id, record_of
from penstock.batches.redis_queue import CLIENT_SECONDS, WORK_SECONDS, RedisQueue, batch_from, failures, file_fields
from penstock.batches.redis_scripts import NUMBER, PREFIX
from penstock.batches.store import Kept
from penstock.core.errors import StartupError, Unavailable

T = TypeVar("T")

THREADS = 4  # on which answers of Redis are waited for

_decode_file = msgspec.json.Decoder(StoredFile).decode


class RedisOnThreads:
    """The event loop does not wait for Redis."""

    def __init__(self, url: str, seconds: float, deadline: float | None = None) -> None:
        """`deadline`: seconds that a call may take, its wait for a thread included."""
        self.queue = RedisQueue(url, seconds)
        self._deadline = deadline
        self._threads = ThreadPoolExecutor(THREADS, "batches")

    async def call(self, work: Callable[[RedisQueue], T]) -> T:
        try:
            async with asyncio.timeout(self._deadline):
                return await asyncio.get_running_loop().run_in_executor(self._threads, work, self.queue)
        except TimeoutError as error:
            raise Unavailable("Redis does not answer in time", code="store_unavailable") from error

    async def run(self, script: str, *args: str | float | bytes) -> Any:
        return await self.call(lambda queue: queue.run(script, *args))

    async def close(self) -> None:
        await asyncio.to_thread(self.queue.close)
        self._threads.shutdown()


class RedisBatches:
    """What clients ask for and what the runner does go separate ways: neither waits for the other's threads."""

    def __init__(self, url: str) -> None:
        self.owner = new_id("")
        self._clients = RedisOnThreads(url, CLIENT_SECONDS, deadline=2 * CLIENT_SECONDS)
        self._work = RedisOnThreads(url, WORK_SECONDS)

    async def open(self) -> None:
        def ping(queue: RedisQueue) -> None:
            with failures():
                queue.redis.ping()

        try:
            await self._work.call(ping)
        except Unavailable as error:
            raise StartupError(f"cannot keep batches: {error.message}", param="state") from error

    async def close(self) -> None:
        await self._clients.close()
        await self._work.close()

    # ------------------------------------------------------------ files

    async def add_file(self, file: StoredFile, limits: FileLimits | None) -> None:
        most = (-1, -1) if limits is None else (limits.files, limits.bytes)
        added, count, size = await self._clients.run(scripts.ADD_FILE, *most, *file_fields(file))
        if not added and limits is not None:
            check_limits(limits, count, size, file.bytes)

    async def file(self, tenant: str, id: str) -> StoredFile | None:
        (found,) = await self._clients.call(lambda queue: _files(queue, [id]))
        return found if found is not None and found.tenant == tenant else None

    async def files(self, tenant: str, page: Page) -> list[StoredFile]:
        return await self._clients.call(lambda queue: _page(queue, f"{PREFIX}files:{tenant}", _files, page))

    async def delete_file(self, tenant: str, id: str) -> bool:
        found = await self._clients.run(scripts.DELETE_FILE, id, tenant)
        if isinstance(found, bytes):
            raise in_use(id, found.decode())
        return bool(found)

    async def unknown_files(self, ids: Collection[str]) -> list[str]:
        found = await self._work.call(lambda queue: _files(queue, list(ids))) if ids else []
        return [id for id, file in zip(ids, found, strict=True) if file is None]

    async def expired_files(self, now: float) -> list[str]:
        return [id.decode() for id in await self._work.run(scripts.EXPIRED_FILES, now)]

    # ------------------------------------------------------------ batches

    async def add_batch(self, batch: Batch) -> None:
        fields = (batch.id, batch.tenant, batch.input_file_id, batch.status)
        await self._clients.run(scripts.ADD_BATCH, *fields, record_of(batch))

    async def batch(self, tenant: str, id: str) -> Batch | None:
        found = await self._clients.call(lambda queue: queue.batch(id))
        return found if found is not None and found.tenant == tenant else None

    async def batches(self, tenant: str, page: Page) -> list[Batch]:
        return await self._clients.call(
            lambda queue: _page(queue, f"{PREFIX}batches:{tenant}", RedisQueue.batches, page)
        )

    async def cancel(self, tenant: str, id: str, now: float) -> Batch | None:
        def work(queue: RedisQueue) -> Batch | None:
            while True:
                found = queue.batch(id)
                if found is None or found.tenant != tenant:
                    return None
                changed = cancelled(found, now)
                if changed is found or queue.save(changed, found.status):
                    return changed

        return await self._clients.call(work)

    async def advance(self, now: float) -> Mapping[str, int]:
        def work(queue: RedisQueue) -> Mapping[str, int]:
            lines = {}
            for fields in queue.run(scripts.ADVANCE, now):
                batch, leased = batch_from(fields), int(fields[4])
                unanswered = batch.total - batch.completed - batch.failed
                found = next_status(batch, unanswered, leased, now)
                if found is not None:
                    status, ending = found
                    changed = replace(batch, status=status, ending=ending, finalizing_at=int(now))
                    queue.save(changed, batch.status)
                elif batch.status == "in_progress":
                    lines[batch.id] = unanswered
            return lines

        return await self._work.call(work)

    async def claim_job(self, now: float) -> Job | None:
        fields = await self._work.run(scripts.CLAIM_JOB, self.owner, now, now + LEASE_SECONDS)
        if fields is None:
            return None
        batch = batch_from(fields)
        return Job("validate" if batch.status == "validating" else "assemble", batch)

    async def renew_job(self, job: Job, now: float) -> None:
        await self._work.run(scripts.LEASE_JOB, job.batch.id, self.owner, now + LEASE_SECONDS)

    async def end_job(self, job: Job, retry_at: float) -> None:
        await self._work.run(scripts.LEASE_JOB, job.batch.id, self.owner, retry_at)

    async def announce(self, models: Sequence[Sequence[str]], now: float) -> list[list[str]]:
        key = f"{PREFIX}served"

        def work(queue: RedisQueue) -> list[list[str]]:
            with failures(), queue.redis.pipeline() as pipeline:
                pipeline.zremrangebyscore(key, "-inf", now)
                for names in models:
                    pipeline.zadd(key, {json.dumps(list(names)): now + SERVED_SECONDS})
                pipeline.zrange(key, 0, -1)
                return [json.loads(names) for names in pipeline.execute()[-1]]

        return await self._work.call(work)

    # ------------------------------------------------------------ lines

    async def lease(self, models: Collection[str], count: int, now: float) -> list[Line]:
        answer = await self._work.run(scripts.LEASE, self.owner, now, now + LEASE_SECONDS, count, *models)
        found = []
        for record, lines in answer:
            batch = batch_from((record, b"in_progress", b"0", b"0"))
            for number, name, model, start, size, seed, attempts, losses, journal in sorted(lines, key=lambda x: x[0]):
                found.append(
                    Line(
                        batch.id,
                        int(number),
                        name.decode(),
                        batch.tenant,
                        batch.endpoint,
                        model.decode(),
                        int(start),
                        int(size),
                        batch.input_file_id,
                        int(seed),
                        int(attempts),
                        int(losses),
                        journal or b"",
                        batch.expires_at,
                    )
                )
        return found

    async def renew(self, lines: Sequence[Kept], now: float) -> set[tuple[str, int]]:
        fields: list[str | bytes] = []
        for line, journal in lines:
            fields += [line.batch, NUMBER.format(line.number), *_journal(journal)]
        kept = await self._work.run(scripts.RENEW, self.owner, now + LEASE_SECONDS, *fields)
        return {(line.batch, line.number) for (line, _), is_kept in zip(lines, kept, strict=True) if not is_kept}

    async def answer(self, line: Line, answer: Answered, *, failed: bool) -> bool:
        where = (self.owner, line.batch, NUMBER.format(line.number), "failed" if failed else "completed")
        return bool(await self._work.run(scripts.ANSWER, *where, answer.status, answer.request_id, answer.body))

    async def release(self, line: Line, not_before: float, *, counts: bool, journal: bytes | None) -> None:
        where = (self.owner, line.batch, NUMBER.format(line.number))
        await self._work.run(scripts.RELEASE, *where, not_before, int(counts), *_journal(journal))


def _journal(journal: bytes | None) -> tuple[str, bytes]:
    return ("0", b"") if journal is None else ("1", journal)


def _files(queue: RedisQueue, ids: Sequence[str]) -> list[StoredFile | None]:
    with failures():
        records = queue.redis.mget([f"{PREFIX}file:{id}" for id in ids])
    return [None if record is None else _decode_file(record) for record in records]


def _page(
    queue: RedisQueue, key: str, load: Callable[[RedisQueue, Sequence[str]], list[T | None]], page: Page
) -> list[T]:
    redis, found = queue.redis, list[T]()
    rank, read = (redis.zrank, redis.zrange) if page.ascending else (redis.zrevrank, redis.zrevrange)
    start = 0
    if page.after is not None:
        with failures():
            at = rank(key, page.after)
        if at is None:
            return []
        start = at + 1
    while len(found) < page.limit:
        with failures():
            ids = [id.decode() for id in read(key, start, start + page.limit - 1)]
        if not ids:
            break
        start += len(ids)
        for item in load(queue, ids):
            if item is not None and all(getattr(item, name) == value for name, value in page.extra.items()):
                found.append(item)
    return found[: page.limit]
