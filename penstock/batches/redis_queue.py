"""The Redis that has batches: what its store and the process that validates and assembles them have in common."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import OutOfMemoryError, RedisError
from redis.retry import Retry

from penstock.batches.records import Batch, StoredFile, batch_of, record_of
from penstock.batches.redis_scripts import PREFIX, SAVE_BATCH
from penstock.core.errors import StorageFull, Unavailable

# How long Redis may take to answer.
CLIENT_SECONDS = 1.0  # what a client of the API waits for
WORK_SECONDS = 20.0  # what nobody waits for: given up later than a Redis is usually busy, sooner than leases end


def connect(url: str, seconds: float) -> Any:
    """One more attempt, since a connection of before a restart of Redis is dead; none after a timeout, as a Redis that
    was frozen still runs what it was sent. Threads may share the client."""
    retry = Retry(NoBackoff(), 1, (redis.ConnectionError,))
    return redis.Redis.from_url(url, socket_timeout=seconds, socket_connect_timeout=seconds, retry=retry)


@contextlib.contextmanager
def failures() -> Iterator[None]:
    try:
        yield
    except OutOfMemoryError as error:
        raise StorageFull("there is no room left in Redis (maxmemory): make some, and try again") from error
    except (RedisError, OSError) as error:
        raise Unavailable(f"Redis does not answer: {error}", code="store_unavailable") from error


def file_fields(file: StoredFile) -> list[str | int]:
    """As scripts take them."""
    expires = "" if file.expires_at is None else file.expires_at
    return [file.id, file.tenant, file.bytes, expires, json.dumps(asdict(file))]


class RedisQueue:
    """Its methods block: they are called on threads."""

    def __init__(self, url: str, seconds: float = WORK_SECONDS) -> None:
        self.redis = connect(url, seconds)
        self._scripts: dict[str, Any] = {}

    def run(self, script: str, *args: str | float | bytes) -> Any:
        if script not in self._scripts:
            self._scripts[script] = self.redis.register_script(script)
        with failures():
            return self._scripts[script](args=args)

    def batch(self, id: str) -> Batch | None:
        return self.batches([id])[0]

    def batches(self, ids: Sequence[str]) -> list[Batch | None]:
        with failures(), self.redis.pipeline(transaction=False) as pipeline:
            for id in ids:
                pipeline.hmget(f"{PREFIX}batch:{id}", "record", "status", "completed", "failed")
            return [None if fields[0] is None else batch_from(fields) for fields in pipeline.execute()]

    def save(self, batch: Batch, was: str, owner: str = "", files: Sequence[StoredFile] = ()) -> bool:
        """Unless its status is another one by now, or its job has another owner than the given one."""
        made = [field for file in files for field in file_fields(file)]
        fields = (batch.id, was, owner, batch.status, batch.ending or "", record_of(batch))
        return bool(self.run(SAVE_BATCH, *fields, *made))

    def close(self) -> None:
        self.redis.close()


def batch_from(fields: Sequence[bytes]) -> Batch:
    record, status, completed, failed = fields[:4]
    return batch_of(record, status.decode(), int(completed), int(failed))
