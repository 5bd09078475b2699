"""How much work arrives, and how much will: level, trend and time of day.

Arriving work is counted in bins. A profile holds what usually arrives at each time of the day. Between two bins the
level is expected to change as the profile does; what arrives beyond that moves the level, and a damped trend (Holt and
Winters' method with a profile as the season). How far forecasts were off, made as long before as a replica takes to
start, says how much more than the forecast may come.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import ceil, pow, sqrt
from statistics import median

_BIN_SECONDS = 10.0
_PROFILE_BINS = 1440  # of a period: the minutes of a day
_PERIODS = 3  # of which a profile is the median: what happened on one of three days is not expected daily
_SMOOTHED_BINS = 1  # on each side, over which the profile is averaged
_LEVEL_WEIGHT = 0.25  # of the latest bin
_TREND_WEIGHT = 0.1
_TREND_DAMPING = 0.8  # a bin
_SPREAD_WEIGHT = 0.01  # of the latest error
_FIRST_SPREAD = 0.1  # squared error over the forecast, in seconds of work a second, before there were errors
_GROWTH = (0.25, 4.0)  # that the profile is believed, at least and at most, from one time to another


@dataclass(frozen=True, slots=True)
class Expected:
    """Seconds of one replica's work a second."""

    mean: float
    spread: float  # standard deviation of what comes from it


class Profile:
    """What arrives at each time of a period: the median of the latest periods."""

    def __init__(self, period: float) -> None:
        self.period = period
        self._bins = min(_PROFILE_BINS, int(period / _BIN_SECONDS))
        self._width = period / self._bins
        self._seen: list[deque[float]] = [deque(maxlen=_PERIODS) for _ in range(self._bins)]
        self._rates = [0.0] * self._bins
        self._open = -1  # number of the bin that is being summed up
        self._work = self._seconds = 0.0

    @property
    def seen(self) -> list[list[float]]:
        """By bin, what arrived in each of the latest periods."""
        return [list(rates) for rates in self._seen]

    def restore(self, seen: list[list[float]]) -> None:
        """Go on from what another process saw of the same period."""
        if len(seen) != self._bins:
            raise ValueError(f"there are {self._bins} bins, not {len(seen)}")
        for at, rates in enumerate(seen):
            self._seen[at].extend(rates)
            self._rates[at] = median(rates) if rates else 0.0

    def add(self, begin: float, end: float, rate: float) -> None:
        while end - begin > 1e-6:
            number = int(begin / self._width + 1e-9)
            if number != self._open:
                self._close()
                self._open = number
            until = min(end, (number + 1) * self._width)
            self._work += rate * (until - begin)
            self._seconds += until - begin
            begin = until

    def _close(self) -> None:
        if self._seconds > self._width / 2:
            at = self._open % self._bins
            self._seen[at].append(self._work / self._seconds)
            self._rates[at] = median(self._seen[at])
        self._work = self._seconds = 0.0

    def at(self, now: float) -> float:
        """Interpolated between the middles of bins. 0: not known yet."""
        place = now / self._width - 0.5
        left = int(place // 1)
        before, after = self._smoothed(left), self._smoothed(left + 1)
        return before + (place - left) * (after - before) if before and after else 0.0

    def _smoothed(self, at: int) -> float:
        near = [(at + offset) % self._bins for offset in range(-_SMOOTHED_BINS, _SMOOTHED_BINS + 1)]
        if not all(self._seen[i] for i in near):
            return 0.0
        return sum(self._rates[i] for i in near) / len(near)

    def growth(self, before: float, after: float) -> float:
        """How many times more arrives usually at one time than at another. 1 where that is not known."""
        first, second = self.at(before), self.at(after)
        low, high = _GROWTH
        return min(high, max(low, second / first)) if first and second else 1.0


class Spread:
    """How far forecasts are off. The variance of work is taken to grow as its mean, as that of random arrivals does."""

    def __init__(self) -> None:
        self._factor = _FIRST_SPREAD  # variance over mean
        self._forecasts: deque[tuple[float, float]] = deque()  # (when it is due, what was forecast for then)

    def forecast(self, due: float, mean: float) -> None:
        self._forecasts.append((due, mean))

    def observe(self, now: float, rate: float) -> None:
        while self._forecasts and self._forecasts[0][0] <= now:
            _, mean = self._forecasts.popleft()
            self._factor += _SPREAD_WEIGHT * ((rate - mean) ** 2 / max(mean, rate, 1e-9) - self._factor)

    def of(self, mean: float) -> Expected:
        return Expected(mean, sqrt(self._factor * mean))


class Arrivals:
    """Observes the counter of arrived work at every look. Nothing here reads a clock."""

    def __init__(self, period_seconds: float) -> None:
        self.level = 0.0  # rate of work now, without the noise of single requests
        self.last = 0.0  # rate of work in the latest bin
        self._trend = 0.0  # a bin
        self.profile = Profile(period_seconds)
        self._spread, self._last_spread = Spread(), Spread()
        self._since: tuple[float, float] | None = None  # time and work at the beginning of the bin
        self._bins = 0

    def observe(self, now: float, work: float, ahead: float) -> None:
        """`work` is a counter. `ahead`: how long a replica takes to start, for which forecasts are judged."""
        if self._since is None:
            self._since = (now, work)
        began, before = self._since
        seconds = now - began
        if seconds < _BIN_SECONDS:
            return
        rate = max(0.0, work - before) / seconds
        self.profile.add(began, now, rate)
        self._spread.observe(now, rate)
        self._last_spread.observe(now, rate)
        self._learn(now, seconds, rate)
        self._spread.forecast(now + ahead, self._mean(now, ahead))
        self._last_spread.forecast(now + ahead, self.last)
        self._since = (now, work)

    def _learn(self, now: float, seconds: float, rate: float) -> None:
        self.last = rate
        self._bins += 1
        expected = max(0.0, self.level + self._trend) * self.profile.growth(now - 1.5 * seconds, now - seconds / 2)
        error, weight = rate - expected, max(_LEVEL_WEIGHT, 1 / self._bins)
        self.level = expected + weight * error
        self._trend = _TREND_DAMPING * self._trend + _TREND_WEIGHT * weight * error

    def _mean(self, now: float, ahead: float) -> float:
        bins = ahead / _BIN_SECONDS
        trend = self._trend * (1 - pow(_TREND_DAMPING, bins)) / (1 - _TREND_DAMPING)
        return max(0.0, self.level + trend) * self.profile.growth(now, now + ahead)

    def expected(self, now: float, ahead: float) -> Expected:
        """The most of what is forecast between now and then, and for a bin longer: it may come a little earlier."""
        steps = ceil(ahead / _BIN_SECONDS) + 1
        return self._spread.of(max(self._mean(now, step * _BIN_SECONDS) for step in range(steps + 1)))

    def last_value(self, now: float, ahead: float) -> Expected:
        """The latest value in place of a forecast."""
        return self._last_spread.of(self.last)
