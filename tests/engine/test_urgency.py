"""Who goes before whom, among requests that wait."""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import Overloaded
from penstock.core.request import GenerateRequest, Objective, SamplingParams
from penstock.engine.admission import Admission, Load
from penstock.engine.arrival import sequence_of
from penstock.engine.bookkeeping import Counts
from penstock.engine.fairness import TenantCounter
from penstock.engine.limits import SchedulerLimits
from penstock.engine.sequence import Sequence
from penstock.engine.step_time import StepShape, StepTimes
from penstock.engine.urgency import AGING_SECONDS, Behind, Ranking, WaitingQueue, comes_later
from penstock.simulation.virtual_engine import cpu_step_seconds

LIMITS = SchedulerLimits(
    num_blocks=64, block_size=16, max_seqs=8, max_step_tokens=64, max_model_len=512, vocab_size=100
)
TENANTS = [TenantCounter(name, 1.0) for name in "abc"]
REQUEST = st.tuples(
    st.integers(0, 2), st.integers(-2, 2), st.sampled_from(TENANTS), st.integers(1, 50), st.floats(0, 2 * AGING_SECONDS)
)


def waiting(number: int, asked: tuple[int, int, TenantCounter, int, float]) -> Sequence:
    rank, priority, counter, tokens, due = asked
    request = GenerateRequest(
        str(number), [1] * tokens, SamplingParams(), objective=Objective("", rank=rank), priority=priority
    )
    made = sequence_of(request, number, counter, LIMITS, 0.0)
    made.due = due
    return made


def ranking_of(queue: WaitingQueue, leads: list[int], promoting: bool) -> Ranking:
    best = queue.best_class or (0, 0)
    return Ranking(1.5 * AGING_SECONDS, dict(zip(TENANTS, leads, strict=True)), best, promoting)


LEADS = st.lists(st.integers(0, 2), min_size=3, max_size=3)


@given(st.lists(REQUEST, max_size=20), REQUEST, LEADS, st.booleans(), st.sets(st.integers(0, 19)))
def test_what_comes_behind_a_request_is_told_in_one(
    asked: list[tuple[int, int, TenantCounter, int, float]],
    arriving: tuple[int, int, TenantCounter, int, float],
    leads: list[int],
    promoting: bool,
    leaving: set[int],
) -> None:
    queue, everyone = WaitingQueue(), [waiting(number, one) for number, one in enumerate(asked)]
    for sequence in everyone:
        queue.push(sequence)
    for sequence in [s for s in everyone if s.order[2] in leaving]:
        queue.remove(sequence)
        everyone.remove(sequence)
    ranking, head = ranking_of(queue, leads, promoting), waiting(len(asked), arriving)
    before, behind = queue.split(head, ranking)
    rest = defaultdict(list)
    for sequence in everyone:
        if sequence not in before:
            assert ranking.of(sequence) > ranking.of(head)
            rest[*sequence.order[:2], sequence.counter].append(sequence)
    told = [Behind(min(s.due for s in some), len(some), sum(s.to_compute for s in some)) for some in rest.values()]
    assert sorted(map(repr, behind)) == sorted(map(repr, told))
    assert queue.tokens == sum(s.to_compute for s in everyone)
    same_class = [s for s in everyone if s.order[:2] == head.order[:2] and s.counter is head.counter]
    assert all(sequence in before for sequence in same_class)


@given(REQUEST, REQUEST)
def test_one_of_two_gives_way(
    first: tuple[int, int, TenantCounter, int, float], second: tuple[int, int, TenantCounter, int, float]
) -> None:
    one, other = waiting(0, first), waiting(1, second)
    assert comes_later(one, other) != comes_later(other, one)
    if one.order[0] != other.order[0]:
        assert comes_later(one, other) == (one.order[0] > other.order[0])
    elif one.counter is other.counter:
        assert comes_later(one, other) == (one.order > other.order)
    else:
        assert comes_later(other, one), "tenants do not decide how urgent the work of others is"


def test_who_leads_leaves_room_for_the_streams_of_others() -> None:
    times, itl = StepTimes(), 0.1
    for count in range(1, 300):
        for shape in (StepShape(count, 100 * count), StepShape(count, 100 * count).with_chunk(0, count)):
            times.observe(shape, cpu_step_seconds(shape))
    shapes = (StepShape(count, 100 * count) for count in range(10_000))
    busy = next(s for s in shapes if 0.7 * itl < times.base_seconds(s) < times.plan_within(itl))
    objective = Objective("paced", ttft=60.0, itl=itl)
    for lead in (0, 1):
        request = GenerateRequest(str(lead), [1] * 20, SamplingParams(), objective=objective)
        sequence = sequence_of(request, lead, TENANTS[0], LIMITS, 0.0)
        sequence.due = 60.0
        ranking = Ranking(0.0, {TENANTS[0]: lead}, (0, 0))
        with pytest.raises(Overloaded, match="inter-token latency") if lead else nullcontext():
            Admission(times, Counts()).admit(sequence, objective, Load(ranking, [], [], busy, 0.08, 0.0))
