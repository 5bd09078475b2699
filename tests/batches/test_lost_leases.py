"""A line that the runner still has when its lease has ended is not begun again."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from penstock.batches.decisions import LEASE_SECONDS
from penstock.batches.files import write_lines
from penstock.batches.place import Batches
from penstock.batches.records import Answered
from penstock.batches.runner import Asked, Attempt, BatchRunner
from penstock.batches.settings import BatchesConfig
from tests.batches.answering import ServesOne
from tests.batches.places import MODEL, Folder, queued


class Waits(ServesOne):
    """Answers once it is told to."""

    def __init__(self) -> None:
        super().__init__(MODEL)
        self.asked = asyncio.Semaphore(0)
        self.goes_on = asyncio.Event()
        self.count = 0

    async def answer(self, asked: Asked) -> Attempt:
        self.count += 1
        self.asked.release()
        await self.goes_on.wait()
        return Attempt(Answered(200, "", b"{}"))


async def test_a_line_that_is_leased_again_while_it_runs_is_not_begun_again(tmp_path: Path) -> None:
    """Its lease ended meanwhile: the store had been away."""
    place = Folder(tmp_path)
    store, answers = place.process(), Waits()
    await store.open()
    batch = await queued(place, store, 2)
    write_lines(place.contents, batch.input_file_id, [b"{}"])
    config = BatchesConfig(folder=str(tmp_path))
    runner = BatchRunner(Batches(store, place.contents, place.contents, config, tmp_path), answers, 100)
    await runner._fill([MODEL])
    for _ in range(2):
        await answers.asked.acquire()
    await store.advance(time.time() + LEASE_SECONDS + 1)
    await runner._fill([MODEL])
    tasks = [task for _, _, task in runner._running.values()]
    answers.goes_on.set()
    await asyncio.gather(*tasks)
    assert (answers.count, runner.running, +runner.outcomes) == (2, 0, {"completed": 2})
    await runner.close()
    await store.close()
