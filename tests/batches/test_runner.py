"""What the runner gives back when its server ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from penstock.batches.place import Batches
from penstock.batches.runner import Asked, Attempt, BatchRunner
from penstock.batches.settings import BatchesConfig
from penstock.batches.store import BatchStore
from tests.batches.answering import ServesOne
from tests.batches.places import MODEL, Place, batch_of, queued


class Answers(ServesOne):
    async def answer(self, asked: Asked) -> Attempt:
        raise AssertionError("no line gets as far")


@pytest.fixture
async def processes(place: Place) -> AsyncIterator[tuple[BatchStore, BatchStore]]:
    one, other = place.process(), place.process()
    await one.open()
    await other.open()
    yield one, other
    await one.close()
    await other.close()


async def end_before_it_hears(place: Place, store: BatchStore, operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner that ends when the store has done this for it, and before it knows."""
    done, heard, work = asyncio.Event(), asyncio.Event(), getattr(store, operation)

    async def heard_late(*given: Any) -> Any:
        found = await work(*given)
        done.set()
        await heard.wait()
        return found

    runner = BatchRunner(Batches(store, place.contents, place.contents, BatchesConfig(), None), Answers(MODEL), 2**20)
    with monkeypatch.context() as patch:
        patch.setattr(store, operation, heard_late)
        runner.start()
        await done.wait()
        closing = asyncio.create_task(runner.close())
        await asyncio.sleep(0)
        heard.set()
        await closing


async def test_lines_leased_while_it_ends_are_free_at_once(
    place: Place, processes: tuple[BatchStore, BatchStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = processes
    await queued(place, one, 3)
    await end_before_it_hears(place, one, "lease", monkeypatch)
    found = await other.lease([MODEL], 5, time.time())
    assert [(line.number, line.attempts, line.losses) for line in found] == [(1, 0, 0), (2, 0, 0), (3, 0, 0)]


async def test_a_job_claimed_while_it_ends_is_free_at_once(
    place: Place, processes: tuple[BatchStore, BatchStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = processes
    batch = batch_of()
    await one.add_batch(batch)
    await end_before_it_hears(place, one, "claim_job", monkeypatch)
    now = time.time()
    await other.advance(now)  # frees jobs whose time to be tried again has come
    job = await other.claim_job(now)
    assert job is not None
    assert job.batch == batch
