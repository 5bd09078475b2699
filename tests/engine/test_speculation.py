"""How deep drafts are: never deeper than pays."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.request import GenerateRequest, SamplingParams
from penstock.engine.arrival import sequence_of
from penstock.engine.fairness import TenantCounter
from penstock.engine.limits import SchedulerLimits
from penstock.engine.sequence import Sequence
from penstock.engine.speculation import Prices, Speculation, best_depths, expected_tokens
from penstock.engine.step_time import StepShape, StepTimes
from penstock.simulation.virtual_engine import cpu_step_seconds


def free(sequences: int) -> float:
    return 0.0


def rate(outlooks: list[float], depths: list[int], streams: int, prices: Prices) -> float:
    """Tokens a second."""
    expected = sum(expected_tokens(p, depth) for p, depth in zip(outlooks, depths, strict=True))
    drafting = sum(prices.draft(sum(d >= depth for d in depths)) for depth in range(1, max(depths, default=0) + 1))
    extra = prices.start * any(depths) + prices.token * sum(depths) + drafting
    return (streams + expected) / (prices.plain + extra)


@given(
    outlooks=st.lists(st.floats(0, 1), min_size=1, max_size=8),
    others=st.integers(0, 64),
    start=st.floats(0, 1e-3),
    token=st.floats(0, 2e-3),
    draft=st.floats(0, 5e-3),
    budget=st.integers(0, 40),
    room=st.integers(0, 16),
)
def test_drafts_are_expected_to_gain(
    outlooks: list[float], others: int, start: float, token: float, draft: float, budget: int, room: int
) -> None:
    streams = len(outlooks) + others
    prices = Prices(5.5e-3 + 0.45e-3 * streams, start, token, lambda sequences: draft * (sequences > 0))
    depths = best_depths(outlooks, [room] * len(outlooks), streams, budget, prices)
    assert sum(depths) <= budget
    assert max(depths) <= room
    if any(depths):
        assert rate(outlooks, depths, streams, prices) > 1.02 * streams / prices.plain


@pytest.mark.parametrize(("streams", "deep"), [(1, True), (4, True), (256, False)])
def test_certain_drafts_are_deep_in_small_batches_only(streams: int, deep: bool) -> None:
    prices = Prices(5.5e-3 + 0.45e-3 * streams, 0.0, 0.45e-3, free)
    depths = best_depths([0.99] * streams, [8] * streams, streams, 1000, prices)
    assert (min(depths) >= 4) == deep
    assert any(depths) == deep


def test_a_slow_drafter_does_not_pay() -> None:
    prices = Prices(6e-3, 0.0, 0.45e-3, lambda sequences: 6e-3 * (sequences > 0))
    assert best_depths([0.95], [8], 1, 100, prices) == [0]


def test_a_step_stays_within_its_limit() -> None:
    prices = Prices(6e-3, 0.0, 0.4e-3, free, longest=8e-3)
    assert 1 <= best_depths([0.99], [15], 1, 100, prices)[0] <= 5
    assert best_depths([0.99], [15], 1, 100, Prices(6e-3, 0.0, 0.4e-3, free, longest=math.inf)) == [15]


def test_steps_with_drafts_are_learnt_apart() -> None:
    """On a GPU they take another path than plain decoding."""
    times = StepTimes()
    for number in range(200):
        plain = StepShape(1 + number % 16, 500 * (1 + number % 16))
        times.observe(plain, cpu_step_seconds(plain))
        drafted = StepShape(plain.decodes, plain.context, drafted=1 + number % 7)
        times.observe(drafted, 2e-3 + cpu_step_seconds(StepShape(plain.decodes + drafted.drafted, plain.context)))
    plain, drafted = StepShape(4, 2000), StepShape(4, 2000, drafted=4)
    assert times.predict(plain) == pytest.approx(cpu_step_seconds(plain), rel=0.05)
    assert times.predict(drafted) == pytest.approx(2e-3 + cpu_step_seconds(StepShape(8, 2000)), rel=0.05)


def test_a_slow_time_does_not_end_drafting_for_good() -> None:
    times = StepTimes()
    for number in range(200):
        plain, drafted = StepShape(1 + number % 4, 500), StepShape(1 + number % 4, 500, drafted=1 + number % 7)
        times.observe(plain, cpu_step_seconds(plain))
        times.observe(drafted, 4 * cpu_step_seconds(StepShape(drafted.decodes + drafted.drafted, 500)))
    shape, seconds = StepShape(1, 500, drafted=4), cpu_step_seconds(StepShape(5, 500))
    assert times.predict(shape) > 3 * seconds
    for _ in range(600):
        times.observe(StepShape(1, 500), cpu_step_seconds(StepShape(1, 500)))
    assert times.predict(shape) == pytest.approx(seconds, rel=0.1), "by the times of steps without drafts"


def test_a_machine_that_becomes_faster_without_drafts_is_faster_with_them() -> None:
    times = StepTimes()
    for number in range(200):
        plain, drafted = StepShape(1 + number % 4, 500), StepShape(1 + number % 4, 500, drafted=1 + number % 7)
        times.observe(plain, 2 * cpu_step_seconds(plain))
        times.observe(drafted, 2 * cpu_step_seconds(StepShape(drafted.decodes + drafted.drafted, 500)))
    for number in range(100):
        plain = StepShape(1 + number % 4, 500)
        times.observe(plain, cpu_step_seconds(plain))
    assert times.predict(StepShape(1, 500, drafted=4)) == pytest.approx(cpu_step_seconds(StepShape(5, 500)), rel=0.1)


def test_noise_does_not_make_drafts_seem_dear() -> None:
    """Single steps that take longer must not be taken for a machine that becomes slower and slower."""
    times, random = StepTimes(), Random(1)
    for number in range(20_000):
        shape = StepShape(1, 400 + number % 400, drafted=15 if number < 200 and number % 2 else 0)
        noise = random.lognormvariate(0, 0.03) * (3 if random.random() < 0.01 else 1)
        times.observe(shape, cpu_step_seconds(StepShape(1 + shape.drafted, shape.context)) * noise)
    learnt = times._drafted.predict(StepShape(1, 500, drafted=15).features(int))
    assert learnt == pytest.approx(cpu_step_seconds(StepShape(16, 500)), rel=0.15)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class SlowDrafter:
    """Takes a millisecond for every question, and knows how some sequences go on."""

    def __init__(self, clock: Clock, repeating: set[int]) -> None:
        self.clock, self.repeating, self.asked = clock, repeating, list[int]()

    def outlook(self, sequence: Sequence) -> float:
        self.clock.now += 1e-3
        self.asked.append(sequence.row)
        return 0.95 * (sequence.row in self.repeating)

    def behind(self, sequence: Sequence) -> float | None:
        return None

    def catch_up(self, sequence: Sequence, decodes: list[Sequence], seconds: float) -> bool:
        return True

    def seconds(self, sequences: int) -> float:
        return 0.0

    def propose(self, sequences: list[Sequence], depths: list[int]) -> list[list[int]]:
        return [[7] * depth for depth in depths]

    def forget(self, sequence: Sequence) -> None:
        pass


def test_asking_in_vain_takes_a_bounded_share_of_the_time() -> None:
    clock, rows = Clock(), 64
    drafter = SlowDrafter(clock, set())
    sequences = [decoding(row) for row in range(rows)]
    speculation = Speculation(drafter, learnt(), 15, clock, clock)
    for _ in range(5_000):
        assert not any(speculation.plan(sequences, 100)[:2])
        clock.now += 50e-3
        for sequence in sequences:
            sequence.tokens.append(3)
    assert 0.004 < 1e-3 * len(drafter.asked) / clock.now < 0.006


def test_many_that_come_together_are_asked_in_turn() -> None:
    clock = Clock()
    drafter = SlowDrafter(clock, set())
    sequences = [decoding(row) for row in range(64)]
    speculation = Speculation(drafter, learnt(), 15, clock, clock)
    for _ in range(64 * 41):
        asked = len(drafter.asked)
        speculation.plan(sequences, 100)
        assert len(drafter.asked) - asked <= 1, "one takes all the time there is"
        clock.now += 5e-3
    assert set(drafter.asked) == set(range(64))


def test_sequences_with_drafts_are_asked_all_the_time() -> None:
    clock = Clock()
    drafter = SlowDrafter(clock, {1})
    sequences = [decoding(row) for row in range(64)]
    speculation = Speculation(drafter, learnt(), 15, clock, clock)
    found = []
    for _ in range(1000):
        found.append([s.row for s in speculation.plan(sequences, 100).tokens])
        clock.now += 5e-3
    assert [1] in found[:100], "its turn has come"
    assert found[found.index([1]) :] == [[1]] * (1000 - found.index([1]))
    assert drafter.asked.count(0) < 20
    speculation.forget(sequences.pop(1))
    assert not any(speculation.plan(sequences, 100)[:2])


def test_what_drafts_gain_may_be_spent_on_asking() -> None:
    def asked(gain: int) -> int:
        clock = Clock()
        drafter = SlowDrafter(clock, {0})
        sequences = [decoding(0), decoding(1)]
        speculation = Speculation(drafter, learnt(), 15, clock, clock)
        for _ in range(2000):
            speculation.plan(sequences, 100)
            clock.now += 5e-3
            sequences[0].tokens.extend([7] * (1 + gain))
            sequences[1].tokens.append(3)
        return drafter.asked.count(1)

    assert asked(5) > 2 * asked(0)


class LaggingDrafter(SlowDrafter):
    """Has to compute so many seconds' worth of each sequence before it drafts for it."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__(clock, set(range(64)))
        self.missing: dict[int, float] = {}
        self.seconds_behind, self.chunks = seconds, list[tuple[int, float]]()

    def behind(self, sequence: Sequence) -> float | None:
        return self.missing.setdefault(sequence.row, self.seconds_behind) or None

    def catch_up(self, sequence: Sequence, decodes: list[Sequence], seconds: float) -> bool:
        self.chunks.append((sequence.row, seconds))
        self.clock.now += seconds
        self.missing[sequence.row] = max(0.0, self.missing[sequence.row] - seconds)
        return True


