"""Answers requests from a queue: each is acknowledged once its answer is with the broker.

The order is: keep the answer, publish it, note that it is published, acknowledge the request. Whatever is killed in
between, the request is delivered again and finds how far it had come. So an answer may be published twice, with the
same id and text, and none is lost. Refusals and failures are forgotten in the end: their requests may be sent again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from penstock.batches.decisions import MAX_LOSSES, after_failure, at_once, renewal_seconds
from penstock.batches.journal import LineJournal
from penstock.batches.records import new_id
from penstock.batches.runner import Answers, Asked, failure
from penstock.core.errors import InvalidRequest, MessageTooLarge, PenstockError
from penstock.queues.answers import AnswerStore
from penstock.queues.broker import Broker, Message
from penstock.queues.requests import (
    QueueRequest,
    chunk_answers,
    dead_letter,
    read_request,
    seed_of,
    was_computed,
    whole_answer,
)
from penstock.queues.settings import ConsumeConfig

logger = logging.getLogger("penstock.queues")

T = TypeVar("T")

FULL_SECONDS = 0.1  # before another look, when there is no room
RETRY_SECONDS = 1.0  # before what failed is tried again
PATIENCE_SECONDS = 86_400.0  # for a budget that is spent: as long as one for a day may take
MAX_RETRY_SECONDS = 30.0  # between attempts to reach a broker that is away, each twice as late as the one before
SAY_SECONDS = 30.0  # between warnings that something is away
LAG_SECONDS = 5.0
FORGET_SECONDS = 600.0


@dataclass(slots=True, eq=False)
class _Running:
    message: Message
    task: asyncio.Task[None] | None = None
    id: str = ""  # "": there is nothing to give back
    journal: LineJournal | None = None


class Consumer:
    def __init__(
        self, config: ConsumeConfig, broker: Broker, store: AnswerStore, answers: Answers, endpoints: Collection[str]
    ) -> None:
        self._config = config
        self._broker = broker
        self._store = store
        self._answers = answers
        self._endpoints = endpoints
        self._running: set[_Running] = set()
        self._ids: dict[str, asyncio.Future[None]] = {}  # requests that are being answered
        self._tasks: list[asyncio.Task[None]] = []
        self._reopen = asyncio.Lock()
        self._closing = False
        self._generation = 0  # how often the broker was opened
        self._renewals = 0
        self._said_at = -math.inf  # when it was last said that something is away
        self.outcomes = Counter(dict.fromkeys(("answered", "repeated", "retried", "dead", "released"), 0))
        self.lag = 0  # messages not acknowledged, as of the last look

    @property
    def running(self) -> int:
        return len(self._running)

    async def open(self) -> None:
        await self._broker.open()
        for work in (self._receive, self._renew, self._measure, self._forget):
            self._tasks.append(asyncio.create_task(self._for_ever(work)))

    async def close(self) -> None:
        """What runs is given back, with the tokens it has."""
        self._closing = True
        running = [each.task for each in self._running if each.task is not None]
        for task in (*self._tasks, *running):
            task.cancel()
        await asyncio.gather(*self._tasks, *running, return_exceptions=True)
        await self._broker.close()

    async def _for_ever(self, work: Callable[[], Awaitable[None]]) -> None:
        while not self._closing:  # a client may turn being cancelled into a timeout
            await self._insist(work)

    async def _insist(self, work: Callable[[], Awaitable[T]]) -> T:
        """Until it is done: there may be no broker, or no room on disk, for a while."""
        while True:
            generation = self._generation
            try:
                return await work()
            except MessageTooLarge:
                raise
            except PenstockError as error:
                if self._closing:
                    raise asyncio.CancelledError from error
                if time.monotonic() - self._said_at > SAY_SECONDS:
                    self._said_at = time.monotonic()
                    logger.warning("the queue waits: %s", error.message)
                if error.code == "broker_unavailable":
                    await self._open_again(generation)
                else:
                    await asyncio.sleep(RETRY_SECONDS)

    async def _open_again(self, generation: int) -> None:
        """By whoever notices first, while all others wait. Messages of the old connection are delivered again."""
        async with self._reopen:
            delay = RETRY_SECONDS
            while generation == self._generation and not self._closing:
                await asyncio.sleep(delay * random.uniform(0.5, 1.0))
                delay = min(2 * delay, MAX_RETRY_SECONDS)
                with contextlib.suppress(PenstockError):
                    await self._broker.open()
                    self._generation += 1
                    logger.info("the queue goes on: the broker is back")

    # ------------------------------------------------------------ messages

    async def _receive(self) -> None:
        room = 0 if self._answers.draining else await self._room()
        if room <= 0:
            await asyncio.sleep(FULL_SECONDS)
            return
        for message in await self._broker.receive(room):
            running = _Running(message)
            self._running.add(running)
            running.task = asyncio.create_task(self._run(running))

    async def _room(self) -> int:
        """Of the engine with the most: which model a message asks for shows only when it is here."""
        most = at_once(self.outcomes.total(), self._config.concurrent)
        rooms = (self._answers.room(group, self.running, most) for group in await self._answers.groups())
        return min(max(rooms), most - self.running)

    async def _run(self, running: _Running) -> None:
        try:
            await self._answer(running)
        except asyncio.CancelledError:
            await self._release(running)
            raise
        finally:
            self._running.discard(running)

    async def _answer(self, running: _Running) -> None:
        message, config = running.message, self._config
        try:
            request, body = read_request(message.payload, self._endpoints, stream=config.answers == "chunks")
        except InvalidRequest as error:
            await self._bury(message, error.code or "invalid_message", error.message)
            return
        id = f"{config.scope}{self._broker.incarnation}/{request.custom_id}"
        while id in self._ids:  # it was sent twice, or delivered again over a new connection
            await asyncio.wait([self._ids[id]])
        self._ids[id] = asyncio.get_running_loop().create_future()
        try:
            await self._answer_once(running, id, request, body)
        finally:
            self._ids.pop(id).set_result(None)

    async def _answer_once(self, running: _Running, id: str, request: QueueRequest, body: bytes) -> None:
        message = running.message
        known = await self._insist(lambda: self._store.begin(id))
        if known.answer is not None:
            kept = msgspec.json.decode(known.answer, type=list[str])
            if known.published:
                self.outcomes["repeated"] += 1
                await self._end(message, id, kept)
            else:
                await self._finish(message, id, request.custom_id, kept)
            return
        if known.begun >= MAX_LOSSES:
            await self._bury(message, "given_up", f"{known.begun} processes ended while they worked on its next token")
            return
        running.id, running.journal = id, LineJournal(seed_of(self._config.requests, request.custom_id), known.journal)
        answer = await self._attempts(request, body, running.journal)
        running.id = ""  # from here on it is finished, not given back
        await self._keep(id, [each.decode() for each in answer])
        self.outcomes["answered"] += 1
        rest = answer[-1:] if self._config.answers == "chunks" else answer
        await self._finish(message, id, request.custom_id, [each.decode() for each in rest])

    async def _finish(self, message: Message, id: str, custom_id: str, answer: list[str]) -> None:
        try:
            await self._publish(custom_id, answer)
        except MessageTooLarge as error:
            logger.warning("request %s of the queue: %s", custom_id, error.message)
            answer = [whole_answer(custom_id, failure(error).answer).decode()]
            await self._keep(id, answer)
            await self._publish(custom_id, answer)
        await self._insist(lambda: self._store.published(id))
        await self._end(message, id, answer)

    async def _publish(self, custom_id: str, answer: list[str]) -> None:
        payloads = [each.encode() for each in answer]
        await self._insist(lambda: self._broker.publish(self._config.results, custom_id, payloads))

    async def _keep(self, id: str, answer: list[str]) -> None:
        packed = msgspec.json.encode(answer)
        await self._insist(lambda: self._store.keep(id, packed))

    async def _end(self, message: Message, id: str, answer: list[str]) -> None:
        if await self._acknowledge(message) and not was_computed(answer):
            await self._insist(lambda: self._store.drop(id))

    async def _attempts(self, request: QueueRequest, body: bytes, journal: LineJournal) -> list[bytes]:
        """The messages that are the answer. Chunks are published as they come, all but the last."""
        failures = 0
        while True:
            chunks = _Chunks(self._broker, self._config.results, request.custom_id)
            on_events = chunks.take if self._config.answers == "chunks" else None
            attempt = await self._answers.answer(
                Asked(self._config.tenant or "", request.url, body, journal, on_events)
            )
            status, wait = attempt.answer.status, attempt.retry_after
            retry = after_failure(status, attempt.retryable, failures, random.random(), wait, PATIENCE_SECONDS)
            if retry is None:
                streamed = chunks.made and status < 400
                return chunks.made if streamed else [whole_answer(request.custom_id, attempt.answer)]
            if self._closing or self._answers.draining:
                raise asyncio.CancelledError  # it is given back, for another consumer
            failures += retry.counts
            self.outcomes["retried"] += 1
            await asyncio.sleep(retry.delay)

    async def _bury(self, message: Message, code: str, why: str) -> None:
        self.outcomes["dead"] += 1
        size = len(message.payload)
        while not await self._send_letter(dead_letter(code, why, message.payload, message.source, size), code):
            if not size:
                logger.error("message %s of the queue is dead and its letter is lost: %s", message.source, why)
                break
            size //= 2
        await self._acknowledge(message)

    async def _send_letter(self, letter: bytes, code: str) -> bool:
        """Whether the broker takes a message of that size."""
        try:
            await self._insist(lambda: self._broker.publish(self._config.dead_letters, code, [letter]))
        except MessageTooLarge:
            return False
        return True

    async def _acknowledge(self, message: Message) -> bool:
        """If the connection was lost it is delivered again, and its id is known."""
        try:
            await self._broker.acknowledge(message)
        except PenstockError as error:
            logger.warning("a request could not be acknowledged and is delivered again: %s", error.message)
            return False
        return True

    async def _release(self, running: _Running) -> None:
        self.outcomes["released"] += 1
        try:
            if running.id:
                await self._keep_journals([running])
                await self._store.released(running.id)
            await self._broker.release(running.message)
        except PenstockError as error:
            logger.warning("a request is delivered again later: %s", error.message)

    # ------------------------------------------------------------ from time to time

    async def _renew(self) -> None:
        await asyncio.sleep(min(renewal_seconds(self._renewals), self._config.lease_seconds / 4))
        self._renewals += 1
        running = list(self._running)
        if running:
            await self._keep_journals(running)
            await self._broker.renew([each.message for each in running])

    async def _keep_journals(self, running: list[_Running]) -> None:
        changed = {
            each.id: each.journal.packed()
            for each in running
            if each.id and each.journal is not None and each.journal.changed
        }
        if changed:
            await self._store.keep_journals(changed)

    async def _measure(self) -> None:
        self.lag = await self._broker.lag()
        await asyncio.sleep(LAG_SECONDS)

    async def _forget(self) -> None:
        await self._store.forget(time.time() - self._config.remember_hours * 3600)
        await asyncio.sleep(FORGET_SECONDS)


class _Chunks:
    """The chunks of one attempt, published as they come but for the last, which is published once all are kept."""

    def __init__(self, broker: Broker, queue: str, custom_id: str) -> None:
        self._broker = broker
        self._queue = queue
        self._custom_id = custom_id
        self._attempt = new_id("")
        self.made: list[bytes] = []

    async def take(self, events: bytes) -> None:
        made = chunk_answers(self._custom_id, self._attempt, len(self.made), events)
        if not made:
            return
        ready = [*self.made[-1:], *made[:-1]]
        self.made += made
        if ready:
            await self._broker.publish(self._queue, self._custom_id, ready)
