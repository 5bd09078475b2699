"""The stream behind the live page: what it says, to whom, and that it stops when nobody listens."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from penstock.core.errors import Overloaded
from penstock.gateway.api import live
from penstock.gateway.settings import TenantConfig
from penstock.settings import Settings
from penstock.simulation.scripted_engine import MODEL, hang
from penstock.text.tokenizer import Tokenizer
from tests.gateway.conftest import Gateway, serving

ASK = {"model": MODEL, "prompt": "Hello", "max_tokens": 4, "stream": True}
END = threading.Event()


@contextmanager
def watching(gateway: Gateway, key: str = "") -> Iterator[Iterator[dict[str, Any]]]:
    """What the stream says, event after event."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with gateway.http() as http, http.stream("GET", "/admin/live", headers=headers) as response:
        assert response.status_code == 200, response.read()
        lines = response.iter_lines()
        yield (json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: "))


def until(events: Iterator[dict[str, Any]], field: str) -> dict[str, Any]:
    """The first event that has something there."""
    return next(event for event in events if event.get(field))


def test_requests_are_seen_while_they_run_and_after(gateway: Gateway) -> None:
    first, rest = gateway.tokenizer.encode("Hello there", add_special_tokens=False)[:2]
    gateway.runs(lambda request: [[first], [rest], hang])
    with watching(gateway) as events, gateway.http() as http:
        hello = next(events)
        assert hello["classes"][MODEL].keys() >= {"interactive", "batch"}
        assert (hello["backlog"], hello["frame_seconds"], hello["processes"]) == ([], live.FRAME_SECONDS, 1)
        with http.stream("POST", "/v1/completions", json=ASK) as response:
            lines = response.iter_lines()
            next(lines)
            id, _, objective, model, arrived, submitted, first_token, prompt_tokens, output_tokens = next(
                running
                for event in events
                for running in event["running"]
                if running[8] == 2  # its tokens
            )
            assert (objective, model, prompt_tokens, output_tokens) == ("standard", MODEL, 1, 2)
            assert arrived <= submitted <= first_token
        (account,) = until(events, "ended")["ended"]  # the client left, and the engine let go of it
        assert (account["id"], account["status"]) == (id, 499)
        frame = until(events, "tenants")
        assert [tenant["requests"] for tenant in frame["tenants"]] == [1]
        assert sum(frame["latencies"][MODEL]["standard"]["ttft"]) == 1
        assert frame["engines"][MODEL].keys() >= {"running", "steps", "kv_blocks"}
    with watching(gateway) as events:
        assert [account["id"] for account in next(events)["backlog"]] == [id]


def test_refusals_say_why(gateway: Gateway) -> None:
    gateway.runs(lambda request: [Overloaded("the queue is full", retry_after=3)])
    with watching(gateway) as events, gateway.http() as http:
        next(events)
        assert http.post("/v1/completions", json={**ASK, "stream": False}).status_code == 429
        assert http.post("/v1/completions", json={**ASK, "max_tokens": -1}).status_code == 400
        accounts: list[dict[str, Any]] = []
        refusals: list[dict[str, Any]] = []
        while not (accounts and refusals):
            event = next(events)
            accounts += event.get("ended", [])
            refusals += event.get("refused", [])
        (account,), (refusal,) = accounts, refusals
        assert "the queue is full" in account["error"]
        assert (refusal["status"], refusal["endpoint"]) == (400, "/v1/completions")


def test_nothing_is_made_or_kept_while_nobody_watches(gateway: Gateway) -> None:
    page = gateway.edge.live
    with watching(gateway) as events, watching(gateway) as others:
        for stream in (events, others):
            next(stream), next(stream)
    for _ in range(1000):
        if page._ticking is None:
            break
        END.wait(0.02)
    assert (page._ticking, page._watchers, len(page._frames)) == (None, 0, 0)
    made = page._count
    with gateway.http() as http:
        http.post("/v1/completions", json={**ASK, "stream": False})
        http.get("/nowhere")
    assert (page._count, page._ended, page._refused, page.running) == (made, [], [], {})


def test_where_there_are_tenants_it_needs_the_admin_key(tokenizer: Tokenizer) -> None:
    with serving(tokenizer, Settings(tenants={"acme": TenantConfig()})) as gateway:
        for headers in ({}, {"authorization": f"Bearer {gateway.key('acme')}"}):
            assert httpx.get(f"{gateway.url}/admin/live", headers=headers).status_code in (401, 403)
        with watching(gateway, gateway.key("")) as events:
            assert until(events, "tenants")["tenants"][0]["name"] == "acme"
