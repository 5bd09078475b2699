"""Where one output is in its grammar, by llguidance."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from typing import Any

from penstock.core.errors import InvalidRequest
from penstock.grammar.schema import OWNER

_PLACE = re.compile(r"at \d+\(\d+\): (?:failed to compile JSON schema: )?")
_DRAWN = re.compile(r" *\d+ \| ")  # a line of the grammar
_ONE_OF = re.compile(r"oneOf constraints are not supported\. Enable 'coerce_one_of' option to [\w ]*anyOf")
_OVERLAP = (
    "branches of a oneOf that may overlap are not supported: give each the same required property with another const, "
    "or use anyOf"
)


_SHARE = 1 / 16  # of a mean that the last mask has
# What one mask counts for at most, as a multiple of the mean and of the least mean: the system may have given the core
# to someone else.
_MOST, _LEAST_SECONDS = 10, 50e-6
_NOTHING = 5e-6


class MaskTimes:
    """How long masks of a grammar take of late: mostly some microseconds, but a thousand times as long in strings that
    come near their `maxLength` or match a pattern."""

    __slots__ = ("at_once", "mean")

    def __init__(self) -> None:
        self.mean = 0.0
        self.at_once = 1  # how many of them can be computed at the same time

    def observe(self, seconds: float) -> None:
        mean = self.mean + _SHARE * (min(seconds, _MOST * max(self.mean, _LEAST_SECONDS)) - self.mean)
        self.mean = mean if mean > _NOTHING else 0.0


class LLGuidanceMatcher:
    """Until the output has the tokens of `after`, one after the other, it is free and only must not end."""

    __slots__ = ("_after", "_ends", "_param", "_seen", "ended", "free", "last_resort", "state", "times")

    def __init__(
        self,
        state: Any,
        after: tuple[int, ...],
        ends: Container[int],
        param: str,
        last_resort: Sequence[int] = (),
        times: MaskTimes | None = None,
    ) -> None:
        """`ends`: tokens that end an output. `param`: the field of the request that errors name. `last_resort`: which
        of `ends` may come only where nothing else may. `times`: of its grammar."""
        self.state = state  # llguidance.LLMatcher
        self.free = bool(after)
        self.ended = not after and bool(state.is_stopped())
        self.last_resort = last_resort
        self.times = times or MaskTimes()
        self._after = after
        self._ends = ends
        self._param = param
        self._seen: tuple[int, ...] = ()

    @property
    def error(self) -> str:
        return one_line(self.state.get_error()) if self.state.is_error() else ""

    @property
    def mask_seconds(self) -> float:
        return 0.0 if self.free else self.times.mean

    def consume(self, tokens: list[int]) -> None:
        """The output went on with these. Raises InvalidRequest where the grammar does not allow them, or comes to a
        limit of llguidance: another replica could not go on either."""
        if self.free:
            tokens = self._constrained_part(tokens)
        if self.free:
            return
        if not self.state.consume_tokens(tokens):
            raise InvalidRequest(f"the output cannot go on: {self.error}", param=self._param)
        self.ended = self.state.is_stopped()

    def _constrained_part(self, tokens: list[int]) -> list[int]:
        """What comes after the end of the part that may be anything, if that is among them."""
        for number, token in enumerate(tokens, start=1):
            self._seen = (*self._seen, token)[-len(self._after) :]
            if self._seen == self._after:
                self.free = False
                return tokens[number:]
        return []

    def take_forced(self) -> list[int]:
        taken: list[int] = []
        while not self.free and not self.ended and (forced := self.state.compute_ff_tokens()):
            self.consume(forced)
            taken += forced
        return taken

    def follow(self, token: int) -> list[int]:
        self.consume([token])
        return self.take_forced()

    def take(self, token: int) -> list[int] | None:
        if token in (self._ends if self.free else self.last_resort):
            return None
        if self.free:
            self.consume([token])
        elif self.state.try_consume_tokens([token]):
            self.ended = self.state.is_stopped()
        else:
            return None
        try:
            return self.take_forced()
        except InvalidRequest:  # what it forces comes to a limit
            return None

    def copy(self) -> LLGuidanceMatcher:
        state = self.state.deep_copy()
        made = LLGuidanceMatcher(state, self._after, self._ends, self._param, self.last_resort, self.times)
        made.free, made.ended, made._seen = self.free, self.ended, self._seen
        return made


def one_line(message: str) -> str:
    """An error of llguidance, which may be drawn below lines of the grammar. Where the last of them says whose it is,
    they are left out."""
    lines = message.split("\n")
    drawn = max((n for n, line in enumerate(lines[1:]) if line.strip() == "^"), default=0)
    if (place := _PLACE.match(message)) and (owner := OWNER.search(lines[drawn] + "\n")):
        while drawn and _DRAWN.match(lines[drawn]):
            drawn -= 1
        message = f"{owner['owner']}: " + "\n".join(lines[: drawn + 1])[place.end() :]
    message = _ONE_OF.sub(_OVERLAP, message)
    return " ".join(message.removesuffix("<non-verbose/>").split())[:300]
