"""Streams of background responses: read, dropped and read on, here and at another gateway, by OpenAI's client."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import EngineFailure
from penstock.gateway.api import responses, responses_store
from penstock.gateway.api.blocks import Block
from penstock.gateway.api.responses_events import follow
from penstock.gateway.api.responses_store import Progress, Recording
from penstock.gateway.http.response import Response
from penstock.gateway.settings import ResponsesConfig, TenantConfig
from penstock.settings import Settings
from penstock.text.tokenizer import Tokenizer
from tests.families import family
from tests.gateway.api.test_responses import ASKED, CALLED, PATH, WEATHER, Held, client_of, create, polled
from tests.gateway.api.test_responses_store import response
from tests.gateway.conftest import Gateway, serving


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "HOLD_SECONDS", 0.01)
    monkeypatch.setattr(responses_store, "POLL_SECONDS", 0.01)


def begun(client: Any, **fields: Any) -> Any:
    """The stream of a new background response."""
    return client.responses.create(**ASKED | fields, background=True, stream=True)


def dumped(events: Any) -> list[dict[str, Any]]:
    """Strictly validated: the client itself takes whatever comes."""
    found = [event.model_dump(mode="json", by_alias=True, warnings="error") for event in events]
    return found if [type(event).model_validate(one) for event, one in zip(events, found, strict=True)] else []


def resumed(client: Any, id: str, after: int | None = None) -> list[dict[str, Any]]:
    more = {} if after is None else {"starting_after": after}
    return dumped(list(client.responses.retrieve(id, stream=True, **more)))


def until(stream: Any, kind: str) -> list[Any]:
    """Events up to the first of this kind."""
    found = []
    for event in stream:
        found.append(event)
        if event.type == f"response.{kind}":
            return found
    raise AssertionError(f"no {kind} in {[event.type for event in found]}")


def test_a_stream_can_be_read_again_from_any_event(tokenizer: Tokenizer) -> None:
    with serving(family(tokenizer, "hermes")) as gateway:
        gateway.answers("<think>\nThey greet me.\n</think>\n\nHello there!" + CALLED)
        client, include = client_of(gateway), ["reasoning.encrypted_content"]
        events = dumped(list(begun(client, tools=[WEATHER], include=include)))
        kinds = [event["type"].removeprefix("response.") for event in events]
        assert kinds[:3] == ["created", "queued", "in_progress"]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert {"reasoning_text.delta", "output_text.delta", "function_call_arguments.delta"} < set(kinds)
        last = events[-1]["response"]
        assert (kinds[-1], last["status"], last["background"]) == ("completed", "completed", True)
        kept = client.responses.retrieve(last["id"])
        assert kept.model_dump(mode="json", by_alias=True) == last
        assert [item.type for item in kept.output] == ["reasoning", "message", "function_call"]
        assert resumed(client, kept.id) == events
        for number in range(len(events) - 1):
            assert resumed(client, kept.id, number) == events[number + 1 :]
        assert [event["type"] for event in resumed(client, kept.id, len(events) + 7)] == ["response.completed"]


def test_a_dropped_stream_goes_on_where_it_was(gateway: Gateway) -> None:
    held, client = Held(gateway), client_of(gateway)
    with begun(client) as stream:
        first = until(stream, "output_text.delta")
    id, number = first[0].response.id, first[-1].sequence_number
    assert client.responses.retrieve(id).status == "in_progress"
    with client.responses.retrieve(id, stream=True) as again:
        assert dumped(until(again, "output_text.delta")) == dumped(first)
        with client.responses.stream(response_id=id, starting_after=number) as helper:
            held.let_go()
            assert helper.get_final_response().output_text == "HelloHello"
        rest = dumped(list(again))
    assert rest == resumed(client, id, number)
    assert dumped(first) + rest == resumed(client, id)


def test_a_client_that_leaves_at_the_first_event_misses_nothing(gateway: Gateway) -> None:
    held, client = Held(gateway), client_of(gateway)
    with begun(client) as stream:
        (created,) = until(stream, "created")
    assert held.begun.wait(20)
    held.let_go()
    assert polled(client, created.response.id).output_text == "HelloHello"
    assert resumed(client, created.response.id, 0)[-1]["type"] == "response.completed"


def test_what_was_cut_is_incomplete_again(gateway: Gateway) -> None:
    client = client_of(gateway)
    events = dumped(list(begun(client, max_output_tokens=2)))
    assert events[-1]["type"] == "response.incomplete"
    assert events[-2]["item"]["status"] == "incomplete"
    assert resumed(client, events[0]["response"]["id"]) == events


def test_a_failure_ends_the_stream_each_time(gateway: Gateway) -> None:
    token = gateway.tokenizer.encode("Hi")[0]
    gateway.runs(lambda request: [[token], EngineFailure("the step failed")])
    client = client_of(gateway)
    events = dumped(list(begun(client)))
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["message"] == "the step failed"
    assert resumed(client, events[0]["response"]["id"]) == events


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_stream_of_another_gateway_has_the_same_events(tokenizer: Tokenizer, tmp_path: Path, elsewhere: bool) -> None:
    kept = Settings(state=f"sqlite:///{tmp_path / 'state.db'}")
    with serving(tokenizer, kept) as gateway, serving(tokenizer, kept) as other:
        here, there = client_of(gateway), client_of(other)
        held = Held(gateway)
        with begun(here) as stream:
            first = until(stream, "output_text.delta")
            id = first[0].response.id
            with there.responses.retrieve(id, stream=True) as read:
                seen = until(read, "output_text.delta")
                assert dumped(seen) == dumped(first)
                if elsewhere:
                    assert there.responses.cancel(id).status == "cancelled"
                else:
                    held.let_go()
                rest, theirs = dumped(list(stream)), dumped(list(read))
        assert rest == theirs == resumed(there, id, first[-1].sequence_number)
        last = ("response.failed", "cancelled") if elsewhere else ("response.completed", "completed")
        assert (rest[-1]["type"], rest[-1]["response"]["status"]) == last


def test_a_stream_whose_server_has_gone_ends_after_what_was_read(tokenizer: Tokenizer, tmp_path: Path) -> None:
    kept = Settings(state=f"sqlite:///{tmp_path / 'state.db'}")
    with serving(tokenizer, kept) as gateway:
        held = Held(gateway)
        id = create(gateway, background=True).id
        with begun(client_of(gateway)) as stream:
            first = until(stream, "output_text.delta")
        assert held.begun.wait(20)
    with serving(tokenizer, kept) as gateway:
        (last,) = resumed(client_of(gateway), first[0].response.id, 1000)
        assert (last["type"], last["sequence_number"]) == ("response.failed", 1001)
        with pytest.raises(openai.BadRequestError, match="background and stream"):
            resumed(client_of(gateway), id)


def test_other_tenants_streams_are_not_found(tokenizer: Tokenizer) -> None:
    with serving(tokenizer, Settings(tenants={"acme": TenantConfig(), "other": TenantConfig()})) as gateway:
        acme, other = (client_of(gateway, gateway.key(name)) for name in ("acme", "other"))
        held = Held(gateway)
        with begun(acme) as stream:
            id = until(stream, "output_text.delta")[0].response.id
            for _ in range(2):
                with pytest.raises(openai.NotFoundError):
                    resumed(other, id)
                held.let_go()
                polled(acme, id)


def test_bad_queries_are_named(gateway: Gateway) -> None:
    plain = create(gateway)
    with gateway.http() as http:
        for query, param in (
            ("stream=yes", "stream"),
            ("stream=true&starting_after=x", "starting_after"),
            ("stream=true&starting_after=-1", "starting_after"),
            ("starting_after=1", "starting_after"),
            ("stream=true", "stream"),
        ):
            found = http.get(f"{PATH}/{plain.id}?{query}")
            assert (found.status_code, found.json()["error"]["param"]) == (400, param), query
        assert http.head(f"{PATH}/{plain.id}?stream=true").status_code == 200


def test_events_that_are_too_many_to_be_kept_are_not_half_kept(tokenizer: Tokenizer) -> None:
    with serving(tokenizer, Settings(responses=ResponsesConfig(max_mib=0.001))) as gateway:
        gateway.answers("a b c d e f g h i j k l m n o p q r s t u v w x y z " * 8)
        client = client_of(gateway)
        events = list(begun(client))
        with pytest.raises(openai.BadRequestError, match="while they are stored"):
            resumed(client, events[0].response.id)


class Sent:
    """Stands for the connection of somebody who reads."""

    disconnected = False

    def __init__(self) -> None:
        self.request = self
        self.events: list[dict[str, Any]] = []

    async def send_events(self, data: bytes) -> None:
        lines = data.decode().split("\n")
        self.events += [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]

    end_events = send_events


PIECES = st.lists(st.text(min_size=1, max_size=3), max_size=4)


@given(kinds=st.lists(st.tuples(st.sampled_from(["text", "call"]), PIECES), max_size=4), data=st.data())
def test_whenever_somebody_reads_the_events_are_the_same(kinds: list[Any], data: st.DataObject) -> None:
    queued, final = response("queued"), response("completed")
    whole = [Block(kind, index, "id", "name", pieces) for index, (kind, pieces) in enumerate(kinds)]

    def read(states: list[Progress], after: int = -1) -> list[dict[str, Any]]:
        async def each() -> Any:
            for state in states:
                yield state

        sent = Sent()
        asyncio.run(follow(each(), cast(Response, sent), after))
        return sent.events

    complete = Progress(queued, Recording(whole, False, "completed"), final)
    events = read([complete])
    states = []
    for upto, block in enumerate(whole):
        for size in range(len(block.pieces) + 1):
            if data.draw(st.booleans()):
                grown = [*whole[:upto], replace(block, pieces=block.pieces[:size])]
                states.append(Progress(queued, Recording(grown, False)))
    assert read([*states, complete]) == events
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    after = data.draw(st.integers(-1, len(events) - 2))
    assert read([*states, complete], after) == events[after + 1 :]
