"""Decisions on snapshots as they would be at some moment. No clock runs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.engine import EngineStats
from penstock.core.errors import StartupError
from penstock.core.settings import convert_section
from penstock.fleet.cascade import escalates, is_decided, small_may_try
from penstock.fleet.routing import Decision, RoutedRequest, choose, session_digest
from penstock.fleet.settings import CascadeConfig, RoutingConfig
from penstock.fleet.snapshot import Snapshot, Stream
from penstock.fleet.versions import assigned_version, is_shadowed
from penstock.settings import settings_from_mapping

KNOWN = EngineStats(
    kv_blocks=1000, prefill_tokens_per_second=10_000, decode_step_seconds=0.01, loaded_step_seconds=0.02
)
FORECAST = RoutingConfig()
LATENCY = RoutingConfig("latency")


def replica(slot: int, **fields: Any) -> Snapshot:
    defaults: dict[str, Any] = {"stats": KNOWN, "kv_tokens": 16_000, "max_model_len": 8192}
    return Snapshot(f"replica-{slot}", slot, **defaults | fields)


def fleet(count: int = 4, **fields: Any) -> list[Snapshot]:
    return [replica(slot, **fields) for slot in range(count)]


def decide(
    snapshots: list[Snapshot], tokens: int = 1000, config: RoutingConfig = FORECAST, now: float = 0.0, **fields: Any
) -> Decision:
    decision = choose(RoutedRequest(tokens, **fields), snapshots, now, config)
    assert decision is not None
    return decision


def started(snapshot: Snapshot, tokens: int, now: float = 0.0, ttft: float = 0.1) -> Stream:
    """A stream whose first token has come."""
    stream = snapshot.sent(tokens, 0, now)
    stream.emitted(1, now + ttft)
    return stream


# -- what is counted ---------------------------------------------------------------------------------------------------

EVENTS = st.lists(st.tuples(st.sampled_from(["sent", "emitted", "ended"]), st.integers(0, 9)), max_size=60)


@given(EVENTS)
def test_counts_are_those_of_the_streams_in_flight(events: list[tuple[str, int]]) -> None:
    snapshot = replica(0)
    streams: list[Stream] = []
    for now, (event, which) in enumerate(events):
        if event == "sent":
            streams.append(snapshot.sent(100 + which, which, now))
        elif streams and event == "emitted":
            streams[which % len(streams)].emitted(which % 3, now)
        elif streams:
            stream = streams.pop(which % len(streams))
            stream.ended(now, completed=which > 5)
            stream.ended(now)  # twice is once
    waiting = [stream for stream in streams if not stream.emitted_tokens]
    assert snapshot.streams == len(streams)
    assert snapshot.prefilling == len(waiting)
    assert snapshot.prefill_tokens == sum(stream.prefill for stream in waiting)
    assert snapshot.context_tokens == sum(stream.context for stream in streams)


def test_streams_of_other_gateways_count_until_the_next_reading() -> None:
    snapshot = replica(0)
    snapshot.sent(100, 0, 0.0)
    snapshot.heard(EngineStats(running=5, waiting=1))
    snapshot.derive()
    assert (snapshot.streams, snapshot.load) == (1, 6)
    snapshot.restarted()
    snapshot.derive()
    assert snapshot.load == 1


# -- the forecast ------------------------------------------------------------------------------------------------------


def test_a_prefix_hit_counts_as_the_work_it_saves() -> None:
    snapshots = fleet()
    decision = decide(snapshots, 1310, cached=[0, 0, 1024])
    assert decision.snapshot is snapshots[2]
    assert decision.cached == 1024
    assert decision.reason == "forecast TTFT 39 ms, 1,024 of 1,310 tokens cached there"


def test_a_hit_is_given_up_where_more_work_waits_before_it() -> None:
    snapshots = fleet()
    snapshots[2].sent(900, 0, 0.0)
    assert decide(snapshots, cached=[0, 0, 960]).snapshot is snapshots[2]
    snapshots[2].sent(900, 0, 0.0)
    assert decide(snapshots, cached=[0, 0, 960]).snapshot is not snapshots[2]


def test_streams_that_would_stand_still_count() -> None:
    """Nothing waits, but the 100 tokens that are not cached would delay many streams there and none elsewhere."""
    snapshots = fleet()
    for _ in range(12):
        started(snapshots[0], 100)
    assert decide(snapshots, cached=[900]).snapshot is not snapshots[0]
    assert decide(snapshots, cached=[990]).snapshot is snapshots[0]


def test_a_full_kv_cache_has_to_be_waited_for() -> None:
    full = EngineStats(
        running=1, kv_blocks=1000, kv_blocks_used=990, prefill_tokens_per_second=10_000, decode_step_seconds=0.01
    )
    snapshots = fleet(2)
    for snapshot in snapshots:
        started(snapshot, 100).ended(9.0)  # streams last 9 s
        started(snapshot, 15_000)
    snapshots[0].heard(full)
    assert decide(snapshots, cached=[990]).snapshot is snapshots[1]


def test_equal_replicas_are_used_equally() -> None:
    snapshots = fleet()
    chosen: Counter[str] = Counter()
    for _ in range(40):
        decision = decide(snapshots)
        chosen[decision.snapshot.id] += 1
        decision.snapshot.sent(1000, 0, 0.0)
    assert set(chosen.values()) == {10}


def test_a_replica_that_tells_nothing_is_judged_by_what_was_measured() -> None:
    opaque = replica(0, stats=EngineStats(), kv_tokens=0, max_model_len=0)
    started(opaque, 1000, ttft=2.0).ended(3.0)
    known = replica(1)
    started(known, 1000, ttft=0.1).ended(3.0)
    assert decide([opaque, known], now=3.0).snapshot is known  # 110 ms forecast
    assert decide([opaque, known], now=90.0).snapshot is opaque  # long ago: worth another try


# -- who may be chosen -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["forecast", "latency", "round_robin"])
def test_only_available_replicas_with_room_are_chosen(policy: Any) -> None:
    config = RoutingConfig(policy)
    snapshots = fleet()
    snapshots[0].available = False
    assert decide(snapshots, config=config, cached=[1000]).snapshot is not snapshots[0]
    roomy = replica(4, max_model_len=32_768, kv_tokens=64_000)
    assert decide([*snapshots, roomy], 9000, config).snapshot is roomy
    assert decide([*snapshots, roomy], 7000, config, max_tokens=4000).snapshot is roomy
    assert decide(snapshots, 7000, config, max_tokens=4000).snapshot in snapshots  # its answer may end early
    assert choose(RoutedRequest(9000), snapshots, 0.0, config) is None
    assert choose(RoutedRequest(9000), [], 0.0, config) is None


def test_a_long_prompt_goes_where_there_is_room_now() -> None:
    config = RoutingConfig("round_robin", long_prompt_tokens=4000)
    snapshots = fleet(3)
    for snapshot in snapshots[:2]:
        snapshot.sent(12_000, 0, 0.0)
    snapshots[2].sent(10, 0, 0.0)
    assert decide(snapshots, 5000, config).snapshot is snapshots[2]
    assert decide(snapshots, 3000, config).snapshot is snapshots[0]
    snapshots[2].sent(12_000, 0, 0.0)
    assert decide(snapshots, 5000, config).snapshot is snapshots[0]  # nowhere: it waits as others do


def test_round_robin_takes_turns() -> None:
    snapshots = fleet(3)
    order = []
    for _ in range(7):
        decision = decide(snapshots, config=RoutingConfig("round_robin"))
        decision.snapshot.sent(10, 0, 0.0)
        order.append(decision.snapshot.slot)
    assert order == [0, 1, 2, 0, 1, 2, 0]


def test_a_new_upstream_is_not_flooded_before_it_is_measured() -> None:
    snapshots = fleet(4, stats=EngineStats())
    for snapshot in snapshots[:3]:
        started(snapshot, 100, ttft=0.5).ended(1.0)
    for _ in range(40):
        decide(snapshots, config=LATENCY, now=1.0).snapshot.sent(100, 0, 1.0)
    assert [snapshot.streams for snapshot in snapshots] == [10, 10, 10, 10]


def test_latency_goes_down_with_time_and_up_with_streams() -> None:
    slow, fast = snapshots = fleet(2, stats=EngineStats())
    started(slow, 100, ttft=1.0).ended(1.0)
    started(fast, 100, ttft=0.2).ended(1.0)
    assert decide(snapshots, config=LATENCY, now=1.0).snapshot is fast
    for _ in range(5):
        started(fast, 100, now=1.0, ttft=0.2)
    assert decide(snapshots, config=LATENCY, now=1.0).snapshot is slow
    reason = decide([fast], config=LATENCY, now=1.2).reason
    assert reason == "least TTFT times streams: 200 ms measured, 5 in flight"


# -- sessions ----------------------------------------------------------------------------------------------------------


def test_a_session_comes_home_unless_that_costs_more_than_a_hit() -> None:
    snapshots = fleet(8)
    session = session_digest("conversation-7")
    home = decide(snapshots, session=session)
    assert home.reason.endswith("its session's replica")
    assert home.cached == 0  # nobody knows
    assert decide(snapshots[::-1], session=session).snapshot is home.snapshot
    for _ in range(3):
        home.snapshot.sent(1000, 0, 0.0)
    assert decide(snapshots, session=session).snapshot is not home.snapshot


def test_only_sessions_of_a_lost_replica_move() -> None:
    snapshots = fleet(8)
    sessions = [session_digest(f"user-{i}") for i in range(4000)]
    homes = [decide(snapshots, session=session).snapshot for session in sessions]
    sizes = Counter(home.slot for home in homes)
    assert len(sizes) == 8
    assert max(sizes.values()) < 1.15 * min(sizes.values()) * 1.15
    snapshots[3].available = False
    moved = [decide(snapshots, session=session).snapshot for session in sessions]
    assert all(new is old for old, new in zip(homes, moved, strict=True) if old.available)


# -- versions and shadows ----------------------------------------------------------------------------------------------


def test_users_keep_their_version_while_a_canary_grows() -> None:
    users = [f"user-{i}" for i in range(5000)]
    small = {user for user in users if assigned_version(user, {"v1": 95, "v2": 5}) == "v2"}
    large = {user for user in users if assigned_version(user, {"v1": 80, "v2": 20}) == "v2"}
    assert small < large
    assert 0.04 < len(small) / 5000 < 0.06
    assert 0.185 < len(large) / 5000 < 0.215
    assert {assigned_version(user, {"v1": 1, "v2": 0}) for user in users} == {"v1"}


def test_shadows_are_a_fraction_and_always_the_same() -> None:
    shadowed = {i for i in range(5000) if is_shadowed(f"request-{i}", 0.1)}
    assert 0.085 < len(shadowed) / 5000 < 0.115
    assert shadowed == {i for i in range(5000) if is_shadowed(f"request-{i}", 0.1)}


# -- cascade -----------------------------------------------------------------------------------------------------------


def test_a_cascade_tries_the_small_model_with_short_requests() -> None:
    cascade = CascadeConfig("small", "large", max_prompt_tokens=100, max_output_tokens=50)
    assert small_may_try(100, 50, cascade)
    assert not small_may_try(101, 50, cascade)
    assert not small_may_try(100, 51, cascade)
    assert not small_may_try(100, None, cascade)
    assert small_may_try(100, None, CascadeConfig("small", "large"))


def test_an_unsure_answer_escalates_before_anything_was_streamed() -> None:
    cascade = CascadeConfig("small", "large", min_logprob=-1.0, confidence_tokens=4)
    assert [is_decided(tokens, False, cascade) for tokens in (0, 3, 4)] == [False, False, True]
    assert is_decided(1, True, cascade)
    assert not escalates([-0.5, -1.0, -0.5, -1.9, -9.0], cascade)  # the fifth token is not judged
    assert escalates([-0.5, -3.0], cascade)
    assert escalates([], cascade)


# -- settings ----------------------------------------------------------------------------------------------------------


def test_settings_are_converted_and_checked() -> None:
    assert convert_section(RoutingConfig, "routing", {"policy": "latency"}).policy == "latency"
    with pytest.raises(StartupError) as refused:
        convert_section(RoutingConfig, "routing", {"policy": "fastest"})
    assert refused.value.message == "routing.policy must be one of forecast, latency, round_robin, not 'fastest'"


REAL: dict[str, Any] = {"v1": {}, "v2": {"replicas": 2}}


def test_virtual_models_name_models_with_replicas() -> None:
    chat = {"versions": {"v1": 9, "v2": 1}, "aliases": ["gpt"], "shadow": {"model": "v1", "fraction": 0.05}}
    cascade = {"cascade": {"small": "v1", "large": "v2"}}
    settings = settings_from_mapping({"models": {**REAL, "chat": chat, "easy": cascade}})
    assert list(settings.served) == ["v1", "v2"]
    assert settings.models["chat"].versions == {"v1": 9, "v2": 1}


@pytest.mark.parametrize(
    ("entry", "param", "message"),
    [
        ({"versions": {"v1": 1, "v22": 1}}, "versions.v22", r"names 'v22', .* \(did you mean v2\?\); there are: v1"),
        ({"versions": {"chat": 1}}, "versions.chat", "must name a model with replicas"),
        ({"versions": {"v1": 0}}, "versions", "must have a weight above 0"),
        ({"versions": {"v1": -1}}, "versions.v1", "must not be negative"),
        ({"versions": ["v1"]}, "versions", "must be a mapping of models to weights"),
        ({"versions": {"v1": 1}, "replicas": 2}, "replicas", "must not be given beside versions"),
        ({"versions": {"v1": 1}, "engine": {"max_seqs": 2}}, "engine", "must not be given beside versions"),
        ({"versions": {"v1": 1}, "cascade": {"small": "v1", "large": "v2"}}, "cascade", "beside versions"),
        ({"cascade": {"small": "v1", "large": "v1"}}, "cascade.large", "must be another model"),
        ({"cascade": {"small": "v1", "large": "other"}}, "cascade.large", "not one of the models"),
        ({"cascade": {"small": "v1", "large": "other"}, "model": "x"}, "model", "must not be given beside cascade"),
        ({"shadow": {"fraction": 0.5}}, "shadow.model", "must name a model"),
        ({"shadow": {"model": "chat"}}, "shadow.model", "must name another model"),
        ({"shadow": {"model": "v1", "fraction": 2}}, "shadow.fraction", "must be above 0 and at most 1"),
    ],
)
def test_mistakes_in_virtual_models_are_named(entry: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(StartupError, match=message) as refused:
        settings_from_mapping({"models": {**REAL, "chat": entry}, "engine": {"max_seqs": 8}})
    assert refused.value.param == f"models.chat.{param}"
