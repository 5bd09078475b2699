"""The cache as clients see it: over HTTP, through the OpenAI client, before a scripted engine and the real one."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from penstock.cache.settings import CacheConfig, SemanticConfig
from penstock.core.request import SamplingParams
from penstock.gateway.settings import ServerConfig
from penstock.settings import Settings, settings_from_mapping
from penstock.simulation.scripted_engine import MODEL, Action
from penstock.text.tokenizer import Tokenizer
from tests.conftest import Server
from tests.gateway.conftest import Gateway, serving
from tests.redis_server import RedisServer

ASKED: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "temperature": 0}


@pytest.fixture
def gateway(tokenizer: Tokenizer) -> Iterator[Gateway]:
    with serving(tokenizer, cached=True) as gateway:
        yield gateway


def ask(
    gateway: Gateway, cache_control: str = "", path: str = "/v1/chat/completions", **changes: Any
) -> httpx.Response:
    headers = {"Cache-Control": cache_control} if cache_control else {}
    asked = {name: value for name, value in ASKED.items() if name != "messages" or "prompt" not in changes}
    with gateway.http() as http:
        return http.post(path, json={**asked, **changes}, headers=headers)


def cache_header(response: Any) -> str:
    """Without the age, which depends on how fast this machine is."""
    return str(response.headers["x-penstock-cache"]).partition("; age=")[0]


def test_an_answer_is_the_same_from_the_cache_streamed_or_not(gateway: Gateway) -> None:
    client = gateway.client()
    answers: list[tuple[str, str | None, int, int]] = []
    states: list[str] = []
    for stream in (False, True, True, False):
        if stream:
            with client.chat.completions.with_streaming_response.create(
                **ASKED, stream=True, stream_options={"include_usage": True}
            ) as raw:
                states.append(cache_header(raw))
                parts = list(raw.parse())
            text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
            reason = next(p.choices[0].finish_reason for p in parts if p.choices and p.choices[0].finish_reason)
            usage = parts[-1].usage
        else:
            raw_answer = client.chat.completions.with_raw_response.create(**ASKED)
            states.append(cache_header(raw_answer))
            whole = raw_answer.parse()
            text, reason, usage = whole.choices[0].message.content, whole.choices[0].finish_reason, whole.usage
        assert usage is not None
        answers.append((text, reason, usage.prompt_tokens, usage.completion_tokens))
    assert states == ["miss", *["hit; tier=memory"] * 3]
    assert len(set(answers)) == 1
    assert answers[0][0] == "Hello there, friend!"
    assert len(gateway.engine.requests) == 1


def test_a_hit_is_reported_as_cached_tokens(gateway: Gateway) -> None:
    answers = [ask(gateway) for _ in range(2)]
    assert re.fullmatch(r"hit; tier=memory; age=\d+", answers[1].headers["x-penstock-cache"])
    usages = [answer.json()["usage"] for answer in answers]
    assert usages[0]["prompt_tokens_details"]["cached_tokens"] == 2
    assert usages[1]["prompt_tokens_details"]["cached_tokens"] == usages[1]["prompt_tokens"]


def test_a_long_answer_replays_as_a_stream(gateway: Gateway, tokenizer: Tokenizer) -> None:
    gateway.answers("one two three four five six seven eight nine ten " * 10)
    texts = [re.findall(rb'"content":"([^"]+)"', ask(gateway, stream=True).content) for _ in range(2)]
    assert len(texts[1]) >= 5
    assert b"".join(texts[0]) == b"".join(texts[1])


def test_choices_prompts_logprobs_and_echo_come_back_whole(gateway: Gateway) -> None:
    gateway.answers("first", "second", "third")
    asked: dict[str, Any] = {"prompt": ["One", "Two"], "n": 2, "seed": 3, "temperature": 1, "logprobs": 2, "echo": True}
    answers = [ask(gateway, path="/v1/completions", max_tokens=8, **asked) for _ in range(2)]
    assert [cache_header(answer) for answer in answers] == ["miss", "hit; tier=memory"]
    assert answers[0].json()["choices"] == answers[1].json()["choices"]
    assert len(gateway.engine.requests) == 4


def test_what_the_model_recommends_decides_what_is_kept(gateway: Gateway) -> None:
    assert cache_header(ask(gateway, temperature=None)) == "bypass"
    greedy = SamplingParams(temperature=0)
    gateway.engine.info = replace(gateway.engine.info, sampling_defaults=greedy)
    assert [cache_header(ask(gateway, temperature=given)) for given in (None, 0)] == ["miss", "hit; tier=memory"]


def test_a_client_chooses_with_cache_control(gateway: Gateway) -> None:
    assert ask(gateway, "only-if-cached").status_code == 504
    assert cache_header(ask(gateway, "no-store")) == "bypass"
    assert cache_header(ask(gateway)) == "miss"
    assert cache_header(ask(gateway, "no-cache")) == "miss"
    assert cache_header(ask(gateway, 'Max-Age="3600", something=else')) == "hit; tier=memory"
    assert cache_header(ask(gateway, "max-age=soon")) == "miss"
    found = ask(gateway, "only-if-cached")
    assert (found.status_code, cache_header(found)) == (200, "hit; tier=memory")
    refused = ask(gateway, "only-if-cached", temperature=1)
    assert refused.status_code == 504
    assert refused.json()["error"]["code"] == "not_cached"
    assert cache_header(ask(gateway, temperature=1)) == "bypass"


@pytest.mark.parametrize(
    "change",
    [
        {"messages": [{"role": "user", "content": "Hi "}]},
        {"messages": [{"role": "system", "content": ""}, {"role": "user", "content": "Hi"}]},
        {"max_tokens": 3},
        {"stop": "x"},
        {"cache_salt": "x"},
        {"logit_bias": {"5": 1}},
        {"logprobs": True},
    ],
)
def test_no_field_of_the_body_gets_another_ones_answer(gateway: Gateway, change: dict[str, Any]) -> None:
    ask(gateway)
    assert cache_header(ask(gateway, **change)) == "miss"


def test_ids_and_headers_a_client_makes_up_do_not_matter(gateway: Gateway) -> None:
    with gateway.http() as http:
        states = [
            cache_header(
                http.post("/v1/chat/completions", json={**ASKED, "user": f"u{i}"}, headers={"x-request-id": f"r{i}"})
            )
            for i in range(2)
        ]
    assert states == ["miss", "hit; tier=memory"]


def test_metrics_count_hits_per_tier(gateway: Gateway) -> None:
    ask(gateway)
    ask(gateway)
    ask(gateway, temperature=1)
    text = gateway.http().get("/metrics").text
    assert 'penstock_answer_cache_requests_total{state="hit",tier="memory"} 1.0' in text
    assert 'penstock_answer_cache_requests_total{state="miss",tier=""} 1.0' in text
    assert 'penstock_answer_cache_requests_total{state="bypass",tier=""} 1.0' in text
    held = re.search(r'penstock_answer_cache_bytes{tier="memory"} (\d+)', text)
    assert held is not None
    assert int(held[1]) > 0


def test_without_a_cache_nothing_is_said_about_one(tokenizer: Tokenizer) -> None:
    with serving(tokenizer, Settings(cache=CacheConfig(enabled=False)), cached=True) as gateway:
        answers = [ask(gateway) for _ in range(2)]
        assert all("x-penstock-cache" not in answer.headers for answer in answers)
        assert len(gateway.engine.requests) == 2


def test_a_semantic_route_answers_rewordings_and_only_there(tokenizer: Tokenizer) -> None:
    semantic = SemanticConfig(routes=("/v1/chat/completions",))
    with serving(tokenizer, Settings(cache=CacheConfig(semantic=semantic)), cached=True) as gateway:

        def chat(text: str, **changes: Any) -> str:
            messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
            return cache_header(ask(gateway, **{"messages": messages, **changes}))

        assert chat("How do I reset my password?") == "miss"
        assert re.fullmatch(r"semantic; score=0\.99\d", chat("How can I reset my password?"))
        assert re.fullmatch(r"semantic; score=0\.99\d", chat("How can I reset my password?", stream=True, user="me"))
        assert chat("How can I reset my password?", top_p=0.5) == "miss"
        assert chat("How can I delete my password?") == "miss"
        for text in ("How do I reset my password?", "How can I reset my password?"):
            assert cache_header(ask(gateway, path="/v1/completions", prompt=text)) == "miss"


@pytest.mark.parametrize("tenants", [("acme", "acme"), ("acme", "other")])
def test_an_answer_is_charged_to_the_one_who_stays_when_the_first_leaves(
    tokenizer: Tokenizer, tenants: tuple[str, str]
) -> None:
    values = {"tenants": {"acme": {}, "other": {}}, "cache": {"scope": "shared"}}
    asked = {**ASKED, "max_tokens": 40, "ignore_eos": True, "stream": True}
    path = "/v1/chat/completions"
    (token,) = tokenizer.encode("Hello", add_special_tokens=False)
    left = threading.Event()

    async def wait() -> None:
        await asyncio.to_thread(left.wait, 20)
        await asyncio.sleep(0.01)  # the gateway sees that the client has left

    with serving(tokenizer, settings_from_mapping(values), cached=True) as gateway, gateway.http() as http:
        rest: list[Action] = [wait, [token]]
        gateway.runs(lambda request: [[token], *rest * 39])
        first, second = ({"authorization": f"Bearer {gateway.key(tenant)}"} for tenant in tenants)
        with ExitStack() as stays:
            with http.stream("POST", path, json=asked, headers=first) as response:
                lines = response.iter_lines()  # held: the response would be closed with it
                next(lines)
                more = {**asked, "stream_options": {"include_usage": True}}
                joined = stays.enter_context(http.stream("POST", path, json=more, headers=second))
                assert joined.headers["x-penstock-cache"] == "shared"
            left.set()
            last = [line for line in joined.iter_lines() if line.startswith("data: {")][-1]
        usage = json.loads(last.removeprefix("data: "))["usage"]
        http.headers["authorization"] = f"Bearer {gateway.key('')}"
        rows: list[Any] = []
        end = time.monotonic() + 20
        while sum(row["requests"] for row in rows) < 2 and time.monotonic() < end:
            time.sleep(0.02)
            rows = http.get("/admin/usage").json()["data"]
        assert len(gateway.engine.requests) == 1
    assert usage["completion_tokens"] == 40
    assert sum(row["output_tokens"] for row in rows) == 40
    assert sum(row["input_tokens"] for row in rows) == usage["prompt_tokens"]
    assert {row["tenant"] for row in rows if row["output_tokens"]} == set(tenants)


def test_redis_stopped_under_load_costs_no_request(tokenizer: Tokenizer) -> None:
    redis = RedisServer()
    settings = Settings(server=ServerConfig(), state=redis.url)
    with serving(tokenizer, settings, cached=True) as gateway, ThreadPoolExecutor(8) as pool, gateway.http() as http:

        def some(number: int) -> int:
            if number == 100:
                redis.stop()
            body = {**ASKED, "messages": [{"role": "user", "content": f"Hi {number}"}]}
            return http.post("/v1/chat/completions", json=body).status_code

        assert set(pool.map(some, range(300))) == {200}
        assert 'penstock_answer_cache_up{tier="redis"} 0.0' in gateway.http().get("/metrics").text
    redis.stop()


# ---------------------------------------------------------------- the real server


ASKED_BY_ALL: dict[str, Any] = {"prompt": "A hundred clients ask about", "max_tokens": 24, "temperature": 0}


def test_a_hundred_identical_streams_run_the_real_model_once(server: Server) -> None:
    client = openai.AsyncOpenAI(base_url=server.base_url, api_key="none", timeout=120, max_retries=0)

    async def stream() -> tuple[str, str, str]:
        async with client.completions.with_streaming_response.create(
            model="smollm2-135m", stream=True, **ASKED_BY_ALL
        ) as raw:
            parts = [part async for part in await raw.parse()]
            return parts[0].id, cache_header(raw), "".join(part.choices[0].text for part in parts)

    async def everyone() -> list[tuple[str, str, str]]:
        return await asyncio.gather(*(stream() for _ in range(100)))

    ids, states, texts = zip(*asyncio.run(everyone()), strict=True)
    assert len(set(texts)) == 1
    kinds = [state.split(";")[0] for state in states]
    assert kinds.count("miss") == 1
    assert set(kinds) <= {"miss", "shared", "hit"}
    with httpx.Client(base_url=server.url, timeout=60) as http:
        accounts = [http.get(f"/v1/requests/{id}").json() for id in ids]
    (ledger,) = [account["choices"][0]["engine"] for account in accounts if account["choices"][0]["engine"]]
    assert ledger["output_tokens"] == ASKED_BY_ALL["max_tokens"], "of the one computation"
