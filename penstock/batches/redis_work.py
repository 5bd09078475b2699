"""Whole batches in Redis: what the process that validates and assembles them does there.

It works for the gateway process that has the lease of the batch's job. When another one has it, since the first was
killed, every change is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from penstock.batches import decisions
from penstock.batches.records import Answered, Batch, LineError, StoredFile
from penstock.batches.redis_queue import RedisQueue, failures
from penstock.batches.redis_scripts import ADD_LINES, FORGET_LINES, NUMBER, PREFIX
from penstock.batches.store import NewLine, Row

T = TypeVar("T")

_SLICE = 1000  # lines forgotten by one script
_ROWS = 100  # lines read in one trip


class RedisWork:
    def __init__(self, url: str, owner: str) -> None:
        self._queue = RedisQueue(url)
        self._owner = owner

    def batch(self, id: str) -> Batch | None:
        return self._queue.batch(id)

    def forget_lines(self, batch: str) -> None:
        while _ours(self._queue.run(FORGET_LINES, batch, self._owner, _SLICE)):
            pass

    def add_lines(self, batch: str, lines: Sequence[NewLine]) -> list[LineError]:
        names = {NUMBER.format(line.number): line for line in lines}
        fields = [field for number, line in names.items() for field in (number, *line[1:])]
        found = _ours(self._queue.run(ADD_LINES, batch, self._owner, *fields))
        return [decisions.repeated(names[number.decode()].custom_id, int(number)) for number in found]

    def validated(self, batch: str, total: int, model: str | None, errors: Sequence[LineError], now: float) -> None:
        found = self._queue.batch(batch)
        if found is None or found.status != "validating":  # cancelled meanwhile
            return
        self._queue.save(decisions.validated(found, total, model, errors, now), "validating", self._owner)
        if errors:
            self.forget_lines(batch)

    def rows(self, batch: str) -> Iterator[Row]:
        """Raises Unavailable at the end if another process has the job by then, and so may have forgotten lines."""
        start = 0
        redis = self._queue.redis
        while True:
            with failures():
                numbers = redis.lrange(f"{PREFIX}order:{batch}", start, start + _ROWS - 1)
                pipeline = redis.pipeline(transaction=False)
                for number in numbers:
                    key = f"{PREFIX}line:{batch}:{number.decode()}"
                    pipeline.hmget(key, "custom_id", "status", "request_id", "body")
                rows = pipeline.execute()
            if not numbers:
                break
            for number, (custom_id, status, request_id, body) in zip(numbers, rows, strict=True):
                answer = None if status is None else Answered(int(status), request_id.decode(), body)
                yield Row(int(number), custom_id.decode(), answer)
            start += len(numbers)
        with failures():
            owner = redis.hget(f"{PREFIX}batch:{batch}", "owner")
        _ours(True if owner == self._owner.encode() else None)

    def assembled(self, batch: str, files: Sequence[StoredFile], now: float) -> None:
        found = self._queue.batch(batch)
        assert found is not None
        _ours(self._queue.save(decisions.ended(found, files, now), found.status, self._owner, files) or None)
        self.forget_lines(batch)

    def close(self) -> None:
        self._queue.close()


def _ours(answer: T | None) -> T:
    if answer is None:
        raise decisions.lost_job()
    return answer
