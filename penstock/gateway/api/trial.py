"""The attempt of a cascade's small model. What it says is held back until its confidence is decided."""

from __future__ import annotations

import asyncio
from statistics import fmean
from typing import Literal, get_args

from penstock.core.errors import PenstockError
from penstock.fleet.cascade import escalates, is_decided
from penstock.fleet.settings import CascadeConfig
from penstock.text.stream import TextDelta

# small: it answered. The large model did where it was skipped (it is not for such requests), unsure (its answer not
# used), or failed.
Outcome = Literal["small", "skipped", "unsure", "failed"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


class Escalated(PenstockError):
    """The large model is to answer. Never sent to a client."""

    def __init__(self, outcome: Outcome, why: str) -> None:
        super().__init__(why)
        self.outcome: Outcome = outcome


class Trial:
    """Of all choices of a request: they are sent when every one of them is sure enough, and otherwise none is."""

    def __init__(self, cascade: CascadeConfig, choices: int, *, show_logprobs: bool) -> None:
        """`show_logprobs`: the client asked for log-probabilities, too."""
        self._cascade = cascade
        self._show_logprobs = show_logprobs
        self._held: dict[int, TextDelta] = {}  # by choice
        self._undecided = choices
        self._passed = asyncio.Event()
        self._least: float | None = None  # mean log-probability of the least sure choice
        self.failed = False
        if cascade.min_logprob is None:
            self._passed.set()

    @property
    def verdict(self) -> str:
        """For the account of the request."""
        sure = "" if self._least is None else f", sure enough: mean log-probability {self._least:.2f}"
        return f"the small model of the cascade{sure}"

    async def judge(self, choice: int, delta: TextDelta) -> TextDelta | None:
        """What may be sent of a choice now; None: nothing yet. Raises Escalated."""
        if not self._passed.is_set():
            held = self._held.get(choice)
            delta = self._held[choice] = delta if held is None else _joined(held, delta)
            logprobs = [entry.logprob for entry in delta.logprobs or ()]
            if not is_decided(len(delta.token_ids), delta.finish_reason is not None, self._cascade):
                return None
            self._decide(logprobs)
            await self._passed.wait()
        if not self._show_logprobs:
            delta.logprobs = None
        return delta

    def _decide(self, logprobs: list[float]) -> None:
        judged = logprobs[: self._cascade.confidence_tokens]
        mean = fmean(judged) if judged else None
        if escalates(logprobs, self._cascade):
            self.failed = True
            found = "said nothing to judge" if mean is None else f"was unsure: mean log-probability {mean:.2f}"
            raise Escalated("unsure", f"the small model {found}")
        if mean is not None:
            self._least = mean if self._least is None else min(self._least, mean)
        self._undecided -= 1
        if not self._undecided:
            self._passed.set()


def _joined(first: TextDelta, second: TextDelta) -> TextDelta:
    logprobs = [*(first.logprobs or ()), *(second.logprobs or ())]
    return TextDelta(
        first.text + second.text,
        [*first.token_ids, *second.token_ids],
        second.finish_reason,
        logprobs,
        second.stop_matched,
        first.reasoning + second.reasoning,
        [*first.calls, *second.calls],
        [*first.pieces, *second.pieces],
    )
