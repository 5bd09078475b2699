"""What the store promises, whoever dies when: each line has one lease at a time, and one answer in the end."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.batches.decisions import LEASE_SECONDS, SERVED_SECONDS
from penstock.batches.files import write_lines
from penstock.batches.records import Answered, Batch, FileLimits, Line, Page, StoredFile, new_id
from penstock.batches.redis_contents import CHUNK_BYTES
from penstock.batches.sqlite import SqliteBatches
from penstock.batches.store import BatchStore, Kept, NewLine
from penstock.core.errors import InvalidRequest, StorageFull, Unavailable
from tests.batches.places import MODEL, Folder, Place, Redis, batch_of, queued
from tests.redis_server import RedisServer

T = TypeVar("T")


@pytest.fixture
async def store(place: Place) -> AsyncIterator[BatchStore]:
    store = place.process()
    await store.open()
    yield store
    await store.close()


def answer_to(line: Line) -> Answered:
    return Answered(200, "", b'"%d"' % line.number)


class Machine(RuleBasedStateMachine):
    """Two processes work on one batch. They answer, give back, hang past their leases, and are killed."""

    def place(self) -> Place:
        self.folder = tempfile.TemporaryDirectory()
        return Folder(Path(self.folder.name))

    @initialize(lines=st.integers(1, 6))
    def begin(self, lines: int) -> None:
        self.loop = asyncio.Runner()
        self.where = self.place()
        self.now = time.time()
        self.total = lines
        self.processes = [self.where.process() for _ in range(2)]
        for process in self.processes:
            self.run(process.open())
        self.batch = self.run(queued(self.where, self.processes[0], lines))
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
        self.run(self.where.kill(self.processes[who]))
        self.processes[who] = self.where.process()
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
        assert self.run(process.claim_job(self.now)) is not None
        rows = list(self.where.work(process).rows(self.batch.id))
        assert [row.answer.body for row in rows if row.answer] == [b'"%d"' % n for n in range(1, self.total + 1)]
        for each in self.processes:
            self.run(each.close())
        self.loop.close()


class MachineOverRedis(Machine):
    url = ""

    def place(self) -> Place:
        return Redis(self.url)


TestLeases = Machine.TestCase
TestLeases.settings = settings(max_examples=25, stateful_step_count=20)


TestLeasesInRedis = pytest.mark.usefixtures("redis_of_machine")(MachineOverRedis.TestCase)
TestLeasesInRedis.settings = TestLeases.settings


@pytest.fixture
def redis_of_machine(redis_server: RedisServer) -> None:
    MachineOverRedis.url = redis_server.url


async def test_a_line_keeps_its_seed_and_journal(place: Place, store: BatchStore) -> None:
    await queued(place, store, 1)
    (line,) = await store.lease([MODEL], 5, time.time())
    await store.renew([Kept(line, b"tokens")], time.time())
    await store.release(line, 0.0, counts=True, journal=None)
    (again,) = await store.lease([MODEL], 5, time.time())
    assert (again.seed, again.journal, again.attempts) == (line.seed, b"tokens", 1)


async def test_only_deaths_without_a_new_token_count_against_a_line(place: Place, store: BatchStore) -> None:
    await queued(place, store, 1)
    now, losses = time.time(), []
    for journal in (None, None, b"a token", None):
        (line,) = await store.lease([MODEL], 5, now)
        losses.append(line.losses)
        await store.renew([Kept(line, journal)], now)
        now += LEASE_SECONDS + 1
        await store.advance(now)
    assert losses == [0, 1, 2, 1]


async def test_processes_know_what_others_serve(place: Place, store: BatchStore) -> None:
    now = time.time()
    other = place.process()
    await other.open()
    assert await store.announce([["a", "alias"]], now) == [["a", "alias"]]
    assert sorted(await other.announce([["b"], ["c"]], now + 60)) == [["a", "alias"], ["b"], ["c"]]
    assert sorted(await other.announce([["b"]], now + SERVED_SECONDS + 1)) == [["b"], ["c"]]
    await other.close()


@pytest.mark.parametrize("renews", [True, False])
async def test_who_was_cut_off_goes_on_if_nobody_else_has_the_line(
    renews: bool, place: Place, store: BatchStore
) -> None:
    batch = await queued(place, store, 1)
    now = time.time()
    (line,) = await store.lease([MODEL], 1, now)
    other = place.process()
    await other.open()
    later = now + LEASE_SECONDS + 1
    await other.advance(later)  # which frees the line
    if renews:
        assert not await store.renew([Kept(line, b"tokens")], later)
        assert await other.lease([MODEL], 1, later) == []
    assert await store.answer(line, answer_to(line), failed=False)
    assert await other.lease([MODEL], 1, later) == []
    found = await other.batch("", batch.id)
    assert found is not None
    assert found.completed == 1
    await other.close()


async def test_who_was_cut_off_leaves_a_line_that_another_has(place: Place, store: BatchStore) -> None:
    await queued(place, store, 1)
    now = time.time()
    (line,) = await store.lease([MODEL], 1, now)
    other = place.process()
    await other.open()
    later = now + LEASE_SECONDS + 1
    await other.advance(later)
    (taken,) = await other.lease([MODEL], 1, later)
    assert await store.renew([Kept(line, None)], later) == {(line.batch, line.number)}
    assert not await store.answer(line, answer_to(line), failed=False)
    assert await other.answer(taken, answer_to(line), failed=False)
    assert not await store.answer(line, answer_to(line), failed=False)
    assert await store.renew([Kept(line, None)], later) == {(line.batch, line.number)}
    await other.close()


async def test_lines_of_other_models_and_lines_that_wait_are_left(place: Place, store: BatchStore) -> None:
    now = time.time()
    await queued(place, store, 2)
    assert not await store.lease(["another"], 5, now)
    first, second = await store.lease([MODEL], 5, now)
    await store.release(first, now + 60, counts=True, journal=None)
    await store.release(second, now, counts=False, journal=None)
    assert [line.number for line in await store.lease([MODEL], 5, now)] == [2]


async def test_batches_take_turns(place: Place, store: BatchStore) -> None:
    large, small = await queued(place, store, 50), await queued(place, store, 2)
    leased = await store.lease([MODEL], 10, time.time())
    assert len([line for line in leased if line.batch == large.id]) == 5
    assert len([line for line in leased if line.batch == small.id]) == 2


async def test_an_expired_batch_takes_no_more_answers(place: Place, store: BatchStore) -> None:
    now = time.time()
    batch = await queued(place, store, 1, expires_at=int(now) + 10)
    (line,) = await store.lease([MODEL], 1, now)
    assert await store.advance(now) == {batch.id: 1}
    assert await store.advance(now + 11) == {}
    assert not await store.answer(line, answer_to(line), failed=False)


async def test_a_tenant_sees_its_own_and_has_limits(place: Place, store: BatchStore) -> None:
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


@pytest.mark.parametrize("ascending", [False, True])
async def test_what_is_created_in_one_second_is_listed_in_order(store: BatchStore, ascending: bool) -> None:
    files = [StoredFile(new_id("file-"), "", "x", 1, 9, "batch") for _ in range(6)]
    batches = [replace(batch_of(), created_at=9) for _ in range(6)]
    for file, batch in zip(files, batches, strict=True):
        await store.add_file(file, None)
        await store.add_batch(batch)
    assert await store.delete_file("", files.pop(2).id)
    for made, found in ((files, store.files), (batches, store.batches)):
        listed: Sequence[StoredFile | Batch] = made if ascending else made[::-1]
        assert await found("", Page(10, None, ascending)) == listed
        for at, each in enumerate(listed, 1):
            assert await found("", Page(2, each.id, ascending)) == listed[at : at + 2]


@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
async def test_a_full_disk_is_said_and_leaves_the_queue_as_it_was(place: Place, store: BatchStore) -> None:
    assert isinstance(store, SqliteBatches)
    batch = await queued(place, store, 1)
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


@pytest.mark.parametrize("place", ["redis"], indirect=True)
async def test_a_full_redis_is_said_and_leaves_the_queue_as_it_was(place: Place, store: BatchStore) -> None:
    assert isinstance(place, Redis)
    batch = await queued(place, store, 1)
    (line,) = await store.lease([MODEL], 1, time.time())
    place.client.config_set("maxmemory", 1)
    try:
        with pytest.raises(StorageFull):
            await store.answer(line, answer_to(line), failed=False)
        with pytest.raises(StorageFull):
            write_lines(place.contents, "file-1", [b"a line\n"])
    finally:
        place.client.config_set("maxmemory", 0)
    found = await store.batch("", batch.id)
    assert found is not None
    assert found.completed == 0
    assert await store.answer(line, answer_to(line), failed=False)


async def test_a_batch_from_its_first_job_to_its_files(place: Place, store: BatchStore) -> None:
    batch = await queued(place, store, 3)
    now = time.time()
    assert await store.claim_job(now) is None
    for line in await store.lease([MODEL], 3, now):
        assert await store.answer(line, Answered(400 if line.number == 2 else 200, "r", b"{}"), failed=line.number == 2)
    assert await store.advance(now) == {}
    job = await store.claim_job(now)
    assert job is not None
    assert (job.kind, job.batch.id, job.batch.ending) == ("assemble", batch.id, "completed")
    assert await store.claim_job(now) is None  # it is leased
    work = place.work(store)
    made = StoredFile(new_id("file-"), "", f"{batch.id}_output.jsonl", 5, int(now), "batch_output", int(now) + 60)
    work.assembled(batch.id, [made], now)
    assert list(work.rows(batch.id)) == []
    await store.end_job(job, now)
    found = await store.batch("", batch.id)
    assert found is not None
    assert (found.status, found.completed, found.failed) == ("completed", 2, 1)
    assert found.output_file_id == made.id
    assert await store.file("", made.id) == made
    assert [each.id for each in await store.batches("", Page(5))] == [batch.id]
    assert await store.claim_job(now) is None
    assert await store.expired_files(now) == []
    assert await store.expired_files(now + 61) == [made.id]


async def test_a_cancelled_batch_ends_once_nobody_works_on_it(place: Place, store: BatchStore) -> None:
    batch = await queued(place, store, 2)
    now = time.time()
    (line,) = await store.lease([MODEL], 1, now)
    assert await store.cancel("another tenant", batch.id, now) is None
    found = await store.cancel("", batch.id, now)
    assert found is not None
    assert found.status == "cancelling"
    assert await store.advance(now) == {}
    assert await store.lease([MODEL], 1, now) == []
    assert await store.claim_job(now) is None
    await store.release(line, now, counts=False, journal=None)
    await store.advance(now)
    job = await store.claim_job(now)
    assert job is not None
    assert (job.kind, job.batch.ending) == ("assemble", "cancelled")


async def test_the_input_of_a_running_batch_is_not_deleted(place: Place, store: BatchStore) -> None:
    now = time.time()
    await store.add_file(StoredFile("file-1", "", "x", 10, int(now), "batch", int(now)), None)
    batch = await queued(place, store, 1)
    with pytest.raises(InvalidRequest, match=batch.id):
        await store.delete_file("", "file-1")
    assert await store.expired_files(now + 5) == []


async def test_a_custom_id_that_came_before_is_named(place: Place, store: BatchStore) -> None:
    batch = batch_of()
    await store.add_batch(batch)
    await store.claim_job(time.time())
    work = place.work(store)
    lines = [NewLine(number, name, MODEL, 0, 2, 1) for number, name in ((1, "a"), (3, "b"), (4, "a"))]
    (error,) = work.add_lines(batch.id, lines)
    assert (error.code, error.line) == ("duplicate_custom_id", 4)
    work.validated(batch.id, 3, MODEL, [error], time.time())
    found = await store.batch("", batch.id)
    assert found is not None
    assert (found.status, found.errors) == ("failed", (error,))
    assert list(work.rows(batch.id)) == []


async def test_whoever_lost_a_batch_changes_nothing_of_it(place: Place, store: BatchStore) -> None:
    """Its gateway was killed, and another one has begun anew; the process that it had started lives on."""
    now = time.time()
    batch = batch_of()
    await store.add_batch(batch)
    await store.claim_job(now)
    orphan = place.work(store)
    line = NewLine(1, "a", MODEL, 0, 2, 1)
    orphan.add_lines(batch.id, [line])
    other = place.process()
    await other.open()
    await other.advance(now + LEASE_SECONDS + 1)
    assert await other.claim_job(now + LEASE_SECONDS + 1) is not None
    with pytest.raises(Unavailable, match="another process"):
        orphan.add_lines(batch.id, [line._replace(number=2, custom_id="b")])
    orphan.validated(batch.id, 1, MODEL, [], now)
    work = place.work(other)
    work.forget_lines(batch.id)
    with pytest.raises(Unavailable, match="another process"):
        list(orphan.rows(batch.id))  # else it would write a file without the lines that are gone
    assert work.add_lines(batch.id, [line]) == []
    assert len(list(work.rows(batch.id))) == 1
    found = await other.batch("", batch.id)
    assert found is not None
    assert found.status == "validating"
    await other.close()


async def test_an_assembly_that_outlives_its_gateway_leaves_the_files_of_the_next_one(
    place: Place, store: BatchStore
) -> None:
    batch = await queued(place, store, 2)
    now = time.time()
    for line in await store.lease([MODEL], 2, now):
        await store.answer(line, answer_to(line), failed=False)
    await store.advance(now)
    assert await store.claim_job(now) is not None
    orphan, other = place.work(store), place.process()
    await other.open()
    begun = place.contents.create("file-o")  # the first half of what the orphan would write
    begun.write(b"half")
    later = now + LEASE_SECONDS + 1
    await other.advance(later)
    job = await other.claim_job(later)
    assert job is not None
    work = place.work(other)
    size = write_lines(place.contents, "file-o", [b"%d\n" % row.number for row in work.rows(batch.id)])
    made = StoredFile("file-o", "", f"{batch.id}_output.jsonl", size, int(now), "batch_output", int(now) + 60)
    work.assembled(batch.id, [made], later)
    await other.end_job(job, later)
    with pytest.raises(Unavailable, match="another process"):
        list(orphan.rows(batch.id))
    begun.abandon()
    with pytest.raises(Unavailable, match="another process"):
        orphan.assembled(batch.id, [], later)
    assert place.contents.read("file-o", 0, 10) == b"1\n2\n"
    assert await other.file("", "file-o") == made
    found = await other.batch("", batch.id)
    assert found is not None
    assert (found.status, found.output_file_id) == ("completed", "file-o")
    await other.close()


def test_contents_are_whole_or_not_at_all(place: Place) -> None:
    contents = place.contents
    text = bytes(range(256)) * (CHUNK_BYTES // 256 + 3)
    writer = contents.create("file-1")
    writer.write(text[:1000])
    assert contents.size("file-1") is None
    assert contents.read("file-1", 0, 10) is None
    writer.abandon()
    assert write_lines(contents, "file-1", [text[:-5], text[-5:]]) == len(text)
    assert contents.size("file-1") == len(text)
    assert contents.read("file-1", CHUNK_BYTES - 3, 10) == text[CHUNK_BYTES - 3 : CHUNK_BYTES + 7]
    assert contents.read("file-1", len(text) - 2, 10) == text[-2:]
    assert write_lines(contents, "file-1", [b"anew"]) == 4
    assert contents.read("file-1", 0, 10) == b"anew"
    assert write_lines(contents, "file-2", []) == 0
    assert contents.size("file-2") is None
    contents.delete(["file-1", "file-2"])
    assert contents.read("file-1", 0, 10) is None
    if isinstance(place, Redis):
        assert place.client.dbsize() == 0
