"""Virtual models over HTTP: a version for each user, a small model before a large one, shadow traffic, sessions."""

from __future__ import annotations

import gc
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from openai.types.chat import ChatCompletionMessageParam
from prometheus_client.parser import text_string_to_metric_families

from penstock.core.engine import EngineStats
from penstock.core.errors import Failure, InvalidRequest, Overloaded, Unavailable
from penstock.fleet.versions import assigned_version
from penstock.gateway.api.generation import Generation
from penstock.gateway.api.models import ServedModel
from penstock.gateway.api.shadow import MAX_SEQUENCES
from penstock.gateway.api.trial import Trial
from penstock.gateway.http.request import Request
from penstock.settings import settings_from_mapping
from penstock.simulation.scripted_engine import MODEL, ScriptedEngine, hang, says
from penstock.text.tokenizer import Tokenizer
from tests.gateway.api.test_many_models import byte_tokenizer
from tests.gateway.conftest import Gateway, serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]
OTHER = "other"  # a model with another tokenizer, another template and a longer context
FIRST_SAYS, OTHER_SAYS = "Hello there, friend!", "by bytes"


@contextmanager
def serving_both(tokenizer: Tokenizer, **settings: Any) -> Iterator[tuple[Gateway, ScriptedEngine]]:
    """The gateway, whose engine is that of the first model, and the engine of the other one."""
    other = byte_tokenizer()
    (script,) = says(other, OTHER_SAYS)
    engine = ScriptedEngine(other, lambda request: [[token] for token in script])
    engine.info = replace(engine.info, model=OTHER, max_model_len=8192)
    settings["models"] = {MODEL: {}, OTHER: {}, **settings["models"]}
    given = settings_from_mapping(settings)
    with serving(tokenizer, given, beside=[ServedModel([OTHER], other, engine)]) as gateway:
        yield gateway, engine


def post(gateway: Gateway, path: str = CHAT, headers: dict[str, str] | None = None, **body: Any) -> Any:
    body = {"messages": HI, **body} if path == CHAT else body
    return httpx.post(gateway.url + path, json=body, headers=headers, timeout=20)


def text_of(answer: Any) -> str:
    (choice,) = answer.json()["choices"]
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text


def account_of(gateway: Gateway, answer: Any) -> dict[str, Any]:
    with gateway.http() as http:
        found: dict[str, Any] = http.get(f"/v1/requests/{answer.headers['x-request-id']}").json()
        return found


# -- versions ----------------------------------------------------------------------------------------------------------

WEIGHTS = {MODEL: 0.5, OTHER: 0.5}


@pytest.fixture(scope="module")
def versions(tokenizer: Tokenizer) -> Iterator[tuple[Gateway, ScriptedEngine]]:
    models = {"chat": {"versions": WEIGHTS, "aliases": ["gpt"]}}
    with serving_both(tokenizer, models=models) as found:
        yield found


def test_each_user_keeps_a_version(versions: tuple[Gateway, ScriptedEngine]) -> None:
    gateway, _ = versions
    said = {MODEL: FIRST_SAYS, OTHER: OTHER_SAYS}
    seen = set()
    for user in ("ann", "bob", "cat", "dan", "eve"):
        version = assigned_version(f"user//{user}", WEIGHTS)
        seen.add(version)
        for name in ("chat", "gpt"):
            answer = post(gateway, model=name, user=user)
            assert (answer.json()["model"], answer.headers["x-penstock-model"]) == (name, version)
            assert text_of(answer) == said[version]
    assert seen == {MODEL, OTHER}
    answer = post(gateway, model=OTHER)
    assert "x-penstock-model" not in answer.headers
    assert account_of(gateway, answer)["why"] == ""


