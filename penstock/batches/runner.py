"""Runs batches: leases their lines, has them answered, and keeps what became of them.

One runner per gateway process. Everything that must survive is in the store; a runner that is killed leaves leases,
which others take over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, TypeVar, TypeVarTuple

import msgspec

from penstock.batches.decisions import ANNOUNCE_SECONDS, MAX_LOSSES, after_failure, at_once, renewal_seconds
from penstock.batches.journal import LineJournal
from penstock.batches.place import Batches
from penstock.batches.records import Answered, Job, Line
from penstock.batches.store import Kept
from penstock.batches.work import EXIT_FULL, Assignment
from penstock.core.errors import PenstockError, StorageFull, Unavailable

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

logger = logging.getLogger("penstock.batches")

POLL_SECONDS = 1.0  # between looks for what other processes have queued
LEASE_GAP_SECONDS = 0.02  # between two leases, so that lines which end together are replaced together
RETRY_SECONDS = 2.0  # before an answer that could not be kept is written again
JOB_RETRY_SECONDS = 10.0  # before a batch that could not be validated or assembled is tried again
SWEEP_SECONDS = 600.0  # between looks for files whose time has passed
CONTENTS_THREADS = 4  # that wait for contents, so that requests of clients do not wait for those
ABANDONED_SECONDS = 86_400.0  # after which contents without a record are no longer somebody's who is about to write it


class Attempt(NamedTuple):
    """What came of one attempt to answer a line."""

    answer: Answered
    retryable: bool = False
    retry_after: float = 0.0


class Asked(NamedTuple):
    """A request that nobody waits for."""

    tenant: str
    endpoint: str
    body: bytes
    journal: LineJournal
    on_events: Callable[[bytes], Awaitable[None]] | None = None  # takes server-sent events, if it asks for a stream


class Answers(Protocol):
    """Answers lines by way of everything that requests over HTTP pass through."""

    async def answer(self, asked: Asked) -> Attempt: ...

    async def served(self) -> Sequence[Sequence[str]]:
        """The models and adapters of this server, each with all of its names."""
        ...

    def models(self, tenant: str, served: Sequence[Sequence[str]]) -> Sequence[str]:
        """Which of the names of those that are served, here or elsewhere, a tenant may use."""
        ...

    async def groups(self) -> Sequence[Sequence[str]]:
        """The names of each engine's models and adapters."""
        ...

    def refusal(self, model: str) -> PenstockError | None:
        """Why lines for this model or adapter cannot be answered, now or later."""
        ...

    def room(self, group: Sequence[str], running: int, most: int) -> int:
        """How many more lines the engine of these models should be given, which has `running` of them."""
        ...

    @property
    def draining(self) -> bool: ...


