"""Objectives, admission, fairness and ledgers: the real scheduler on a virtual clock."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.cost import cost
from penstock.core.errors import DeadlineTooShort, Overloaded
from penstock.core.ledger import MissCause
from penstock.core.request import GenerateRequest, Objective, SamplingParams
from penstock.engine.limits import SchedulerLimits
from penstock.engine.scheduler import Scheduler
from penstock.simulation.virtual_engine import Outcome, VirtualEngine, cpu_step_seconds, gpu_step_seconds

GPU = SchedulerLimits(
    num_blocks=50_000, block_size=16, max_seqs=512, max_step_tokens=8192, max_model_len=32_768, vocab_size=100_000
)
CPU = replace(GPU, num_blocks=4096, max_seqs=64, max_step_tokens=256, max_model_len=8192)
SHORT = Objective("short", ttft=0.2, itl=0.05)
LONG = Objective("long", ttft=4.0, itl=0.05)

Arrival = tuple[float, GenerateRequest]


class Requests:
    """Makes requests with prompts that share nothing."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.made = 0

    def make(self, prompt_len: int, output_len: int, **options: Any) -> GenerateRequest:
        self.made += 1
        prompt = [self.made, *(self.random.randrange(100_000) for _ in range(prompt_len - 1))]
        params = SamplingParams(max_tokens=output_len, ignore_eos=True)
        return GenerateRequest(f"r{self.made}", prompt, params, **options)

    def poisson(self, rate: float, start: float, seconds: float) -> list[float]:
        times, now = [], start + self.random.expovariate(rate)
        while now < start + seconds:
            times.append(now)
            now += self.random.expovariate(rate)
        return times


