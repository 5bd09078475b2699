"""Drafts from repeated text: what is found, how sure it is, and whose text it may come from."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.request import Adapter, GenerateRequest, SamplingParams
from penstock.engine.arrival import sequence_of
from penstock.engine.fairness import TenantCounter
from penstock.engine.limits import SchedulerLimits
from penstock.engine.sequence import Sequence
from penstock.speculative import suffix
from penstock.speculative.suffix import SuffixDrafter

LIMITS = SchedulerLimits(1000, 16, 8, 256, 100_000, 50_000)


def sequence(prompt: list[int], **fields: Any) -> Sequence:
    request = GenerateRequest("r", prompt, SamplingParams(), **fields)
    return sequence_of(request, 0, TenantCounter("", 1.0), LIMITS, 0.0)


def outlook(drafter: SuffixDrafter, s: Sequence) -> float:
    """Once all its tokens are read."""
    for _ in range(100):
        if found := drafter.outlook(s):
            return found
    return 0.0


def accepted(drafter: SuffixDrafter, s: Sequence, output: list[int], least: float = 0.5) -> int:
    """Steps that are saved by drafts of up to 8 tokens where they are likely."""
    at = saved = 0
    while at < len(output):
        draft = drafter.propose([s], [8])[0] if drafter.outlook(s) > least else []
        right = next((i for i, t in enumerate(draft) if i >= len(output) - at - 1 or t != output[at + i]), len(draft))
        s.tokens += output[at : at + right + 1]
        at += right + 1
        saved += right
    return saved


def test_a_copy_is_drafted_from_the_prompt() -> None:
    text = random.Random(1).choices(range(1000), k=200)
    assert accepted(SuffixDrafter(), sequence(text), text) > 160


def test_a_copy_is_recognised_by_whoever_asks_rarely() -> None:
    text = random.Random(1).choices(range(1000), k=200)
    drafter, s = SuffixDrafter(), sequence(text)
    assert not drafter.outlook(s)
    s.tokens += text[:100]
    assert drafter.outlook(s) > 0.8


def test_how_a_prompt_goes_on_does_not_count_against_its_output() -> None:
    never_the_same = [token for number in range(8) for token in (5, 6, 100 + number)]
    drafter, s = SuffixDrafter(), sequence(never_the_same)
    s.tokens += [5, 6]
    assert outlook(drafter, s) >= suffix._PRIOR


def test_an_edited_copy_is_found_again_after_every_change() -> None:
    draw = random.Random(2)
    text = draw.choices(range(1000), k=400)
    edited = [t for t in text if draw.random() > 0.02 for t in ([t, 7] if draw.random() < 0.02 else [t])]
    assert accepted(SuffixDrafter(), sequence(text), edited) > 250


def test_repetition_goes_on() -> None:
    drafter, s = SuffixDrafter(), sequence([5, 6, 7, *[1, 2, 3] * 8])
    outlook(drafter, s)
    assert drafter.propose([s], [7]) == [[1, 2, 3, 1, 2, 3, 1]]


def test_text_that_does_not_repeat_is_not_drafted() -> None:
    draw = random.Random(3)
    drafter, s = SuffixDrafter(), sequence(draw.choices(range(40), k=300))
    asked = 0
    for _ in range(300):
        asked += drafter.outlook(s) > 0.4
        s.tokens.append(draw.randrange(40))
    assert asked < 30, "pairs recur by chance, and what follows them is chance"


def test_long_prompts_are_read_bit_by_bit() -> None:
    text = random.Random(4).choices(range(1000), k=5000)
    drafter, s = SuffixDrafter(), sequence([*text, *text[4000:4020]])
    asked = sum(drafter.outlook(s) == 0 for _ in range(10))
    assert 2 <= asked < 10
    assert drafter.propose([s], [5]) == [text[4020:4025]]


def test_what_the_client_predicts_is_drafted_from_its_beginning() -> None:
    draw = random.Random(7)
    prompt, predicted = draw.choices(range(1000), k=100), draw.choices(range(1000), k=200)
    edited = [t for t in predicted if draw.random() > 0.02]
    assert accepted(SuffixDrafter(), sequence(prompt, prediction=predicted), edited) > 150
    assert accepted(SuffixDrafter(), sequence(prompt), edited) == 0


def test_answers_are_found_by_the_same_scope_only() -> None:
    answer = random.Random(5).choices(range(1000), k=50)
    theirs: dict[str, Any] = {"tenant": "a", "prefix_scope": "a", "cache_salt": "s", "adapter": Adapter("x", "/x")}
    drafter = SuffixDrafter()
    first = sequence([1], **theirs)
    drafter.outlook(first)
    first.tokens += answer
    drafter.forget(first)
    others = ({"tenant": "b"}, {"prefix_scope": "b"}, {"cache_salt": ""}, {"adapter": None})
    for changed in others:
        assert not outlook(drafter, sequence([1, *answer[:10]], **{**theirs, **changed}))
    same = sequence([1, *answer[:10]], **theirs)
    assert outlook(drafter, same)
    assert drafter.propose([same], [4]) == [answer[10:14]]


def test_memory_is_bounded() -> None:
    drafter, draw = SuffixDrafter(), random.Random(6)
    for number in range(100):
        s = sequence(draw.choices(range(1000), k=20_000), tenant=str(number % 50))
        drafter.outlook(s)
        s.tokens += draw.choices(range(1000), k=3000)
        assert len(drafter._readers[s]._index._before) <= suffix._MOST_INDEXED
        drafter.forget(s)
    assert not drafter._readers
    assert len(drafter._scopes) <= suffix._SCOPES
    for answers in drafter._scopes.values():
        assert len(answers.newer.tokens) <= suffix._ANSWERS


@given(data=st.data(), tokens=st.lists(st.integers(0, 3), min_size=1, max_size=60))
def test_whatever_is_read_drafts_are_there_and_of_their_depth(data: st.DataObject, tokens: list[int]) -> None:
    drafter, s = SuffixDrafter(), sequence(tokens[:1])
    for token in tokens[1:]:
        s.tokens.append(token)
        if data.draw(st.booleans()):
            chance = drafter.outlook(s)
            assert 0 <= chance <= 1
            if chance:
                (draft,) = drafter.propose([s], [5])
                assert 1 <= len(draft) <= 5
                assert set(draft) <= set(tokens)
