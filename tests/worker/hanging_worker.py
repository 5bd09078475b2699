"""A worker whose engine hangs in its first step: `python -m tests.worker.hanging_worker CONTROL_FD [SECONDS]`.

Before that, while it is idle, no other thread of it runs for so many seconds.
"""

from __future__ import annotations

import asyncio
import ctypes
import socket
import sys
import threading
from collections.abc import Iterable, Mapping

from penstock.core.engine import EngineInfo
from penstock.engine.executor import AdapterWeights, Step, StepResult, TokenMask
from penstock.engine.limits import SchedulerLimits
from penstock.engine.scheduler import Scheduler
from penstock.engine.step_time import StepShape, StepTimes
from penstock.worker.control import Control
from penstock.worker.main import serve
from tests.engine.toy_grammar import ToyGrammars


class HangingExecutor:
    num_blocks = 12
    runs_ahead = False
    idle_seconds: float | None = None
    mask_memory: TokenMask | None = None
    host_memory = None
    adapter_modules: Mapping[str, tuple[int, int]] = {}
    verifies_drafts = False
    device = "nothing"
    kernel_probe = None

    def enter_thread(self) -> None:
        pass

    def prepare_adapter(self, adapter: AdapterWeights) -> None:
        pass

    def padded_tokens(self, tokens: int) -> int:
        return tokens

    def launch(self, step: Step) -> None:
        threading.Event().wait()

    def resample(self, handle: None, masks: Mapping[int, TokenMask]) -> list[int]:
        raise AssertionError("no step is launched")

    def constrain(self, handle: None, masks: TokenMask) -> None:
        raise AssertionError("no step is launched")

    def collect(self, handle: None) -> StepResult:
        raise AssertionError("no step ends")


class SlowGrammars(ToyGrammars):
    """Hold the GIL while they are prepared, as a library does that reads a vocabulary."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def prepare(self) -> None:
        with self.pausing():
            ctypes.PyDLL(None).usleep(int(self._seconds * 1e6))


class ImpatientTimes(StepTimes):
    def patience(self, steps: Iterable[StepShape]) -> float:
        return 1.0


def main() -> None:
    control = Control(socket.socket(fileno=int(sys.argv[1])))
    limits = SchedulerLimits(
        num_blocks=12, block_size=4, max_seqs=4, max_step_tokens=8, max_model_len=40, vocab_size=50, eos_ids=frozenset()
    )
    scheduler = Scheduler(limits, ImpatientTimes())
    grammars = SlowGrammars(float(sys.argv[2])) if len(sys.argv) > 2 else None
    asyncio.run(serve(scheduler, HangingExecutor(), EngineInfo("m", 40, 50), control, {}, grammars=grammars))


if __name__ == "__main__":
    main()