def test_a_drafter_catches_up_before_it_drafts_in_parts_as_long_as_a_step() -> None:
    clock, times = Clock(), learnt()
    drafter, sequences = LaggingDrafter(clock, 0.02), [decoding(row) for row in range(3)]
    speculation, drafted = Speculation(drafter, times, 15, clock, clock), [0, 0, 0]
    plain = times.predict(StepShape(3, 6))
    for _ in range(400):
        done = len(drafter.chunks)
        for s, draft in speculation.plan(sequences, 100).tokens.items():
            assert not drafter.missing[s.row]
            drafted[s.row] += len(draft)
        assert len(drafter.chunks) <= done + 1, "of one sequence in a step"
        clock.now += plain
        for s in sequences:
            s.tokens.append(3)
    assert all(drafted)
    assert all(seconds == pytest.approx(plain, rel=0.01) for _, seconds in drafter.chunks)
    rows = [row for row, _ in drafter.chunks]
    assert rows == sorted(rows), "one is through before the next one begins"


@pytest.mark.parametrize(("outputs", "left", "pays"), [(1, 10_000, False), (400, 10_000, True), (400, 20, False)])
def test_a_drafter_catches_up_where_as_many_tokens_again_make_up_for_it(outputs: int, left: int, pays: bool) -> None:
    clock = Clock()
    drafter, s = LaggingDrafter(clock, 0.5), decoding(0)
    s.tokens += [3] * outputs
    s.max_len = len(s.tokens) + left
    Speculation(drafter, learnt(), 15, clock, clock).plan([s], 100)
    assert bool(drafter.chunks) == pays


