"""The account of a real answer: every millisecond is somewhere, and none is there twice."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest

from penstock.cli.main import main
from tests.conftest import Server

ASK = {"model": "smollm2-135m", "prompt": "The rain in Spain falls", "max_tokens": 24, "ignore_eos": True, "seed": 1}


ROUNDING = 1e-6  # seconds; the ledger's entries are differences of the same clock, so their sum misses nothing else


def check(account: dict[str, Any], measured: float) -> None:
    assert account["total"] <= measured
    for choice in account["choices"]:
        parts, engine = choice["parts"], choice["engine"]
        assert sum(parts.values()) == pytest.approx(account["total"], abs=ROUNDING)
        assert all(seconds >= 0 for seconds in parts.values()), parts
        from_engine = parts["queued"] + parts["prefill"] + parts["decode"] + parts["stalled"]
        assert from_engine == pytest.approx(engine["total"], abs=ROUNDING)
        assert engine["cached_tokens"] + sum(engine["missed_tokens"].values()) == engine["prompt_tokens"]
        assert engine["output_tokens"] == 24
        assert sum(stall["seconds"] for stall in engine["stalls"]) <= engine["stalled"] + ROUNDING


async def test_parts_sum_to_the_measured_time_alone_and_in_a_crowd(server: Server) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:

        async def ask(number: int, **more: Any) -> None:
            body = {**ASK, "prompt": f"{number} {ASK['prompt']}", "seed": number, "cache_salt": "accounts", **more}
            start = time.monotonic()
            answer = (await http.post("/v1/completions", json=body)).json()
            measured = time.monotonic() - start
            check((await http.get(f"/v1/requests/{answer['id']}")).json(), measured)

        await ask(0)
        await ask(1, n=3)
        await asyncio.gather(*(ask(number) for number in range(2, 14)))


async def test_what_a_client_gave_up_on_has_its_ledger(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """While it was computed, and while it waited behind what is computed."""
    body = {**ASK, "max_tokens": 2000, "stream": True, "seed": None}
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
        async with http.stream("POST", "/v1/completions", json=body, headers={"x-request-id": "half-read"}) as response:
            await anext(response.aiter_bytes())
        with pytest.raises(httpx.ReadTimeout):
            await http.post(
                "/v1/completions",
                json={**body, "stream": False},
                headers={"x-request-id": "never-read"},
                timeout=httpx.Timeout(120, read=0.2),
            )
        for id in ("half-read", "never-read"):
            for _ in range(400):  # the account comes soon, but after nothing that could be waited for
                found = await http.get(f"/v1/requests/{id}")
                if found.status_code == 200:
                    break
                await asyncio.sleep(0.05)
            (choice,) = found.json()["choices"]
            parts, engine = choice["parts"], choice["engine"]
            assert sum(parts.values()) == pytest.approx(found.json()["total"], abs=ROUNDING)
            assert (parts["answer"], found.json()["status"]) == (0, 499)
            assert engine["prefill"]
            assert engine["total"] <= found.json()["total"]
    assert await asyncio.to_thread(main, ["explain", "half-read", "--url", server.url]) == 0
    shown = capsys.readouterr().out
    for words in ("client closed the connection", "computing the answer", "Prefill:", "Prefix cache:"):
        assert words in shown, shown


@pytest.mark.parametrize("seed", [None, 3])  # past the result cache, and through it
def test_a_missed_deadline_is_explained(server: Server, capsys: pytest.CaptureFixture[str], seed: int | None) -> None:
    with httpx.Client(base_url=server.url, timeout=120) as http:
        body = {**ASK, "max_tokens": 2000, "seed": seed, "deadline_ms": 400}
        response = http.post("/v1/completions", json=body, headers={"x-request-id": f"late-{seed}"})
        assert response.status_code == 504, response.text
        account = http.get(f"/v1/requests/late-{seed}").json()
    check_early_end(account)
    assert main(["explain", f"late-{seed}", "--url", server.url]) == 0
    shown = capsys.readouterr().out
    for words in ("error: the deadline passed", "Prefill:", "Decode:", "Prefix cache:"):
        assert words in shown, shown


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("seed", [None, 4])
def test_an_answer_that_ends_with_a_stop_string_has_its_ledger(server: Server, seed: int | None, stream: bool) -> None:
    with httpx.Client(base_url=server.url, timeout=120) as http:
        body = {**ASK, "max_tokens": 2000, "seed": seed, "stop": ["e", "a"], "stream": stream}
        name = f"stopped-{seed}-{stream}"
        salt = {"cache_salt": name, "prompt": f"{name} {ASK['prompt']}"}
        assert http.post("/v1/completions", json=body | salt, headers={"x-request-id": name}).status_code == 200
        check_early_end(http.get(f"/v1/requests/{name}").json())


def check_early_end(account: dict[str, Any]) -> None:
    (choice,) = account["choices"]
    parts, engine = choice["parts"], choice["engine"]
    assert sum(parts.values()) == pytest.approx(account["total"], abs=ROUNDING)
    assert parts["answer"] == 0
    assert all(seconds >= 0 for seconds in parts.values()), parts
    assert engine["request_id"].startswith(account["id"])
    assert engine["prefill"]


def test_explain_says_where_the_time_of_a_real_answer_went(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    with httpx.Client(base_url=server.url, timeout=120) as http:
        named = {"x-request-id": f"of-a-client-{'x' * 60}"}
        answer = http.post("/v1/completions", json={**ASK, "seed": 77}, headers=named).json()
    assert main(["explain", answer["id"], "--url", server.url]) == 0
    shown = capsys.readouterr().out
    for words in (
        "computing the answer",
        "Prefill:",
        "Decode: 24 tokens",
        "Prefix cache:",
        "Objective ",
        "Most of it:",
    ):
        assert words in shown, shown
    title = shown.splitlines()[0]
    assert "/v1/completions" in title
    assert title.endswith(f"  (x-request-id {named['x-request-id']})"), "a pipe has no width"
