from __future__ import annotations

import math
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.charts import axis_over
from penstock.bench.html_report import render
from penstock.bench.measure import Timeline, summarise
from penstock.bench.report import Result
from penstock.bench.stall import chosen, story_of, worst_stall
from penstock.bench.workloads import Workload, mix_workload, uniform_workload
from penstock.core.ledger import Ledger, Stall
from penstock.core.request import Objective

HOSTILE = '<img src="http://elsewhere/x">'


class Page(HTMLParser):
    """Checks that tags nest, and collects what a reader sees."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.seen.append(data)


def timeline(sent: float, first: float, gaps: list[float], kind: str, name: str, prompt: int = 100) -> Timeline:
    times = [first]
    for gap in gaps:
        times.append(times[-1] + gap)
    ledger = Ledger(name, prompt_tokens=prompt, queued={"order": 0.01})
    objective = Objective(kind, 0.2, 0.05)
    return Timeline(sent, prompt, len(times), times, times[-1], None, kind, objective, late=0.001, ledger=ledger)


def stalled_run() -> list[Timeline]:
    """A long prompt from 1.0 to 1.4 holds up one stream for 0.4 seconds and another for 0.3."""
    victim = timeline(0.9, 1.0, [0.02, 0.4, 0.02], "short", "victim")
    assert victim.ledger is not None
    victim.ledger.stalls = [Stall("culprit", 0.38, 3)]
    other = timeline(0.9, 1.05, [0.3, 0.02], HOSTILE, "other")
    culprit = timeline(1.0, 1.42, [0.02], "short", "culprit", prompt=9000)
    bystanders = [timeline(0.5 + i / 100, 0.9, [0.05] * 20, "short", f"b{i}") for i in range(12)]
    return [other, *bystanders, culprit, victim]


def result(workload: Workload, timelines: list[Timeline], label: str) -> Result:
    detail = {"scheduling": "deadline", "values": [1.0], "stopped_early": False}
    return Result(workload, summarise(timelines, 2.0), None, detail, label, timelines)


FACTS = {"model": "m", "precision": "int8", "capacity": {"slo_mix": None}, "attainment": 0.99}


def test_the_page_is_whole_and_loads_nothing() -> None:
    refused = Timeline(0.0, finished=0.01, kind="short", objective=Objective("short", 0.2), refused=True, retry_after=2)
    runs = [result(mix_workload("slo_mix", rate, 60), [*stalled_run(), refused], f"slo_mix@{rate}") for rate in (2, 40)]
    runs.append(result(uniform_workload(8, 8, 1, 1), [timeline(0, 0.1, [], "", "x")], "closed"))
    text = render("engine", runs, FACTS)
    page = Page(text)
    seen = " ".join(page.seen)
    assert HOSTILE in seen  # as text
    assert page.tags.count("svg") == 4  # attainment, first token, gaps, stall
    assert not {"img", "script", "link", "iframe"} & set(page.tags)
    assert not [value for name, value in page.attributes if name in ("src", "href")]
    assert "nan" not in text
    assert "inf" not in re.sub(r"\binfo\w*", "", text)
    for expected in ("slo_mix@2", "slo_mix@40", "no rate tried holds 99.0%", "waited 400 ms for token 3 of 4"):
        assert expected in seen
    numbers = [float(value) for name, value in page.attributes if name in ("x", "y", "cx", "cy", "x1", "x2")]
    assert min(numbers) >= 0
    assert max(numbers) <= 700


def test_a_closed_run_without_gaps_still_makes_a_page() -> None:
    page = Page(render("engine", [result(uniform_workload(8, 1, 1, 1), [timeline(0, 0.1, [], "", "x")], "r")], FACTS))
    assert "svg" not in page.tags


def test_the_worst_stall_names_who_waited_and_who_is_to_blame() -> None:
    run = stalled_run()
    found = worst_stall([result(mix_workload("slo_mix", 2, 60), run, "run")])
    assert found is not None
    stall, timelines = found
    assert stall.victim is run[-1]
    assert stall.seconds == pytest.approx(0.4)
    lanes = chosen(stall, timelines)
    assert lanes[:2] == [run[-1], run[-2]]  # the victim, then the culprit, of fifteen
    assert len(lanes) == 10
    story = " ".join(story_of(stall, timelines))
    assert "9,000 tokens in" in story
    assert "380 ms in 3 steps" in story


@given(values=st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=20), log=st.booleans())
def test_an_axis_holds_its_values_and_has_a_few_round_ticks(values: list[float], log: bool) -> None:
    axis = axis_over("", values, log=log)
    places = [axis.at(value) for value in sorted(values)]
    assert places == sorted(places)
    assert all(0 <= place <= 1 and math.isfinite(place) for place in places)
    assert axis.low <= min(values) * (1 + 1e-9)
    assert axis.high >= max(values) * (1 - 1e-9)
    ticks = axis.ticks()
    assert 1 <= len(ticks) <= 12
    assert all(axis.low * (1 - 1e-6) <= tick <= axis.high * (1 + 1e-6) for tick in ticks)
