"""A cascade's small model: whatever comes in which order, all of it is released once all of it is sure enough."""

from __future__ import annotations

import asyncio
import random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.request import TokenLogprob
from penstock.fleet.settings import CascadeConfig
from penstock.gateway.api.trial import Escalated, Trial
from penstock.text.stream import TextDelta

WINDOW, LEAST = 3, -1.0
logprobs = st.floats(-2.0, 0.0)
chunks = st.lists(st.lists(logprobs, min_size=1, max_size=3), min_size=1, max_size=5)  # of one choice


def deltas(choice: list[list[float]]) -> list[TextDelta]:
    pieces = [TextDelta("x" * len(p), [1] * len(p), None, [TokenLogprob(1, value) for value in p]) for p in choice]
    pieces[-1].finish_reason = "stop"
    return pieces


def is_sure(choice: list[list[float]]) -> bool:
    return fmean([value for piece in choice for value in piece][:WINDOW]) >= LEAST


@given(st.lists(chunks, min_size=1, max_size=4), st.booleans(), st.integers(0, 99))
def test_all_choices_are_released_whole_or_none_is(
    choices: list[list[list[float]]], show_logprobs: bool, order: int
) -> None:
    draw = random.Random(order)
    cascade = CascadeConfig("s", "l", min_logprob=LEAST, confidence_tokens=WINDOW)
    released: list[list[TextDelta]] = [[] for _ in choices]

    async def run() -> None:
        trial = Trial(cascade, len(choices), show_logprobs=show_logprobs)
        seen = [0] * len(choices)

        async def read(index: int) -> None:
            for piece in deltas(choices[index]):
                for _ in range(draw.randrange(4)):
                    await asyncio.sleep(0)
                seen[index] += len(piece.token_ids)
                if (found := await trial.judge(index, piece)) is not None:
                    released[index].append(found)
                    for other, tokens in enumerate(seen):
                        assert tokens >= min(WINDOW, sum(map(len, choices[other]))), "released before all had decided"

        async with asyncio.TaskGroup() as tasks:
            for index in range(len(choices)):
                tasks.create_task(read(index))

    if not all(map(is_sure, choices)):
        with pytest.raises(ExceptionGroup) as failures:
            asyncio.run(run())
        assert {type(failure) for failure in failures.value.exceptions} == {Escalated}
        assert not any(released)
        return
    asyncio.run(run())
    for choice, pieces in zip(choices, released, strict=True):
        assert sum(len(piece.text) for piece in pieces) == sum(map(len, choice))
        assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["stop"]
        shown = [entry.logprob for piece in pieces for entry in piece.logprobs or ()]
        assert shown == ([value for piece in choice for value in piece] if show_logprobs else [])


def test_without_a_threshold_nothing_is_held_back() -> None:
    trial = Trial(CascadeConfig("s", "l", min_logprob=None), 1, show_logprobs=True)
    first = TextDelta("x", [1])
    assert asyncio.run(trial.judge(0, first)) is first
