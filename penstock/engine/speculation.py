"""Speculative decoding: how many tokens are drafted for which sequence, so that a step is never worth less for it.

A drafter guesses how a sequence goes on. A step computes the guessed tokens behind the last known one, as it would
compute a piece of a prompt, and samples after each of them: what was sampled is the output, as far as the guesses were
right, and the token that corrects the first wrong one. The output is the same as without drafts, token for token.

Every drafted token lengthens the step a little. It is worth that if the tokens that are expected to be accepted come
faster with it than without: `best_depths` decides by the step-time model and by how often drafts were right of late.

A drafter that has a context of its own must compute a sequence's tokens before it can draft for it. It catches up in
chunks, one before each step, none longer than that, and only where drafts are expected to make up for it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Collection
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from penstock.engine.grammar import allowed_draft
from penstock.engine.placement import Placement
from penstock.engine.planned_step import PlannedStep
from penstock.engine.sequence import Sequence
from penstock.engine.step_time import StepShape, StepTimes

# Both because predictions err: speed that drafts must be expected to gain, and by how much the tokens that are expected
# of a draft must be worth more than its time.
_LEAST_GAIN = 1.03
_DOUBT = 1.5
# Tokens that a draft must be expected to gain for a sequence to wait for its last token, where others would not wait:
# so many or this share of the longest draft, and never fewer than waiting costs.
_WORTH_WAITING, _SHARE_WORTH_WAITING, _WAITING_COSTS = 4.0, 0.6, 1.5
# Tokens for which a sequence without a draft is left alone at most: asking for one costs some microseconds each time.
_LONGEST_PAUSE = 8
# Share of the time that may go into asking for drafts in vain, and of the time that drafts save, which may go there as
# well. It is saved up for a while.
_ASKING_SHARE = 0.005
_GAIN_SHARE = 0.1
_SAVED_SECONDS = 0.1
_PROBE = 8  # drafted tokens from which the step-time model's price of one is taken
# What catching up may add to a step, as a share of what that takes: as beside a long prompt, streams wait at most twice
# as long. Where an objective leaves less than the least share there is none, for a chunk has a least size.
_CATCH_UP_SHARE, _LEAST_CATCH_UP_SHARE = 1.0, 0.5
# Tokens that an output is expected to have yet, at least, if its request allows; else as many as it has, as nobody
# knows how long it gets. They must make up for catching up.
_LEAST_EXPECTED = 64


class Drafter(Protocol):
    """Guesses how sequences go on. Used by one thread at a time."""

    def outlook(self, sequence: Sequence, /) -> float:
        """How likely the next token of a draft for it would be accepted, and then the one after it; 0: no draft."""
        ...

    def behind(self, sequence: Sequence, /) -> float | None:
        """Seconds that it takes to compute the tokens of it that the drafter must have seen before it drafts; 0 while
        that is not known. None: it can draft at once. Asked after `outlook`."""
        ...

    def catch_up(self, sequence: Sequence, decodes: list[Sequence], seconds: float, /) -> bool:
        """Compute some of them, for about so long. False: there is no room for it beside others that decode."""
        ...

    def seconds(self, sequences: int, /) -> float:
        """What it takes to draft one more token for so many sequences at once."""
        ...

    def propose(self, sequences: list[Sequence], depths: list[int], /) -> list[list[int]]:
        """Guesses for each, at most as many as its depth says. None of them is behind."""
        ...

    def forget(self, sequence: Sequence, /) -> None:
        """It has ended."""
        ...


class Drafts(NamedTuple):
    """For one step."""

    tokens: dict[Sequence, list[int]]
    waiting: set[Sequence]  # that should not be in this step
    seconds: float = 0.0  # that they took


NO_DRAFTS = Drafts({}, set())


class Speculation:
    """Drafts for the sequences of a step that decode. `max_tokens`: of one draft."""

    def __init__(
        self,
        drafter: Drafter,
        times: StepTimes,
        max_tokens: int,
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self.drafter = drafter
        self._times = times
        self._most = max_tokens
        self._worth_waiting = max(_WAITING_COSTS, min(_WORTH_WAITING, _SHARE_WORTH_WAITING * max_tokens))
        self._clock, self._cpu_clock = clock, cpu_clock
        # Those that had a draft when they were last asked for, or wait for one, or for the drafter to catch up, and how
        # many tokens they had then.
        self._drafting: dict[Sequence, int] = {}
        self._rest_until = -math.inf  # only these are asked before: the share of asking in vain is used up

    def plan(self, decodes: list[Sequence], budget: int) -> Drafts:
        """Drafts of at most `budget` tokens in all, and the sequences that should not be in this step.

        Those are sequences whose last token is still being computed: a draft after it, one step later, is expected to
        gain more than the token that this step would give them.
        """
        began = self._clock()
        rests = began < self._rest_until
        if budget < 1 or (rests and not self._drafting):
            return NO_DRAFTS
        due = [s for s in decodes if s in self._drafting] if rests else self._due(decodes)
        if not due:
            return NO_DRAFTS
        asking = -self._cpu_clock()
        prices = self._prices(decodes)
        if _DOUBT * prices.token * len(decodes) < prices.plain:
            outlooks = self._ask(due, began)
        else:  # not even tokens that are certain would pay
            outlooks = dict.fromkeys(due, 0.0)
        behind = {s: time for s in outlooks if outlooks[s] and (time := self.drafter.behind(s)) is not None}
        waiting = {s for s in outlooks if s.pending and s not in behind and self._is_worth_waiting(outlooks[s])}
        lagging = self._worth_catching_up(behind, outlooks, len(decodes), budget, prices)
        if lagging is not None:
            prices = replace(prices, longest=prices.longest - prices.catching_up)
        ready = {s: outlooks[s] for s in outlooks if not s.pending and s not in behind}
        depths = self._depths(ready, len(decodes) - len(waiting), budget, prices)
        asking += self._cpu_clock()
        advanced = lagging is not None and self.drafter.catch_up(lagging, decodes, prices.catching_up)
        proposed = self.drafter.propose(list(depths), list(depths.values())) if depths else []
        asking -= self._cpu_clock()  # drafting has its own price
        found = ((s, sensible(s, draft)) for s, draft in zip(depths, proposed, strict=True))
        drafts = {s: draft for s, draft in found if draft}
        kept = {*drafts, *waiting}
        if lagging is not None and advanced:
            kept.add(lagging)
        for s in outlooks:
            if s not in kept:
                s.draft_from = len(s.tokens) + s.draft_pause
                s.draft_pause = min(_LONGEST_PAUSE, 2 * s.draft_pause)
            elif s not in waiting:
                s.draft_pause = 1
        accepted = sum(max(0, len(s.tokens) - self._drafting.pop(s) - 1) for s in outlooks if s in self._drafting)
        self._drafting.update((s, len(s.tokens)) for s in kept)
        earned = _GAIN_SHARE * accepted * prices.plain / len(decodes)
        in_vain = (asking + self._cpu_clock()) * (1 - len(kept) / len(outlooks))
        saved = max(self._rest_until - earned / _ASKING_SHARE, began - _SAVED_SECONDS)
        self._rest_until = saved + in_vain / _ASKING_SHARE
        return Drafts(drafts, waiting, self._clock() - began)

    def _due(self, decodes: list[Sequence]) -> list[Sequence]:
        """Those that drafts are thought of for, first those that had one."""
        due = [s for s in decodes if len(s.tokens) >= s.draft_from and s.first_token is not None]
        return sorted(due, key=lambda s: s not in self._drafting) if self._drafting else due

    def _ask(self, due: list[Sequence], began: float) -> dict[Sequence, float]:
        """The outlooks of those that have drafts, and of others until the time for asking in vain is used up: many
        that come together are asked in turn, step after step."""
        outlooks: dict[Sequence, float] = {}
        until: float | None = None
        for s in due:
            if s not in self._drafting:
                now = self._clock()
                if until is None:
                    until = now + _ASKING_SHARE * min(began - self._rest_until, _SAVED_SECONDS)
                elif now > until:
                    break
            outlooks[s] = self.drafter.outlook(s)
        return outlooks

    def _worth_catching_up(
        self,
        behind: dict[Sequence, float],
        outlooks: dict[Sequence, float],
        streams: int,
        budget: int,
        prices: Prices,
    ) -> Sequence | None:
        """Of the sequences that the drafter is behind with, and for which it pays to catch up, the one that it takes
        the least time for. None as well where the step has no time for it."""
        if prices.catching_up >= _LEAST_CATCH_UP_SHARE * prices.plain:
            for s in sorted(behind, key=behind.__getitem__):
                saved = seconds_saved(s, outlooks[s], self._room(s), streams, budget, prices)
                if saved > _DOUBT * behind[s]:
                    return s
        return None

    def _is_worth_waiting(self, outlook: float) -> bool:
        return expected_tokens(outlook, self._most) > self._worth_waiting

    def forget(self, sequence: Sequence) -> None:
        """It has ended."""
        self._drafting.pop(sequence, None)
        self.drafter.forget(sequence)

    def _room(self, sequence: Sequence) -> int:
        """For a draft."""
        return min(self._most, sequence.max_len - len(sequence.tokens) - 1)

    def _depths(
        self, outlooks: dict[Sequence, float], streams: int, budget: int, prices: Prices
    ) -> dict[Sequence, int]:
        """Of those of them for which a draft pays."""
        rooms = [self._room(s) for s in outlooks]
        depths = best_depths(list(outlooks.values()), rooms, streams, budget, prices)
        return {s: depth for s, depth in zip(outlooks, depths, strict=True) if depth}

    def _prices(self, decodes: list[Sequence]) -> Prices:
        streams, context = len(decodes), sum(s.computed for s in decodes)
        plain, few, many = (
            self._times.predict(StepShape(streams, context, drafted=drafted)) for drafted in (0, 1, 1 + _PROBE)
        )
        token = max(0.0, many - few) / _PROBE
        longest = self._times.plan_within(min((s.itl for s in decodes), default=math.inf))
        return Prices(plain, max(0.0, few - token - plain), token, self.drafter.seconds, longest)


def decode(planned: PlannedStep, decodes: list[Sequence], drafts: Drafts, placement: Placement) -> None:
    """Give each of these its next token and its draft, if it has one. Blocks that become full are shared."""
    tokens, waiting, _ = drafts
    planned.decode([s for s in decodes if s not in tokens and s not in waiting] if tokens or waiting else decodes)
    for s, draft in tokens.items():
        if s.finished is not None:
            continue
        end = min(s.computed + 1 + len(draft), placement.most_tokens(s))
        placement.allocate(s, end)
        planned.verify(s, draft[: end - s.computed - 1])
    placement.share_all(planned.sequences)


@dataclass(frozen=True, slots=True)
class Prices:
    """In seconds."""

    plain: float  # of the step without drafts
    start: float  # that drafts add, however few they are
    token: float  # that every drafted token adds
    draft: Callable[[int], float]  # to draft one more token for so many sequences
    longest: float = math.inf  # that the step may take

    @property
    def catching_up(self) -> float:
        """How long a drafter may catch up before the step."""
        return min(_CATCH_UP_SHARE * self.plain, self.longest - self.plain)


def best_depths(
    outlooks: Collection[float], rooms: Collection[int], streams: int, budget: int, prices: Prices
) -> list[int]:
    """How many tokens to draft for each sequence, so that the step gives the most tokens a second.

    Depth after depth: the tokens at a depth are taken for those sequences where they are expected to give more tokens
    a second than the step does without them, until that holds for none.
    """
    depths, token = [0] * len(outlooks), _DOUBT * prices.token
    tokens, seconds, chances = float(streams), prices.plain + prices.start, list(outlooks)
    for depth in range(1, max(rooms, default=0) + 1):
        rate = tokens / seconds if seconds else 0.0
        deeper = [i for i, chance in enumerate(chances) if depths[i] == depth - 1 < rooms[i] and chance > token * rate]
        deeper = sorted(deeper, key=lambda i: -chances[i])[:budget]
        gain, price = sum(chances[i] for i in deeper), token * len(deeper) + prices.draft(len(deeper))
        if not deeper or gain <= price * rate or seconds + price > prices.longest:
            break
        tokens, seconds, budget = tokens + gain, seconds + price, budget - len(deeper)
        for i in deeper:
            depths[i] = depth
            chances[i] *= outlooks[i]
    worth = tokens * prices.plain > _LEAST_GAIN * streams * seconds
    return depths if worth else [0] * len(depths)


def seconds_saved(sequence: Sequence, outlook: float, room: int, streams: int, budget: int, prices: Prices) -> float:
    """What drafts for this sequence alone are expected to save until it ends."""
    (depth,) = best_depths([outlook], [room], streams, budget, prices)
    if not depth:
        return 0.0
    accepted = expected_tokens(outlook, depth)
    saved = accepted * prices.plain / streams - prices.start - depth * (prices.token + prices.draft(1))
    tokens = min(sequence.max_len - len(sequence.tokens), max(_LEAST_EXPECTED, sequence.outputs))
    return saved * tokens / (1 + accepted)


def expected_tokens(outlook: float, depth: int) -> float:
    """Of a draft of this depth: those that will be accepted."""
    return float(depth) if outlook >= 1 else outlook * (1 - outlook**depth) / (1 - outlook)


def sensible(sequence: Sequence, draft: list[int]) -> list[int]:
    """The draft up to where it would end the output, or leave what its grammar allows."""
    stops = sequence.stop_ids
    end = next((at for at, token in enumerate(draft) if token in stops), len(draft))
    return draft[:end] if sequence.constraint is None else allowed_draft(sequence.constraint, draft[:end])
