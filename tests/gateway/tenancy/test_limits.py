"""A tenant's limits, budget and shape of requests, through the real app with the memory store."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from penstock.core.engine import EngineStats
from penstock.core.errors import DeadlineExceeded, Overloaded
from penstock.core.request import GenerateRequest
from penstock.gateway.tenancy.budgets import Prices, machine_price
from penstock.settings import settings_from_mapping
from penstock.simulation.scripted_engine import MAX_MODEL_LEN, MODEL, Action, hang
from penstock.state.memory import MemoryStore
from penstock.state.store import BILLION
from penstock.text.tokenizer import Tokenizer
from tests.gateway.api.test_bad_input import check_error
from tests.gateway.conftest import Gateway, serving

HI: list[Any] = [{"role": "user", "content": "Hi"}]
LONG: list[Any] = [{"role": "user", "content": "word " * 450}]  # over two kilobytes, so it is read in another process
CHAT = "/v1/chat/completions"
TENANTS: dict[str, Any] = {
    "few-requests": {"requests_per_minute": 2},
    "few-tokens": {"tokens_per_minute": 200},
    "long": {"requests_per_minute": 2, "tokens_per_minute": 1000, "concurrent": 1},
    "one-at-a-time": {"concurrent": 1},
    "by-model": {
        "requests_per_minute": 50,
        "model_limits": {
            "org/alias": {"requests_per_minute": 1, "tokens_per_minute": 100},
            "another": {"concurrent": 1},
        },
    },
    "poor": {"budget_per_day": 0.00006},
    "small": {"max_tokens": 3, "max_prompt_tokens": 60, "max_body_mib": 0.001},
    "free": {},
}
DAY = "2031-05-06"  # on which all is spent, whenever midnight is
USAGE = {"since": DAY, "until": DAY}
PRICES = {MODEL: {"input": 1.0, "cached": 0.5, "output": 2.0}}


@pytest.fixture(scope="module")
def limited_gateway(tokenizer: Tokenizer) -> Iterator[Gateway]:
    values = {"tenants": TENANTS, "prices": PRICES}
    with pytest.MonkeyPatch.context() as patch, serving(tokenizer, settings_from_mapping(values)) as gateway:
        patch.setattr(MemoryStore, "day", lambda _: DAY)
        yield gateway


@pytest.fixture
def limited(limited_gateway: Gateway) -> Gateway:
    limited_gateway.answers("Hello there, friend!")  # whatever the test before has made it say
    return limited_gateway


def post(gateway: Gateway, tenant: str, **body: Any) -> Any:
    with gateway.http() as http:
        headers = {"authorization": f"Bearer {gateway.key(tenant)}"}
        return http.post(CHAT, json={"model": MODEL, "messages": HI, **body}, headers=headers)


def test_requests_per_minute(limited: Gateway) -> None:
    begun = time.monotonic()
    for left in (1, 0):
        response = post(limited, "few-requests", model="org/alias" if left else MODEL)  # an alias has the same limit
        assert response.status_code == 200
        assert response.headers["x-ratelimit-limit-requests"] == "2"
        assert response.headers["x-ratelimit-remaining-requests"] == str(left)
        assert response.headers["x-ratelimit-reset-requests"].startswith("1m")
        assert "x-ratelimit-limit-tokens" not in response.headers
    refused = post(limited, "few-requests")
    error = check_error(refused, 429, None)
    assert error["code"] == "rate_limit_exceeded"
    assert "2 requests per minute" in error["message"]
    assert begun + 60 <= time.monotonic() + int(refused.headers["retry-after"])
    assert int(refused.headers["retry-after"]) <= 61
    assert post(limited, "few-requests", max_tokens=-1).status_code == 400, "what is wrong is not counted"
    assert post(limited, "few-requests", messages=LONG, max_tokens=-1).status_code == 429, "not even read"
    assert post(limited, "free").status_code == 200


def test_tokens_are_reserved_and_settled(limited: Gateway) -> None:
    first = post(limited, "few-tokens", max_tokens=100)
    usage = first.json()["usage"]
    assert usage["total_tokens"] < 100
    assert int(first.headers["x-ratelimit-remaining-tokens"]) == 200 - usage["prompt_tokens"] - 100
    second = post(limited, "few-tokens", max_tokens=50, stream=True)
    left = int(second.headers["x-ratelimit-remaining-tokens"])
    assert left == 200 - usage["total_tokens"] - usage["prompt_tokens"] - 50, "the first was settled at what it used"
    check_error(post(limited, "few-tokens", max_tokens=140), 429, None)
    error = check_error(post(limited, "few-tokens", max_tokens=200), 413, "max_tokens")
    assert "200 per minute" in error["message"], "waiting would not help"


def test_long_requests_are_admitted_before_they_are_read(limited: Gateway) -> None:
    """They count once, for what they used, and not at all where reading them finds that they are wrong."""
    check_error(post(limited, "long", messages=LONG, max_tokens=-1), 400, "max_tokens")
    check_error(post(limited, "long", messages=LONG, model="unknown"), 404, "model")
    check_error(post(limited, "long", messages=[*LONG, *LONG], max_tokens=5), 400, "messages")
    first = post(limited, "long", messages=LONG, max_tokens=5)
    assert first.status_code == 200, first.text
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    used = first.json()["usage"]
    assert int(first.headers["x-ratelimit-remaining-tokens"]) == 1000 - used["prompt_tokens"] - 5
    second = post(limited, "long", messages=HI, max_tokens=5)
    left = 1000 - used["total_tokens"] - second.json()["usage"]["prompt_tokens"] - 5
    assert int(second.headers["x-ratelimit-remaining-tokens"]) == left
    broken = {"model": MODEL, "messages": LONG, "tools": "none"}
    error = check_error(post(limited, "long", **broken), 429, None)
    assert "2 requests per minute" in error["message"], "refused before anybody noticed what is wrong with it"
    with limited.http() as http:
        http.headers["authorization"] = f"Bearer {limited.key('')}"
        (row,) = http.get("/admin/usage", params={"tenant": "long", **USAGE}).json()["data"]
    assert (row["requests"], row["input_tokens"]) == (
        2,
        used["prompt_tokens"] + second.json()["usage"]["prompt_tokens"],
    )


def test_a_model_has_limits_of_its_own_under_all_its_names(limited: Gateway) -> None:
    error = check_error(post(limited, "by-model", max_tokens=200), 413, "max_tokens")
    assert "100 per minute" in error["message"]
    response = post(limited, "by-model", max_tokens=5)
    assert response.headers["x-ratelimit-limit-requests"] == "1"
    assert response.headers["x-ratelimit-limit-tokens"] == "100"
    for name in (MODEL, "org/alias"):
        error = check_error(post(limited, "by-model", max_tokens=5, model=name), 429, None)
        assert f"1 requests per minute of {MODEL}" in error["message"]


def test_concurrent_requests(limited: Gateway) -> None:
    started = threading.Event()

    async def tell() -> None:
        started.set()

    limited.runs(lambda request: [[100], tell, hang])
    client = limited.client(limited.key("one-at-a-time"))
    with client.chat.completions.create(model=MODEL, messages=HI, stream=True) as stream:
        next(iter(stream))
        assert started.wait(20)
        with pytest.raises(openai.RateLimitError, match="1 requests at a time"):
            client.chat.completions.create(model=MODEL, messages=HI)
    limited.answers("Hello")
    while True:  # until the server has noticed that the client left
        try:
            client.chat.completions.create(model=MODEL, messages=HI)
            break
        except openai.RateLimitError:
            pass


def test_spending_past_the_budget_is_refused_and_accounted(limited: Gateway) -> None:
    error = check_error(post(limited, "poor", max_tokens=100), 429, None)
    assert "0.000060000 left" in error["message"], "more than it has, whatever it will cost"
    assert "lower max_tokens" in error["message"]
    usage = post(limited, "poor", max_tokens=10).json()["usage"]
    refused = post(limited, "poor", max_tokens=10)
    error = check_error(refused, 429, None)
    assert error["code"] == error["type"] == "insufficient_quota"
    assert refused.headers["x-should-retry"] == "false", "OpenAI's clients would try again"
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    cost = (usage["prompt_tokens"] - cached + 0.5 * cached + 2 * usage["completion_tokens"]) / 1e6
    with limited.http() as http:
        http.headers["authorization"] = f"Bearer {limited.key('')}"
        (row,) = http.get("/admin/usage", params={"tenant": "poor", **USAGE}).json()["data"]
        table = http.get("/admin/usage", params={"tenant": "poor", "format": "csv", **USAGE})
        metrics = http.get("/metrics").text
        check_error(http.get("/admin/usage", params={"since": "yesterday"}), 400, "since")
        check_error(http.get("/admin/usage", params={"since": "1999-01-01"}), 400, "since")
    assert (row["requests"], row["output_tokens"], float(row["cost"])) == (1, usage["completion_tokens"], cost)
    assert table.headers["content-type"].startswith("text/csv")
    assert table.text.splitlines()[1] == ",".join(str(value) for value in row.values())
    assert f'penstock_spend_total{{model="{MODEL}",tenant="poor"}} {cost}' in metrics
    assert f'penstock_cost_per_million_tokens{{model="{MODEL}"}}' in metrics
    assert 'penstock_limited_total{limit="day",tenant="poor"} 2.0' in metrics


@pytest.mark.parametrize("priced", [MODEL, "org/alias"])
def test_parallel_requests_share_what_is_left_of_a_budget(tokenizer: Tokenizer, priced: str) -> None:
    """Of twenty at once that cost a fifth of the budget each, five run; what fails gives its part back."""
    prompt = len(tokenizer.encode("Hi"))
    budget = 5 * (prompt + 2 * 10) / 1e6
    values = {"tenants": {"acme": {"budget_per_day": budget}}, "prices": {priced: PRICES[MODEL]}}
    with serving(tokenizer, settings_from_mapping(values)) as gateway, ThreadPoolExecutor(20) as pool:
        released = threading.Event()

        async def wait() -> None:
            await asyncio.get_running_loop().run_in_executor(None, released.wait)

        gateway.runs(lambda request: [wait, RuntimeError("no")])
        headers = {"authorization": f"Bearer {gateway.key('acme')}"}
        body = {"model": MODEL, "prompt": "Hi", "max_tokens": 10}

        def ask(_: int) -> int:
            with gateway.http() as http:
                status = http.post("/v1/completions", json=body, headers=headers).status_code
            if status == 429:
                refused.release()
            return status

        refused = threading.Semaphore(0)
        statuses = pool.map(ask, range(20))
        for _ in range(15):
            assert refused.acquire(timeout=20)
        released.set()
        assert sorted(statuses) == [429] * 15 + [500] * 5
        gateway.answers("Hello")
        assert ask(0) == 200


def test_nothing_is_charged_for_what_failed_in_the_engine(limited: Gateway) -> None:
    limited.runs(lambda request: [RuntimeError("no")])
    assert post(limited, "free").status_code == 500
    with limited.http() as http:
        http.headers["authorization"] = f"Bearer {limited.key('')}"
        before = http.get("/admin/usage", params={"tenant": "free", **USAGE}).json()["data"][0]
        post(limited, "free")
        after = http.get("/admin/usage", params={"tenant": "free", **USAGE}).json()["data"][0]
    assert after == before | {"requests": before["requests"] + 1}


def test_a_refusal_of_the_engine_counts_neither_as_a_request_nor_its_tokens(limited: Gateway) -> None:
    refuses, begun = Overloaded("full", retry_after=1), asyncio.Event()
    with limited.http() as http:
        http.headers["authorization"] = f"Bearer {limited.key('')}"

        def counted() -> dict[str, float]:
            """What usage says of the tenant, and what the metrics do."""
            days = http.get("/admin/usage", params={"tenant": "free", **USAGE}).json()["data"]
            usage = {name: sum(day[name] for day in days) for name in ("requests", "input_tokens", "output_tokens")}
            metrics = limited.edge.metrics.registry.get_sample_value
            of_model = ("prompt_tokens_total", "output_tokens_total", "request_seconds_count")
            found = {name: metrics(f"penstock_{name}", {"model": MODEL}) or 0 for name in of_model}
            requests = metrics("penstock_tenant_requests_total", {"tenant": "free", "model": MODEL})
            return {**usage, **found, "tenant_requests": requests or 0}

        def gained(expected_status: int, **fields: Any) -> list[float]:
            before = counted()
            assert post(limited, "free", **fields).status_code == expected_status
            return [after - before[name] for name, after in counted().items()]

        limited.runs(lambda request: [refuses])
        assert gained(429) == [0] * 7
        limited.answers("Hello")
        prompt = post(limited, "free", max_tokens=2).json()["usage"]["prompt_tokens"]
        assert gained(200, max_tokens=2) == [1, prompt, 2, prompt, 2, 1, 1]

        async def until_begun() -> None:
            await begun.wait()

        async def begin() -> None:
            begun.set()

        def one_of_two(request: GenerateRequest) -> list[Action]:
            return [[5], begin, hang] if request.id.endswith("-0") else [until_begun, refuses]

        limited.runs(one_of_two)
        assert gained(429, n=2) == [1, prompt, 1, prompt, 1, 1, 1], "the engine had begun with one of them"


def test_answers_from_the_result_cache_are_not_charged(tokenizer: Tokenizer) -> None:
    settings = settings_from_mapping({"tenants": {"acme": {"tokens_per_minute": 1000}}, "cache": {"disk_mib": 0}})
    with serving(tokenizer, settings, cached=True) as gateway:
        first, second = (post(gateway, "acme", temperature=0, max_tokens=20) for _ in range(2))
        assert len(gateway.engine.requests) == 1
        used = first.json()["usage"]["total_tokens"]
        assert second.json()["usage"]["total_tokens"] == used
        third = post(gateway, "acme", temperature=0, max_tokens=21)
        reserved = first.json()["usage"]["prompt_tokens"] + 21
        assert int(third.headers["x-ratelimit-remaining-tokens"]) == 1000 - used - reserved


def test_a_passed_deadline_is_said_so(limited: Gateway) -> None:
    async def pass_deadline() -> None:
        raise DeadlineExceeded("the deadline passed in the engine")

    limited.runs(lambda request: [pass_deadline])
    check_error(post(limited, "free", deadline_ms=1000), 504, "deadline_ms")


def test_prices_follow_from_the_machine() -> None:
    stats = EngineStats(prefill_tokens_per_second=1000.0, decode_step_seconds=0.01, running=4)
    price = machine_price(3.6, stats)  # a thousandth a second
    assert price.cost(prompt_tokens=1000, cached_tokens=0, output_tokens=0) == BILLION // 1000
    assert price.cost(prompt_tokens=1000, cached_tokens=1000, output_tokens=0) == 0
    assert price.cost(prompt_tokens=0, cached_tokens=0, output_tokens=400) == BILLION // 1000
    assert machine_price(3.6, EngineStats()).cost(1000, 0, 1000) == 0, "nothing measured yet"
    settings = settings_from_mapping({"machine_per_hour": 3.6, "prices": {"listed": {"input": 1}}})
    assert Prices(settings, ["other"], lambda: stats).now() == price
    assert Prices(settings, ["listed"], lambda: stats).now().cost(1_000_000, 0, 5) == BILLION


def test_shapes_of_requests(limited: Gateway) -> None:
    limited.runs(lambda request: [[100]] * 50)
    answer = post(limited, "small", max_tokens=20).json()
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (3, "length")
    assert post(limited, "small").json()["usage"]["completion_tokens"] == 3
    check_error(post(limited, "small", max_tokens=MAX_MODEL_LEN), 400, "max_tokens")
    long = [{"role": "user", "content": "word " * 60}]
    error = check_error(post(limited, "small", messages=long), 400, "messages")
    assert "this tenant is limited to 60" in error["message"]
    check_error(post(limited, "small", messages=HI * 100), 413, None)
    assert post(limited, "free", messages=long, max_tokens=20).json()["usage"]["completion_tokens"] == 20


def test_a_depth_bomb_is_refused(limited: Gateway) -> None:
    key = limited.key("free")
    bomb = b'{"model": "x", "messages": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"
    with limited.http() as http:
        for body in (bomb, b"[" * 100_000, b'{"a":' * 50_000):
            response = http.post(CHAT, content=body, headers={"authorization": f"Bearer {key}"})
            assert response.status_code == 400, response.text
