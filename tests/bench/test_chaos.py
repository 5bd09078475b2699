"""What `penstock chaos` counts as lost, repeated and changed, and which faults it blames."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.chaos.faults import Fault, breakable
from penstock.bench.chaos.load import Load, Phase
from penstock.bench.chaos.report import ALL, BETWEEN, Report, hits
from penstock.bench.chaos.streams import (
    KINDS,
    RESYNC,
    STOPPED,
    Ask,
    Choice,
    Difference,
    Stream,
    difference,
    has_chats,
    plan,
    token_difference,
    with_stop_string,
)
from penstock.client.http import HttpClient
from penstock.core.errors import Unavailable
from tests.conftest import start_server

ASK = Ask("completion", "/v1/completions", {})
OPTIONS = {"streams": 1, "output_tokens": 1, "interval": 1.0, "slow_seconds": 1.0, "url": "http://server"}


@given(st.lists(st.integers(0, 10**9), min_size=40, max_size=60, unique=True), st.data())
def test_tokens_that_are_lost_and_repeated_are_counted(tokens: list[int], data: st.DataObject) -> None:
    at, count = data.draw(st.integers(8, 20)), data.draw(st.integers(1, 8))
    assert token_difference(tokens, tokens) == (0, 0, False)
    assert token_difference(tokens, tokens[:at] + tokens[at + count :]) == (count, 0, False)
    assert token_difference(tokens, tokens[:at] + tokens[at - count :]) == (0, count, False)
    assert token_difference(tokens, tokens[:at]) == (len(tokens) - at, 0, False)
    assert token_difference(tokens, tokens[:at] + [-1] * RESYNC + tokens[at + RESYNC :]) == (0, 0, True)


def stream(text: str = "a b", tokens: tuple[int, ...] = (1, 2), **more: Any) -> Stream:
    found = Stream(ASK, 10.0, 20.0, usage=(3, len(tokens)), **more)
    found.choices[0] = Choice(text, list(tokens), finish_reason="length", times=[11.0, 12.0, 19.0])
    return found


def test_an_answer_is_compared_as_a_whole() -> None:
    right = stream()
    assert not difference(right, stream())
    assert difference(right, stream("a c")) == Difference(changed=True)
    assert difference(right, stream(tokens=(1,))) == Difference(lost=1, changed=True)
    other = stream()
    other.usage = (3, 3)
    assert difference(right, other) == Difference(changed=True)
    scored, otherwise = stream(), stream()
    scored.choices[0].logprobs = [{"content": [1]}, {"content": [2]}]
    otherwise.choices[0].logprobs = [{"content": [1, 2]}]
    assert not difference(scored, otherwise), "chunks may hold any number of tokens"


def ledger(*replicas: str) -> dict[str, Any]:
    moves = [{"replica": replica, "lost": 0.5} for replica in replicas[:-1]]
    return {"replica": replicas[-1], "failovers": moves, "queued": {"step": 0.1}, "prefill": [{"seconds": 0.4}]}


@pytest.mark.parametrize(
    ("route", "expected"),
    [
        (["a"], []),
        (["a", "b"], ["kill a", "slow b"]),
        (["b"], ["slow b"]),
        (["a", "b", "a"], ["kill a", "slow b", "cut b"]),
        (["b", "a"], ["slow b", "cut b"]),
    ],
)
def test_a_stream_is_followed_from_replica_to_replica(route: list[str], expected: list[str]) -> None:
    faults = [
        Fault("kill", "a", 5.0, 1, recovered=6.0),
        Fault("kill", "a", 12.5, 1, recovered=13.0),
        Fault("slow", "b", 14.0, 1, recovered=15.0),
        Fault("cut", "b", 16.0, 1, recovered=17.0),
        Fault("kill", "b", 25.0, 1, recovered=26.0),
    ]
    found = [f"{hit.fault.kind} {hit.fault.replica}" for hit in hits(stream(ledgers={0: ledger(*route)}), faults)]
    assert found == expected


def report(*streams: Stream, ended: str = "", tolerate: bool = False) -> Report:
    calm, chaos = Phase(), Phase()
    calm.add(stream(), stream())
    for one in streams:
        chaos.add(one, stream())
    args = Namespace(faults=["kill", "slow"], tolerate_changed_text=tolerate, **OPTIONS)
    return Report(args, "m", 1, calm, chaos, [Fault("kill", "a", 12.5, 1, 18.0, 19.5)], ended)


def test_a_gap_is_divided_and_the_verdict_is_strict() -> None:
    good = report(stream(ledgers={0: ledger("a", "b")}), stream())
    assert good.passed
    row = good.rows["kill"]
    assert (row.faults, row.streams, good.rows[BETWEEN].streams, good.rows[ALL].streams) == (1, 1, 1, 2)
    assert (row.gaps, row.moved, row.prefill, row.rest) == ([7.0], [0.5], [0.5], [6.0])
    failed = report(stream(error="http 500"))
    assert (failed.passed, failed.rows["kill"].failed, failed.rows["kill"].gaps) == (False, 1, [])
    assert not report(stream(), ended="the fleet has not recovered").passed
    refused = report(stream(shed=True))
    assert (refused.passed, refused.rows["kill"].shed, refused.rows["kill"].failed) == (True, 1, 0)
    assert not report(stream("b a")).passed
    assert report(stream("b a"), tolerate=True).passed
    assert not report(stream(tokens=(1,)), tolerate=True).passed
    assert "completion" in report(stream("b a")).table().splitlines()[-1]


def test_every_kind_is_asked_for_and_stop_strings_end_answers() -> None:
    asks = plan("m", 64, 32, seed=1)
    assert asks == plan("m", 64, 32, seed=1)
    assert len({ask.kind for ask in asks}) == 8
    assert any(ask.body.get("min_tokens") == 24 for ask in asks)
    stopped = with_stop_string(asks[0], "one two three four")
    assert (stopped.kind, stopped.body["stop"]) == (STOPPED, ["e four"])
    assert with_stop_string(asks[0], "").body["stop"] == ["\n"]


async def test_a_model_without_a_chat_template_is_asked_for_completions(tiny_model: Path) -> None:
    (tiny_model / "chat_template.jinja").unlink()
    server = start_server(f"dummy:{tiny_model}", "--served-model-name", "m")
    try:
        async with HttpClient(server.url) as http:
            assert not await has_chats(http, "m")
            load = Load(http, 4)
            await load.learn(plan("m", 4, 8, seed=1, chats=False))
    finally:
        server.stop()
    assert {answer.ask.kind for answer in load.right} == {STOPPED, *(kind for kind in KINDS if "completion" in kind)}


async def test_a_server_that_fails_before_anything_is_broken_is_said_so() -> None:
    async with HttpClient("http://127.0.0.1:9") as http:
        with pytest.raises(Unavailable, match="fails while nothing is broken: cannot connect"):
            await Load(http, 4).learn(plan("m", 4, 8, seed=1))


def test_what_a_fault_can_break() -> None:
    local, remote = {"process": 7, "place": "local process"}, {"process": None, "place": "tcp://gpu:9000"}
    server = {"process": None, "place": "http://elsewhere:8000"}
    assert [breakable(one, "kill") for one in (local, remote, server)] == [True, False, False]
    assert [breakable(one, "cut") for one in (local, remote, server)] == [True, True, False]
