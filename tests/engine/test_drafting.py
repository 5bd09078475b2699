"""Drafters compute while requests come and go: nobody else waits for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from penstock.core.errors import InvalidRequest
from penstock.core.request import Chunk, GenerateRequest, SamplingParams
from penstock.engine.limits import SchedulerLimits
from penstock.engine.loop import EngineLoop
from penstock.engine.scheduler import Scheduler
from penstock.engine.sequence import Sequence
from penstock.simulation.paged_executor import VOCAB, PagedExecutor, expected_output
from tests.engine.guessing import Guesser, tried_whenever_possible

LIMITS = SchedulerLimits(64, 4, 4, 16, 200, VOCAB)
PATIENCE = 60.0  # seconds, only of tests that fail


class BusyDrafter(Guesser):
    """Does not come to an end before it may."""

    def __init__(self) -> None:
        super().__init__(lambda request: output_of(request.id), seed=1, right=1.0)
        self.busy, self.may_end = threading.Event(), threading.Event()
        self.forgotten: list[str] = []
        self.fails = False

    def propose(self, sequences: list[Sequence], depths: list[int]) -> list[list[int]]:
        known = [(s.computed, list(s.blocks), s.row) for s in sequences]
        forgotten = len(self.forgotten)
        self.busy.set()
        assert self.may_end.wait(PATIENCE)
        assert known == [(s.computed, s.blocks, s.row) for s in sequences], "they changed under its hands"
        assert forgotten == len(self.forgotten), "it is used by two threads at a time"
        if self.fails:
            raise RuntimeError("the drafter broke")
        return super().propose(sequences, depths)

    def forget(self, sequence: Sequence) -> None:
        self.forgotten.append(sequence.request.id)


class Drafting:
    """An engine whose drafter is at work. What others ask of it in the meantime they ask on a thread of their own."""

    def __init__(self) -> None:
        self.now, self.chunks, self.drafter = 0.0, list[Chunk](), BusyDrafter()
        scheduler = Scheduler(LIMITS)
        scheduler.speculation = tried_whenever_possible(self.drafter, 4)
        executor = PagedExecutor(LIMITS.num_blocks, LIMITS.block_size, runs_ahead=False)
        self.scheduler = scheduler
        self.loop = EngineLoop(scheduler, executor, self.chunks.extend, clock=lambda: self.now)
        self._threads = ThreadPoolExecutor(2)
        for name in ("first", "second"):
            self.loop.submit(request(name))
        self._run = self._threads.submit(self._finish)
        assert self.drafter.busy.wait(PATIENCE)

    def _finish(self) -> None:
        while self.loop.step():
            self.scheduler.check_integrity()

    def ask(self, call: Any) -> Any:
        asked: Future[Any] = self._threads.submit(call)
        return asked.result(PATIENCE)

    def finish(self) -> None:
        self.drafter.may_end.set()
        self._run.result(PATIENCE)

    def tokens(self, name: str) -> list[int]:
        return [token for chunk in self.chunks if chunk.request_id == name for token in chunk.token_ids]

    def last(self, name: str) -> Chunk:
        (last,) = [c for c in self.chunks if c.request_id == name and c.finish_reason is not None]
        return last


def request(name: str) -> GenerateRequest:
    return GenerateRequest(name, [1, 2, 3, len(name)], SamplingParams(max_tokens=40, ignore_eos=True))


def output_of(name: str) -> list[int]:
    return expected_output(request(name).prompt, 0, 40, frozenset())


@pytest.fixture
def drafting() -> Iterator[Drafting]:
    engine = Drafting()
    yield engine
    engine.drafter.may_end.set()


def test_the_engine_answers(drafting: Drafting) -> None:
    assert drafting.ask(lambda: drafting.loop.stats).running == 2
    drafting.now += 30.0
    assert drafting.ask(lambda: drafting.loop.stats).seconds_since_step == 30.0
    assert not drafting.ask(drafting.loop.health).ok, "a drafter that hangs is noticed"
    drafting.finish()
    assert drafting.loop.stats.accepted_tokens
    assert drafting.loop.health().ok


def test_requests_come(drafting: Drafting) -> None:
    drafting.now += 1.0
    drafting.ask(lambda: drafting.loop.submit(request("another")))
    with pytest.raises(InvalidRequest):
        drafting.ask(lambda: drafting.loop.submit(GenerateRequest("large", [VOCAB], SamplingParams())))
    drafting.finish()
    for name in ("first", "second", "another"):
        assert drafting.tokens(name) == output_of(name)
    ledger = drafting.last("another").ledger
    assert ledger is not None
    assert all(seconds >= 0 for seconds in ledger.queued.values())


def test_requests_end_once_the_drafter_has_read_them(drafting: Drafting) -> None:
    drafting.ask(lambda: drafting.loop.abort("first"))
    drafting.ask(lambda: drafting.loop.abort("first"))
    assert not drafting.drafter.forgotten
    drafting.finish()
    assert drafting.last("first").finish_reason == "abort"
    assert drafting.drafter.forgotten[0] == "first"
    assert drafting.tokens("first") == output_of("first")[:1], "it was in no step any more"
    assert drafting.tokens("second") == output_of("second")


def test_requests_end_where_the_drafter_fails(drafting: Drafting) -> None:
    drafting.drafter.fails = True
    drafting.ask(lambda: drafting.loop.abort("first"))
    drafting.ask(lambda: drafting.loop.abort("second"))
    drafting.finish()
    assert {drafting.last(name).finish_reason for name in ("first", "second")} == {"abort"}


def test_a_drafter_that_always_fails_ends_requests_with_an_error(drafting: Drafting) -> None:
    drafting.drafter.fails = True
    drafting.finish()
    for name in ("first", "second"):
        assert drafting.last(name).finish_reason == "error"
        assert drafting.tokens(name) == output_of(name)[:1]
    drafting.drafter.fails = False
    drafting.loop.submit(request("later"))
    while drafting.loop.step():
        pass
    assert drafting.tokens("later") == output_of("later")
