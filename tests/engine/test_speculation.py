"""How deep drafts are: never deeper than pays."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.speculation import Prices, best_depths, expected_tokens
from penstock.engine.step_time import StepShape, StepTimes
from penstock.simulation.virtual_engine import cpu_step_seconds


def free(sequences: int) -> float:
    return 0.0


def rate(outlooks: list[float], depths: list[int], streams: int, prices: Prices) -> float:
    """Tokens a second."""
    expected = sum(expected_tokens(p, depth) for p, depth in zip(outlooks, depths, strict=True))
    drafting = sum(prices.draft(sum(d >= depth for d in depths)) for depth in range(1, max(depths, default=0) + 1))
    extra = prices.start * any(depths) + prices.token * sum(depths) + drafting
    return (streams + expected) / (prices.plain + extra)


@given(
    outlooks=st.lists(st.floats(0, 1), min_size=1, max_size=8),
    others=st.integers(0, 64),
    start=st.floats(0, 1e-3),
    token=st.floats(0, 2e-3),
    draft=st.floats(0, 5e-3),
    budget=st.integers(0, 40),
    room=st.integers(0, 16),
)
def test_drafts_are_expected_to_gain(
    outlooks: list[float], others: int, start: float, token: float, draft: float, budget: int, room: int
) -> None:
    streams = len(outlooks) + others
    prices = Prices(5.5e-3 + 0.45e-3 * streams, start, token, lambda sequences: draft * (sequences > 0))
    depths = best_depths(outlooks, [room] * len(outlooks), streams, budget, prices)
    assert sum(depths) <= budget
    assert max(depths) <= room
    if any(depths):
        assert rate(outlooks, depths, streams, prices) > 1.02 * streams / prices.plain


@pytest.mark.parametrize(("streams", "deep"), [(1, True), (4, True), (256, False)])
def test_certain_drafts_are_deep_in_small_batches_only(streams: int, deep: bool) -> None:
    prices = Prices(5.5e-3 + 0.45e-3 * streams, 0.0, 0.45e-3, free)
    depths = best_depths([0.99] * streams, [8] * streams, streams, 1000, prices)
    assert (min(depths) >= 4) == deep
    assert any(depths) == deep


def test_a_slow_drafter_does_not_pay() -> None:
    prices = Prices(6e-3, 0.0, 0.45e-3, lambda sequences: 6e-3 * (sequences > 0))
    assert best_depths([0.95], [8], 1, 100, prices) == [0]


def test_a_step_stays_within_its_limit() -> None:
    prices = Prices(6e-3, 0.0, 0.4e-3, free, longest=8e-3)
    assert 1 <= best_depths([0.99], [15], 1, 100, prices)[0] <= 5
    assert best_depths([0.99], [15], 1, 100, Prices(6e-3, 0.0, 0.4e-3, free, longest=math.inf)) == [15]


def test_steps_with_drafts_are_learnt_apart() -> None:
    """On a GPU they take another path than plain decoding."""
    times = StepTimes()
    for number in range(200):
        plain = StepShape(1 + number % 16, 500 * (1 + number % 16))
        times.observe(plain, cpu_step_seconds(plain))
        drafted = StepShape(plain.decodes, plain.context, drafted=1 + number % 7)
        times.observe(drafted, 2e-3 + cpu_step_seconds(StepShape(plain.decodes + drafted.drafted, plain.context)))
    plain, drafted = StepShape(4, 2000), StepShape(4, 2000, drafted=4)
    assert times.predict(plain) == pytest.approx(cpu_step_seconds(plain), rel=0.05)
    assert times.predict(drafted) == pytest.approx(2e-3 + cpu_step_seconds(StepShape(8, 2000)), rel=0.05)


def test_a_slow_time_does_not_end_drafting_for_good() -> None:
    times = StepTimes()
    for number in range(200):
        plain, drafted = StepShape(1 + number % 4, 500), StepShape(1 + number % 4, 500, drafted=1 + number % 7)
        times.observe(plain, cpu_step_seconds(plain))
        times.observe(drafted, 4 * cpu_step_seconds(StepShape(drafted.decodes + drafted.drafted, 500)))
    shape, seconds = StepShape(1, 500, drafted=4), cpu_step_seconds(StepShape(5, 500))
    assert times.predict(shape) > 3 * seconds
    for _ in range(600):
        times.observe(StepShape(1, 500), cpu_step_seconds(StepShape(1, 500)))
    assert times.predict(shape) == pytest.approx(seconds, rel=0.1), "by the times of steps without drafts"
