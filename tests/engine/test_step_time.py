from __future__ import annotations

import json
import random
from dataclasses import replace
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


def test_a_fit_that_is_far_off_is_learnt_again() -> None:
    times, shape = StepTimes(), StepShape(1, 300)
    for _ in range(200):
        times.observe(shape, 0.0005)
    for _ in range(100):
        times.observe(shape, 0.007)
    assert times.predict(shape) == pytest.approx(0.007, rel=0.1)


@pytest.mark.parametrize("rest", [3, 300, 3000])
def test_steps_with_drafts_stay_known_however_rare_they_are(rest: int) -> None:
    draw, times = random.Random(rest), StepTimes()

    def seconds(shape: StepShape) -> float:
        return 0.005 + 0.0004 * (shape.decodes + 2 * shape.drafted) + 1e-7 * shape.context

    for step in range(60_000):
        shape = StepShape(draw.randrange(1, 9), draw.randrange(100, 9000))
        if step < 300 or step % rest == 0:
            shape = replace(shape, drafted=draw.randrange(1, 9))
            times.observe(shape, seconds(shape) * draw.lognormvariate(0, 0.3))
            if step > 300:
                assert 0.6 < times.predict(shape) / seconds(shape) < 1.5
        times.observe(shape, seconds(shape) * draw.lognormvariate(0, 0.3))


def test_drafts_are_slower_on_a_machine_that_became_slower_without_them() -> None:
    draw, times = random.Random(5), StepTimes()
    drafted, plain = StepShape(2, 400, drafted=4), StepShape(2, 400)
    for _ in range(200):
        times.observe(plain, 0.005 * draw.lognormvariate(0, 0.05))
        times.observe(drafted, 0.007 * draw.lognormvariate(0, 0.05))
    for _ in range(100):
        times.observe(plain, 0.010 * draw.lognormvariate(0, 0.05))
    assert times.predict(drafted) == pytest.approx(0.014, rel=0.1)
    times.observe(drafted, 0.014)
    assert times.predict(drafted) == pytest.approx(0.014, rel=0.1)


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