class BatchRunner:
    def __init__(self, batches: Batches, answers: Answers, max_line_bytes: int) -> None:
        self._store = batches.store
        self._contents = batches.work_contents
        self._threads = ThreadPoolExecutor(CONTENTS_THREADS, "batch-contents")
        self._place = batches
        self._config = batches.config
        self._answers = answers
        self._max_line_bytes = max_line_bytes
        self._wake = asyncio.Event()
        self._running: dict[tuple[str, int], tuple[Line, LineJournal, asyncio.Task[None]]] = {}
        self._given_back: set[tuple[str, int]] = set()  # lines that still run, to their end
        self._unkept: set[Line] = set()  # lines whose answers there was no room for
        self._job: Job | None = None
        self._renewals = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.outcomes = Counter(dict.fromkeys(("completed", "failed", "retried", "dropped"), 0))  # of attempts
        self.waiting = 0  # lines of all batches, as of the last look

    @property
    def running(self) -> int:
        return len(self._running)

    def wake(self) -> None:
        """There may be something to do."""
        self._wake.set()

    def start(self) -> None:
        for work in (self._announce, self._lease_lines, self._renew, self._sweep):
            self._spawn(self._for_ever(work))

    async def close(self) -> None:
        """Give back what is running, so that others, or this server when it is started again, go on at once."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        running = list(self._running.values())
        for _, _, task in running:
            task.cancel()
        await asyncio.gather(*(task for _, _, task in running), return_exceptions=True)
        self._threads.shutdown(wait=False)

    async def _in_thread(self, work: Callable[[*Ts], T], *args: *Ts) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _for_ever(self, work: Callable[[], Awaitable[None]]) -> None:
        """What fails is said once and tried again: a store that is away comes back."""
        failing = False
        while True:
            try:
                await work()
                failing = False
            except PenstockError as error:
                if not failing:
                    logger.warning("batches wait: %s", error.message)
                failing = True
                await asyncio.sleep(RETRY_SECONDS)

    # ------------------------------------------------------------ lines

    async def _lease_lines(self) -> None:
        self._wake.clear()
        in_progress = await self._store.advance(time.time())
        self.waiting = sum(in_progress.values())
        for line, _, task in list(self._running.values()):
            if line.batch not in in_progress:  # it was cancelled, or its time has passed
                task.cancel()
        if self._job is None:
            job = await self._take(self._store.claim_job(time.time()), self._give_up)
            if job is not None:
                self._job = job
                self._spawn(self._work_on(job))
        if self.waiting and not self._answers.draining:
            for group in await self._answers.groups():
                await self._fill(group)
        try:
            async with asyncio.timeout(POLL_SECONDS):
                await self._wake.wait()
        except TimeoutError:
            return
        await asyncio.sleep(LEASE_GAP_SECONDS)

    async def _fill(self, group: Sequence[str]) -> None:
        running = sum(line.model in group for line, _, _ in self._running.values())
        most = at_once(self.outcomes.total(), self._config.concurrent)
        room = min(self._answers.room(group, running, most), most - len(self._running))
        if room <= 0:
            return
        for line in await self._take(self._store.lease(group, room, time.time()), self._return):
            key = line.batch, line.number
            if key in self._running and key not in self._given_back:
                continue  # its lease ended while the store was away, and what runs goes on with the new one
            journal = LineJournal(line.seed, line.journal)
            self._given_back.discard(key)
            self._running[key] = line, journal, asyncio.create_task(self._run(line, journal))

    async def _take(self, asked: Awaitable[T], give_back: Callable[[T], Awaitable[None]]) -> T:
        """What the store hands out. Cancelled before it is here, it goes back at once: its lease would keep it from
        others for a while."""
        answer = asyncio.ensure_future(asked)
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            with contextlib.suppress(PenstockError):
                await give_back(await answer)
            raise

    async def _return(self, lines: Sequence[Line]) -> None:
        for line in lines:
            await self._store.release(line, time.time(), counts=False, journal=None)

    async def _give_up(self, job: Job | None) -> None:
        if job is not None:
            await self._store.end_job(job, time.time())

    async def _run(self, line: Line, journal: LineJournal) -> None:
        """To its answer, or to the next attempt. Cancelled, it gives the line back with what it has."""
        done = False
        try:
            attempt = await self._attempt(line, journal)
            status, wait, left = attempt.answer.status, attempt.retry_after, line.expires_at - time.time()
            retry = after_failure(status, attempt.retryable, line.attempts, random.random(), wait, left)
            if retry is None:
                done = True
                await self._keep(line, attempt.answer)
            else:
                self.outcomes["retried"] += 1
                await self._give_back(line, journal, time.time() + retry.delay, counts=retry.counts)
        except asyncio.CancelledError:
            if not done:
                await self._give_back(line, journal, time.time(), counts=False)
            raise
        finally:
            key = line.batch, line.number
            if self._running[key][2] is asyncio.current_task():  # else it was given back, and leased and begun again
                del self._running[key]
                self._given_back.discard(key)
            self._wake.set()

    async def _attempt(self, line: Line, journal: LineJournal) -> Attempt:
        if line.losses >= MAX_LOSSES:
            return failure(Unavailable(f"given up: {line.losses} processes ended while they worked on its next token"))
        if (refusal := self._answers.refusal(line.model)) is not None:
            return failure(refusal)
        try:
            body = await self._in_thread(self._contents.read, line.file, line.start, line.size)
        except PenstockError as error:
            return failure(error)._replace(retryable=error.retryable)
        if body is None or len(body) != line.size:
            return failure(Unavailable("the input file is gone", code="file_not_found"))
        return await self._answers.answer(Asked(line.tenant, line.endpoint, body, journal))

    async def _keep(self, line: Line, answer: Answered) -> None:
        """The answer waits for as long as there is no room for it, and its lease is renewed meanwhile."""
        failed = answer.status >= 400
        while True:
            try:
                taken = await self._store.answer(line, answer, failed=failed)
                self.outcomes["dropped" if not taken else "failed" if failed else "completed"] += 1
                return
            except (StorageFull, Unavailable) as error:
                if not self._unkept:
                    logger.warning("answers wait to be kept: %s", error.message)
                self._unkept.add(line)
                await asyncio.sleep(RETRY_SECONDS)
            finally:
                self._unkept.discard(line)

    async def _give_back(self, line: Line, journal: LineJournal, not_before: float, *, counts: bool) -> None:
        """If that fails, the lease ends by itself. The journal goes along even if it was packed before, since that may
        have been cancelled before it was kept."""
        self._given_back.add((line.batch, line.number))
        try:
            await self._store.release(line, not_before, counts=counts, journal=journal.packed())
        except PenstockError as error:
            logger.warning("a line of %s is free once its lease ends: %s", line.batch, error.message)

    async def _renew(self) -> None:
        await asyncio.sleep(renewal_seconds(self._renewals))
        self._renewals += 1
        if self._job is not None:
            await self._store.renew_job(self._job, time.time())
        kept = [
            Kept(line, journal.packed() if journal.changed else None) for line, journal, _ in self._running.values()
        ]
        for lost in await self._store.renew(kept, time.time()) if kept else ():
            if lost in self._running:
                self._running[lost][2].cancel()

    async def _announce(self) -> None:
        """Whoever validates a batch knows then that its lines can be answered here."""
        await self._store.announce(await self._answers.served(), time.time())
        await asyncio.sleep(ANNOUNCE_SECONDS)

    # ------------------------------------------------------------ whole batches

    async def _work_on(self, job: Job) -> None:
        """In a process of its own, see `work.py`."""
        try:
            served = await self._store.announce(await self._answers.served(), time.time())
        except PenstockError as error:
            self._job = None  # its lease ends
            logger.warning("%s waits: %s", job.batch.id, error.message)
            return
        given = Assignment(
            job.kind,
            str(self._place.folder),
            self._place.redis,
            self._store.owner,
            job.batch.id,
            list(self._answers.models(job.batch.tenant, served)),
            self._config.max_lines,
            self._max_line_bytes,
            int(self._config.keep_days * 86400),
        )
        retry_at = time.time()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "penstock.batches.work"),
                stdin=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,  # a Ctrl-C in the terminal is not for it
            )
            try:
                _, said = await process.communicate(msgspec.json.encode(given))
            except asyncio.CancelledError:
                process.kill()
                await process.wait()
                raise
            if process.returncode:
                retry_at += JOB_RETRY_SECONDS
                why = said.decode(errors="replace").strip().rpartition("\n")[2]
                room = "; there is no room for it" if process.returncode == EXIT_FULL else ""
                logger.error("cannot %s %s, it is tried again: %s%s", job.kind, job.batch.id, why, room)
        finally:
            self._job = None
            await self._store.end_job(job, retry_at)
            self._wake.set()

    async def _sweep(self) -> None:
        gone = await self._store.expired_files(time.time())
        await self._in_thread(self._contents.delete, gone)
        before = time.time() - ABANDONED_SECONDS
        await self._in_thread(self._contents.clear_parts, before)
        finished = await self._in_thread(self._contents.finished, before)
        await self._in_thread(self._contents.delete, await self._store.unknown_files(finished))
        await asyncio.sleep(SWEEP_SECONDS)


def failure(error: PenstockError) -> Attempt:
    """An answer that says so, not to be tried again."""
    body = {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}
    return Attempt(Answered(error.status, "", msgspec.json.encode(body)))
