"""A grammar over the vocabulary of `PagedExecutor`: many of its tokens force others, and it ends by itself."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.errors import InvalidRequest
from penstock.core.request import Grammar
from penstock.simulation.paged_executor import EOS, VOCAB, next_token

ACCEPTED_FROM = 3  # tokens: from then on an end is allowed
CLOSED_FROM = 6  # in "closing": from then on nothing else is


class ToyMatcher:
    """The source says after how many tokens nothing may follow, and which ones are forced at the beginning."""

    def __init__(self, source: str, ignored: Collection[int] = ()) -> None:
        self.hopeless, self.empty, self.closing = (source == name for name in ("hopeless", "empty", "closing"))
        named = self.hopeless or self.empty or self.closing
        self.length, *self.ahead = [99] if named else map(int, source.split())
        self.ignored = ignored
        self.taken: list[int] = []

    @property
    def error(self) -> str:
        return "three tokens are enough" if self.hopeless and len(self.taken) == 3 else ""

    @property
    def mask_seconds(self) -> float:
        return float(len(self.taken) % 4)

    @property
    def ended(self) -> bool:
        return not self.ahead and len(self.taken) >= self.length

    @property
    def allowed(self) -> list[int]:
        if self.empty and len(self.taken) == 3:
            return []
        if self.ahead:
            return self.ahead[:1]
        if self.ended:
            return [EOS]
        if self.closing and len(self.taken) >= CLOSED_FROM:
            return [EOS]
        accepted = len(self.taken) >= ACCEPTED_FROM and EOS not in self.ignored
        return [t for t in range(VOCAB) if t % 2 and (t != EOS or accepted)]

    def consume(self, tokens: list[int]) -> None:
        for token in tokens:
            if token not in self.allowed:
                raise InvalidRequest("the output left its grammar")
            if token == EOS:
                self.length = len(self.taken)
            elif self.ahead:
                del self.ahead[0]
            elif token % 3 == 0:
                self.ahead = [t for t in range(token + 1, token + 1 + token % 5) if t < VOCAB and t != EOS]
            self.taken.append(token)

    def take_forced(self) -> list[int]:
        forced = list(self.ahead)
        self.consume(forced)
        return forced

    def follow(self, token: int) -> list[int]:
        self.consume([token])
        return self.take_forced()

    def take(self, token: int) -> list[int] | None:
        return self.follow(token) if token in self.allowed and token not in self.ignored else None

    def copy(self) -> ToyMatcher:
        return deepcopy(self)


class ToyGrammars:
    """With the source "hopeless" there is no mask, with "empty" one that allows nothing, with "closing" one that allows
    an end token alone; "broken" is no grammar."""

    pausing: Callable[[], AbstractContextManager[None]] = nullcontext

    def is_compiled(self, grammar: Grammar) -> bool:
        return False

    def compile(self, grammar: Grammar) -> None:
        if grammar.source == "broken":
            raise InvalidRequest("no", param=grammar.param)

    def matcher(self, grammar: Grammar, ignored: Collection[int] = ()) -> ToyMatcher:
        self.compile(grammar)
        return ToyMatcher(grammar.source, ignored)

    def prepare(self) -> None:
        pass

    def fill(self, matchers: Mapping[int, Any], masks: npt.NDArray[np.int32]) -> list[int]:
        for row, matcher in matchers.items():
            bits = np.zeros(masks.shape[1] * 32, np.uint8)
            bits[matcher.allowed] = 1
            masks[row] = np.packbits(bits, bitorder="little").view(np.int32)
        return [row for row, matcher in matchers.items() if matcher.error]


def constrained_output(
    prompt: Sequence[int], seed: int, max_tokens: int, stop: frozenset[int], min_tokens: int, source: str
) -> list[int]:
    """A token at a time, as if nothing were forced."""
    matcher, output = ToyMatcher(source, {EOS} - stop), list[int]()
    while len(output) < max_tokens and not matcher.ended:
        forbidden = stop if len(output) < min_tokens else ()
        allowed = matcher.allowed
        token = next_token([*prompt, *output], len(prompt), seed, forbidden if len(allowed) > 1 else (), allowed)
        output.append(token)
        if token in stop and len(output) >= min_tokens:
            break
        matcher.consume([token])
    return output
