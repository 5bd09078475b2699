"""Virtual models over HTTP: a version for each user, a small model before a large one, shadow traffic, sessions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessageParam

from penstock.fleet.versions import assigned_version
from penstock.gateway.api.models import ServedModel
from penstock.settings import settings_from_mapping
from penstock.simulation.scripted_engine import MODEL, ScriptedEngine, says
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
    with gateway.http() as http:
        return http.post(path, json=body, headers=headers)


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

    assert {chosen() for _ in range(40)} == {MODEL, OTHER}
    assert len({chosen(headers={"x-session-id": "a"}) for _ in range(20)}) == 1
    assert len({chosen(prompt_cache_key="b") for _ in range(20)}) == 1
    assert {chosen(user={"not": "a text"}) for _ in range(40)} == {MODEL, OTHER}


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
