"""What admitted requests get at several times the capacity, and beside one very long prompt: on a virtual clock."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from penstock.core.request import Chunk, Objective
from penstock.engine.limits import SchedulerLimits
from penstock.engine.planned_step import PlannedStep
from penstock.engine.scheduler import Scheduler
from penstock.engine.step_time import StepShape, StepTimes
from penstock.simulation.virtual_engine import VirtualEngine, cpu_step_seconds
from tests.engine.test_objectives import CPU, GPU, Requests, engine, met, percentile

INTERACTIVE = Objective("interactive", ttft=1.6, itl=0.08)
CAPACITY = 20.0  # requests of 64 in and 32 out a second on the virtual CPU


@pytest.mark.parametrize("load", [1.5, 3.0, 6.0])
@pytest.mark.parametrize("noise", [0.1, 0.2])
def test_the_admitted_keep_their_objective_however_much_arrives(load: float, noise: float) -> None:
    """Step times vary as on a machine that others use too; what is learnt of that in the first minute counts."""
    virtual = engine(CPU, noise=noise)
    requests, start = Requests(seed=1), virtual.now
    arrivals = [(at, requests.make(64, 32, objective=INTERACTIVE)) for at in requests.poisson(30.0, start, 40)]
    arrivals += [
        (at, requests.make(64, 32, objective=INTERACTIVE)) for at in requests.poisson(load * CAPACITY, start + 40, 40)
    ]
    answers = virtual.run(arrivals)
    counted = [(at, request) for at, request in arrivals if at >= start + 40]
    admitted = [(at, request) for at, request in counted if answers[request.id].refused is None]
    assert met(admitted, answers) >= 0.97
    assert len(admitted) / 40 >= 0.85 * CAPACITY  # the machine is not left idle for it


def test_a_missed_first_token_comes_soon_after() -> None:
    """The machine becomes three times slower at once: what was admitted before is late, but not for long."""
    virtual = engine(CPU)
    requests, start = Requests(seed=2), virtual.now
    arrivals = [(at, requests.make(64, 32, objective=INTERACTIVE)) for at in requests.poisson(60.0, start, 30)]
    slow_from = start + 10

    def seconds(shape: StepShape) -> float:
        return cpu_step_seconds(shape) * (3.0 if virtual.now > slow_from else 1.0)

    virtual.executor.seconds = seconds
    answers = virtual.run(arrivals)
    late = [a.ttft for a in answers.values() if a.refused is None and a.ttft > 1.6]
    assert late, "the case is too easy"
    assert max(late) < 4 * 1.6


@dataclass
class Crowd:
    """Streams in a closed loop, beside which a long prompt may arrive."""

    virtual: VirtualEngine
    ends: float
    requests: Requests = field(default_factory=lambda: Requests(seed=3))
    objective: Objective = field(default_factory=lambda: Objective("standard", paced=True))
    short: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.virtual.on_chunk = self._send_another

    def _send_another(self, chunk: Chunk) -> None:
        if chunk.finish_reason and chunk.request_id in self.short and self.virtual.now < self.ends:
            self.send()

    def send(self) -> None:
        draw = self.requests.random
        request = self.requests.make(draw.randint(32, 128), draw.randint(32, 128), objective=self.objective)
        self.short.add(request.id)
        self.virtual.submit(request)

    def first_tokens(self, begin: float, end: float) -> list[float]:
        answers = [self.virtual.outcomes[name] for name in self.short]
        return [a.ttft for a in answers if begin <= a.arrival < end]

    def gaps(self, begin: float, end: float) -> list[float]:
        times = [self.virtual.outcomes[name].token_times for name in self.short]
        return [b - a for t in times for a, b in itertools.pairwise(t) if begin <= a < end]


@pytest.mark.parametrize(
    ("limits", "long_len", "most_gap", "most_slowdown"),
    [
        (CPU, 8000, 2.0, 1.3),
        (replace(GPU, max_model_len=131_072, num_blocks=60_000, query_tile=32), 100_000, 2.5, 2.1),
    ],
    ids=["cpu", "gpu"],
)
def test_a_long_prompt_stalls_nobody(
    limits: SchedulerLimits, long_len: int, most_gap: float, most_slowdown: float
) -> None:
    alone = engine(limits)
    request = Requests(seed=4).make(long_len, 4)
    alone.run([(alone.now, request)])
    virtual = engine(limits)
    start = virtual.now
    crowd = Crowd(virtual, ends=start + 30)
    for _ in range(28):
        crowd.send()
    arrives = start + 10
    long = crowd.requests.make(long_len, 4, objective=crowd.objective)
    answers = virtual.run([(arrives, long)])
    there = arrives + answers[long.id].ttft
    before, during = crowd.first_tokens(start + 1, arrives), crowd.first_tokens(arrives, there)
    assert len(during) >= 10
    assert percentile(during, 0.99) <= 3 * percentile(before, 0.99)
    calm, busy = crowd.gaps(start + 1, arrives), crowd.gaps(arrives, there)
    assert percentile(busy, 0.99) <= most_gap * percentile(calm, 0.99)
    assert answers[long.id].ttft <= most_slowdown * alone.outcomes[request.id].ttft


def test_who_arrives_during_a_long_step_is_in_the_next() -> None:
    """A device that runs ahead is given its next step late, if the one under way is long."""
    virtual = engine(replace(GPU, max_model_len=131_072, num_blocks=60_000, query_tile=32))
    scheduler, requests, objective = virtual.scheduler, Requests(seed=8), Objective("standard", paced=True)
    for _ in range(8):
        virtual.submit(requests.make(32, 1000, objective=objective))
    virtual.run([], until=virtual.now + 0.1)
    assert scheduler.in_flight.plan_next_at() <= virtual.now  # only streams: no reason to wait
    virtual.submit(requests.make(100_000, 4, objective=objective))
    virtual.run([], until=virtual.now + 3.0)
    [shape] = scheduler.in_flight.shapes
    expected = scheduler.times.predict(shape)
    assert scheduler.in_flight.plan_next_at() == pytest.approx(virtual.now + min(0.7 * expected, expected - 0.005))
    short = requests.make(32, 4, objective=objective)
    virtual.run([(virtual.now + 0.3 * expected, short)], until=virtual.now + 2.5 * expected)
    assert virtual.outcomes[short.id].ttft < 2 * expected


def test_parts_of_a_prompt_are_whole_tiles() -> None:
    virtual = engine(replace(GPU, query_tile=32))
    requests, objective = Requests(seed=9), Objective("standard", paced=True)
    virtual.submit(requests.make(32, 1000, objective=objective))
    virtual.run([], until=virtual.now + 0.1)
    long = requests.make(10_007, 1, objective=objective)
    virtual.submit(long)
    parts, schedule = [], virtual.scheduler.schedule

    def noting(*args: Any) -> PlannedStep | None:
        planned = schedule(*args)
        if planned is not None and planned.culprit is not None and planned.culprit.request is long:
            parts.append(planned.largest)
        return planned

    virtual.scheduler.schedule = noting  # type: ignore[method-assign, assignment]
    virtual.run([], until=virtual.now + 1.0)
    assert sum(parts) == 10_007
    assert len(parts) > 10
    assert all(part % 32 == 0 for part in parts[:-1])


def test_a_long_prompt_gets_its_turn_beside_short_ones_that_overload_the_machine() -> None:
    virtual = engine(CPU)
    requests, start = Requests(seed=5), virtual.now
    objective = Objective("standard", paced=True)
    long = requests.make(4000, 4, objective=objective)
    short = [(at, requests.make(100, 16, objective=objective)) for at in requests.poisson(18.0, start, 60)]
    answers = virtual.run([(start + 5, long), *short], until=start + 60)
    assert answers[long.id].ttft < 25


def test_offline_work_is_not_slowed_down_for_streams_nobody_reads() -> None:
    """Requests without a class, as the library makes them: a step is as large as it may be."""
    virtual = engine(GPU)
    requests = Requests(seed=6)
    virtual.run([(virtual.now, requests.make(64, 200))], until=virtual.now + 0.1)
    virtual.submit(requests.make(30_000, 4))
    scheduler = virtual.scheduler
    planned = scheduler.schedule(virtual.now, scheduler.choose(virtual.now))
    assert planned is not None
    assert len(planned.step.tokens) == GPU.max_step_tokens


def test_steps_are_planned_shorter_by_what_they_have_overrun() -> None:
    times, shape = StepTimes(), StepShape(8, 2000).with_chunk(0, 100)
    assert times.plan_within(math.inf) == math.inf
    for _ in range(3000):
        times.observe(shape, 0.040)
    assert times.plan_within(0.1) == pytest.approx(0.08)
    times.observe(shape, 0.040 + 0.024)
    assert times.plan_within(0.1) == pytest.approx(0.07, abs=0.002)
    times.observe(shape, 0.5)  # more than any plan could make up for
    assert times.plan_within(0.1) == pytest.approx(0.05)
    for _ in range(1200):
        times.observe(shape, 0.040)
    assert times.plan_within(0.1) == pytest.approx(0.08)


def test_first_come_first_served_stays_that() -> None:
    limits = replace(CPU, fcfs=True, max_seqs=1)
    virtual = VirtualEngine(Scheduler(limits), cpu_step_seconds, runs_ahead=False)
    requests = Requests(seed=7)
    long, short = requests.make(3000, 2), requests.make(20, 2)
    answers = virtual.run([(0.0, long), (0.001, short)])
    assert answers[long.id].token_times[-1] < answers[short.id].token_times[0]
