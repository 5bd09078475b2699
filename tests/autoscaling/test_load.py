"""What a fleet's counters say about the load."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.autoscaling.load import Load, Meter
from penstock.core.engine import EngineStats
from penstock.fleet.stats import combined

SPEEDS = EngineStats(
    prefill_tokens_per_second=1000.0,
    fixed_step_seconds=0.02,
    stream_step_seconds=0.001,
    context_token_seconds=1e-6,
    kv_blocks=1000,
)


def seen(meter: Meter, stats: EngineStats, *, ready: int = 1, held: int = 0) -> Load:
    return meter.load(0.0, stats, ready=ready, starting=0, held=held, warmup_seconds=3.0)


def warm_meter(**objectives: float) -> tuple[Meter, EngineStats]:
    """After a thousand requests of 400 prompt tokens, a quarter of them cached, and 100 output tokens."""
    meter, stats = Meter(**objectives), SPEEDS
    for _ in range(20):
        stats = replace(
            stats,
            requests=stats.requests + 50,
            prompt_tokens=stats.prompt_tokens + 50 * 400,
            cached_tokens=stats.cached_tokens + 50 * 100,
            output_tokens=stats.output_tokens + 50 * 100,
        )
        seen(meter, stats)
    return meter, stats


def test_work_is_what_requests_add_to_steps() -> None:
    meter, stats = warm_meter()
    prefill, decode = 300 / 1000.0, 100 * (0.001 + 450 * 1e-6)
    assert meter.request_work == pytest.approx(prefill + decode, rel=0.02)
    before = seen(meter, stats)
    after = seen(meter, replace(stats, requests=stats.requests + 1, prompt_tokens=stats.prompt_tokens + 400))
    assert after.requests - before.requests == 1
    assert after.work - before.work == pytest.approx(meter.request_work)


def test_capacity_by_itl_objective_and_by_memory() -> None:
    meter, stats = warm_meter(itl_objective=0.1)
    assert seen(meter, stats).capacity == pytest.approx(1 - 0.02 / 0.07)
    free, _ = warm_meter()
    assert seen(free, stats).capacity == 1.0
    for _ in range(60):  # streams that take 100 blocks each: ten at a time
        stats = replace(stats, requests=stats.requests + 50, running=4, kv_blocks_used=400)
        seen(free, replace(stats, prompt_tokens=stats.requests * 400, output_tokens=stats.requests * 100))
    work = free.request_work
    expected = 10 * work / (10 * work + free.output_tokens * 0.02)
    assert seen(free, stats).capacity == pytest.approx(expected, rel=0.01)


def test_held_and_refused_requests_arrive_once() -> None:
    meter, stats = warm_meter()
    start = seen(meter, stats, ready=3).requests
    refused = replace(stats, refused=stats.refused + 3)  # by three replicas
    assert seen(meter, refused, ready=3).requests - start == 1
    held = seen(meter, refused, ready=0, held=5)
    assert held.requests - start == 6
    assert held.queued == pytest.approx(5 * 300 / 1000.0, rel=0.02)
    taken = replace(refused, requests=refused.requests + 5, prompt_tokens=refused.prompt_tokens + 2000)
    assert seen(meter, taken).requests - start == 6


def test_nothing_is_known_before_the_first_step() -> None:
    load = seen(Meter(2.0, 0.1), EngineStats(), ready=0, held=1)
    assert (load.capacity, load.work, load.requests, load.held) == (0.0, 0.0, 1.0, 1)


def test_what_steps_consist_of_is_averaged_over_replicas() -> None:
    other = replace(SPEEDS, fixed_step_seconds=0.04, requests=7)
    both = combined([EngineStats(requests=5), SPEEDS, other])
    assert both.fixed_step_seconds == pytest.approx(0.03)
    assert both.requests == 12
