"""Where one output is in its grammar, by llguidance."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from penstock.core.errors import EngineFailure


class LLGuidanceMatcher:
    """Until the output has the tokens of `after`, one after the other, it is free and only must not end."""

    __slots__ = ("_after", "_ends", "_seen", "free", "state")

    def __init__(self, state: Any, after: tuple[int, ...], ends: Container[int]) -> None:
        """`ends`: tokens that end an output."""
        self.state = state  # llguidance.LLMatcher
        self.free = bool(after)
        self._after = after
        self._ends = ends
        self._seen: tuple[int, ...] = ()

    @property
    def ended(self) -> bool:
        return not self.free and bool(self.state.is_stopped())

    @property
    def error(self) -> str:
        return one_line(self.state.get_error()) if self.state.is_error() else ""

    def consume(self, tokens: list[int]) -> None:
        for number, token in enumerate(tokens) if self.free else ():
            self._seen = (*self._seen, token)[-len(self._after) :]
            if self._seen == self._after:
                self.free = False
                tokens = tokens[number + 1 :]
                break
        if not self.free and not self.state.consume_tokens(tokens):
            raise EngineFailure(f"the output left its grammar: {self.error}", code="grammar_failed")

    def forced(self) -> list[int]:
        if self.free or self.state.is_stopped():
            return []
        forced: list[int] = self.state.compute_ff_tokens()
        return forced

    def take(self, token: int) -> bool:
        if not self.free:
            return bool(self.state.try_consume_tokens([token]))
        if token in self._ends:
            return False
        self.consume([token])
        return True

    def copy(self) -> LLGuidanceMatcher:
        made = LLGuidanceMatcher(self.state.deep_copy(), self._after, self._ends)
        made.free, made._seen = self.free, self._seen
        return made


def one_line(message: str) -> str:
    """An error of llguidance, which may be drawn below a line of the grammar."""
    return " ".join(message.removesuffix("<non-verbose/>").split())[:300]
