"""Calls are recorded while a profile is taken, and afterwards everything is as it was."""

from __future__ import annotations

import types

import pytest

from penstock.profiling.recorder import Recorder


class Adder:
    def add(self, a: int, b: int) -> int:
        return a + b

    async def slow_add(self, a: int, b: int) -> int:
        return a + b


def test_a_watched_method_of_a_class_records_each_call_and_its_result() -> None:
    recorder, before = Recorder(), Adder.add
    recorder.watch(Adder, "add", "adding", "arithmetic", lambda total, _, a, b: {"total": total, "of": [a, b]})
    adder = Adder()
    assert adder.add(1, 2) == 3
    recorder.restore()
    assert Adder.add is before
    assert adder.add(1, 2) == 3
    (event,) = recorder.events
    assert (event.name, event.category, event.args) == ("adding", "arithmetic", {"total": 3, "of": [1, 2]})
    assert event.began <= event.ended


def test_objects_and_modules_are_left_as_they_were() -> None:
    adder, module = Adder(), types.ModuleType("module")
    module.twice = lambda x: 2 * x  # type: ignore[attr-defined]
    before = vars(module)["twice"]
    recorder = Recorder()
    recorder.watch(adder, "add", "add", "c")
    recorder.watch(adder, "add", "add again", "c")
    recorder.watch(module, "twice", "twice", "c")
    assert adder.add(2, 3) == 5
    assert module.twice(4) == 8
    recorder.restore()
    assert vars(adder) == {}
    assert vars(module)["twice"] is before
    assert [event.name for event in recorder.events] == ["add", "add again", "twice"]


async def test_a_call_that_fails_is_recorded_and_fails() -> None:
    recorder = Recorder()
    recorder.watch(Adder, "add", "add", "c", lambda total, *_: {"total": total})
    recorder.watch_async(Adder, "slow_add", "slow", "c")
    with pytest.raises(TypeError):
        Adder().add(1, None)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        await Adder().slow_add(1, None)  # type: ignore[arg-type]
    assert await Adder().slow_add(1, 2) == 3
    recorder.restore()
    assert [(event.name, event.args) for event in recorder.events] == [("add", None), ("slow", None), ("slow", None)]
    assert len({event.overlaps for event in recorder.events}) == 3


def test_events_beyond_the_limit_are_counted() -> None:
    recorder = Recorder(limit=2)
    recorder.watch(Adder, "add", "add", "c")
    for _ in range(5):
        Adder().add(1, 2)
    recorder.restore()
    assert (len(recorder.events), recorder.dropped) == (2, 3)
