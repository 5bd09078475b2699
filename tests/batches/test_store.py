"""What the store promises, whoever dies when: each line has one lease at a time, and one answer in the end."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.batches.decisions import LEASE_SECONDS
from penstock.batches.records import Answered, Batch, FileLimits, Line, Page, StoredFile, new_id
from penstock.batches.sqlite import SqliteBatches
from penstock.batches.sqlite_work import SqliteWork
from penstock.batches.store import Kept, NewLine
from penstock.core.errors import InvalidRequest, StorageFull

T = TypeVar("T")

MODEL = "m"


def batch_of(tenant: str = "", expires_at: int = 2**40) -> Batch:
    return Batch(new_id("batch_"), tenant, "/v1/completions", "file-1", "24h", int(time.time()), expires_at)


async def queued(store: SqliteBatches, lines: int, expires_at: int = 2**40) -> Batch:
    """A batch whose lines wait."""
    batch = batch_of(expires_at=expires_at)
    await store.add_batch(batch)
    work = SqliteWork(store.path)
    new = [NewLine(number, f"line {number}", MODEL, 0, 2, number) for number in range(1, lines + 1)]
    assert not work.add_lines(batch.id, new)
    work.validated(batch.id, lines, MODEL, (), time.time())
    work.close()
    return batch


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteBatches]:
    store = SqliteBatches(tmp_path)
    await store.open()
    yield store
    await store.close()


def answer_to(line: Line) -> Answered:
    return Answered(200, "", b'"%d"' % line.number)


class Machine(RuleBasedStateMachine):
    """Two processes work on one batch. They answer, give back, hang past their leases, and are killed."""

    @initialize(lines=st.integers(1, 6))
    def begin(self, lines: int) -> None:
        self.loop = asyncio.Runner()
        self.folder = tempfile.TemporaryDirectory()
        self.now = time.time()
        self.total = lines
        self.processes = [SqliteBatches(Path(self.folder.name)) for _ in range(2)]
        for process in self.processes:
            self.run(process.open())
        self.batch = self.run(queued(self.processes[0], lines))
        self.leased: list[list[Line]] = [[], []]
        self.answered: list[int] = []

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run(work)

    @rule(who=st.integers(0, 1), count=st.integers(1, 4))
    def lease(self, who: int, count: int) -> None:
        self.run(self.processes[who].advance(self.now))
        lines = self.run(self.processes[who].lease([MODEL], count, self.now))
        held = [line.number for leases in self.leased for line in leases]
        fresh = [line.number for line in lines]
        assert len(fresh) <= count
        assert not set(fresh) & set(self.answered)
        # Whoever hung past a lease does not know yet that it was lost; its answer is refused later.
        assert len(fresh) == len(set(fresh)), held
        self.leased[who] += lines

    @precondition(lambda self: any(self.leased))
    @rule(who=st.integers(0, 1), pick=st.integers(0, 5), gives_back=st.booleans())
    def end(self, who: int, pick: int, gives_back: bool) -> None:
        if not self.leased[who]:
            return
        line = self.leased[who].pop(pick % len(self.leased[who]))
        if gives_back:
            self.run(self.processes[who].release(line, self.now, counts=True, journal=b"so far"))
        elif self.run(self.processes[who].answer(line, answer_to(line), failed=False)):
            self.answered.append(line.number)

    @rule(who=st.integers(0, 1))
    def kill(self, who: int) -> None:
        """As the kernel does it: its lock is free, its leases are still written down."""
        process = self.processes[who]
        self.run(process.in_thread(process._lock.close))
        self.run(process.in_thread(process.db.close))
        self.processes[who] = SqliteBatches(Path(self.folder.name))
        self.run(self.processes[who].open())
        self.leased[who] = []

    @rule()
    def hang(self) -> None:
        self.now += LEASE_SECONDS + 1

    @invariant()
    def no_line_is_answered_twice(self) -> None:
        if hasattr(self, "answered"):
            assert len(self.answered) == len(set(self.answered))

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        self.now += LEASE_SECONDS + 1
        process = self.processes[0]
        while self.run(process.advance(self.now)):
            for line in self.run(process.lease([MODEL], 3, self.now)):
                assert self.run(process.answer(line, answer_to(line), failed=False))
                self.answered.append(line.number)
        assert sorted(self.answered) == list(range(1, self.total + 1))
        found = self.run(process.batch("", self.batch.id))
        assert found is not None
        assert (found.status, found.ending, found.completed) == ("finalizing", "completed", self.total)
        rows = list(SqliteWork(process.path).rows(self.batch.id))
        assert [row.answer.body for row in rows if row.answer] == [b'"%d"' % n for n in range(1, self.total + 1)]
        for each in self.processes:
            self.run(each.close())
        self.folder.cleanup()
        self.loop.close()


TestLeases = Machine.TestCase
TestLeases.settings = settings(max_examples=25, stateful_step_count=20)


async def test_a_line_keeps_its_seed_and_journal(store: SqliteBatches) -> None:
    await queued(store, 1)
    (line,) = await store.lease([MODEL], 5, time.time())
    await store.renew([Kept(line, b"tokens")], time.time())
    await store.release(line, 0.0, counts=True, journal=None)
    (again,) = await store.lease([MODEL], 5, time.time())
    assert (again.seed, again.journal, again.attempts) == (line.seed, b"tokens", 1)


async def test_lines_of_other_models_and_lines_that_wait_are_left(store: SqliteBatches) -> None:
    now = time.time()
    await queued(store, 2)
    assert not await store.lease(["another"], 5, now)
    first, second = await store.lease([MODEL], 5, now)
    await store.release(first, now + 60, counts=True, journal=None)
    await store.release(second, now, counts=False, journal=None)
    assert [line.number for line in await store.lease([MODEL], 5, now)] == [2]


async def test_batches_take_turns(store: SqliteBatches) -> None:
    large, small = await queued(store, 50), await queued(store, 2)
    leased = await store.lease([MODEL], 10, time.time())
    assert len([line for line in leased if line.batch == large.id]) == 5
    assert len([line for line in leased if line.batch == small.id]) == 2


async def test_an_expired_batch_takes_no_more_answers(store: SqliteBatches) -> None:
    now = time.time()
    batch = await queued(store, 1, expires_at=int(now) + 10)
    (line,) = await store.lease([MODEL], 1, now)
    assert await store.advance(now) == {batch.id: 1}
    assert await store.advance(now + 11) == {}
    assert not await store.answer(line, answer_to(line), failed=False)


async def test_a_tenant_sees_its_own_and_has_limits(store: SqliteBatches) -> None:
    limits = FileLimits(2, 100)
    mine = [StoredFile(new_id("file-"), "a", "x", 10, number, "batch") for number in range(2)]
    for file in mine:
        await store.add_file(file, limits)
    with pytest.raises(InvalidRequest, match="no more than 2 are kept"):
        await store.add_file(StoredFile(new_id("file-"), "a", "x", 10, 9, "batch"), limits)
    with pytest.raises(InvalidRequest, match="no more than 100 are kept"):
        await store.add_file(StoredFile(new_id("file-"), "b", "x", 101, 9, "batch"), limits)
    assert await store.files("a", Page(10)) == mine[::-1]
    assert await store.files("a", Page(10, after=mine[1].id)) == mine[:1]
    assert await store.files("b", Page(10)) == []
    assert await store.file("b", mine[0].id) is None
    assert not await store.delete_file("b", mine[0].id)
    assert await store.delete_file("a", mine[0].id)


async def test_a_full_disk_is_said_and_leaves_the_queue_as_it_was(store: SqliteBatches) -> None:
    batch = await queued(store, 1)
    (line,) = await store.lease([MODEL], 1, time.time())
    pages = await store.in_thread(lambda: store.db.execute("PRAGMA page_count").fetchone()[0])
    await store.in_thread(lambda: store.db.execute(f"PRAGMA max_page_count = {pages}").fetchone())
    large = Answered(200, "", b'"' + b"x" * 1_000_000 + b'"')
    with pytest.raises(StorageFull):
        await store.answer(line, large, failed=False)
    await store.in_thread(lambda: store.db.execute("PRAGMA max_page_count = 100000").fetchone())
    found = await store.batch("", batch.id)
    assert found is not None
    assert found.completed == 0
    assert await store.answer(line, large, failed=False)