@pytest.mark.parametrize("repeated", [1, 400])  # the longer one is read in another process
def test_a_version_reads_the_request_with_its_own_tokenizer(
    versions: tuple[Gateway, ScriptedEngine], repeated: int
) -> None:
    gateway, other = versions
    user = next(user for user in map(str, range(99)) if assigned_version(f"user//{user}", WEIGHTS) == OTHER)
    content = "word a " * repeated
    answer = post(gateway, model="chat", safety_identifier=user, messages=[{"role": "user", "content": content}])
    assert byte_tokenizer().decode(other.requests[-1].prompt) == content.upper() + "!"
    account = account_of(gateway, answer)
    assert (account["asked"], account["model"], account["prompt_tokens"]) == ("chat", OTHER, len(content) + 1)
    assert account["why"] == "a version for 0.5 of the users"


def test_without_a_user_the_version_follows_session_or_request(versions: tuple[Gateway, ScriptedEngine]) -> None:
    gateway, _ = versions

    def chosen(**given: Any) -> str:
        version: str = post(gateway, model="chat", max_tokens=1, **given).headers["x-penstock-model"]
        return version

    assert {chosen() for _ in range(24)} == {MODEL, OTHER}
    assert len({chosen(headers={"x-session-id": "a"}) for _ in range(8)}) == 1
    assert len({chosen(prompt_cache_key="b") for _ in range(8)}) == 1
    assert {chosen(user={"not": "a text"}) for _ in range(24)} == {MODEL, OTHER}


def test_a_virtual_model_is_listed_allowed_and_tokenized_for(tokenizer: Tokenizer) -> None:
    tenants = {"ann": {"models": ["chat"]}, "bob": {"models": [MODEL]}}
    models = {"chat": {"versions": {MODEL: 0.1, OTHER: 0.9}}}
    with serving_both(tokenizer, models=models, tenants=tenants) as (gateway, _), gateway.http() as http:
        of = {name: {"authorization": f"Bearer {gateway.key(name)}"} for name in tenants}
        listed = http.get("/v1/models", headers=of["ann"]).json()["data"]
        assert [(card["id"], card["max_model_len"]) for card in listed] == [("chat", 8192)]
        assert post(gateway, model="chat", headers=of["ann"]).status_code == 200
        assert post(gateway, model=MODEL, headers=of["ann"]).status_code == 404
        assert post(gateway, model="chat", headers=of["bob"]).status_code == 404
        found = http.post("/tokenize", json={"model": "chat", "prompt": "abc"}, headers=of["ann"]).json()
        assert found["count"] == 3


# -- sessions ----------------------------------------------------------------------------------------------------------


def test_a_session_is_named_by_field_or_header_and_is_of_one_tenant(tokenizer: Tokenizer) -> None:
    settings = settings_from_mapping({"tenants": {"ann": {}, "bob": {}}})
    with serving(tokenizer, settings) as gateway:

        def session(tenant: str = "ann", headers: dict[str, str] | None = None, **body: Any) -> str:
            key = {"authorization": f"Bearer {gateway.key(tenant)}"}
            assert post(gateway, headers={**key, **(headers or {})}, model=MODEL, **body).status_code == 200
            return gateway.engine.requests[-1].session

        conversation = session(prompt_cache_key="c1")
        assert len(conversation) == 32
        assert session(headers={"x-penstock-session": "c1"}) == conversation
        assert session(headers={"x-session-id": "c1"}) == conversation
        assert session("bob", prompt_cache_key="c1") != conversation
        assert session(prompt_cache_key="c2", headers={"x-session-id": "c1"}) not in (conversation, "")
        for ignored in ({"x-session-id": "a b"}, {"x-session-id": "x" * 257}, {}):
            assert session(headers=ignored) == ""
        assert session(prompt_cache_key=7) == ""


# -- cascade -----------------------------------------------------------------------------------------------------------

SURE, UNSURE = -1.0, -0.1  # the scripted engine's log-probabilities are between -1 and -1/8


@contextmanager
def cascading(tokenizer: Tokenizer, **cascade: Any) -> Iterator[tuple[Gateway, ScriptedEngine]]:
    easy = {"cascade": {"small": MODEL, "large": OTHER, "confidence_tokens": 3, **cascade}}
    prices = {MODEL: {"input": 1.0, "output": 1.0}, OTHER: {"input": 5.0, "output": 5.0}}
    with serving_both(tokenizer, models={"easy": easy}, prices=prices) as found:
        yield found


