"""Limits, spend and records shared by several gateways through Redis.

One task owns the connection. Reservations and settlements of the same moment travel together as one run of a script,
which is atomic among all gateways. When Redis fails, requests that wait for it are counted in this process at
once, and so are all that follow until it answers again; what they used is then added to the common account.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from penstock.core.errors import StartupError, Unavailable
from penstock.state.memory import MemoryStore, budget_wait
from penstock.state.redis_script import BATCH, DISCARD, SAVE
from penstock.state.store import Claim, Grant, Keep, Limit, Room, UsageKey, UsageRecord, days_between

logger = logging.getLogger("penstock.state")

TIMEOUT_SECONDS = 1.0  # for an answer; shorter, and a busy event loop would pass for a lost Redis
SETTLE_SECONDS = 0.005  # a settlement waits this long for a reservation to travel with
RETRY_SECONDS = 0.5
CLOSE_SECONDS = 2.0  # for the last settlements
LEASE_SECONDS = 60  # a gateway that dies frees its concurrent requests after this
RENEW_SECONDS = 20
KEEP_SECONDS = 400 * 86400  # spend
MAX_BATCH = 200  # operations of a kind on one trip, which keeps Redis busy for about 3 ms
CONNECTIONS = 32  # for what the one connection does not do
MAX_UNSETTLED = 100_000  # settlements kept through an outage; about 50 MB

_FAILURES = (RedisError, OSError)
_REFUSALS: tuple[Limit | None, ...] = (None, "requests", "tokens", "concurrent", "day", "month")

Operation = tuple[str | int, ...]  # as the script takes them


BATCH_SHA = hashlib.sha1(BATCH.encode(), usedforsecurity=False).hexdigest()  # as Redis names it
encode = msgspec.msgpack.Encoder().encode


class RedisStore:
    def __init__(self, url: str, prefix: str = "penstock", clock: Callable[[], float] | None = None) -> None:
        """By default the clock is that of the Redis server, on which all gateways agree."""
        self.redis = connect(url)
        self.place = place(self.redis)
        # Not from the pool: taking one from there costs as much as the trip.
        self._line = self.redis.connection_pool.make_connection()  # type: ignore[no-untyped-call]
        self.online = False
        self.local = MemoryStore()  # counts while Redis is away
        self._prefix = prefix
        self._clock = clock or (lambda: -1.0)
        self._reservations: deque[tuple[Claim, asyncio.Future[Grant | None]]] = deque()
        self._settlements: deque[Operation] = deque()
        self._acknowledged = 0  # settlements before those
        self._gateway = secrets.token_hex(8)  # who numbers them
        self._held: dict[str, dict[str, str]] = {}  # by request id: keys of leases and its members there
        self._kept: dict[str, dict[str, str]] = {}  # records as last read, by kind
        self._wake = asyncio.Event()
        self._settled = asyncio.Event()
        self._settled.set()
        self._tasks: list[asyncio.Task[None]] = []
        self._turns = asyncio.Semaphore(CONNECTIONS)
        self._silences = 0  # how often Redis did not answer

    async def open(self) -> None:
        try:
            await self._connect()
        except _FAILURES as error:
            raise StartupError(
                f"cannot reach Redis at {self.place}: {error}; start it, or set state to memory or sqlite:///PATH",
                param="state",
            ) from error
        self._tasks = [asyncio.create_task(self._run()), asyncio.create_task(self._renew_leases())]

    async def close(self) -> None:
        self._wake.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._settled.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._line.disconnect()
        await self.redis.aclose()

    # ---------------------------------------------------------------- limits and spend

    async def reserve(self, claim: Claim) -> Grant:
        if not claim.limited or not self.online:
            return await self.local.reserve(claim)
        answer: asyncio.Future[Grant | None] = asyncio.get_running_loop().create_future()
        self._reservations.append((claim, answer))
        self._wake.set()
        try:
            grant = await answer
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled():
                self._give_back(answer.result())
            raise
        return grant or await self.local.reserve(claim)

    def _give_back(self, grant: Grant | None) -> None:
        """The client left while it waited for the grant."""
        if grant is not None and grant.refused is None:
            self.settle(grant, UsageRecord())

    def settle(self, grant: Grant, used: UsageRecord) -> None:
        if grant.local:
            self.local.release(grant, used)
        self._held.pop(grant.claim.id, None)
        if not self.online:  # budgets go on, from what was known when Redis went
            self.local.record(UsageKey(self.local.day(), grant.claim.tenant, grant.claim.model), used)
        if len(self._settlements) < MAX_UNSETTLED:
            self._settlements.append(self._settlement(grant, used))
            if self._settled.is_set():
                self._settled.clear()
                asyncio.get_running_loop().call_later(SETTLE_SECONDS, self._wake.set)

    async def _run(self) -> None:
        while True:
            try:
                if not self.online:
                    await self._connect()
                    logger.info("Redis at %s is back: limits are shared again", self.place)
                while self.online:
                    await self._wake.wait()
                    self._wake.clear()
                    while self.online and (self._reservations or self._settlements):
                        await self._exchange()
                    if self.online:
                        self._settled.set()
            except Exception as error:  # whatever it is, requests must not wait for it
                self._go_local(error)
                await asyncio.sleep(RETRY_SECONDS)

    async def _connect(self) -> None:
        """Connect and check that the server accepts writes: one that is read-only or full still answers a ping."""
        await self.redis.connection_pool.disconnect(inuse_connections=False)  # those of before a failure are dead
        await self._line.disconnect()
        await self._line.connect()
        await self.redis.script_load(BATCH)
        await self.redis.set(f"{self._prefix}:alive", 1, ex=60)
        if await self._version() == 0:
            await self._restore()
        self.online = True
        self._wake.set()

    def _go_local(self, error: Exception) -> None:
        if self.online:
            logger.warning("lost Redis at %s, limits are local until it is back: %s", self.place, error)
        self.online = False
        self._silences += not isinstance(error, ResponseError)
        self._wake.set()
        while self._reservations:
            _, answer = self._reservations.popleft()
            if not answer.done():
                answer.set_result(None)

    async def _exchange(self) -> None:
        """Send one batch. On failure nothing is forgotten: a settlement whose answer was lost is sent again under its
        number, and counts once."""
        waiting = [self._reservations.popleft() for _ in range(min(MAX_BATCH, len(self._reservations)))]
        settlements = list(itertools.islice(self._settlements, MAX_BATCH))
        reservations = [self._reservation(claim) for claim, _ in waiting]
        numbering = (self._gateway, self._acknowledged)
        batch = (self._clock(), LEASE_SECONDS, KEEP_SECONDS, *numbering, settlements, reservations)
        try:
            await self._line.send_command("EVALSHA", BATCH_SHA, 0, self._prefix, encode(batch))
            answers = await self._line.read_response()
        except BaseException:
            self._reservations.extendleft(reversed(waiting))
            raise
        for _ in settlements:
            self._settlements.popleft()
        self._acknowledged += len(settlements)
        for (claim, answer), found in zip(waiting, answers, strict=True):
            grant = self._grant(claim, found)
            if answer.done():
                self._give_back(grant)
            else:
                answer.set_result(grant)

    def _reservation(self, claim: Claim) -> Operation:
        limits = (
            claim.requests_per_minute,
            claim.tokens_per_minute,
            claim.concurrent,
            claim.budget_per_day,
            claim.budget_per_month,
        )
        whose = (claim.tenant, claim.model, claim.id, claim.requests, claim.tokens, claim.cost, self.local.day())
        return (*whose, *[-1 if limit is None else limit for limit in limits])

    def _grant(self, claim: Claim, answer: list[int]) -> Grant:
        refusal, wait, requests, requests_reset, tokens, tokens_reset, second, left, day_spent, month_spent = answer
        refused = _REFUSALS[refusal]
        day = self.local.day()
        self.local.spent[claim.tenant, day] = day_spent
        self.local.spent[claim.tenant, day[:7]] = month_spent
        if refused is None:
            held = self._held.setdefault(claim.id, {})
            held[f"{self._prefix}:leases:{claim.tenant}:{claim.model}"] = claim.id
            if claim.reserved:
                held[f"{self._prefix}:reserved:{claim.tenant}"] = f"{claim.id} {claim.reserved}"
        delay = wait / 1000
        if refused == "day":
            delay = budget_wait(claim, refused, day_spent, time.time())
        elif refused == "month":
            delay = budget_wait(claim, refused, month_spent, time.time())
        return Grant(
            claim,
            second,
            refused,
            delay,
            None if claim.requests_per_minute is None else Room(requests, requests_reset / 1000),
            None if claim.tokens_per_minute is None else Room(tokens, tokens_reset / 1000),
            left,
            local=False,
        )

    def _settlement(self, grant: Grant, used: UsageRecord) -> Operation:
        claim = grant.claim
        second = -1 if grant.local else grant.second
        changes = (used.requests - claim.requests, used.tokens - claim.tokens, claim.reserved)
        return (claim.tenant, claim.model, claim.id, second, *changes, self.local.day(), *used)

    async def _renew_leases(self) -> None:
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            if self.online and self._held:
                with contextlib.suppress(Unavailable):
                    now = int((await self._ask(self.redis.time))[0])
                    pipeline = self.redis.pipeline(transaction=False)
                    for held in self._held.values():
                        for key, member in held.items():
                            pipeline.execute_command("ZADD", key, "XX", now + LEASE_SECONDS, member)
                            pipeline.expire(key, 2 * LEASE_SECONDS)
                    await self._ask(pipeline.execute)

    # ---------------------------------------------------------------- usage and records

    async def usage(self, first_day: str, last_day: str) -> dict[UsageKey, UsageRecord]:
        found: dict[UsageKey, UsageRecord] = {}
        for day in days_between(first_day, last_day):
            amounts: dict[str, str] = await self._ask(self.redis.hgetall, f"{self._prefix}:usage:{day}")
            for field, amount in amounts.items():
                tenant, rest = field.split(" ", 1)
                model, name = rest.rsplit(" ", 1)
                key = UsageKey(day, tenant, model)
                found[key] = found.get(key, UsageRecord()).plus(UsageRecord(**{name: int(amount)}))
        return found

    async def put(self, kind: str, name: str, value: str) -> None:
        await self._change("HSET", kind, name, value)

    async def delete(self, kind: str, name: str) -> bool:
        return bool(await self._change("HDEL", kind, name))

    async def _change(self, command: str, kind: str, *values: str) -> int:
        pipeline = self.redis.pipeline(transaction=True)
        pipeline.execute_command(command, f"{self._prefix}:records:{kind}", *values)
        pipeline.incr(f"{self._prefix}:version")
        return int((await self._ask(pipeline.execute))[0])

    async def records(self, kind: str) -> dict[str, str]:
        self._kept[kind] = await self._ask(self.redis.hgetall, f"{self._prefix}:records:{kind}")
        return dict(self._kept[kind])

    async def save(
        self, kind: str, tenant: str, name: str, document: bytes, keep: Keep, instead_of: bytes | None = None
    ) -> bool:
        if len(document) > keep.bytes:
            return False
        where, wall = f"{self._prefix}:documents:{kind}:{tenant}", self._clock()
        expected = () if instead_of is None else (instead_of,)
        return bool(await self._ask(self.redis.eval, SAVE, 0, where, name, document, *keep, wall, *expected))

    async def load(self, kind: str, tenant: str, name: str) -> bytes | None:
        found: str | None = await self._ask(self.redis.get, f"{self._prefix}:documents:{kind}:{tenant}:{name}")
        return None if found is None else found.encode()

    async def discard(self, kind: str, tenant: str, name: str) -> bool:
        where = f"{self._prefix}:documents:{kind}:{tenant}"
        return bool(await self._ask(self.redis.eval, DISCARD, 0, where, name))

    async def version(self) -> int:
        if not self.online:  # nor does it know yet whether the records are still there
            raise Unavailable(f"Redis at {self.place} is away", code="store_unavailable")
        found = await self._ask(self._version)
        if found == 0 and await self._ask(self._restore):
            found = await self._ask(self._version)
        return int(found)

    async def _version(self) -> int:
        return int(await self.redis.get(f"{self._prefix}:version") or 0)

    async def _restore(self) -> bool:
        """Give a server that came back empty the keys and tenants it had. Whether there were any."""
        kept = {kind: values for kind, values in self._kept.items() if values}
        if not kept:
            return False
        logger.warning("Redis at %s has lost its records, writing back those known here", self.place)
        pipeline = self.redis.pipeline(transaction=True)
        for kind, values in kept.items():
            pipeline.execute_command("HSET", f"{self._prefix}:records:{kind}", *itertools.chain(*values.items()))
        pipeline.incr(f"{self._prefix}:version")
        await pipeline.execute()
        return True

    async def _ask(self, question: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        """Waits while all connections are in use: that does not pass for a lost Redis. Once one of them gets no answer
        whoever waits fails as well, instead of finding out one after another."""
        silences = self._silences
        error: Exception | None = None
        async with self._turns:
            if self._silences == silences:
                try:
                    return await question(*args)
                except _FAILURES as failure:
                    error = failure
                    self._go_local(error)
        raise Unavailable(f"Redis at {self.place} does not answer", code="store_unavailable") from error


def connect(url: str) -> redis.asyncio.Redis:
    """Answers soon or fails: what is stored there can be done without."""
    return redis.asyncio.Redis.from_url(
        url,
        socket_timeout=TIMEOUT_SECONDS,
        socket_connect_timeout=TIMEOUT_SECONDS,
        retry=Retry(NoBackoff(), 0),
        decode_responses=True,
    )


def place(client: redis.asyncio.Redis) -> str:
    """The URL without its password, for messages."""
    options = client.connection_pool.connection_kwargs
    return str(options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}")
