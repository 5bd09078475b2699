"""What `penstock status` makes of two readings of a server."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from penstock.cli.status import Attainment, Reading, page, summarised


def replica(model: str, number: int, tokens: int, state: str = "ready", **others: Any) -> dict[str, Any]:
    view = {"id": f"{model}-{number}", "model": model, "place": "local process", "process": 40 + number}
    load = {"streams": 3, "running": 2, "waiting": 1, "kv_blocks": 10, "kv_blocks_used": 5, "output_tokens": tokens}
    return {**view, **load, "state": state, "detail": "", "seconds": 12.0, "restarts": 0, **others}


def reading(at: float, replicas: list[dict[str, Any]], met: int = 0, missed: int = 0, **others: Any) -> Reading:
    key = "small", "fast", "ttft"
    return Reading(at, replicas, others.pop("autoscale", {}), {key: 0.5}, {(*key, True): met, (*key, False): missed})


def text(now: Reading, before: Reading | None = None, since: Reading | None = None, width: int = 200) -> str:
    console = Console(width=width)
    with console.capture() as shown:
        console.print(page(summarised(now, before, since), "lately"))
    return shown.get()


def test_rates_are_those_between_two_readings() -> None:
    """A replica that has been started in between has none, and counts from zero again."""
    before = reading(10.0, [replica("small", 0, 100), replica("small", 1, 500)])
    now = reading(12.0, [replica("small", 0, 160), replica("small", 1, 20), replica("small", 2, 7)])
    (model,) = summarised(now, before).models
    assert [one["tokens_per_second"] for one in model.replicas] == [30.0, None, None]
    assert model.tokens_per_second == 30.0
    assert summarised(now, None).models[0].tokens_per_second is None


def test_objectives_are_counted_since_a_reading_or_from_the_start() -> None:
    then, now = (
        reading(0.0, [replica("small", 0, 0)], met=90, missed=10),
        reading(60.0, [replica("small", 0, 0)], 189, 11),
    )
    (model,) = summarised(now, then, since=then).models
    assert model.classes == {"fast": {"ttft": Attainment(500.0, 99, 1)}}
    assert model.classes["fast"]["ttft"].share == 0.99
    (model,) = summarised(now, then).models
    assert model.classes["fast"]["ttft"].share == pytest.approx(189 / 200)
    (model,) = summarised(then, None, since=then).models
    assert model.classes["fast"]["ttft"].share is None


def test_each_model_has_its_own_objectives() -> None:
    found = summarised(reading(0.0, [replica("small", 0, 0), replica("large", 0, 0)], met=1), None).models
    assert {model.model: bool(model.classes) for model in found} == {"small": True, "large": False}


def test_what_the_autoscaler_says_and_what_it_costs() -> None:
    """Also of a model that has no replica just now."""
    about = {"model": "small", "wanted": 3, "reason": "TTFT 800 ms of 500", "held": 0, "standby": 1}
    idle = {"model": "idle", "wanted": 0, "reason": "no request for 300 s", "held": 0, "standby": 0}
    scaled = {"small": {**about, "replica_per_hour": 0.4}, "idle": idle}
    replicas = [replica("small", 0, 0), replica("small", 1, 0, "starting"), replica("small", 2, 0, "stopped")]
    shown = text(reading(0.0, replicas, autoscale=scaled)).splitlines()
    assert shown[0] == "small: 1 of 3 ready, 6 running, 3 waiting, 1 on standby, 0.80 per hour"
    assert shown[1] == "autoscaler: wants 3 (TTFT 800 ms of 500)"
    assert "idle: 0 of 0 ready, 0 running, 0 waiting" in shown
    assert "autoscaler: wants 0 (no request for 300 s)" in shown


def test_numbers_are_whole_on_a_terminal_of_80_columns() -> None:
    replicas = [replica("smollm2-135m", number, 10**6 * number, seconds=86400.0) for number in range(2)]
    shown = text(reading(12.0, replicas), reading(10.0, [{**one, "output_tokens": 0} for one in replicas]), width=80)
    assert "…" not in shown
    for part in ("for", "streams", "running", "waiting", "KV", "tok/s", "restarts", "86400 s", "500000", "50%"):
        assert part in shown.split() or part in shown


def test_a_gateway_without_replicas() -> None:
    assert "no replicas of its own" in text(reading(0.0, []))


def test_several_gateways_and_where_they_serve() -> None:
    gateway = {"id": "gateway-1", "place": "node 10.0.0.7", "process": 812, "url": "http://10.0.0.7:8000"}
    gateway |= {"state": "ready", "detail": "", "seconds": 90.0, "restarts": 1}
    now = Reading(0.0, [replica("small", 0, 0)], {}, {}, {}, 2.5, [gateway])
    shown = text(now).splitlines()
    assert " ".join(shown[-3].split()) == "gateway-1 node 10.0.0.7 812 http://10.0.0.7:8000 ready 90 s 1"
    assert shown[-1] == "the machine costs 2.50 per hour"
