"""When a request's first token will come, and how long the next step may be. Pure arithmetic on the step-time model.

The engine computes in steps of at most `limit` seconds, of which decoding takes `decode`; what is left of each is
prefill. More urgent prefill goes first, and more of it will arrive.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.engine.peak import RecentPeak

TTFT_SHARE = 0.25  # of the time to first token promised: a request meets the rest of two steps and then has its own
SHORTEST_SHARE = 0.6  # of the limit: shorter steps than this waste the machine
HEADROOM = 1.5  # more machine than the work at hand needs, for what will come before it is done
ARRIVALS_SECONDS = 10.0  # over which the rate of arriving work is taken
_CALIBRATION_PACE = 0.05
_MARGINS = (0.2, 0.6)  # share of a time to first token that admission leaves free at least and at most
_FIRST_MARGIN = 0.4  # until a class has had so many first tokens:
_LEARNT_REQUESTS = 64
_MARGIN_REQUESTS = (8, 32)  # windows and their size: a late first token is remembered for a few hundred
_REMEMBERED = 64  # different promises; the one not heard of for longest is forgotten


@dataclass(frozen=True, slots=True)
class Backlog:
    """What stands between a new request and its first token, in seconds of work."""

    until_free: float  # until the steps under way end
    decode: float  # of each step
    limit: float  # longest step allowed; inf: none
    before: float  # prefill of more urgent requests
    after: float  # prefill of less urgent ones, which fills up its last step
    arriving: float  # share of the machine that more urgent requests will take, 0 to 1

    def first_token(self, own: float) -> float:
        """Seconds from now to the first token of a request with `own` seconds of prefill."""
        work = self.before + own
        if self.limit == math.inf:
            return self.until_free + self.decode + work + self.after
        room = max(self.limit - self.decode, 0.1 * self.limit)
        whole = math.ceil(work / room) - 1
        fill = min(self.after, room * (whole + 1) - work)
        served = whole * (room + self.decode) + work - whole * room + self.decode + fill
        return self.until_free + served / max(0.05, 1.0 - self.arriving)


def step_limit(itl: float, ttft: float, decode: float, needed_share: float) -> float:
    """The longest the next step may take: short enough for the tightest ITL among running streams and for the tightest
    time to first token that is being promised, and no longer than the work at hand needs to be done when it is due.

    `needed_share`: the part of the machine that prefill needs, headroom included; inf: all it can get.
    """
    longest = min(itl, ttft * TTFT_SHARE)
    if longest == math.inf or needed_share >= 1.0:
        return longest
    return min(longest, max(decode / (1.0 - needed_share), longest * SHORTEST_SHARE))


def needed_share(work: Iterable[tuple[float, float]], now: float) -> float:
    """`work`: (due, seconds) by due time. The largest share of the time left that what is due by then takes."""
    share = done_by = 0.0
    for due, seconds in work:
        done_by += seconds
        left = due - now
        if left <= 0:
            return math.inf
        share = max(share, HEADROOM * done_by / left)
    return share


class Calibration:
    """By how much forecasts for each class have been off of late: on average, and at worst."""

    def __init__(self) -> None:
        self._factors: dict[str, float] = {}
        self._overruns: dict[str, RecentPeak] = {}  # measured less forecast, as a share of the objective

    def factor(self, objective: str) -> float:
        """What to multiply a forecast by for it to be right on average."""
        return self._factors.get(objective, 1.0)

    def margin(self, objective: str) -> float:
        """The share of its time to first token that a forecast must leave free, as it may be wrong by that much."""
        overrun = self._overruns.get(objective)
        if overrun is None or overrun.count < _LEARNT_REQUESTS:
            return _FIRST_MARGIN
        least, most = _MARGINS
        return min(most, max(least, overrun.value))

    def learn(self, objective: str, forecast: float, measured: float, allowed: float) -> None:
        """`forecast` includes the factor of that time."""
        if objective not in self._factors and len(self._factors) >= _REMEMBERED:
            return
        error = min(2.0, max(0.5, measured / forecast))
        self._factors[objective] = min(4.0, max(0.25, self.factor(objective) * error**_CALIBRATION_PACE))
        overrun = self._overruns.setdefault(objective, RecentPeak(*_MARGIN_REQUESTS))
        overrun.add((measured - forecast) / allowed)


class Arrivals:
    """How much work arrives, by how soon it is due: a share of the machine for each promised time to first token."""

    def __init__(self) -> None:
        self._rates: dict[float, tuple[float, float]] = {}  # ttft: (share at that time, time)

    def add(self, ttft: float, seconds: float, now: float) -> None:
        share, since = self._rates.get(ttft, (0.0, now))
        self._rates.pop(ttft, None)
        self._rates[ttft] = (share * math.exp((since - now) / ARRIVALS_SECONDS) + seconds / ARRIVALS_SECONDS, now)
        if len(self._rates) > _REMEMBERED:
            del self._rates[next(iter(self._rates))]

    def more_urgent_than(self, ttft: float, now: float) -> float:
        return sum(
            share * math.exp((since - now) / ARRIVALS_SECONDS)
            for other, (share, since) in self._rates.items()
            if other < ttft
        )

    def tightest(self, now: float) -> float:
        """The shortest time to first token promised of late."""
        recent = [ttft for ttft, (_, since) in self._rates.items() if now - since < 6 * ARRIVALS_SECONDS]
        return min(recent, default=math.inf)
