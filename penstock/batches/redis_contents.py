"""The contents of files in Redis, in chunks.

A writer has chunks under a name of its own, which expire. When it has finished they no longer do, and the file's id
points to them: so a file is there whole or not at all, also when two processes write it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from penstock.batches.records import new_id
from penstock.batches.redis_queue import WORK_SECONDS, connect, failures
from penstock.batches.redis_scripts import PREFIX

CHUNK_BYTES = 2**22
UNFINISHED_SECONDS = 86_400  # after which chunks of a writer that died are gone


def _chunk(name: str, number: int) -> str:
    return f"{PREFIX}chunk:{name}:{number}"


def _pointer(id: str) -> str:
    return f"{PREFIX}content:{id}"


class RedisContents:
    def __init__(self, url: str, seconds: float = WORK_SECONDS) -> None:
        self._redis = connect(url, seconds)

    def create(self, id: str) -> RedisWriter:
        return RedisWriter(self, self._redis, id)

    def found(self, id: str) -> tuple[str, int] | None:
        """The name of its chunks, and its bytes."""
        found = self._redis.get(_pointer(id))
        if found is None:
            return None
        name, _, size = found.decode().partition(" ")
        return name, int(size)

    def size(self, id: str) -> int | None:
        with failures():
            found = self.found(id)
        return None if found is None else found[1]

    def read(self, id: str, start: int, size: int) -> bytes | None:
        with failures():
            found = self.found(id)
            if found is None:
                return None
            name, total = found
            parts, end = [], min(start + size, total)
            while start < end:
                number, offset = divmod(start, CHUNK_BYTES)
                last = min(CHUNK_BYTES, offset + end - start) - 1
                parts.append(self._redis.getrange(_chunk(name, number), offset, last))
                start += last + 1 - offset
            return b"".join(parts)

    def delete(self, ids: Iterable[str]) -> None:
        with failures():
            for id in ids:
                if (found := self.found(id)) is not None:
                    self._redis.delete(_pointer(id))
                    self.drop(*found)

    def drop(self, name: str, size: int) -> None:
        """The chunks of this name."""
        for number in range(-(-size // CHUNK_BYTES)):
            self._redis.unlink(_chunk(name, number))

    def clear_parts(self, older_than: float) -> None:
        """They expire by themselves."""

    def finished(self, older_than: float) -> list[str]:
        """None: Redis does not say how old a key is."""
        return []


class RedisWriter:
    def __init__(self, contents: RedisContents, client: Any, id: str) -> None:
        self._contents = contents
        self._redis = client
        self._id = id
        self._name = new_id("")
        self._size = 0

    def write(self, data: bytes) -> None:
        left = memoryview(data)
        with failures():
            while left:
                number, offset = divmod(self._size, CHUNK_BYTES)
                part = left[: CHUNK_BYTES - offset]
                with self._redis.pipeline() as pipeline:
                    pipeline.setrange(_chunk(self._name, number), offset, bytes(part))
                    pipeline.expire(_chunk(self._name, number), UNFINISHED_SECONDS)
                    pipeline.execute()
                self._size += len(part)
                left = left[len(part) :]

    def finish(self) -> None:
        with failures():
            before = self._contents.found(self._id)
            with self._redis.pipeline() as pipeline:
                for number in range(-(-self._size // CHUNK_BYTES)):
                    pipeline.persist(_chunk(self._name, number))
                pipeline.set(_pointer(self._id), f"{self._name} {self._size}")
                pipeline.execute()
            if before is not None:  # of a writer that finished and was killed before anybody heard of it
                self._contents.drop(*before)

    def abandon(self) -> None:
        with failures():
            found = self._contents.found(self._id)
            if found is not None and found[0] == self._name:
                self._redis.delete(_pointer(self._id))
            self._contents.drop(self._name, self._size)
