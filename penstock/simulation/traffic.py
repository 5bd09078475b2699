"""Days of requests: a daily curve, days that differ, noise that drifts, bursts, and random arrivals. All from a seed.

requests = Traffic(peak=30.0, seed=1).day(2)   # of the third day, in order of arrival
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

# Share of the peak rate at each hour.
CONSUMER = (
    *(0.42, 0.31, 0.24, 0.20, 0.18, 0.20, 0.28, 0.41, 0.56, 0.68, 0.76, 0.80),
    *(0.78, 0.80, 0.84, 0.86, 0.85, 0.83, 0.86, 0.93, 1.00, 0.97, 0.80, 0.58),
)
OFFICE = (
    *(0.10, 0.08, 0.08, 0.08, 0.08, 0.10, 0.16, 0.34, 0.72, 0.95, 1.00, 0.94),
    *(0.72, 0.88, 0.98, 0.96, 0.88, 0.66, 0.38, 0.26, 0.22, 0.18, 0.14, 0.12),
)
_STEP_SECONDS = 5.0  # in which the rate is constant


@dataclass(frozen=True, slots=True)
class Arrival:
    at: float  # seconds since the beginning of the day
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """`seconds` is the length of a day: it may be shorter than a real one, and its hours with it."""

    peak: float  # requests a second, at the peak of the usual day
    seed: int = 0
    seconds: float = 86_400.0
    hours: Sequence[float] = CONSUMER
    day_spread: float = 0.08  # standard deviation of the logarithm of a day's factor
    drift: float = 0.06  # the same of slow noise
    drift_seconds: float = 600.0  # in which that noise is forgotten
    bursts: float = 12.0  # a day
    burst_size: tuple[float, float] = (0.25, 0.6)  # of the rate at that time, at least and at most
    burst_ramp: tuple[float, float] = (20.0, 90.0)  # seconds until a burst is at its height
    burst_seconds: tuple[float, float] = (60.0, 300.0)  # for which it stays there; then it fades
    jobs: int = 0  # bursts that come every day at the same times
    job_size: tuple[float, float] = (0.5, 1.0)
    job_seconds: tuple[float, float] = (60.0, 180.0)
    prompt_tokens: float = 400.0  # median; lengths are lognormal
    output_tokens: float = 10.0

    def rates(self, number: int) -> list[float]:
        """Requests a second of one day, for every 5 seconds of it."""
        draw = random.Random(f"{self.seed} {number} rates")
        factor = math.exp(draw.gauss(0, self.day_spread))
        steps = int(self.seconds / _STEP_SECONDS)
        kept = math.exp(-_STEP_SECONDS / self.drift_seconds)
        noise = draw.gauss(0, self.drift)
        rates = []
        for step in range(steps):
            noise = kept * noise + math.sqrt(1 - kept * kept) * draw.gauss(0, self.drift)
            rates.append(self.peak * factor * self._usual(step / steps) * math.exp(noise))
        for _ in range(_poisson(draw, self.bursts)):
            self._add_burst(draw, rates)
        self._add_jobs(draw, rates)
        return rates

    def _usual(self, share: float) -> float:
        """Interpolated between the middles of hours."""
        hours = self.hours
        place = share * len(hours) - 0.5
        left = math.floor(place)
        weight = (1 - math.cos(math.pi * (place - left))) / 2
        return hours[left] + weight * (hours[(left + 1) % len(hours)] - hours[left])

    def _add_burst(self, draw: random.Random, rates: list[float]) -> None:
        begin = draw.randrange(len(rates))
        ramp, lasting = draw.uniform(*self.burst_ramp), draw.uniform(*self.burst_seconds)
        height = rates[begin] * draw.uniform(*self.burst_size)
        for step in range(begin, len(rates)):
            since = (step - begin) * _STEP_SECONDS
            over = max(0.0, since - ramp - lasting)
            if over > 5 * ramp:
                return
            rates[step] += height * min(1.0, since / ramp) * math.exp(-over / ramp)

    def _add_jobs(self, draw: random.Random, rates: list[float]) -> None:
        """They begin on the hour, with all they have, a few seconds earlier or later; each day some more or less."""
        timetable, steps = random.Random(f"{self.seed} jobs"), len(rates)
        for hour in timetable.sample(range(24), self.jobs):
            size, lasting = timetable.uniform(*self.job_size), timetable.uniform(*self.job_seconds)
            begin = round(hour / 24 * steps + draw.gauss(0, 1))
            height = size * draw.uniform(0.8, 1.2)
            for step in range(max(0, begin), min(steps, begin + round(lasting / _STEP_SECONDS))):
                rates[step] *= 1 + height

    def day(self, number: int) -> list[Arrival]:
        draw = random.Random(f"{self.seed} {number} requests")
        arrivals = []
        for step, rate in enumerate(self.rates(number)):
            at = draw.expovariate(rate) if rate else math.inf
            while at < _STEP_SECONDS:
                prompt = max(16, min(1200, round(self.prompt_tokens * draw.lognormvariate(0, 0.6))))
                output = max(2, min(100, round(self.output_tokens * draw.lognormvariate(0, 0.6))))
                arrivals.append(Arrival(step * _STEP_SECONDS + at, prompt, output))
                at += draw.expovariate(rate)
        return arrivals


def _poisson(draw: random.Random, mean: float) -> int:
    count, left = 0, draw.expovariate(1.0)
    while left < mean:
        count += 1
        left += draw.expovariate(1.0)
    return count
