"""Many requests over one WebSocket, as a client of the `websockets` library sees it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import Frame, Opcode
from websockets.sync.client import ClientConnection, connect

from penstock.core.request import GenerateRequest
from penstock.gateway.settings import TenantConfig
from penstock.settings import Settings
from penstock.simulation.scripted_engine import MODEL, Action, hang
from penstock.text.tokenizer import Tokenizer
from tests.gateway.conftest import Gateway, serving

SECONDS = 60
CHAT = "/v1/chat/completions"
HELLO = "Hello there, friend!"


@contextmanager
def socket(gateway: Gateway, **options: Any) -> Iterator[ClientConnection]:
    with connect(f"ws://{gateway.host}:{gateway.port}/v1/stream", open_timeout=SECONDS, **options) as client:
        yield client


def asking(id: str, *, url: str = CHAT, **fields: Any) -> str:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **fields}
    return json.dumps({"type": "request", "id": id, "url": url, "body": body})


def cancelling(id: str) -> str:
    return json.dumps({"type": "cancel", "id": id})


def ask(client: ClientConnection, id: str, *, url: str = CHAT, **fields: Any) -> None:
    client.send(asking(id, url=url, **fields))


def receive(client: ClientConnection) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(client.recv(SECONDS))
    return found


def text_of(messages: list[dict[str, Any]], id: str) -> str:
    events = [message["data"] for message in messages if message["id"] == id and message["type"] == "event"]
    return "".join(part["delta"].get("content") or "" for event in events for part in event["choices"])


def test_requests_share_a_connection(gateway: Gateway) -> None:
    with socket(gateway) as client:
        for number in range(20):
            ask(client, f"s{number}", stream=True)
        ask(client, "whole")
        ask(client, "bad", temperature=-1)
        messages: list[dict[str, Any]] = []
        while sum(message["type"] == "response" for message in messages) < 22:
            messages.append(receive(client))
        ends = {message["id"]: message for message in messages if message["type"] == "response"}
        assert {ends[f"s{number}"]["status"] for number in range(20)} == {200}
        assert {text_of(messages, f"s{number}") for number in range(20)} == {HELLO}
        assert ends["whole"]["body"]["choices"][0]["message"]["content"] == HELLO
        assert ends["bad"]["status"] == 400
        assert ends["bad"]["body"]["error"]["param"] == "temperature"
        assert client.ping().wait(SECONDS)


def test_a_message_cancels_a_request(gateway: Gateway) -> None:
    begun = threading.Semaphore(0)

    async def begin_and_hang() -> None:
        begun.release()
        await hang()

    answer = gateway.engine.script

    def script(request: GenerateRequest) -> list[Action]:
        return [begin_and_hang] if request.params.max_tokens == 7 else list(answer(request))

    gateway.runs(script)
    with socket(gateway) as client:
        ask(client, "a", max_tokens=7)
        assert begun.acquire(timeout=SECONDS)
        ask(client, "a")
        assert receive(client)["message"] == "a request with this id is running"
        client.send(cancelling("a"))
        assert receive(client) == {"type": "cancelled", "id": "a"}
        ask(client, "a")
        assert receive(client)["status"] == 200
        ask(client, "b", max_tokens=7)
        assert begun.acquire(timeout=SECONDS)
    for ended in list(gateway.engine.ended.values()):  # the client has left, and its request with it
        assert ended.wait(SECONDS)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_cancelled_before_it_begins(gateway: Gateway, stream: bool) -> None:
    messages = asking("a", stream=stream), cancelling("a")
    frames = [Frame(Opcode.TEXT, message.encode()).serialize(mask=True) for message in messages]
    with socket(gateway) as client:
        for _ in range(3):
            client.socket.sendall(b"".join(frames))  # which the server reads at once
            assert receive(client) == {"type": "cancelled", "id": "a"}
        ask(client, "a")
        assert receive(client)["status"] == 200


def test_a_stream_that_is_cancelled_ends_with_that(gateway: Gateway) -> None:
    gateway.runs(lambda request: [[100], [101], hang])
    with socket(gateway) as client:
        ask(client, "a", stream=True)
        assert receive(client)["type"] == "event"
        client.send(cancelling("a"))
        while (last := receive(client))["type"] == "event":
            pass
        assert last == {"type": "cancelled", "id": "a"}
        gateway.answers(HELLO)
        ask(client, "a")
        assert receive(client)["status"] == 200


@pytest.mark.parametrize("message", ["{", '{"type": "nothing"}', '{"type": "request", "id": "a"}', "\x00", b"\xff"])
def test_what_is_not_understood_is_said(gateway: Gateway, message: str | bytes) -> None:
    with socket(gateway) as client:
        client.send(message)
        assert receive(client)["type"] == "error"
        ask(client, "a", url="/admin/keys")
        assert "must be one of" in receive(client)["message"]
        ask(client, "a")
        assert receive(client)["status"] == 200


def test_messages_that_are_too_long_close_the_connection(gateway: Gateway) -> None:
    with socket(gateway) as client:
        ask(client, "a", user="x" * 2**19)
        with pytest.raises(ConnectionClosed) as closed:
            receive(client)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1009


def test_who_may_connect(tokenizer: Tokenizer, gateway: Gateway) -> None:
    with gateway.http() as http:
        assert http.get("/v1/stream").status_code == 400
    with pytest.raises(InvalidStatus) as refused, socket(gateway, origin="https://elsewhere.example"):
        pass
    assert refused.value.response.status_code == 403
    with serving(tokenizer, Settings(tenants={"a": TenantConfig()})) as keyed:
        with pytest.raises(InvalidStatus) as refused, socket(keyed):
            pass
        assert refused.value.response.status_code == 401
        key = keyed.key("a")
        with socket(keyed, additional_headers={"Authorization": f"Bearer {key}"}) as client:
            ask(client, "x")
            assert receive(client)["status"] == 200
        assert [request.tenant for request in keyed.engine.requests] == ["a"]


def test_a_server_that_ends_says_goodbye(tokenizer: Tokenizer) -> None:
    with ExitStack() as stack:
        with serving(tokenizer) as gateway:
            client = stack.enter_context(socket(gateway))
            ask(client, "a")
            assert receive(client)["status"] == 200
        with pytest.raises(ConnectionClosed) as closed:
            receive(client)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1001
