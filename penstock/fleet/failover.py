"""What keeps a failure from spreading: who crashed a replica, how often to try again, which replica to leave alone."""

from __future__ import annotations

import asyncio
import hashlib
import math

import msgspec

from penstock.core.errors import DeadlineExceeded, EngineFailure
from penstock.core.request import GenerateRequest
from penstock.fleet.journal import Journal

SUSPECT_AFTER = 2  # crashes in a row without a token between them; the next one, alone, convicts
QUARANTINE_SECONDS = 600.0
QUARANTINED = 1024  # remembered
RETRY_SECONDS = 10.0  # over which fruitless retries are counted
SPARE_RETRIES = 32
BREAK_AFTER = 3  # failures in a row
FIRST_BREAK_SECONDS = 1.0
LAST_BREAK_SECONDS = 30.0


class Trial:
    """Of a suspect without other suspects beside it, until it has a token."""

    def __init__(self) -> None:
        self._running = asyncio.Lock()

    async def begin(self, journal: Journal) -> None:
        """Wait until no other suspect is tried. Raises DeadlineExceeded."""
        try:
            async with asyncio.timeout(None if journal.request.deadline is None else journal.remaining()):
                await self._running.acquire()
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed while a request that may crash workers ran alone") from None
        journal.on_trial = True

    def end(self, journal: Journal) -> None:
        journal.on_trial = False
        self._running.release()


class Quarantine:
    """Requests that crash whatever computes them. Sent again, they are refused instead."""

    def __init__(self) -> None:
        self._until: dict[bytes, float] = {}

    def check(self, request: GenerateRequest, now: float) -> None:
        if self._until and self._until.get(_digest(request), 0.0) > now:
            raise _quarantined()

    def convict(self, request: GenerateRequest, now: float) -> EngineFailure:
        """Refuse its like from now on. Returns the error that ends it."""
        self._until[_digest(request)] = now + QUARANTINE_SECONDS
        while len(self._until) > QUARANTINED:
            del self._until[next(iter(self._until))]
        return _quarantined()


def _quarantined() -> EngineFailure:
    error = EngineFailure(
        f"this request ended {SUSPECT_AFTER + 1} workers one after the other, so it is not tried again for "
        f"{QUARANTINE_SECONDS / 60:.0f} minutes; the server's log has the reason",
        code="quarantined",
    )
    error.retryable = False
    return error


def _digest(request: GenerateRequest) -> bytes:
    content = msgspec.msgpack.encode((list(request.prompt), request.params))
    return hashlib.blake2b(content, digest_size=16).digest()


class RetryBudget:
    """Retries that bring no token add load when there is least to spare: so many in all, and then none."""

    def __init__(self) -> None:
        self._fruitless = 0.0
        self._at = 0.0

    def spend(self, in_flight: int, now: float) -> bool:
        """Whether one more is allowed; it counts as fruitless until `refund`."""
        self._fruitless *= math.exp((self._at - now) / RETRY_SECONDS)
        self._at = now
        if self._fruitless >= SPARE_RETRIES + 2 * in_flight:
            return False
        self._fruitless += 1
        return True

    def refund(self) -> None:
        self._fruitless = max(0.0, self._fruitless - 1)


class CircuitBreaker:
    """Open after a few failures in a row: its replica gets no requests for a while, and then one to see."""

    def __init__(self) -> None:
        self._failures = 0
        self._open_until = 0.0

    def allows(self, now: float) -> bool:
        return self._failures < BREAK_AFTER or now >= self._open_until

    def try_again(self, now: float) -> None:
        """The one request that shows whether it has recovered is on its way."""
        if self._failures >= BREAK_AFTER:
            self._open_until = now + self._pause()

    def failed(self, now: float) -> None:
        self._failures += 1
        self._open_until = now + self._pause()

    def succeeded(self) -> None:
        self._failures = 0

    @property
    def open(self) -> bool:
        return self._failures >= BREAK_AFTER

    def _pause(self) -> float:
        return float(min(LAST_BREAK_SECONDS, FIRST_BREAK_SECONDS * 2 ** max(0, self._failures - BREAK_AFTER)))
