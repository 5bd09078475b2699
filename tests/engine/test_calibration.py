from __future__ import annotations

import pytest

from penstock.core.engine import EngineStats
from penstock.engine.calibration import calibrate
from penstock.engine.limits import SchedulerLimits
from penstock.engine.scheduler import Scheduler
from penstock.simulation.clock import VirtualClock
from penstock.simulation.virtual_engine import TimedExecutor, cpu_step_seconds


@pytest.mark.parametrize(("num_blocks", "max_seqs", "max_waiting"), [(2000, 32, 100), (12, 2, 1)])
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_the_speed_is_known_afterwards_and_nothing_else_has_changed(
    num_blocks: int, max_seqs: int, max_waiting: int, runs_ahead: bool
) -> None:
    limits = SchedulerLimits(num_blocks, 16, max_seqs, 256, 4096, 50, max_waiting=max_waiting)
    scheduler = Scheduler(limits)
    clock = VirtualClock()
    executor = TimedExecutor(clock, cpu_step_seconds, num_blocks=num_blocks, runs_ahead=runs_ahead, noise=0.04, seed=0)
    assert calibrate(scheduler, executor, clock)
    stats = scheduler.stats()
    assert stats.prefill_tokens_per_second > 0
    assert stats.loaded_step_seconds > 0
    assert not scheduler.has_work
    assert (stats.steps, stats.prompt_tokens, stats.kv_blocks_used) == (0, 0, 0)
    assert scheduler.pool.available == num_blocks
    scheduler.check_integrity()
    assert EngineStats().loaded_step_seconds == 0
