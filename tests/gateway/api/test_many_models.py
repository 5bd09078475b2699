"""Two models behind one gateway: each request meets the tokenizer, template, engine, limits and prices of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import tokenizers
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from penstock.core.engine import EngineStats
from penstock.core.errors import StartupError
from penstock.gateway.api.models import ServedModel
from penstock.gateway.app import create_app
from penstock.settings import Settings, settings_from_mapping
from penstock.simulation.scripted_engine import MAX_MODEL_LEN, MODEL, ScriptedEngine, says
from penstock.text.tokenizer import Tokenizer
from tests.gateway.api.test_bad_input import check_error
from tests.gateway.conftest import Gateway, serving

BYTES = "bytes"  # the second model: a token a byte, and a template that shouts
BYTES_CONTEXT = 4096
TEMPLATE = "{% for message in messages %}{{ message.content | upper }}!{% endfor %}"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TENANTS: dict[str, Any] = {
    "both": {},
    "bytes-only": {"models": ["org/bytes"]},
    "limited": {"model_limits": {BYTES: {"requests_per_minute": 1}}},
    "nothing": {"models": ["elsewhere"]},
}
PRICES = {MODEL: {"input": 1.0, "output": 1.0}, BYTES: {"input": 5.0, "output": 5.0}}


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", normalized=False)])
    return Tokenizer(backend, eos_ids=(256,), chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def second() -> ServedModel:
    tokenizer = byte_tokenizer()
    (script,) = says(tokenizer, "by bytes")
    engine = ScriptedEngine(tokenizer, lambda request: [[token] for token in script])
    engine.info = replace(engine.info, model=BYTES, max_model_len=BYTES_CONTEXT)
    engine.stats = EngineStats(waiting=9, usual_prompt_seconds=0.25, loaded_step_seconds=0.1)
    return ServedModel([BYTES, "org/bytes"], tokenizer, engine)


@pytest.fixture(scope="module")
def gateway(tokenizer: Tokenizer, second: ServedModel) -> Iterator[Gateway]:
    settings = settings_from_mapping({"tenants": TENANTS, "prices": PRICES})
    with serving(tokenizer, settings, beside=[second]) as gateway:
        yield gateway


def ask(gateway: Gateway, method: str, path: str, tenant: str = "both", **body: Any) -> Any:
    with gateway.http() as http:
        headers = {"authorization": f"Bearer {gateway.key(tenant)}"}
        return http.request(method, path, json=body or None, headers=headers)


def check_refusal(response: Any, status: int, param: str | None, words: str) -> None:
    assert words in check_error(response, status, param)["message"]


def engine_of(second: ServedModel) -> ScriptedEngine:
    assert isinstance(second.engine, ScriptedEngine)
    return second.engine


@pytest.mark.parametrize("repeated", [1, 400])  # the longer one is read in another process
def test_a_chat_is_rendered_tokenized_and_answered_by_its_own_model(
    gateway: Gateway, second: ServedModel, repeated: int
) -> None:
    content = "word a " * repeated
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": content}], "max_tokens": 20}
    answer = ask(gateway, "POST", CHAT, model="org/bytes", **chat).json()
    assert (answer["model"], answer["choices"][0]["message"]["content"]) == ("org/bytes", "by bytes")
    (wanted,) = engine_of(second).requests[-1:]
    assert second.tokenizer.decode(wanted.prompt) == content.upper() + "!"
    if repeated == 1:
        other = ask(gateway, "POST", CHAT, model=MODEL, **chat).json()
        assert (other["model"], other["choices"][0]["message"]["content"]) == (MODEL, "Hello there, friend!")
        assert content in gateway.tokenizer.decode(gateway.engine.requests[-1].prompt)
    else:
        check_refusal(ask(gateway, "POST", CHAT, model=MODEL, **chat), 400, "messages", "maximum context length is 512")


def test_bounds_are_those_of_the_model_asked_for(gateway: Gateway) -> None:
    long = [1] * (MAX_MODEL_LEN + 1)
    assert ask(gateway, "POST", TEXT, model=BYTES, prompt=long).status_code == 200
    check_refusal(ask(gateway, "POST", TEXT, model=MODEL, prompt=long), 400, "prompt", f"is {MAX_MODEL_LEN}")
    too_long = [1] * (BYTES_CONTEXT + 1)
    check_refusal(ask(gateway, "POST", TEXT, model=BYTES, prompt=too_long), 400, "prompt", f"is {BYTES_CONTEXT}")
    check_refusal(ask(gateway, "POST", TEXT, model=BYTES, prompt=[300]), 400, "prompt", "token ids below 257")
    assert ask(gateway, "POST", TEXT, model=MODEL, prompt=[300]).status_code == 200
    check_refusal(
        ask(gateway, "POST", TEXT, model=BYTES, prompt="a", stop_token_ids=[300]), 400, "stop_token_ids[0]", "below 257"
    )


def test_models_are_listed_with_their_own_limits_and_promises(gateway: Gateway) -> None:
    cards = {card["id"]: card for card in ask(gateway, "GET", "/v1/models").json()["data"]}
    assert {name: card["max_model_len"] for name, card in cards.items()} == {
        **dict.fromkeys((MODEL, "org/alias"), MAX_MODEL_LEN),
        **dict.fromkeys((BYTES, "org/bytes"), BYTES_CONTEXT),
    }
    assert cards[BYTES]["classes"]["interactive"] == {"ttft_ms": 1000.0, "itl_ms": 400.0}
    assert cards[MODEL]["classes"]["interactive"] == {"ttft_ms": None, "itl_ms": None}
    assert ask(gateway, "GET", "/v1/models/org/bytes").json() == cards["org/bytes"]


def test_a_tenant_uses_the_models_it_is_allowed(gateway: Gateway) -> None:
    hi: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
    listed = ask(gateway, "GET", "/v1/models", "bytes-only").json()["data"]
    assert [card["id"] for card in listed] == [BYTES, "org/bytes"]
    assert ask(gateway, "POST", CHAT, "bytes-only", model=BYTES, **hi).status_code == 200
    for path, body in ((CHAT, hi), (TEXT, {"prompt": "a"}), ("/tokenize", {"prompt": "a"})):
        refused = ask(gateway, "POST", path, "bytes-only", model=MODEL, **body)
        check_refusal(refused, 404, "model", "served: bytes, org")
        unknown = ask(gateway, "POST", path, model="gpt-9", **body)
        check_refusal(unknown, 404, "model", f"served: {MODEL}, org/alias, bytes, org/bytes")
    long: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi " * 1000}]}
    check_refusal(
        ask(gateway, "POST", CHAT, "bytes-only", model=MODEL, **long), 404, "model", "served: bytes, org/bytes"
    )
    check_refusal(ask(gateway, "GET", f"/v1/models/{MODEL}", "bytes-only"), 404, "model", "served: bytes, org")
    check_refusal(
        ask(gateway, "GET", f"/v1/models/{MODEL}", "nothing"), 404, "model", "served: nothing for this tenant"
    )


def test_tokenize_and_detokenize_know_the_model(gateway: Gateway, second: ServedModel) -> None:
    for name, tokenizer, context in (
        (MODEL, gateway.tokenizer, MAX_MODEL_LEN),
        ("org/bytes", second.tokenizer, BYTES_CONTEXT),
    ):
        ids = tokenizer.encode("a few words")
        found = ask(gateway, "POST", "/tokenize", model=name, prompt="a few words").json()
        assert found == {"tokens": ids, "count": len(ids), "max_model_len": context}
        assert ask(gateway, "POST", "/detokenize", model=name, tokens=ids).json()["prompt"] == "a few words"
    shouted = ask(gateway, "POST", "/tokenize", model=BYTES, messages=[{"role": "user", "content": "hi"}]).json()
    assert second.tokenizer.decode(shouted["tokens"]) == "HI!"
    for tenant, context in (("both", MAX_MODEL_LEN), ("bytes-only", BYTES_CONTEXT), ("nothing", MAX_MODEL_LEN)):
        assert ask(gateway, "POST", "/tokenize", tenant, prompt="a").json()["max_model_len"] == context


def test_limits_are_counted_for_each_model(gateway: Gateway) -> None:
    """Also of a long request, whose model is not known when it arrives."""
    hi: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
    first = ask(gateway, "POST", CHAT, "limited", model="org/bytes", **hi)
    assert (first.status_code, first.headers["x-ratelimit-limit-requests"]) == (200, "1")
    long: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi " * 1000}], "truncate_prompt_tokens": 20}
    for chat in (hi, long):
        refused = ask(gateway, "POST", CHAT, "limited", model=BYTES, **chat)
        check_refusal(refused, 429, None, "limited to 1 requests per minute of bytes")
        assert ask(gateway, "POST", CHAT, "limited", model=MODEL, **chat).status_code == 200


def test_accounts_spend_and_metrics_are_by_canonical_name(gateway: Gateway) -> None:
    answer = ask(gateway, "POST", TEXT, model="org/bytes", prompt="abc", max_tokens=2)
    account = ask(gateway, "GET", f"/v1/requests/{answer.json()['id']}").json()
    assert (account["model"], account["prompt_tokens"], account["output_tokens"]) == (BYTES, 3, 2)
    with gateway.http() as http:
        text = http.get("/metrics", headers={"authorization": f"Bearer {gateway.key('')}"}).text
        usage = http.get("/admin/usage", headers={"authorization": f"Bearer {gateway.key('')}"}).json()["data"]
    assert {row["model"] for row in usage} == {MODEL, BYTES}
    samples = {
        (sample.name, sample.labels.get("model")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["penstock_waiting_sequences", MODEL] == 2
    assert samples["penstock_waiting_sequences", BYTES] == 9
    assert samples["penstock_cost_per_million_tokens", BYTES] == pytest.approx(5.0)
    assert samples["penstock_cost_per_million_tokens", MODEL] == pytest.approx(1.0)


def test_a_gateway_is_ready_while_one_model_works(gateway: Gateway, second: ServedModel) -> None:
    """Else a load balancer would leave out the models that work. The queue of the one that fails is empty."""
    engine, idle = engine_of(second), gateway.engine.stats
    engine.healthy = False
    try:
        with gateway.http() as http:
            for path in ("/health", "/ready"):
                answer = http.get(path)
                report = {"status": "degraded", "detail": "bytes: no step for 60 s"}
                assert (answer.status_code, answer.json()) == (200, report)
            gateway.engine.stats = replace(idle, waiting=4096)
            assert (http.get("/ready").json()["status"], http.get("/health").status_code) == ("overloaded", 200)
            gateway.engine.healthy = False
            answer = http.get("/ready")
            assert (answer.status_code, answer.json()["status"]) == (503, "unhealthy")
    finally:
        engine.healthy = gateway.engine.healthy = True
        gateway.engine.stats = idle


def test_two_models_cannot_have_the_same_name(tokenizer: Tokenizer) -> None:
    model = ServedModel(["one"], tokenizer, ScriptedEngine(tokenizer, lambda request: []))
    with pytest.raises(StartupError, match="two models are served as 'one'"):
        create_app([model, model], Settings())
