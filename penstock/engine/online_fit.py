"""A sum of non-negative terms fitted to measurements as they come, such as the seconds of steps."""

from __future__ import annotations

import math
from typing import Any

_MEMORY = 0.997  # weight of the past at each observation: about 300 of them
_REFIT_EVERY = 8
_DRIFT = 0.1  # weight of the latest observation in the drift
_MOVED_DRIFT = 0.01  # share of its logarithm that moves into the coefficients at each observation
_READY = 16
SETTLED = 4 * _READY  # observations; before, errors say more about the fit than about the machine
_OUTLIER = 5.0  # what is so many times as long as predicted says something about the machine, not about steps
_OUTLIERS = 8  # but not if there are so many in a row


class OnlineFit:
    """Non-negative least squares of the relative error, with the past fading out.

    A factor follows a machine whose speed drifts faster than that; coefficients are fitted to what is left. Nothing in
    a measurement says how much of it is drift, so some of the factor always moves into the coefficients: else the two
    would walk apart.
    """

    def __init__(self, features: int) -> None:
        self.coefficients = [0.0] * features
        self.moments = [[0.0] * features for _ in range(features)]
        self.targets = [0.0] * features
        self.observed = 0
        self.drift = 1.0
        self.moved = 1.0  # of the drift into the coefficients, at the latest observation
        self._outliers = 0  # in a row

    @property
    def ready(self) -> bool:
        return self.observed >= _READY

    def predict(self, x: tuple[float, ...]) -> float:
        return self.drift * math.fsum(map(float.__mul__, self.coefficients, x))

    def observe(self, x: tuple[float, ...], seconds: float) -> float | None:
        """Learn from a measurement; returns what had been predicted for it."""
        predicted = self.predict(x) if self.ready else None
        if predicted:
            ratio = seconds / predicted
            self._outliers = self._outliers + 1 if ratio > _OUTLIER and self.observed > SETTLED else 0
            if 0 < self._outliers <= _OUTLIERS:
                self.moved = 1.0
                return predicted
            self.drift *= min(2.0, max(0.5, ratio)) ** _DRIFT
        self.moved = moved = self.drift**_MOVED_DRIFT
        self.drift /= moved
        self.coefficients = [value * moved for value in self.coefficients]
        scale, kept, kept_moment = self.drift / seconds, _MEMORY / moved, _MEMORY / moved**2
        scaled = [value * scale for value in x]
        for row, value, i in zip(self.moments, scaled, range(len(x)), strict=True):
            for j, other in enumerate(scaled):
                row[j] = row[j] * kept_moment + value * other
            self.targets[i] = self.targets[i] * kept + value
        self.observed += 1
        if self.observed % _REFIT_EVERY == 0 or self.observed < SETTLED:
            self._refit()
        return predicted

    def _refit(self) -> None:
        """Coordinate descent from where it was; a few rounds a time are enough, since it goes on at every refit."""
        c, m = self.coefficients, self.moments
        for _ in range(12):
            for i, row in enumerate(m):
                if row[i] > 0:
                    rest = math.fsum(map(float.__mul__, row, c)) - row[i] * c[i]
                    c[i] = max(0.0, (self.targets[i] - rest) / row[i])

    def state(self) -> dict[str, object]:
        return {
            "coefficients": self.coefficients,
            "moments": self.moments,
            "targets": self.targets,
            "observed": self.observed,
            "drift": self.drift,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Raises KeyError, TypeError or ValueError for what is not a state of a fit with as many features."""
        size = len(self.targets)
        moments = [[float(v) for v in row] for row in state["moments"]]
        targets, coefficients = ([float(v) for v in state[part]] for part in ("targets", "coefficients"))
        if {len(moments), len(targets), len(coefficients), *map(len, moments)} != {size}:
            raise ValueError(f"not {size} features")
        self.moments, self.targets, self.coefficients = moments, targets, coefficients
        self.observed, self.drift = int(state["observed"]), float(state["drift"])
