"""A worker whose engine hangs in its first step: `python -m tests.worker.hanging_worker CONTROL_FD`."""

from __future__ import annotations

import asyncio
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


class HangingExecutor:
    num_blocks = 12
    runs_ahead = False
    idle_seconds: float | None = None
    mask_memory: TokenMask | None = None
    host_memory = None
    adapter_modules: Mapping[str, tuple[int, int]] = {}
    verifies_drafts = False
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


class ImpatientTimes(StepTimes):
    def patience(self, steps: Iterable[StepShape]) -> float:
        return 1.0


def main() -> None:
    control = Control(socket.socket(fileno=int(sys.argv[1])))
    limits = SchedulerLimits(
        num_blocks=12, block_size=4, max_seqs=4, max_step_tokens=8, max_model_len=40, vocab_size=50, eos_ids=frozenset()
    )
    scheduler = Scheduler(limits, ImpatientTimes())
    asyncio.run(serve(scheduler, HangingExecutor(), EngineInfo("m", 40, 50), control, {}))


if __name__ == "__main__":
    main()
