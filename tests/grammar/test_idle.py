"""What grammars need before the first of them is read while the engine is idle, not while streams run."""

from __future__ import annotations

import threading

from penstock.engine.limits import SchedulerLimits
from penstock.engine.loop import EngineLoop
from penstock.engine.scheduler import Scheduler
from penstock.simulation.paged_executor import VOCAB, PagedExecutor
from tests.engine.toy_grammar import ToyGrammars


class Prepared(ToyGrammars):
    def __init__(self) -> None:
        super().__init__()
        self.prepared = threading.Event()

    def prepare(self) -> None:
        self.prepared.set()


def test_an_idle_engine_prepares_its_grammars() -> None:
    grammars = Prepared()
    limits = SchedulerLimits(
        num_blocks=12, block_size=4, max_seqs=4, max_step_tokens=8, max_model_len=40, vocab_size=VOCAB
    )
    loop = EngineLoop(Scheduler(limits), PagedExecutor(12, 4), lambda _: None, grammars)
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        assert grammars.prepared.wait(30)
    finally:
        loop.stop()
        thread.join()
