"""Forecasts of arriving work: noise, bursts, time of day."""

from __future__ import annotations

import random
from statistics import stdev

from hypothesis import given
from hypothesis import strategies as st

from penstock.autoscaling.arrivals import Arrivals

PERIOD = 7200.0
STEP = 10.0
AHEAD = 20.0


def observed(rates: list[float], period: float = PERIOD) -> Arrivals:
    """What was seen after one rate for each step."""
    arrivals, work = Arrivals(period), 0.0
    arrivals.observe(0.0, 0.0, AHEAD)
    for step, rate in enumerate(rates, start=1):
        work += rate * STEP
        arrivals.observe(step * STEP, work, AHEAD)
    return arrivals


def test_noise_is_smoothed_and_known() -> None:
    draw = random.Random(0)
    rates = [draw.gauss(4.0, 0.5) for _ in range(600)]
    levels = [observed(rates[:count], period=1e6).level for count in range(300, 600, 3)]
    assert stdev(levels) < 0.35
    arrivals, now = observed(rates, period=1e6), 600 * STEP
    expected, last = arrivals.expected(now, AHEAD), arrivals.last_value(now, AHEAD)
    assert 0.3 < expected.spread < 0.8
    assert last.spread > 1.15 * expected.spread  # noise counts twice where the latest value is the forecast


def test_what_cannot_be_noise_is_followed_at_once() -> None:
    draw = random.Random(0)
    rates = [draw.gauss(4.0, 0.3) for _ in range(300)]
    noise, burst = observed([*rates, 4.5], period=1e6), observed([*rates, 8.0], period=1e6)
    assert noise.level < 4.3
    assert burst.level > 7.0


def daily(days: int, burst_on: int = -1) -> list[float]:
    """A job every day between 3,000 and 3,300 s, and something that happened once between 5,000 and 5,300 s."""
    rates = []
    for day in range(days):
        for step in range(int(PERIOD / STEP)):
            at = step * STEP
            once = day == burst_on and 5000 <= at < 5300
            rates.append(4.0 if 3000 <= at < 3300 or once else 2.0)
    return rates


def test_what_comes_every_day_is_expected_in_time() -> None:
    until = int(2980 / STEP)
    first_day = observed(daily(1)[:until])
    assert first_day.expected(2980.0, AHEAD).mean < 2.1
    fourth_day = observed(daily(3) + daily(1)[:until])
    assert fourth_day.expected(3 * PERIOD + 2980.0, AHEAD).mean > 3.5
    over = observed(daily(3) + daily(1)[: int(3320 / STEP)])
    assert over.expected(3 * PERIOD + 3320.0, AHEAD).mean < 2.5


def test_what_came_once_is_not_expected_again() -> None:
    arrivals = observed(daily(3, burst_on=1) + daily(1)[: int(4980 / STEP)])
    assert arrivals.expected(3 * PERIOD + 4980.0, AHEAD).mean < 2.1


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=60), st.floats(0, 600))
def test_forecasts_are_never_negative(rates: list[float], ahead: float) -> None:
    arrivals = observed(rates, period=300.0)
    for expected in (arrivals.expected(len(rates) * STEP, ahead), arrivals.last_value(0.0, ahead)):
        assert 0 <= expected.mean < 1e5
        assert 0 <= expected.spread < 1e5
