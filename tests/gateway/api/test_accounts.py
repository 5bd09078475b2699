"""Where a request's time went: in its answer, at /v1/requests, in the metrics and in the terminal."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from penstock.cli.main import main
from penstock.core.errors import DeadlineExceeded, EngineFailure, Failure, PenstockError
from penstock.gateway.http.request import Request
from penstock.gateway.http.response import Response
from penstock.gateway.settings import TenantConfig
from penstock.observability.account import Account
from penstock.observability.request_log import RequestLog
from penstock.settings import Settings
from penstock.simulation.scripted_engine import MODEL, hang
from penstock.text.tokenizer import Tokenizer
from tests.gateway.conftest import Gateway, serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}


def check_sums(account: dict[str, Any]) -> None:
    for choice in account["choices"]:
        assert sum(choice["parts"].values()) == pytest.approx(account["total"], abs=1e-6)
        assert all(seconds >= 0 for seconds in choice["parts"].values()), choice["parts"]


def ask(http: httpx.Client, **more: Any) -> dict[str, Any]:
    response = http.post(CHAT, json=HI | more)
    assert response.status_code == 200
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.parametrize("end", [lambda it: it.send(200, b"{}"), lambda it: it.end_events(b"data: [DONE]\n\n")])
def test_time_of_an_answer_ends_before_its_client_can_have_it(end: Any) -> None:
    sent: list[float] = []
    connection: Any = SimpleNamespace(
        paused=False, draining=False, write=lambda _: sent.append(time.monotonic()), finish=lambda _: None
    )
    request = Request(connection, "POST", CHAT, b"", [])
    response = Response(connection, request, keep_alive=True)
    asyncio.run(end(response))
    assert response.elapsed() <= sent[0] - request.arrived


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": True}}])
@pytest.mark.parametrize("body", [(CHAT, HI), (TEXT, {"model": MODEL, "prompt": "Hi"})])
def test_ledger_is_in_the_last_chunk_of_a_stream_that_asks(
    gateway: Gateway, body: tuple[str, dict[str, Any]], options: dict[str, Any]
) -> None:
    path, request = body
    with gateway.http() as http:
        response = http.post(path, json=request | {"stream": True} | options, headers={"x-penstock-ledger": "true"})
        plain = http.post(path, json=request | {"stream": True} | options)
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n")]
    last = json.loads(events[-3])
    assert events[-2:] == ["[DONE]", ""]
    assert last["choices"] == []
    check_sums(last["usage"]["ledger"])
    assert all(json.loads(event)["choices"] for event in events[:-3])
    assert "ledger" not in plain.text


def test_answer_with_several_choices_accounts_for_each(gateway: Gateway) -> None:
    gateway.answers("one", "two and three")
    with gateway.http() as http:
        response = http.post(CHAT, json=HI | {"n": 2}, headers={"x-penstock-ledger": "true"})
        answer = response.json()
        account = answer["usage"]["ledger"]
        check_sums(account)
        assert [choice["index"] for choice in account["choices"]] == [0, 1]
        assert [choice["engine"]["request_id"][-2:] for choice in account["choices"]] == ["-0", "-1"]
        assert account["ttft"] <= account["total"]
        later = http.get(f"/v1/requests/{answer['id']}").json()
    check_sums(later)
    assert later["total"] >= account["total"], "that one ends with the response, not before it"
    assert later["prompt_tokens"] == answer["usage"]["prompt_tokens"]


def test_a_request_is_found_by_every_id_its_client_knows(gateway: Gateway) -> None:
    with gateway.http() as http:
        first = http.post(CHAT, json=HI, headers={"x-request-id": "mine/../1".replace("/", ":")}).json()["id"]
        second = http.post(CHAT, json=HI, headers={"x-request-id": "mine:..:1"}).json()["id"]
        ours = first.removeprefix("chatcmpl-")
        for name in (first, ours, f"{ours}-0"):
            assert http.get(f"/v1/requests/{name}").json()["id"] == ours
        assert http.get("/v1/requests/mine:..:1").json()["id"] == second.removeprefix("chatcmpl-"), "the latest"
        missing = http.get("/v1/requests/nobody/knows%20me")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "request_not_found"


def test_requests_that_fail_or_stop_early_are_accounted_for_too(gateway: Gateway) -> None:
    gateway.runs(lambda request: [[100], EngineFailure("out of luck")])
    with gateway.http() as http:
        assert http.post(CHAT, json=HI, headers={"x-request-id": "failed"}).status_code == 500
        failed = http.get("/v1/requests/failed").json()
        gateway.runs(lambda request: [gateway.tokenizer.encode("one STOP two"), hang])
        assert ask(http, stop="STOP")["choices"][0]["finish_reason"] == "stop"
        stopped = http.get("/v1/requests?limit=2").json()["data"]
    check_sums(failed)
    assert (failed["status"], failed["error"]) == (500, "out of luck")
    assert failed["choices"][0]["parts"]["answer"] > 0
    check_sums(next(account for account in stopped if account["status"] == 200))


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("tokens", [[], [100]])
@pytest.mark.parametrize(("error", "status"), [(DeadlineExceeded("too late"), 504), (EngineFailure("unlucky"), 500)])
def test_what_the_engine_ended_with_an_error_has_its_ledger(
    tokenizer: Tokenizer, error: PenstockError, status: int, tokens: list[int], cached: bool
) -> None:
    with serving(tokenizer, cached=cached) as gateway, gateway.http() as http:
        gateway.runs(lambda request: [*([tokens] if tokens else []), Failure.of(error)])
        assert http.post(CHAT, json=HI | {"seed": 1}, headers={"x-request-id": "failed"}).status_code == status
        account = http.get("/v1/requests/failed").json()
    check_sums(account)
    assert (account["status"], account["error"]) == (status, error.message)
    (choice,) = account["choices"]
    assert choice["engine"]["request_id"].startswith(account["id"])
    assert choice["parts"]["answer"] == 0


@pytest.mark.parametrize("cached", [False, True])
def test_what_a_stop_string_ended_has_its_ledger(tokenizer: Tokenizer, cached: bool) -> None:
    with serving(tokenizer, cached=cached) as gateway, gateway.http() as http:
        gateway.runs(lambda request: [*([token] for token in tokenizer.encode("one STOP two")), hang])
        answer = ask(http, stop="STOP", seed=1)
        account = http.get(f"/v1/requests/{answer['id']}").json()
    check_sums(account)
    assert account["choices"][0]["engine"]["request_id"].startswith(account["id"])


@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("cached", [False, True])
def test_what_a_client_gave_up_on_is_accounted_for(tokenizer: Tokenizer, cached: bool, choices: int) -> None:
    with serving(tokenizer, cached=cached) as gateway, gateway.http() as http:
        gateway.runs(lambda request: [hang])  # not even a first token
        body = HI | {"seed": 5, "n": choices}
        with pytest.raises(httpx.ReadTimeout):
            http.post(CHAT, json=body, headers={"x-request-id": "gave-up"}, timeout=httpx.Timeout(20, read=0.1))
        account = recorded(http, "gave-up")
    check_sums(account)
    assert (account["status"], account["ttft"]) == (499, None)
    for choice in account["choices"]:
        assert choice["engine"]["request_id"].startswith(account["id"])
        assert choice["parts"]["queued"] > 0
        assert choice["parts"]["answer"] == 0


def recorded(http: httpx.Client, id: str) -> dict[str, Any]:
    """Of a request that its client left: its account comes soon, but not before anything that could be waited for."""
    for _ in range(400):
        response = http.get(f"/v1/requests/{id}")
        if response.status_code == 200:
            found: dict[str, Any] = response.json()
            return found
        time.sleep(0.05)
    raise AssertionError(f"no account of {id}")


def test_accounts_and_log_lines_belong_to_a_tenant(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    settings = Settings(tenants={"ann": TenantConfig(), "bob": TenantConfig()})
    with serving(tokenizer, settings) as gateway, caplog.at_level(logging.INFO, "penstock.gateway"):
        headers = {name: {"Authorization": f"Bearer {gateway.key(name)}"} for name in ("ann", "bob")}
        with gateway.http() as http:
            answer = http.post(CHAT, json=HI, headers=headers["ann"] | {"x-request-id": "mine"}).json()
            for id in (answer["id"], "mine"):
                assert http.get(f"/v1/requests/{id}", headers=headers["ann"]).json()["tenant"] == "ann"
                assert http.get(f"/v1/requests/{id}", headers=headers["bob"]).status_code == 404
            assert http.get("/v1/requests", headers=headers["bob"]).json()["data"] == []
            assert http.get(f"/v1/requests/{answer['id']}").status_code == 401
    (line,) = [record.getMessage() for record in caplog.records if "request_id=mine" in record.getMessage()]
    usage = answer["usage"]
    assert " tenant=ann class=standard first_ms=" in line
    assert f" prompt={usage['prompt_tokens']} cached=2 output={usage['completion_tokens']} request_id=mine" in line


def test_answers_from_the_cache_are_accounted_for(tokenizer: Tokenizer) -> None:
    with serving(tokenizer, cached=True) as gateway, gateway.http() as http:
        ids = [ask(http, temperature=0)["id"] for _ in range(2)]
        missed, hit = (http.get(f"/v1/requests/{id}").json() for id in ids)
    check_sums(missed)
    check_sums(hit)
    assert [account["choices"][0]["cache"] for account in (missed, hit)] == ["miss", "hit"]
    assert missed["choices"][0]["engine"] is not None
    assert hit["choices"][0]["engine"] is None
    assert hit["choices"][0]["parts"]["answer"] > 0


def test_slowest_come_first_and_the_limit_is_checked(gateway: Gateway) -> None:
    with gateway.http() as http:
        for _ in range(3):
            ask(http)
        totals = [account["total"] for account in http.get("/v1/requests?limit=2").json()["data"]]
        assert len(totals) == 2
        assert totals == sorted(totals, reverse=True)
        for bad in ("0", "101", "x", "-1", "²", "1e1"):
            response = http.get("/v1/requests", params={"limit": bad})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "limit")


def test_metrics_sum_up_the_ledgers(gateway: Gateway) -> None:
    with gateway.http() as http:
        id = ask(http)["id"]
        account = http.get(f"/v1/requests/{id}").json()
        text = http.get("/metrics").text
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    (choice,) = account["choices"]
    name = account["objective"]
    for part, seconds in choice["parts"].items():
        assert samples["penstock_part_seconds_total", name, part] == pytest.approx(seconds)
    assert samples["penstock_queue_cause_seconds_total", "order"] == pytest.approx(choice["engine"]["queued"]["order"])
    assert samples["penstock_cache_miss_tokens_total", "never_seen"] == account["prompt_tokens"] - 2
    assert samples["penstock_objectives_total", name, "false", account["model"], "ttft"] == 1
    assert samples["penstock_objectives_total", name, "true", account["model"], "gap"] == 1
    assert samples["penstock_recomputed_tokens_total",] == 5
    assert samples["penstock_forced_tokens_total",] == 1


def test_explain_in_the_terminal(gateway: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    with gateway.http() as http:
        id = ask(http)["id"]
    assert main(["explain", "--url", gateway.url]) == 0
    ours = id.removeprefix("chatcmpl-")
    assert ours in capsys.readouterr().out
    assert main(["explain", id, "--url", gateway.url]) == 0
    shown = capsys.readouterr().out
    for words in (
        ours,
        "others went first",
        "by someone-else-0 (3 steps)",
        "never seen before",
        "Preempted 1 times",
        "first token missed",
        "gaps kept",
        "Most of it:",
    ):
        assert words in shown, shown
    assert main(["explain", "no-such-id", "--url", gateway.url]) == 1
    assert "no request 'no-such-id'" in capsys.readouterr().err


def test_commands_say_how_to_give_a_key(
    tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tokenizer, Settings(tenants={"ann": TenantConfig()})) as gateway:
        load = [
            "bench",
            "serve",
            "--url",
            gateway.url,
            "--requests",
            "1",
            "--prompt-tokens",
            "8",
            "--output-tokens",
            "2",
        ]
        for command in (["explain", "--url", gateway.url], load):
            monkeypatch.setenv("PENSTOCK_API_KEY", "")
            assert main(command) == 1
            shown = capsys.readouterr().err
            assert "'penstock keys create NAME'" in shown, "the server says how a key is made"
            assert "Set PENSTOCK_API_KEY" in shown
            monkeypatch.setenv("PENSTOCK_API_KEY", gateway.key("ann"))
            assert main(command) == 0
            capsys.readouterr()


def account(id: str, tenant: str, request_id: str, total: float) -> Account:
    return Account(
        id=id, request_id=request_id, tenant=tenant, objective="standard", endpoint=CHAT, asked=MODEL, model=MODEL,
        status=200, error=None, arrived=0.0, total=total, ttft=None, prompt_tokens=1, cached_tokens=0, output_tokens=1,
        choices=[],
    )  # fmt: skip


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xyz"), st.floats(0, 9)), max_size=30),
    st.integers(1, 8),
    st.integers(300, 3000),
)
def test_log_is_bounded_and_never_crosses_tenants(
    added: list[tuple[str, str, float]], max_requests: int, max_bytes: int
) -> None:
    log = RequestLog(max_requests, max_bytes)
    accounts = [account(f"{number:024x}", *fields) for number, fields in enumerate(added)]
    for one in accounts:
        log.add(one)
    assert len(log) <= max_requests
    kept = [one for one in accounts if log.find(one.tenant, one.id) is not None]
    assert kept == accounts[len(accounts) - len(log) :], "the oldest go first"
    assert sum(len(log.find(one.tenant, one.id) or b"") for one in kept) <= max_bytes
    for one in accounts:
        assert log.find("b" if one.tenant == "a" else "a", one.id) is None
    for tenant in "ab":
        theirs = [one for one in kept if one.tenant == tenant]
        assert len(log.slowest(tenant, 100)) == len(theirs)
        for name in "xyz":
            latest = [one.id for one in theirs if one.request_id == name][-1:]
            found = log.find(tenant, name)
            assert ([json.loads(found)["id"]] if found else []) == latest
