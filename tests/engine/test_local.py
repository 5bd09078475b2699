"""An engine in this process, whatever becomes of its thread."""

from __future__ import annotations

import asyncio
import queue
from typing import Any

import pytest

from penstock.core.engine import EngineInfo
from penstock.core.errors import EngineFailure, Unavailable
from penstock.core.request import Chunk, GenerateRequest, SamplingParams
from penstock.engine.executor import Step
from penstock.engine.limits import SchedulerLimits
from penstock.engine.local import LocalEngine
from penstock.engine.scheduler import Scheduler
from penstock.simulation.paged_executor import VOCAB, PagedExecutor

LIMITS = SchedulerLimits(num_blocks=12, block_size=4, max_seqs=4, max_step_tokens=8, max_model_len=40, vocab_size=VOCAB)
INFO = EngineInfo(model="m", max_model_len=40, vocab_size=VOCAB)


class Panic(BaseException):
    """What a library raises that must not be caught, and yet ends a thread."""


def _request(name: str) -> GenerateRequest:
    return GenerateRequest(name, [1, 2, 3], SamplingParams(max_tokens=30, ignore_eos=True))


@pytest.mark.parametrize("broken_books", [False, True])
def test_an_engine_whose_thread_ends_fails_its_requests_and_refuses_more(
    monkeypatch: pytest.MonkeyPatch, broken_books: bool
) -> None:
    executor, scheduler, steps = PagedExecutor(12, 4), Scheduler(LIMITS), list[Step]()
    launch = executor.launch

    def third_fails(step: Step) -> Any:
        steps.append(step)
        if len(steps) == 3:
            if broken_books:
                monkeypatch.setattr(scheduler, "end", None)
            raise Panic
        return launch(step)

    monkeypatch.setattr(executor, "launch", third_fails)
    engine, chunks = LocalEngine(scheduler, executor, INFO), queue.SimpleQueue[Chunk]()
    assert engine.health().ok
    engine.start(_request("a"), chunks.put)
    while (last := chunks.get(timeout=30)).finish_reason is None:
        pass
    with pytest.raises(EngineFailure, match="failed before the answer was complete"):
        last.raise_failure()
    assert (last.ledger is None) == broken_books
    assert engine.health().ok is False
    with pytest.raises(EngineFailure, match="the engine has failed; load the model again"):
        engine.start(_request("b"), chunks.put)

    async def submitted() -> None:
        async for _ in engine.submit(_request("c")):
            pass

    with pytest.raises(EngineFailure, match="the engine has failed"):
        asyncio.run(asyncio.wait_for(submitted(), 30))
    engine.close()
    with pytest.raises(Unavailable, match="has been closed"):
        engine.check_open()
    assert chunks.empty()
