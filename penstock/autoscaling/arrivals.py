"""How much work arrives, and how much will: level and time of day.

Arriving work is counted in bins. A profile holds what usually arrives at each time of the day. Between two bins the
level is expected to change as the profile does (exponential smoothing with a profile as the season). What arrives
beyond that moves the level, and the more the less it can be noise. How far forecasts were off, made as long before as a
replica takes to start, says how much more than the forecast may come.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import ceil, sqrt
from statistics import median

_BIN_SECONDS = 10.0
_PROFILE_BINS = 1440  # of a period: the minutes of a day
_PERIODS = 3  # of which a profile is the median: what happened on one of three days is not expected daily
_SMOOTHED_BINS = 1  # on each side, over which the profile is averaged
_LEVEL_WEIGHT = 0.35  # of the latest bin, at least
_NOISE = 3.0  # usual squared errors of a bin: so much of a squared error is taken for noise, the rest moves the level
_SPREAD_WEIGHT = 0.01  # of the latest error
_FIRST_SPREAD = 0.1  # squared error over the forecast, in seconds of work a second, before there were errors
_GROWTH = (0.25, 4.0)  # that the profile is believed, at least and at most, from one time to another


@dataclass(frozen=True, slots=True)
class Expected:
    """Seconds of one replica's work a second."""

    mean: float
    spread: float  # standard deviation of what comes from it
    usual: float = 0.0  # by the profile, at that time; 0: not known


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
            self.learn(self._forecasts.popleft()[1], rate)

    def learn(self, mean: float, rate: float) -> None:
        self._factor += _SPREAD_WEIGHT * ((rate - mean) ** 2 / max(mean, rate, 1e-9) - self._factor)

    def variance(self, mean: float) -> float:
        return self._factor * mean


class Arrivals:
    """Observes the counter of arrived work at every look. Nothing here reads a clock."""

    def __init__(self, period_seconds: float) -> None:
        self.level = 0.0  # rate of work in the latest bin, without the noise of single requests
        self.last = 0.0  # the same, with it
        self.profile = Profile(period_seconds)
        self._middle = 0.0  # of the latest bin: the time of the level
        self._noise, self._spread, self._last_spread = Spread(), Spread(), Spread()
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
        self._learn(now - seconds / 2, rate)
        self._spread.forecast(now + ahead, self._mean(now + ahead))
        self._last_spread.forecast(now + ahead, self.last)
        self._since = (now, work)

    def _learn(self, middle: float, rate: float) -> None:
        self.last = rate
        self._bins += 1
        expected = self._mean(middle)
        squared, noise = (rate - expected) ** 2, _NOISE * self._noise.variance(max(rate, expected))
        weight = max(_LEVEL_WEIGHT, 1 / self._bins, 1 - noise / squared if squared > noise else 0.0)
        self._noise.learn(expected, rate)
        self.level, self._middle = expected + weight * (rate - expected), middle

    def _mean(self, when: float) -> float:
        return self.level * self.profile.growth(self._middle, when)

    def expected(self, now: float, ahead: float) -> Expected:
        """The most of what is forecast between now and then, and for a bin longer: it may come a little earlier."""
        last = ahead + _BIN_SECONDS
        times = [now + min(step * _BIN_SECONDS, last) for step in range(ceil(last / _BIN_SECONDS) + 1)]
        mean, when = max((self._mean(when), when) for when in times)
        return Expected(mean, sqrt(self._spread.variance(mean)), self.profile.at(when))

    def last_value(self, now: float, ahead: float) -> Expected:
        """The latest value in place of a forecast."""
        return Expected(self.last, sqrt(self._last_spread.variance(self.last)))
