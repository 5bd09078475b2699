"""How many replicas are decided: limits, cool-downs, hysteresis, zero. The policy says what the test gives it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.autoscaling.arrivals import Arrivals
from penstock.autoscaling.load import Load
from penstock.autoscaling.policies import POLICIES, last_value, predictive, reactive
from penstock.autoscaling.policy import Need
from penstock.autoscaling.scaler import Scaler
from penstock.autoscaling.settings import BUILT_IN_POLICIES, AutoscaleConfig
from penstock.core.errors import StartupError

LOAD = Load(
    now=1e9,
    ready=1,
    starting=0,
    warmup_seconds=20.0,
    requests=0.0,
    work=0.0,
    request_work=0.2,
    capacity=0.5,
    queued=0.0,
    held=0,
    in_flight=1,
    ttft=0.1,
    ttft_objective=2.0,
)
LOOK_SECONDS = 2.0
COOL_DOWN = 20.0

needs = st.lists(st.floats(0, 12), min_size=1, max_size=80)


def as_queued(load: Load, arrivals: Arrivals, config: AutoscaleConfig) -> Need:
    return Need(load.queued, "as queued")


def in_turn(needs: Iterator[Need], load: Load, arrivals: Arrivals, config: AutoscaleConfig) -> Need:
    return next(needs)


def decisions(config: AutoscaleConfig, needed: list[float]) -> list[int]:
    scaler, replicas, decided = Scaler(config, as_queued), config.min_replicas, []
    for look, need in enumerate(needed):
        load = replace(LOAD, now=LOAD.now + look * LOOK_SECONDS, ready=replicas, queued=need)
        replicas = scaler.look(load).replicas
        decided.append(replicas)
    return decided


@given(needs, st.integers(0, 3), st.integers(3, 8), st.one_of(st.none(), st.floats(3, 20)))
def test_stays_within_limits_and_spend(needed: list[float], least: int, most: int, spend: float | None) -> None:
    config = AutoscaleConfig(
        min_replicas=least, max_replicas=most, replica_per_hour=1.0, max_per_hour=spend, down_cooldown_seconds=4.0
    )
    for replicas, need in zip(decisions(config, needed), needed, strict=True):
        assert max(1, least) <= replicas <= min(most, spend or most)
        assert replicas >= min(need, config.ceiling)  # what is needed is there at once


@given(needs)
def test_up_after_down_only_if_load_rose(needed: list[float]) -> None:
    config = AutoscaleConfig(max_replicas=20, down_cooldown_seconds=COOL_DOWN, hysteresis=0.3)
    decided, window = decisions(config, needed), int(COOL_DOWN / LOOK_SECONDS)
    lowered = None
    for look, (before, after) in enumerate(pairwise(decided), start=1):
        if after > before and lowered is not None and look - lowered <= window:
            earlier = max(needed[max(0, lowered - window) : lowered + 1])
            assert needed[look] > earlier + config.hysteresis - 1e-5
        if after < before:
            lowered = look
            assert max(needed[max(0, look - window) : look + 1]) + config.hysteresis <= after + 1e-5


@given(st.lists(st.tuples(st.floats(0, 8), st.floats(0, 4)), min_size=1, max_size=60))
def test_more_load_never_means_fewer_replicas(pairs: list[tuple[float, float]]) -> None:
    config = AutoscaleConfig(max_replicas=20, down_cooldown_seconds=COOL_DOWN)
    less = decisions(config, [need for need, _ in pairs])
    more = decisions(config, [need + extra for need, extra in pairs])
    assert all(few <= many for few, many in zip(less, more, strict=True))


@given(st.floats(0, 5), st.floats(0, 5), st.floats(0, 5), st.floats(0, 5), st.floats(0, 5))
def test_policies_need_more_for_more(rate: float, queued: float, more: float, ttft: float, later: float) -> None:
    config = AutoscaleConfig()
    for policy in (reactive, predictive, last_value):
        found = []
        for extra, wait in ((0.0, ttft), (more, ttft + later)):
            arrivals = Arrivals(config.period_seconds)
            for look in range(30):
                arrivals.observe(LOAD.now + look * 10, look * 10 * (rate + extra), LOAD.warmup_seconds)
            load = replace(LOAD, now=LOAD.now + 300, queued=queued + extra, ttft=wait)
            found.append(policy(load, arrivals, config).replicas)
        assert found[0] <= found[1] + 1e-9
        assert found[0] >= rate / LOAD.capacity * 0.99  # there is room for what arrives


def test_to_zero_when_idle_and_back_for_a_held_request() -> None:
    config = AutoscaleConfig(min_replicas=0, idle_seconds=60.0, down_cooldown_seconds=30.0)
    scaler, now = Scaler(config), LOAD.now
    assert scaler.look(replace(LOAD, requests=1.0)).replicas == 1
    decided = {}
    for seconds in range(2, 100, 2):
        decided[seconds] = scaler.look(replace(LOAD, now=now + seconds, requests=1.0, in_flight=0)).replicas
    assert decided[58] == 1
    assert decided[60] == 0
    idle = replace(LOAD, now=now + 100, ready=0, requests=1.0, in_flight=0)
    assert scaler.look(idle).replicas == 0
    woken = scaler.look(replace(idle, now=now + 100.1, requests=2.0, held=1, queued=0.1))
    assert woken.replicas == 1
    assert scaler.look(replace(idle, now=now + 102, ready=0, starting=1, requests=2.0, held=1)).replicas == 1


@pytest.mark.parametrize("idle_ttft", [0.9, 1.9, 2.5])
def test_how_long_a_prompt_takes_by_itself_needs_no_replica(idle_ttft: float) -> None:
    """More of them would compute it no faster, also where that alone takes up most of the objective, or more."""
    config, arrivals = AutoscaleConfig(), Arrivals(AutoscaleConfig().period_seconds)
    idle = replace(LOAD, ready=3, in_flight=0, ttft=idle_ttft, idle_ttft=idle_ttft)
    assert reactive(idle, arrivals, config).replicas == 0
    busy = replace(idle, in_flight=9, ttft=idle_ttft + 2.0)
    need = reactive(busy, arrivals, config)
    assert need.replicas > 3
    assert need.reason == f"forecast TTFT {busy.ttft * 1e3:.0f} ms"


def test_says_why() -> None:
    scaler = Scaler(AutoscaleConfig(max_replicas=3), as_queued)
    decision = scaler.look(replace(LOAD, queued=5.0))
    assert (decision.replicas, decision.need) == (3, 5.0)
    assert decision.reason == "as queued; 5 needed, 3 allowed"


def test_waits_for_the_cool_down_after_starting_replicas() -> None:
    scaler = Scaler(AutoscaleConfig(max_replicas=9, up_cooldown_seconds=10.0), as_queued)
    counts = [scaler.look(replace(LOAD, now=LOAD.now + at, queued=need)).replicas for at, need in ((0, 2), (4, 5))]
    assert counts == [2, 2]
    assert scaler.look(replace(LOAD, now=LOAD.now + 10, queued=5.0)).replicas == 5


def test_what_is_needed_again_soon_is_kept_and_not_started() -> None:
    needs = iter([Need(3.0, "now"), Need(1.0, "later", keep=2.5), Need(1.0, "later", keep=8.0), Need(1.0, "over")])
    config = AutoscaleConfig(max_replicas=9, down_cooldown_seconds=10.0, hysteresis=0.0)
    scaler = Scaler(config, partial(in_turn, needs))
    assert [scaler.look(replace(LOAD, now=LOAD.now + at)).replicas for at in (0, 20, 40, 60)] == [3, 3, 3, 1]


def test_the_end_of_what_ends_every_day_is_not_waited_for() -> None:
    job, over, unknown = Need(6.0, "job", usual=4.0), Need(3.0, "over", usual=2.0), Need(3.0, "over")
    config = AutoscaleConfig(max_replicas=9, down_cooldown_seconds=10.0, hysteresis=0.0)
    for after, expected in ((over, [6, 6, 3, 3]), (unknown, [6, 6, 6, 3])):
        scaler = Scaler(config, partial(in_turn, iter([job, job, after, after])))
        assert [scaler.look(replace(LOAD, now=LOAD.now + at)).replicas for at in (0, 10, 12, 22)] == expected


@given(st.lists(st.tuples(st.floats(0, 12), st.sampled_from([0.0, 1.0, 2.0, 3.0])), min_size=1, max_size=60))
def test_down_leaves_enough_for_the_cool_down_at_what_is_usual_now(looks: list[tuple[float, float]]) -> None:
    config = AutoscaleConfig(max_replicas=20, down_cooldown_seconds=COOL_DOWN)
    needs = iter([Need(need, "", usual=usual) for need, usual in looks])
    window, before = int(COOL_DOWN / LOOK_SECONDS), 0
    scaler = Scaler(config, partial(in_turn, needs))
    for number, (_, usual) in enumerate(looks):
        replicas = scaler.look(replace(LOAD, now=LOAD.now + number * LOOK_SECONDS)).replicas
        for need, then in looks[max(0, number - window) : number + 1]:
            share = min(1.0, usual / then) if usual and then else 1.0
            assert replicas >= before or need * share + config.hysteresis <= replicas + 1e-5
        before = replicas


def test_a_policy_by_import_path() -> None:
    scaler = Scaler(AutoscaleConfig(policy=f"{__name__}:as_queued"))
    assert scaler.look(replace(LOAD, queued=2.5)).replicas == 3
    for path in ("nowhere.at_all:policy", f"{__name__}:nothing", f"{__name__}:LOOK_SECONDS"):
        with pytest.raises(StartupError, match="policy"):
            Scaler(AutoscaleConfig(policy=path))


def test_settings_name_the_policies_there_are() -> None:
    assert set(POLICIES) == set(BUILT_IN_POLICIES)


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({"min_replicas": 5, "max_replicas": 4}, "min_replicas"),
        ({"policy": "clever"}, "policy"),
        ({"max_per_hour": 4.0}, "max_per_hour needs replica_per_hour"),
        ({"max_per_hour": 4.0, "replica_per_hour": 5.0}, "max_per_hour must pay for 1 replicas"),
        ({"hysteresis": 1.0}, "hysteresis"),
    ],
)
def test_refuses_settings_that_cannot_be(settings: dict[str, object], wrong: str) -> None:
    with pytest.raises(StartupError, match=wrong):
        AutoscaleConfig(**settings)  # type: ignore[arg-type]


def test_unknown_speed_means_one_replica_for_requests() -> None:
    scaler = Scaler(AutoscaleConfig(min_replicas=0))
    assert scaler.look(replace(LOAD, capacity=0.0, ready=0, held=3, in_flight=0)).replicas == 1