def test_a_step_with_an_objective_has_no_time_for_catching_up() -> None:
    clock, times = Clock(), learnt()
    drafter, s = LaggingDrafter(clock, 0.02), decoding(0)
    s.itl = times.predict(StepShape(1, 2))
    Speculation(drafter, times, 15, clock, clock).plan([s], 100)
    assert drafter.asked
    assert not drafter.chunks


def test_catching_up_is_not_taken_for_asking_in_vain() -> None:
    clock = Clock()
    drafter = LaggingDrafter(clock, 1.0)
    speculation, s = Speculation(drafter, learnt(), 15, clock, clock), decoding(0)
    s.tokens += [3] * 2000
    for _ in range(1000):
        asked = len(drafter.asked)
        if speculation.plan([s], 100).tokens:
            break
        assert len(drafter.asked) == asked + 1, "nobody is sent away while the drafter catches up"
        clock.now += 6e-3
        s.tokens.append(3)
    else:
        pytest.fail("there was no draft")


def decoding(row: int) -> Sequence:
    request = GenerateRequest(str(row), (1, 2, 3), SamplingParams(max_tokens=100_000))
    limits = SchedulerLimits(10_000, 16, max_seqs=8, max_step_tokens=512, max_model_len=150_000, vocab_size=100)
    sequence = sequence_of(request, row, TenantCounter("", 1.0), limits, 0.0)
    sequence.row, sequence.computed, sequence.first_token = row, 2, 0.0
    return sequence


def learnt() -> StepTimes:
    times = StepTimes()
    for number in range(200):
        shape = StepShape(1 + number % 16, 500)
        times.observe(shape, 6e-3 + 1e-5 * shape.decodes)
    return times
