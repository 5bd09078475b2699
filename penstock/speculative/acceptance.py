"""How often guesses were right of late."""

from __future__ import annotations


class Acceptance:
    """Of guesses of one kind, with the past fading out."""

    __slots__ = ("_keep", "_right", "_tested")

    def __init__(self, memory: float) -> None:
        """`memory`: over how many guesses, about."""
        self._keep = 1.0 - 1.0 / memory
        self._right = self._tested = 0.0

    def add(self, right: bool) -> None:
        keep = self._keep
        self._right = self._right * keep + right
        self._tested = self._tested * keep + 1.0

    def rate(self, prior: float, weight: float) -> float:
        """`prior` is what is believed before there were any guesses, and counts as `weight` of them."""
        return (self._right + prior * weight) / (self._tested + weight)
