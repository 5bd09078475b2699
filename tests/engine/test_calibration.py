from __future__ import annotations

import random
from pathlib import Path

import pytest

from penstock.core.engine import EngineStats
from penstock.core.errors import Overloaded
from penstock.core.request import GenerateRequest, Objective, SamplingParams
from penstock.engine.calibration import calibrate
from penstock.engine.limits import SchedulerLimits
from penstock.engine.scheduler import Scheduler
from penstock.engine.step_time import StepShape, StepTimes
from penstock.simulation.clock import VirtualClock
from penstock.simulation.virtual_engine import TimedExecutor, VirtualEngine, cpu_step_seconds

LIMITS = SchedulerLimits(2000, 16, 32, 256, 4096, 50)


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
    assert stats.usual_prompt_seconds > 0
    assert stats.loaded_step_seconds > 0
    assert not scheduler.has_work
    assert (stats.steps, stats.prompt_tokens, stats.kv_blocks_used) == (0, 0, 0)
    assert scheduler.pool.available == num_blocks
    scheduler.check_integrity()
    assert EngineStats().loaded_step_seconds == 0
    hasty = GenerateRequest("hasty", [7] * 100, SamplingParams(max_tokens=4), objective=Objective("hasty", 1e-6, None))
    with pytest.raises(Overloaded):
        scheduler.add(hasty, clock.now)
    assert scheduler.stats().refused == 1


def calibrated(path: Path) -> Scheduler:
    scheduler, clock = Scheduler(LIMITS, StepTimes(path)), VirtualClock()
    executor = TimedExecutor(
        clock, cpu_step_seconds, num_blocks=LIMITS.num_blocks, runs_ahead=False, noise=0.04, seed=0
    )
    assert calibrate(scheduler, executor, clock)
    return scheduler


def test_the_yardsticks_are_what_a_prompt_and_a_step_take(tmp_path: Path) -> None:
    stats = calibrated(tmp_path / "times.json").stats()
    chunks = (StepShape().with_chunk(start, 256) for start in range(0, 1024, 256))
    assert stats.usual_prompt_seconds == pytest.approx(sum(map(cpu_step_seconds, chunks)), rel=0.1)
    assert stats.loaded_step_seconds == pytest.approx(cpu_step_seconds(StepShape(32, 32 * 518)), rel=0.1)


@pytest.mark.parametrize("length", [8, 24, 90])
def test_promises_stay_whatever_requests_came_in_between(tmp_path: Path, length: int) -> None:
    """Prompts of one length alone cannot tell the constant of a step from what each token costs."""
    path = tmp_path / "times.json"
    before, draw = calibrated(path).stats(), random.Random(1)
    for _ in range(3):  # starts
        times = StepTimes(path)
        for _ in range(600):
            shape = StepShape().with_chunk(0, length)
            times.observe(shape, cpu_step_seconds(shape) * draw.lognormvariate(0, 0.2))
        times.save()
    scheduler = Scheduler(LIMITS, StepTimes(path))
    after = scheduler.stats()
    assert after.usual_prompt_seconds == before.usual_prompt_seconds
    assert after.loaded_step_seconds == before.loaded_step_seconds
    objective = Objective("interactive", 4 * after.usual_prompt_seconds, 4 * after.loaded_step_seconds)
    request = GenerateRequest("long", [7] * 1024, SamplingParams(max_tokens=4), objective=objective)
    outcome = VirtualEngine(scheduler, cpu_step_seconds, runs_ahead=False).run([(0.0, request)])["long"]
    assert outcome.refused is None
    assert outcome.ttft <= 4 * after.usual_prompt_seconds


def test_a_machine_too_slow_to_calibrate_keeps_its_first_estimate(tmp_path: Path) -> None:
    times, draw = StepTimes(tmp_path / "times.json"), random.Random(2)
    assert times.yardsticks is None
    shapes = [StepShape(draw.randrange(1, 32), 9000) for _ in range(40)]
    for shape in [*shapes, *(shape.with_chunk(0, draw.randrange(20, 256)) for shape in shapes)]:
        times.observe(shape, 50 * cpu_step_seconds(shape))
    first = times.yardsticks
    assert first is not None
    times.observe(StepShape(8, 2000), 0.001)
    times.save()
    assert StepTimes(tmp_path / "times.json").yardsticks == first
