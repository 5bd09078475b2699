from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.arrivals import (
    BURST_FACTOR,
    BURST_PERIOD,
    BURST_SECONDS,
    burst_time,
    in_bursts,
    parse_objectives,
    parse_shares,
    poisson_workload,
    trace_workload,
    with_classes,
    with_objectives,
)
from penstock.bench.workloads import mix_workload, uniform_workload
from penstock.core.errors import InvalidRequest
from penstock.core.request import Objective

BASE = uniform_workload(8, 4, count=3, clients=2)


@given(rate=st.floats(20, 100), seed=st.integers(0, 2**32))
def test_arrivals_are_poisson_at_the_rate(rate: float, seed: int) -> None:
    seconds = 1000 / rate
    jobs = poisson_workload(BASE, rate, seconds).jobs(seed)
    arrivals = [job.arrival for job in jobs]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] > 0
    assert arrivals[-1] <= seconds
    assert 830 < len(jobs) < 1180  # 1000 expected; more than five standard deviations
    assert len({tuple(job.prompt) for job in jobs}) == len(jobs)  # no cache helps


@given(a=st.floats(0, 1000), b=st.floats(0, 1000), period=st.integers(0, 100))
def test_bursts_bend_time_without_changing_order_or_the_mean_rate(a: float, b: float, period: int) -> None:
    first, second = sorted((a, b))
    assert burst_time(first) <= burst_time(second)
    assert burst_time(period * BURST_PERIOD) == period * BURST_PERIOD


def test_bursts_bring_their_share_at_once() -> None:
    jobs = in_bursts(poisson_workload(BASE, rate=100, seconds=60)).jobs(seed=0)
    inside = sum(job.arrival % BURST_PERIOD < BURST_SECONDS for job in jobs)
    assert inside / len(jobs) == pytest.approx(BURST_FACTOR * BURST_SECONDS / BURST_PERIOD, abs=0.03)


def test_classes_occur_by_their_share() -> None:
    shares = parse_shares("interactive=9,batch=1")
    jobs = with_classes(poisson_workload(BASE, 100, 30), shares).jobs(seed=0)
    counts = Counter(job.kind for job in jobs)
    assert set(counts) == {"interactive", "batch"}
    assert counts["batch"] / len(jobs) == pytest.approx(0.1, abs=0.03)


@pytest.mark.parametrize("text", ["interactive", "interactive=", "=1", "a=0", "a=-1", "a=nan", "a=inf", "a=1,", ""])
def test_malformed_shares_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="must look like"):
        parse_shares(text)


def test_objectives_given_replace_the_workloads_own_and_all_are_scaled() -> None:
    workload = with_objectives(mix_workload("slo_mix", 1, 1), parse_objectives("short=300/-"), scale=2)
    assert workload.objectives == {"short": Objective("short", 0.6, None), "long": Objective("long", 8.0, 0.1)}


@pytest.mark.parametrize("text", ["short", "short=1", "short=a/b", "short=1/2/3", "short=-1/5", ""])
def test_malformed_objectives_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"must"):
        parse_objectives(text)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "not JSON"),
        ("[]", "must be an object"),
        ({"output_tokens": 1, "prompt_tokens": 1}, "at must be"),
        ({"at": -1, "output_tokens": 1, "prompt_tokens": 1}, "at must be"),
        ({"at": True, "output_tokens": 1, "prompt_tokens": 1}, "at must be"),
        ('{"at": NaN, "output_tokens": 1, "prompt_tokens": 1}', "at must be"),
        ({"at": 1, "prompt_tokens": 1}, "output_tokens must be"),
        ({"at": 1, "output_tokens": 0, "prompt_tokens": 1}, "output_tokens must be"),
        ({"at": 1, "output_tokens": 1, "prompt_tokens": 1.5}, "prompt_tokens must be"),
        ({"at": 1, "output_tokens": 1}, "exactly one of"),
        ({"at": 1, "output_tokens": 1, "prompt_tokens": 1, "prompt": "x"}, "exactly one of"),
        ({"at": 1, "output_tokens": 1, "prompt": ""}, "prompt must be text"),
        ({"at": 1, "output_tokens": 1, "messages": ["x"]}, "messages must be"),
        ({"at": 1, "output_tokens": 1, "messages": []}, "messages must be"),
        ({"at": 1, "output_tokens": 1, "prompt_tokens": 1, "class": 3}, "class must be"),
        ({"at": 1, "output_tokens": 1, "prompt_tokens": 1, "model": "x"}, "model is not a field"),
    ],
)
def test_a_bad_line_of_a_trace_is_named_with_its_field(tmp_path: Path, line: Any, complaint: str) -> None:
    file = tmp_path / "trace.jsonl"
    good = json.dumps({"at": 0, "output_tokens": 1, "prompt_tokens": 1})
    file.write_text(f"{good}\n\n{line if isinstance(line, str) else json.dumps(line)}\n")
    with pytest.raises(InvalidRequest, match=f"trace.jsonl, line 3: .*{complaint}"):
        trace_workload(str(file))