def events(answer: Any) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def texts(answer: Any, stream: bool) -> list[str]:
    """By choice."""
    found: dict[int, str] = defaultdict(str)
    for part in events(answer) if stream else [answer.json()]:
        for choice in part["choices"]:
            content = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
            found[choice["index"]] += content.get("content") or ""
    return [found[index] for index in sorted(found)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("min_logprob", [SURE, UNSURE])
def test_the_large_model_answers_where_the_small_one_is_unsure(
    tokenizer: Tokenizer, stream: bool, path: str, n: int, min_logprob: float
) -> None:
    prompt: dict[str, Any] = {} if path == CHAT else {"prompt": "abc"}
    with cascading(tokenizer, min_logprob=min_logprob) as (gateway, other):
        answer = post(gateway, path, model="easy", n=n, stream=stream, max_tokens=40, **prompt)
        said, model = (FIRST_SAYS, MODEL) if min_logprob == SURE else (OTHER_SAYS, OTHER)
        assert texts(answer, stream) == [said] * n
        assert answer.headers["x-penstock-model"] == model
        assert '"logprobs":{' not in answer.text.replace(" ", "")
        assert len(other.requests) == (0 if min_logprob == SURE else n)
        assert all(request.params.logprobs == 0 for request in gateway.engine.requests)
        account = account_of(gateway, answer)
        assert (account["asked"], account["model"], account["status"]) == ("easy", model, 200)
        assert sum(account["choices"][0]["parts"].values()) == pytest.approx(account["total"], abs=1e-6)
        if min_logprob == SURE:
            assert "sure enough: mean log-probability -0." in account["why"]
            assert account["attempts"] == []
        else:
            assert account["why"].startswith("the small model was unsure: mean log-probability -0.")
            (attempt,) = account["attempts"]
            assert (attempt["model"], attempt["why"]) == (MODEL, account["why"])
            assert attempt["output_tokens"] >= 3
            assert account["choices"][0]["parts"]["cascade"] == attempt["seconds"] > 0


def test_streamed_pieces_come_once_and_with_one_finish_reason(tokenizer: Tokenizer) -> None:
    with cascading(tokenizer) as (gateway, _):
        answer = post(gateway, TEXT, model="easy", prompt="abc", n=2, stream=True, max_tokens=40, logprobs=1)
        for index in (0, 1):
            choices = [c for part in events(answer) for c in part["choices"] if c["index"] == index]
            tokens = [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["tokens"]]
            assert "".join(tokens).startswith(FIRST_SAYS)
            assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
            assert choices[0]["text"] == "".join(tokens[:3])


@pytest.mark.parametrize(
    ("config", "asked", "why"),
    [
        ({"max_prompt_tokens": 5}, {}, "not easy enough for the small model: it has"),
        ({"max_output_tokens": 9}, {"max_tokens": 10}, "and may have 10 more"),
        ({"max_output_tokens": 9}, {}, "not easy enough"),
        ({}, {"max_tokens": 600}, "the small model cannot take it: This model's maximum context length is"),
        ({}, {"prompt_logprobs": 1}, "the log-probabilities of a prompt"),
    ],
)
def test_what_is_not_easy_goes_to_the_large_model_at_once(
    tokenizer: Tokenizer, config: dict[str, Any], asked: dict[str, Any], why: str
) -> None:
    with cascading(tokenizer, **config) as (gateway, _):
        answer = post(gateway, model="easy", **asked)
        assert text_of(answer) == OTHER_SAYS
        account = account_of(gateway, answer)
        assert why in account["why"]
        assert (account["attempts"], gateway.engine.requests) == ([], [])


def test_a_background_response_is_the_large_models(tokenizer: Tokenizer) -> None:
    with cascading(tokenizer, min_logprob=UNSURE) as (gateway, other):
        client: Any = gateway.client()
        *_, last = client.responses.create(model="easy", input="Hi", background=True, stream=True)
        assert last.type == "response.completed"
        assert last.response.output_text == client.responses.retrieve(last.response.id).output_text != ""
        assert (len(gateway.engine.requests), len(other.requests)) == (0, 1)


@pytest.mark.parametrize("min_logprob", [SURE, None])
@pytest.mark.parametrize(
    "failure",
    [
        lambda: Unavailable("no replica"),
        lambda: Overloaded("full", retry_after=1.0),
        lambda: Failure("EngineFailure", "a step failed"),
    ],
)
def test_the_large_model_stands_in_for_a_small_one_that_fails(
    tokenizer: Tokenizer, failure: Callable[[], Any], min_logprob: float | None
) -> None:
    with cascading(tokenizer, min_logprob=min_logprob) as (gateway, _):
        gateway.runs(lambda request: [failure()])
        answer = post(gateway, model="easy", stream=True)
        assert texts(answer, True) == [OTHER_SAYS]
        assert account_of(gateway, answer)["why"].startswith("the small model failed: ")
        gateway.runs(lambda request: [[5], [6], [7], [8], failure()])
        answer = post(gateway, model="easy", stream=True)
        assert '"error":' in answer.text, "what was sent cannot be taken back"


@pytest.mark.parametrize("min_logprob", [SURE, None])
def test_the_large_model_does_what_the_small_one_refuses(tokenizer: Tokenizer, min_logprob: float | None) -> None:
    refusal = InvalidRequest("logprobs cannot be had from this upstream", param="logprobs")
    with cascading(tokenizer, min_logprob=min_logprob) as (gateway, other), gateway.http() as http:
        gateway.runs(lambda request: [refusal])
        for stream in (False, True):
            answer = post(gateway, model="easy", stream=stream, n=2)
            assert texts(answer, stream) == [OTHER_SAYS] * 2
            account = account_of(gateway, answer)
            assert account["why"] == f"the small model cannot take it: {refusal.message}"
            assert sum(account["choices"][0]["parts"].values()) == pytest.approx(account["total"], abs=1e-6)
        samples = metrics_of(http)
        assert samples["penstock_cascades_total", "easy", "skipped"] == 2
        assert samples["penstock_prompt_tokens_total", MODEL] == 0
        other.script = lambda request: [InvalidRequest("nor from this one")]
        refused = post(gateway, model="easy")
        assert (refused.status_code, refused.json()["error"]["message"]) == (400, "nor from this one")
        gateway.runs(lambda request: [[5], [6], [7], [8], refusal])
        assert refusal.message in post(gateway, model="easy", stream=True).text, "what was sent cannot be taken back"


def test_only_the_answer_that_was_sent_is_charged_and_counted(tokenizer: Tokenizer) -> None:
    with cascading(tokenizer, min_logprob=UNSURE) as (gateway, _), gateway.http() as http:
        answer = post(gateway, model="easy", max_tokens=40)
        samples = metrics_of(http)
        used = answer.json()["usage"]
        assert used["completion_tokens"] == len(OTHER_SAYS) + 1
        assert samples["penstock_output_tokens_total", OTHER] == used["completion_tokens"]
        assert samples["penstock_output_tokens_total", MODEL] == 0
        assert samples["penstock_cascades_total", "easy", "unsure"] == 1
        assert samples["penstock_answers_total", OTHER, "200"] == 1
        assert samples["penstock_time_to_first_token_seconds_count", OTHER] == 1
        assert samples["penstock_time_to_first_token_seconds_count", MODEL] == 0
        usage = http.get("/admin/usage", headers={"authorization": f"Bearer {gateway.key('')}"}).json()["data"]
        assert [(row["model"], row["requests"]) for row in usage] == [(OTHER, 1)]


@pytest.mark.parametrize(("kept", "model"), [(None, OTHER), (100, MODEL)])
def test_a_long_request_is_counted_for_the_model_that_answers(
    tokenizer: Tokenizer, kept: int | None, model: str
) -> None:
    """Its limits admit it before anybody knows which one that is."""
    messages = [{"role": "user", "content": "word a " * 400}]  # too long for the small model, unless it is cut
    with cascading(tokenizer) as (gateway, _), gateway.http() as http:
        answer = post(gateway, model="easy", messages=messages, truncate_prompt_tokens=kept)
        assert (answer.status_code, answer.headers["x-penstock-model"]) == (200, model)
        usage = http.get("/admin/usage", headers={"authorization": f"Bearer {gateway.key('')}"}).json()["data"]
        assert [(row["model"], row["requests"]) for row in usage] == [(model, 1)]


def test_escalated_requests_leave_nothing_for_the_garbage_collector(tokenizer: Tokenizer) -> None:
    with cascading(tokenizer, min_logprob=UNSURE) as (gateway, _), gateway.http() as http:
        gc.collect()
        gc.disable()
        try:
            for stream in (False, True) * 4:
                post(gateway, model="easy", stream=stream)
                post(gateway, model="easy", stream=stream, max_tokens=600)
            http.get("/health")
            left = Counter(type(thing) for thing in gc.get_objects())
        finally:
            gc.enable()
    for kind in (Request, Generation, Trial):
        assert left[kind] <= 1, kind


def metrics_of(http: httpx.Client, headers: dict[str, str] | None = None) -> dict[tuple[str, ...], float]:
    """By the name and the values of its labels."""
    families = text_string_to_metric_families(http.get("/metrics", headers=headers).text)
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


# -- shadow traffic ----------------------------------------------------------------------------------------------------


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("content", ["Hi", "word a " * 400])  # the longer one is read in another process
def test_a_shadow_is_computed_and_neither_shown_nor_charged(tokenizer: Tokenizer, content: str) -> None:
    models = {MODEL: {"shadow": {"model": OTHER, "fraction": 1.0}}}
    with serving_both(tokenizer, models=models, tenants={"ann": {}}) as (gateway, other), gateway.http() as http:
        ann, admin = ({"authorization": f"Bearer {gateway.key(name)}"} for name in ("ann", ""))
        other.stats = EngineStats()
        messages = [{"role": "user", "content": content}]
        answer = post(
            gateway, headers=ann, model=MODEL, messages=messages, n=2, max_tokens=40, truncate_prompt_tokens=300
        )
        assert [choice["message"]["content"] for choice in answer.json()["choices"]] == [FIRST_SAYS] * 2
        until(lambda: metrics_of(http, admin).get(("penstock_shadows_total", OTHER, "completed")) == 1)
        assert len(other.requests) == 2
        request = other.requests[0]
        assert byte_tokenizer().decode(request.prompt) == (content.upper() + "!")[-300:]
        assert (request.objective.name, request.objective.rank, request.tenant) == ("batch", 2, "*shadow*")
        assert request.prefix_scope == gateway.engine.requests[0].prefix_scope != ""
        usage = http.get("/admin/usage", headers=admin).json()["data"]
        assert [(row["tenant"], row["model"], row["requests"]) for row in usage] == [("ann", MODEL, 1)]
        assert metrics_of(http, admin)["penstock_answers_total", OTHER, "200"] == 0


def test_a_shadow_that_hangs_fails_or_finds_no_room_changes_nothing(tokenizer: Tokenizer) -> None:
    models = {"chat": {"versions": {MODEL: 1}, "shadow": {"model": OTHER, "fraction": 1.0}}}
    with serving_both(tokenizer, models=models) as (gateway, other), gateway.http() as http:

        def shadows(outcome: str) -> float:
            return metrics_of(http).get(("penstock_shadows_total", OTHER, outcome), 0)

        def ask() -> None:
            assert text_of(post(gateway, model="chat")) == FIRST_SAYS

        ask()
        assert shadows("dropped") == 1, "requests wait there"
        other.stats, other.healthy = EngineStats(), False
        ask()
        assert shadows("dropped") == 2
        other.healthy = True
        other.script = lambda request: [Failure("EngineFailure", "a step failed")]
        ask()
        until(lambda: shadows("failed") == 1)
        other.script = lambda request: [[5], hang]
        for _ in range(MAX_SEQUENCES + 1):
            ask()
        until(lambda: len(other.requests) == MAX_SEQUENCES + 1)
        assert shadows("dropped") == 3
    assert all(ended.is_set() for ended in other.ended.values())