def engine(limits: SchedulerLimits, *, noise: float = 0.04) -> VirtualEngine:
    """One that has run for a while and knows its own speed."""
    on_gpu = limits.max_step_tokens > 1000
    virtual = VirtualEngine(
        Scheduler(limits), gpu_step_seconds if on_gpu else cpu_step_seconds, runs_ahead=on_gpu, noise=noise
    )
    requests = Requests(seed=99)
    longest = 15_000 if on_gpu else 5000
    virtual.run([(i * 0.02, requests.make(20 + i * longest // 60, 20)) for i in range(60)])
    virtual.outcomes.clear()
    return virtual


def mix(requests: Requests, start: float, rate: float, seconds: float) -> list[Arrival]:
    """Short chats and one prompt in twenty of 12k to 16k tokens."""
    draw = requests.random
    arrivals = []
    for at in requests.poisson(rate, start, seconds):
        if draw.random() < 0.05:
            arrivals.append((at, requests.make(draw.randint(12_000, 16_000), 64, objective=LONG)))
        else:
            prompt_len = max(16, min(2048, int(draw.lognormvariate(5.4, 0.8))))
            output_len = max(8, min(512, int(draw.lognormvariate(4.8, 0.6))))
            arrivals.append((at, requests.make(prompt_len, output_len, objective=SHORT)))
    return arrivals


def percentile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


def met(arrivals: list[Arrival], answers: dict[str, Outcome]) -> float:
    """Share of all requests that kept both objectives; a refusal does not."""
    kept = 0
    for _, request in arrivals:
        answer, objective = answers[request.id], request.objective
        assert objective.ttft is not None
        assert objective.itl is not None
        kept += answer.ttft <= objective.ttft and answer.itl(0.99) <= objective.itl
    return kept / len(arrivals)


def test_long_prompts_advance_in_the_slack() -> None:
    """At a load where first-come-first-served breaks most promises, nearly all are kept, and the forecasts hold."""
    shares = {}
    for fcfs in (False, True):
        virtual = engine(replace(GPU, fcfs=fcfs))
        arrivals = mix(Requests(seed=1), virtual.now, rate=20, seconds=20)
        answers = virtual.run(arrivals)
        shares[fcfs] = met(arrivals, answers)
        if not fcfs:
            ledgers = [a.ledger for a in answers.values() if a.ledger is not None]
            forecasts = [(x.predicted_ttft, x.ttft) for x in ledgers if x.predicted_ttft and x.ttft]
            close = sum(abs(forecast - measured) <= 0.2 * measured for forecast, measured in forecasts)
            assert len(forecasts) > 300
            assert close / len(forecasts) >= 0.9
            assert virtual.scheduler.times.median_error <= 0.1
            assert all(x.met_ttft and x.met_gap for x in ledgers)
    assert shares[False] >= 0.99
    assert shares[True] <= 0.5


def test_past_capacity_the_admitted_keep_their_objective() -> None:
    virtual = engine(GPU)
    arrivals = mix(Requests(seed=2), virtual.now, rate=45, seconds=20)
    answers = virtual.run(arrivals)
    refused = [a.refused for a in answers.values() if a.refused is not None]
    admitted = [(at, request) for at, request in arrivals if answers[request.id].refused is None]
    assert refused
    assert all(error.retry_after > 0 for error in refused)
    assert met(admitted, answers) >= 0.95
    assert all(answers[request.id].finish_reason == "length" for _, request in admitted)
    assert virtual.scheduler.counters.refused == len(refused)


def test_short_requests_on_a_cpu_beside_long_prompts() -> None:
    ttft = {}
    for fcfs in (False, True):
        virtual = engine(replace(CPU, fcfs=fcfs))
        requests, start = Requests(seed=3), virtual.now
        objective = Objective("short", ttft=1.0, itl=0.15)
        short = [(at, requests.make(100, 32, objective=objective)) for at in requests.poisson(1.0, start, 60)]
        patient = Objective("long", ttft=30.0, itl=0.15)
        long = [(at, requests.make(5000, 16, objective=patient)) for at in requests.poisson(0.15, start, 60)]
        answers = virtual.run(short + long)
        ttft[fcfs] = percentile([answers[request.id].ttft for _, request in short], 0.99)
        assert all(answers[request.id].finish_reason == "length" for _, request in short)
    assert ttft[False] * 5 <= ttft[True]


def test_waiting_as_long_as_told_helps() -> None:
    virtual = engine(GPU, noise=0)
    requests, now = Requests(seed=4), virtual.now
    for _ in range(40):
        virtual.submit(requests.make(14_000, 8, objective=LONG))
    refused = [a.refused for a in virtual.outcomes.values() if a.refused is not None]
    assert 0 < len(refused) < 40
    assert not any("by itself" in error.message for error in refused)
    with pytest.raises(Overloaded) as caught:
        virtual.scheduler.add(requests.make(14_000, 8, objective=LONG), now)
    later = now + caught.value.retry_after
    virtual.run([], until=later)
    virtual.scheduler.add(requests.make(14_000, 8, objective=LONG), virtual.now)


def test_an_impossible_promise_is_refused_with_the_time_it_would_take() -> None:
    virtual, requests = engine(CPU, noise=0), Requests(seed=6)
    with pytest.raises(Overloaded, match="the first token is forecast after") as caught:
        virtual.scheduler.add(requests.make(100, 8, objective=Objective("hasty", ttft=1e-6)), virtual.now)
    patient = requests.make(100, 8, objective=Objective("patient", ttft=60.0))
    virtual.submit(patient)
    assert "prefill of 100 tokens takes" in caught.value.message
    forecast = float(caught.value.message.split()[6])
    assert virtual.run([])[patient.id].ttft == pytest.approx(forecast, rel=0.5)


def test_a_deadline_that_an_idle_engine_cannot_meet_is_no_load() -> None:
    """Whoever adds replicas for refusals would add them in vain; a deadline that only load misses is another thing."""
    virtual, requests = engine(CPU, noise=0), Requests(seed=6)
    standard = Objective("standard")
    with pytest.raises(DeadlineTooShort, match="so waiting does not help") as caught:
        virtual.scheduler.add(requests.make(100, 8, objective=standard, deadline=0.001), virtual.now)
    assert (caught.value.param, caught.value.retryable) == ("deadline_ms", False)
    for _ in range(40):
        virtual.submit(requests.make(400, 200, objective=standard))
    virtual.run([], until=virtual.now + 1.0)
    assert virtual.scheduler.counters.refused == 0
    with pytest.raises(Overloaded) as late:
        virtual.scheduler.add(requests.make(100, 8, objective=standard, deadline=1.0), virtual.now)
    assert type(late.value) is Overloaded
    assert virtual.scheduler.counters.refused == 1


def test_a_stream_that_could_not_keep_its_pace_is_told_so() -> None:
    virtual, requests = engine(CPU, noise=0), Requests(seed=7)
    with pytest.raises(Overloaded, match=r"inter-token latency would be over its objective of 0\.001 s"):
        virtual.scheduler.add(requests.make(100, 8, objective=Objective("rapid", ttft=60.0, itl=0.001)), virtual.now)


def test_what_promises_nothing_is_queued_up_to_a_bound() -> None:
    virtual = engine(replace(CPU, max_waiting=10))
    requests = Requests(seed=5)
    for _ in range(30):
        virtual.submit(requests.make(400, 4, objective=Objective("batch", rank=1)))
    answers = virtual.run([])
    assert sum(a.refused is not None for a in answers.values()) == 20
    assert sum(a.finish_reason == "length" for a in answers.values()) == 10


def test_a_deadline_frees_what_it_held() -> None:
    virtual = engine(CPU)
    requests = Requests(seed=6)
    start = virtual.now
    late = requests.make(300, 4000, deadline=3.0)
    waiting = [requests.make(6000, 4, deadline=2.0) for _ in range(3)]
    answers = virtual.run([(start, request) for request in (late, *waiting)])
    assert answers[late.id].finish_reason == "deadline"
    assert answers[late.id].token_times
    assert answers[late.id].token_times[-1] <= start + 3.2  # the step under way ends
    outcomes = [answers[request.id] for request in waiting]
    assert all(a.refused is not None or a.finish_reason == "deadline" for a in outcomes)
    assert virtual.scheduler.pool.used == 0
    assert virtual.scheduler.counters.expired >= 1


def flood(seed: int, *, flooding: bool) -> list[float]:
    """Times to first token of one of two tenants that ask for 40% of the machine each, or the other for 400%."""
    virtual = engine(CPU)
    requests, start = Requests(seed), virtual.now
    modest = [(at, requests.make(120, 24, tenant="modest")) for at in requests.poisson(4.0, start, 60)]
    rate = 40.0 if flooding else 4.0
    loud = [(at, requests.make(120, 24, tenant="loud")) for at in requests.poisson(rate, start, 60)]
    answers = virtual.run(modest + loud, until=start + 60)
    return [answers[request.id].ttft for at, request in modest if at < start + 55]


def test_a_tenant_that_floods_delays_itself() -> None:
    before, during = flood(seed=7, flooding=False), flood(seed=7, flooding=True)
    assert percentile(during, 0.99) < 1.5 * percentile(before, 0.99)


@pytest.mark.parametrize("weights", [(1.0, 1.0), (3.0, 1.0)])
def test_saturating_tenants_get_cost_by_weight(weights: tuple[float, float]) -> None:
    """Whatever their requests look like: many short ones against a few long ones."""
    virtual = engine(CPU)
    requests, start = Requests(seed=8), virtual.now
    shapes = {"a": (40, 60, weights[0]), "b": (700, 10, weights[1])}
    arrivals = []
    sizes = {}
    for tenant, (prompt_len, output_len, weight) in shapes.items():
        rate = 150_000 / cost(prompt_len, output_len) / 20
        for at in requests.poisson(rate, start, 60):
            request = requests.make(prompt_len, output_len, tenant=tenant, weight=weight)
            arrivals.append((at, request))
            sizes[request.id] = (tenant, prompt_len)
    answers = virtual.run(arrivals, until=start + 60)
    spent: defaultdict[str, float] = defaultdict(float)
    for request_id, answer in answers.items():
        tenant, prompt_len = sizes[request_id]
        if answer.token_times:
            spent[tenant] += cost(prompt_len, len(answer.token_times))
    assert all(any(not a.token_times for i, a in answers.items() if sizes[i][0] == t) for t in shapes), "not saturated"
    assert spent["a"] / spent["b"] == pytest.approx(weights[0] / weights[1], rel=0.05)


def test_nothing_waits_for_ever() -> None:
    """A better class that alone overloads the machine: the batch request gets its turn after a while all the same."""
    virtual = engine(CPU)
    requests, start = Requests(seed=9), virtual.now
    batch = requests.make(200, 4, objective=Objective("batch", rank=1))
    better = [(at, requests.make(200, 8)) for at in requests.poisson(40.0, start, 120)]
    answers = virtual.run([(start + 5, batch), *better], until=start + 120)
    assert 1.0 < answers[batch.id].ttft < 60


def test_late_batches_neither_displace_each_other_nor_keep_readers_waiting() -> None:
    virtual = VirtualEngine(Scheduler(replace(CPU, max_seqs=8)), cpu_step_seconds, runs_ahead=False)
    requests = Requests(seed=10)
    batches = [(0.0, requests.make(200, 100, objective=Objective("batch", rank=1))) for _ in range(700)]
    readers = [(at, requests.make(50, 20)) for at in requests.poisson(1.0, 0.0, 90)]
    answers = virtual.run(batches + readers, until=92)
    assert max(answers[request.id].ttft for _, request in readers) < 0.2
    assert sum(answers[request.id].finish_reason is not None for _, request in batches) > 240
    displaced_once_each = len(readers) + 90 / 30 * 8
    assert virtual.scheduler.counters.preemptions < 2 * displaced_once_each


@pytest.mark.parametrize("num_blocks", [8192, 400])
def test_no_tenant_says_how_urgent_the_work_of_others_is(num_blocks: int) -> None:
    virtual = VirtualEngine(
        Scheduler(replace(GPU, num_blocks=num_blocks, max_seqs=32)), gpu_step_seconds, runs_ahead=True
    )
    requests = Requests(seed=11)
    modest = [(i * 0.5, requests.make(300, 200, tenant="modest")) for i in range(40)]
    urgent = [(5 + i * 0.02, requests.make(300, 300, tenant="urgent", priority=-1)) for i in range(700)]
    answers = virtual.run(sorted(modest + urgent, key=lambda arrival: arrival[0]), until=30)
    assert max(answers[request.id].ttft for _, request in modest) < 0.5
    assert max(answers[request.id].itl(1.0) for _, request in modest) < 0.5


def test_priorities_order_the_requests_of_a_tenant() -> None:
    virtual = VirtualEngine(Scheduler(replace(CPU, max_seqs=1)), cpu_step_seconds, runs_ahead=False)
    requests = Requests(seed=12)
    priorities = [3, -(2**31), 7, 0, -5, 2**31 - 1]
    ranked = [(0.0, requests.make(50, 20, tenant="one", priority=priority)) for priority in priorities]
    answers = virtual.run(ranked)
    begun = sorted(ranked, key=lambda arrival: answers[arrival[1].id].ttft)
    assert [request.priority for _, request in begun] == sorted(priorities)


SIZES = st.tuples(st.integers(1, 300), st.integers(1, 12))
TRACE = st.lists(
    st.tuples(
        st.floats(0, 2),
        SIZES,
        st.sampled_from([Objective(), Objective("batch", rank=1), Objective("short", ttft=0.4, itl=0.05)]),
        st.sampled_from(["", "a", "b"]),
        st.sampled_from([None, None, 0.3]),
        st.sampled_from(["", "salt"]),
        st.integers(0, 40),
    ),
    min_size=1,
    max_size=25,
)


@given(trace=TRACE, runs_ahead=st.booleans(), num_blocks=st.integers(24, 60))
@settings(max_examples=60, deadline=None)
def test_any_trace(trace: list[tuple[Any, ...]], runs_ahead: bool, num_blocks: int) -> None:
    """Every request ends once, ledgers add up, and within a class and tenant nobody overtakes an earlier due time."""
    limits = replace(CPU, num_blocks=num_blocks, max_seqs=4, max_step_tokens=64)
    virtual = VirtualEngine(Scheduler(limits), cpu_step_seconds, runs_ahead=runs_ahead)
    scheduler = virtual.scheduler
    inner = scheduler.schedule

    def schedule(now: float, *args: Any) -> object:
        planned = inner(now, *args)
        scheduler.check_integrity()
        for admitted in (s for s in scheduler.running if s.started == now):
            for other in scheduler.waiting:
                if (other.order[:2], other.counter) == (admitted.order[:2], admitted.counter):
                    assert (admitted.due, admitted.order[2]) <= (other.due, other.order[2])
        return planned

    scheduler.schedule = schedule  # type: ignore[method-assign, assignment]
    arrivals = []
    for number, (at, (own, output_len), objective, tenant, deadline, salt, shared) in enumerate(trace):
        prompt = [*range(shared), *((number * 7 + i) % 1000 + 100 for i in range(own))]
        params = SamplingParams(max_tokens=output_len, ignore_eos=True)
        arrivals.append(
            (
                at,
                GenerateRequest(
                    f"r{number}",
                    prompt,
                    params,
                    objective=objective,
                    tenant=tenant,
                    deadline=deadline,
                    cache_salt=salt,
                ),
            )
        )
    answers = virtual.run(arrivals)
    assert not scheduler.has_work
    assert scheduler.pool.used == 0
    for _, request in arrivals:
        answer = answers[request.id]
        assert (answer.refused is None) != (answer.finish_reason is None)
        if answer.refused is not None:
            continue
        ledger = answer.ledger
        assert ledger is not None
        assert answer.finish_reason in ("length", "deadline")
        assert ledger.accounted == pytest.approx(ledger.total, abs=1e-6)
        assert ledger.output_tokens == len(answer.token_times)
        assert sum(stall.seconds for stall in ledger.stalls) <= ledger.stalled + 1e-9
        if answer.finish_reason == "length":
            assert ledger.total == pytest.approx(virtual.outcomes[request.id].token_times[-1] - answer.arrival)
            assert ledger.ttft == pytest.approx(answer.ttft)
        if answer.token_times:
            assert ledger.cached_tokens + sum(ledger.missed_tokens.values()) == len(request.prompt)


def test_misses_are_explained() -> None:
    limits = replace(CPU, num_blocks=8, max_seqs=2)
    virtual = VirtualEngine(Scheduler(limits), cpu_step_seconds, runs_ahead=False)

    def ask(name: str, prompt: list[int], salt: str = "", scope: str = "") -> tuple[int, dict[MissCause, int]]:
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        answers = virtual.run(
            [(virtual.now, GenerateRequest(name, prompt, params, cache_salt=salt, prefix_scope=scope))]
        )
        ledger = answers[name].ledger
        assert ledger is not None
        return ledger.cached_tokens, ledger.missed_tokens

    first, second = list(range(50)), list(range(100, 200))
    assert ask("new", first) == (0, {"never_seen": 48, "too_short": 2})
    assert ask("again", first) == (48, {"too_short": 2})
    assert ask("salted", first, "other") == (0, {"other_salt": 48, "too_short": 2})
    assert ask("another scope", first, "other", "tenant") == (0, {"never_seen": 48, "too_short": 2})
    assert ask("large", second) == (0, {"never_seen": 96, "too_short": 4})
    cached, missing = ask("evicted", first)
    assert cached + missing["evicted"] + missing["too_short"] == 50
    assert missing["evicted"] >= 16
