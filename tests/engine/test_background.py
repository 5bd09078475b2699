"""Work that nobody waits for beside readers: the real scheduler on a virtual clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.core.request import Objective
from penstock.engine.planned_step import PlannedStep
from penstock.engine.step_time import StepShape
from penstock.simulation.virtual_engine import VirtualEngine
from tests.engine.test_objectives import CPU, Requests, engine

BATCH = Objective("batch", rank=1)


def recorded(virtual: VirtualEngine) -> list[PlannedStep]:
    """The steps that are planned from now on."""
    steps: list[PlannedStep] = []
    inner = virtual.scheduler.schedule

    def schedule(*args: Any) -> PlannedStep | None:
        planned = inner(*args)
        if planned is not None:
            steps.append(planned)
        return planned

    virtual.scheduler.schedule = schedule  # type: ignore[method-assign, assignment]
    return steps


def test_it_sits_out_steps_that_compute_the_prompt_of_a_reader() -> None:
    virtual, requests = engine(CPU), Requests(seed=1)
    steps, start = recorded(virtual), virtual.now
    batch = [(start, requests.make(100, 200, objective=BATCH)) for _ in range(16)]
    readers = [(start + 1 + number / 4, requests.make(300, 4)) for number in range(20)]
    answers = virtual.run([*batch, *readers], until=start + 60)
    assert all(answer.finish_reason == "length" for answer in answers.values())
    with_prompts = [
        s for s in steps if any(not q.background and c > 1 for q, c in zip(s.sequences, s.step.counts, strict=True))
    ]
    assert with_prompts
    assert not any(q.background for s in with_prompts for q in s.sequences)


def test_readers_hardly_wait_for_it_and_all_of_it_advances() -> None:
    waits = []
    for number in (0, 24):
        virtual, requests = engine(replace(CPU, max_seqs=32), noise=0.0), Requests(seed=2)
        start = virtual.now
        batch = [(start + 1, requests.make(100, 60, objective=BATCH)) for _ in range(number)]
        readers = [(start + number_of / 2, requests.make(200, 8)) for number_of in range(40)]
        answers = virtual.run([*readers, *batch], until=start + 120)
        waits.append(sorted(answers[request.id].ttft for _, request in readers))
        assert all(len(answers[request.id].token_times) == 60 for _, request in batch)
    alone, beside = waits
    assert beside[-1] < alone[-1] + 0.03


def test_without_readers_steps_are_as_large_as_ever() -> None:
    virtual, requests = engine(CPU), Requests(seed=3)
    virtual.run([], until=virtual.now + 60)
    steps = recorded(virtual)
    answers = virtual.run([(virtual.now, requests.make(50, 20, objective=BATCH)) for _ in range(20)])
    assert len([answer for answer in answers.values() if answer.finish_reason == "length"]) >= 20
    assert max(len(planned.sequences) for planned in steps) == 20


def test_it_goes_on_while_readers_never_stop_and_more_of_it_comes() -> None:
    virtual, requests = engine(CPU), Requests(seed=4)
    start = virtual.now
    first = requests.make(20, 4000, objective=BATCH)
    more = [(start + 1 + number / 4, requests.make(20, 2, objective=BATCH)) for number in range(100)]
    readers = [(at, requests.make(200, 8)) for at in requests.poisson(60.0, start + 0.5, 25)]
    answers = virtual.run([(start, first), *more, *readers], until=start + 25)
    assert sum(at > start + 10 for at in answers[first.id].token_times) >= 10


def test_beside_the_streams_of_readers_it_takes_a_fifth_of_the_time() -> None:
    virtual, requests = engine(CPU, noise=0.0), Requests(seed=5)
    steps, start = recorded(virtual), virtual.now
    readers = [(start + number, requests.make(20, 200)) for number in range(10)]
    batch = [(start, requests.make(200, 40, objective=BATCH)) for _ in range(40)]
    virtual.run([*readers, *batch], until=start + 60)
    times, taken, together = virtual.scheduler.times, 0.0, 0.0
    for planned in steps:
        streams = [
            s for s, c in zip(planned.sequences, planned.step.counts, strict=True) if not s.background and c == 1
        ]
        if streams:
            alone = times.predict(StepShape(len(streams), 100 * len(streams)))
            together += alone
            taken += max(0.0, times.predict(planned.shape) - alone) if len(streams) < len(planned.sequences) else 0.0
    assert 0.1 * together < taken < 0.3 * together


def test_its_prompts_and_its_streams_take_turns() -> None:
    virtual, requests = engine(CPU), Requests(seed=6)
    steps, start = recorded(virtual), virtual.now
    batch = [(start + 1, requests.make(100, 40, objective=BATCH)) for _ in range(20)]
    answers = virtual.run([(start, requests.make(20, 2)), *batch], until=start + 60)
    assert all(answer.finish_reason == "length" for answer in answers.values())
    kinds = {tuple(sorted({count > 1 for count in planned.step.counts})) for planned in steps[10:]}
    assert kinds == {(False,), (True,)}
