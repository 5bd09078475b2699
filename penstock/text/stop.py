"""Finds stop strings in streamed text, also those that are split between chunks."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache


class StopStrings:
    """Cuts a stream at the stop string that is complete first (of several that end there, the longest).

    Text that may still turn out to begin a stop string is held back. Each character costs O(1) per stop string
    whatever their lengths (Knuth-Morris-Pratt), so a hostile stop string cannot slow a stream down.
    """

    def __init__(self, stops: Iterable[str], *, include: bool = False) -> None:
        self._patterns = [_Pattern(stop) for stop in sorted(stops, key=len, reverse=True)]
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """The text that can be shown now, and whether a stop string has been found."""
        if self.matched is not None:
            return "", True
        if not self._patterns:
            return text, False
        window = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            complete = [pattern.stop for pattern in self._patterns if pattern.advance(character)]
            if complete:
                self.matched = complete[0]
                self._held = ""
                return window[: end if self._include else end - len(self.matched)], True
        shown = len(window) - max(pattern.state for pattern in self._patterns)
        self._held = window[shown:]
        return window[:shown], False

    def finish(self) -> str:
        """Return the text that was held back, since the stream has ended without a stop string."""
        held, self._held = self._held, ""
        return held


class _Pattern:
    """`state` is the length of the longest beginning of the stop string that ends at the last character seen."""

    __slots__ = ("_fallback", "state", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.state = 0
        self._fallback = _fallbacks(stop)

    def advance(self, character: str) -> bool:
        """True when the stop string is complete; then the pattern must not be used any more."""
        state, stop = self.state, self.stop
        while state and stop[state] != character:
            state = self._fallback[state]
        if stop[state] == character:
            state += 1
        self.state = state
        return state == len(stop)


@lru_cache(256)  # the choices of a request have the same stop strings, and there may be a thousand of them
def _fallbacks(stop: str) -> list[int]:
    """The failure function of Knuth-Morris-Pratt: by state, the next shorter prefix that ends at the same place."""
    fallback = [0] * (len(stop) + 1)
    for length in range(2, len(stop) + 1):
        shorter = fallback[length - 1]
        while shorter and stop[shorter] != stop[length - 1]:
            shorter = fallback[shorter]
        fallback[length] = shorter + 1 if stop[shorter] == stop[length - 1] else 0
    return fallback
