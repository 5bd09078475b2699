from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from penstock.engine.step_time import StepShape, StepTimes
from penstock.simulation.virtual_engine import StepSeconds, cpu_step_seconds, gpu_step_seconds


def random_shape(draw: random.Random, decode_share: float = 0.5) -> StepShape:
    decodes = draw.randrange(1, 150)
    shape = StepShape(decodes, decodes * draw.randrange(50, 900))
    if draw.random() < decode_share:
        return shape
    return shape.with_chunk(draw.randrange(0, 8000), draw.choice([20, 64, 200, 700, 1500]))


@pytest.mark.parametrize("seconds", [cpu_step_seconds, gpu_step_seconds])
def test_learns_within_two_hundred_steps(seconds: StepSeconds) -> None:
    draw, times = random.Random(0), StepTimes()
    errors = []
    for step in range(600):
        shape = random_shape(draw)
        measured = seconds(shape) * draw.lognormvariate(0, 0.05)
        if step >= 200:
            errors.append(abs(times.predict(shape) - measured) / measured)
        times.observe(shape, measured)
    assert sorted(errors)[len(errors) // 2] <= 0.08
    assert times.median_error <= 0.1


def test_follows_a_machine_that_slows_down_and_ignores_a_hiccup() -> None:
    draw, times = random.Random(1), StepTimes()
    shape = StepShape(8, 2000)
    for _ in range(200):
        times.observe(random_shape(draw), cpu_step_seconds(shape))
    for _ in range(200):
        times.observe(shape, 0.01)
    times.observe(shape, 5.0)
    assert times.predict(shape) == pytest.approx(0.01, rel=0.05)
    for _ in range(30):
        times.observe(shape, 0.013)
    assert times.predict(shape) == pytest.approx(0.013, rel=0.1)


def test_patience_follows_what_steps_should_take() -> None:
    decode, prompt = StepShape(8, 2000), StepShape().with_chunk(0, 256)
    times = StepTimes()
    assert times.patience([]) < times.patience([decode]), "what was never measured may take minutes"
    for _ in range(100):
        times.observe(decode, 0.01)
    floor = times.patience([decode])
    assert floor == times.patience([]) >= 1000 * 0.01
    assert times.patience([decode, prompt]) == times.patience([prompt]) > floor
    for _ in range(100):
        times.observe(prompt, 50.0)
    assert times.patience([prompt]) == pytest.approx(500, rel=0.1)
    assert times.patience([prompt, decode, prompt]) == pytest.approx(1000, rel=0.1)


def test_a_chunk_is_as_large_as_the_time_allows() -> None:
    draw, times = random.Random(2), StepTimes()
    for _ in range(400):
        shape = random_shape(draw)
        times.observe(shape, gpu_step_seconds(shape))
    streams = StepShape(60, 30_000)
    for start in (0, 5000):
        tokens = times.tokens_within(streams, start, 8192, 0.04)
        assert 100 < tokens < 8192
        assert times.predict(streams.with_chunk(start, tokens)) <= 0.04
        assert times.predict(streams.with_chunk(start, tokens + 1)) > 0.04
        assert gpu_step_seconds(streams.with_chunk(start, tokens)) == pytest.approx(0.04, rel=0.15)
    assert times.tokens_within(streams, 0, 64, 0.04) == 64


def test_what_was_learnt_is_kept_and_a_broken_file_is_not_believed(tmp_path: Path) -> None:
    draw, path = random.Random(3), tmp_path / "folder" / "times.json"
    times = StepTimes(path)
    for _ in range(300):
        shape = random_shape(draw)
        times.observe(shape, cpu_step_seconds(shape))
    times.save()
    shape = StepShape(10, 4000).with_chunk(100, 200)
    assert StepTimes(path).predict(shape) == pytest.approx(times.predict(shape), rel=0.05)
    wrong_size = {"coefficients": [1], "moments": [[1]], "targets": [1], "observed": 9, "drift": 1}
    for broken in ("", "{}", json.dumps({"version": 4, "decode": wrong_size})):
        path.write_text(broken)
        assert not StepTimes(path).ready
