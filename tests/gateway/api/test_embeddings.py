"""Embeddings, rerank and score over HTTP: real encoders in this process, beside a model that generates text."""

from __future__ import annotations

import base64
import random
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest

from penstock.checkpoint.source import BUILT_IN_ENCODER, resolve
from penstock.core.ledger import Ledger
from penstock.engine.local import LocalEngine
from penstock.engine.settings import EngineConfig
from penstock.gateway.api.comparisons import cosine
from penstock.gateway.api.models import ServedModel
from penstock.kernels.native import bindings
from penstock.runner.startup import start
from penstock.settings import settings_from_mapping
from penstock.simulation.scripted_engine import MODEL
from penstock.text.tokenizer import Tokenizer, load_tokenizer
from tests.gateway.api.test_bad_input import check_error
from tests.gateway.conftest import Gateway, serving
from tests.models.tiny_encoders import make_encoder

pytestmark = pytest.mark.skipif(not bindings.available(), reason=str(bindings.unavailable_reason()))

MINILM, CROSS = "minilm", "cross"
EMBEDDINGS, RERANK, SCORE = "/v1/embeddings", "/v1/rerank", "/v1/score"
TEXTS = ["Rain falls on the roof.", "It is raining.", "My cat sleeps all day."]
TENANTS: dict[str, Any] = {
    "free": {},
    "few-tokens": {"tokens_per_minute": 20},
    "short": {"max_prompt_tokens": 6},
    "minilm-only": {"models": [MINILM]},
}


class InProcess(LocalEngine):
    async def aborted(self, request_id: str) -> Ledger | None:
        return None


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServedModel]]:
    """MiniLM, and a cross-encoder with random weights that has its tokenizer."""
    folder = tmp_path_factory.mktemp("cross")
    make_encoder("Bert", "ForSequenceClassification", vocab_size=30522, max_position_embeddings=64).save_pretrained(
        folder
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve(BUILT_IN_ENCODER).path / name, folder)
    served = []
    for name, model in ((MINILM, BUILT_IN_ENCODER), (CROSS, str(folder))):
        engine = InProcess(*start(model, EngineConfig(device="cpu", dtype="float32")))
        served.append(ServedModel([name], load_tokenizer(resolve(model)), engine))
    yield served
    for each in served:
        assert isinstance(each.engine, InProcess)
        each.engine.close()


@pytest.fixture(scope="module")
def gateway(tokenizer: Tokenizer, encoders: list[ServedModel]) -> Iterator[Gateway]:
    prices = {MINILM: {"input": 1000.0, "output": 0.0}}
    settings = settings_from_mapping({"tenants": TENANTS, "prices": prices, "server": {"max_body_mib": 4}})
    with serving(tokenizer, settings, beside=encoders) as gateway:
        yield gateway


def ask(gateway: Gateway, path: str, tenant: str = "free", **body: Any) -> Any:
    with gateway.http() as http:
        headers = {"authorization": f"Bearer {gateway.key(tenant)}"}
        return http.post(path, timeout=120, json={"model": MINILM, **body}, headers=headers)


def embedded(gateway: Gateway, **body: Any) -> np.ndarray:
    response = ask(gateway, EMBEDDINGS, **body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert [item["index"] for item in answer["data"]] == list(range(len(answer["data"])))
    return np.array([item["embedding"] for item in answer["data"]], np.float32)


def test_the_openai_client_gets_the_same_numbers_in_both_encodings(gateway: Gateway) -> None:
    client = gateway.client(gateway.key("free"))
    usual = client.embeddings.create(model=MINILM, input=TEXTS)  # asks for base64, and decodes it
    plain = client.embeddings.create(model=MINILM, input=TEXTS, encoding_format="float")
    for answer in (usual, plain):
        assert answer.object == "list"
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (8 + 6 + 8, 22)
        assert [item.index for item in answer.data] == [0, 1, 2]
    vectors = np.array([item.embedding for item in usual.data], np.float32)
    assert np.array_equal(vectors, np.array([item.embedding for item in plain.data], np.float32))
    assert vectors.shape == (3, 384)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert vectors[0] @ vectors[1] > 0.5 > vectors[0] @ vectors[2]
    raw = ask(gateway, EMBEDDINGS, input=TEXTS[0], encoding_format="base64").json()["data"][0]["embedding"]
    assert np.array_equal(np.frombuffer(base64.b64decode(raw), "<f4"), vectors[0])


def test_the_four_forms_of_input(gateway: Gateway, encoders: list[ServedModel]) -> None:
    ids = encoders[0].tokenizer.encode(TEXTS[0])
    (expected,) = embedded(gateway, input=TEXTS[0])
    for form in ([TEXTS[0]], ids, [ids]):
        assert np.array_equal(embedded(gateway, input=form), [expected])


def test_dimensions_are_the_first_numbers_at_length_1(gateway: Gateway) -> None:
    whole, short = embedded(gateway, input=TEXTS), embedded(gateway, input=TEXTS, dimensions=64)
    cut = whole[:, :64]
    np.testing.assert_allclose(short, cut / np.linalg.norm(cut, axis=1, keepdims=True), atol=1e-6)
    assert (
        "at most 384" in check_error(ask(gateway, EMBEDDINGS, input="a", dimensions=385), 400, "dimensions")["message"]
    )


def test_many_texts_are_read_in_another_process_and_come_in_order(gateway: Gateway) -> None:
    texts = [f"Number {number} of many texts" + " and more" * (number % 20) for number in range(70)]
    found = embedded(gateway, input=texts)
    for number in (0, 19, 69):
        assert np.array_equal(found[number], embedded(gateway, input=texts[number])[0])
    too_many = check_error(ask(gateway, EMBEDDINGS, input=["a"] * 2049), 400, "input")
    assert "at most 2048 texts" in too_many["message"]


def test_a_text_that_is_too_long_is_named_or_cut(gateway: Gateway, encoders: list[ServedModel]) -> None:
    long = "word " * 300
    for texts, param in (([TEXTS[0], long], "input[1]"), (long, "input")):
        error = check_error(ask(gateway, EMBEDDINGS, input=texts), 400, param)
        assert error["code"] == "context_length_exceeded"
        assert f"context length is 256 tokens. However, there are more than 256 tokens in {param};" in error["message"]
        assert "truncate_prompt_tokens" in error["message"]
    ids = encoders[0].tokenizer.encode(long)
    cut = embedded(gateway, input=[long], truncate_prompt_tokens=-1)
    assert np.array_equal(cut, embedded(gateway, input=[*ids[:255], ids[-1]]))  # the last token ends every text
    assert np.array_equal(embedded(gateway, input=long, truncate=True), cut)
    response = ask(gateway, EMBEDDINGS, input=[long, "word"], truncate_prompt_tokens=10)
    assert response.json()["usage"]["prompt_tokens"] == 10 + 3
    check_error(ask(gateway, EMBEDDINGS, input="a", truncate_prompt_tokens=257), 400, "truncate_prompt_tokens")


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (EMBEDDINGS, {}, "input"),
        (EMBEDDINGS, {"input": []}, "input"),
        (EMBEDDINGS, {"input": ""}, "input"),
        (EMBEDDINGS, {"input": ["a", ""]}, "input[1]"),
        (EMBEDDINGS, {"input": ["a", 5]}, "input"),
        (EMBEDDINGS, {"input": [5, 10**6]}, "input"),
        (EMBEDDINGS, {"input": [[5], [-1]]}, "input[1]"),
        (EMBEDDINGS, {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        (EMBEDDINGS, {"input": "a", "dimensions": 0}, "dimensions"),
        (EMBEDDINGS, {"input": "a", "temperature": 1}, "temperature"),
        (RERANK, {"query": "a"}, "documents"),
        (RERANK, {"query": "a", "documents": []}, "documents"),
        (RERANK, {"query": "", "documents": ["a"]}, "query"),
        (RERANK, {"query": "a", "documents": ["a", ""]}, "documents[1]"),
        (RERANK, {"query": "a", "documents": ["a"], "top_n": 0}, "top_n"),
        (SCORE, {"text_1": "a", "text_2": []}, "text_2"),
        (SCORE, {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        (SCORE, {"text_1": "a", "text_2": "word " * 300}, "text_2[0]"),
    ],
)
def test_what_is_wrong_is_named(gateway: Gateway, path: str, fields: dict[str, Any], param: str) -> None:
    check_error(ask(gateway, path, **fields), 400, param)


@pytest.mark.parametrize(
    ("path", "model", "fields", "others"),
    [
        (EMBEDDINGS, MODEL, {"input": "a"}, "models for this: minilm"),
        (EMBEDDINGS, CROSS, {"input": "a"}, "models for this: minilm"),
        (RERANK, MODEL, {"query": "a", "documents": ["b"]}, "models for this: minilm, cross"),
        (SCORE, MODEL, {"text_1": "a", "text_2": "b"}, "models for this: minilm, cross"),
        ("/v1/chat/completions", MINILM, {"messages": [{"role": "user", "content": "a"}]}, "models for this: scripted"),
        ("/v1/completions", CROSS, {"prompt": "a"}, "models for this: scripted"),
    ],
)
def test_a_model_that_is_for_something_else_says_which_is_for_this(
    gateway: Gateway, path: str, model: str, fields: dict[str, Any], others: str
) -> None:
    error = check_error(ask(gateway, path, model=model, **fields), 400, "model")
    assert error["code"] == "wrong_task"
    assert others in error["message"]
    alone = check_error(ask(gateway, "/v1/completions", "minilm-only", prompt="a"), 400, "model")
    assert "no model for this is served here" in alone["message"]
    assert "models: {chat: {model: smollm2-135m}}" in alone["message"]
    check_error(ask(gateway, EMBEDDINGS, model="unknown", input="a"), 404, "model")


def test_models_say_what_they_are_for(gateway: Gateway) -> None:
    with gateway.http() as http:
        http.headers["authorization"] = f"Bearer {gateway.key('free')}"
        cards = {card["id"]: card for card in http.get("/v1/models").json()["data"]}
    assert [cards[name]["task"] for name in (MODEL, MINILM, CROSS)] == ["generate", "embed", "score"]
    assert cards[MINILM]["embedding_size"] == 384
    assert "embedding_size" not in cards[MODEL]
    assert ["sampling_defaults" in cards[name] for name in (MODEL, MINILM, CROSS)] == [True, False, False]


def test_cosines_are_within_one() -> None:
    draw = random.Random(1)
    for _ in range(100):
        vector = [draw.gauss(0, 1) for _ in range(8)]
        assert 1 - 1e-12 < cosine(vector, vector) <= 1
        assert -1 <= cosine(vector, [-value for value in vector]) < 1e-12 - 1


@pytest.mark.parametrize("model", [MINILM, CROSS])
def test_documents_are_ranked_by_what_score_says(gateway: Gateway, model: str) -> None:
    query, scores = "What is the weather like?", []
    answer = ask(gateway, SCORE, model=model, text_1=query, text_2=TEXTS).json()
    assert answer["object"] == "list"
    assert [item["index"] for item in answer["data"]] == [0, 1, 2]
    scores = [item["score"] for item in answer["data"]]
    pairwise = ask(gateway, SCORE, model=model, text_1=[query] * 3, text_2=TEXTS).json()
    assert [item["score"] for item in pairwise["data"]] == pytest.approx(scores)
    best_first = sorted(range(3), key=lambda index: -scores[index])
    ranked = ask(gateway, RERANK, model=model, query=query, documents=TEXTS, return_documents=True).json()
    assert [item["index"] for item in ranked["results"]] == best_first
    assert [item["relevance_score"] for item in ranked["results"]] == pytest.approx([scores[i] for i in best_first])
    assert [item["document"]["text"] for item in ranked["results"]] == [TEXTS[i] for i in best_first]
    assert ranked["usage"] == answer["usage"]
    documents = [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]
    (best,) = ask(gateway, RERANK, model=model, query=query, documents=documents, top_n=1).json()["results"]
    assert best == {"index": best_first[0], "relevance_score": pytest.approx(scores[best_first[0]])}
    if model == MINILM:
        assert best_first[2] == 2
        vectors = embedded(gateway, input=[query, *TEXTS])
        assert scores == pytest.approx((vectors[1:] @ vectors[0]).tolist(), abs=1e-6)
    else:
        assert all(0 < score < 1 for score in scores)


def test_a_long_document_is_cut_and_a_long_query_is_not(gateway: Gateway) -> None:
    fields: dict[str, Any] = {"model": CROSS, "documents": ["a document", "word " * 100]}
    check_error(ask(gateway, RERANK, query="a", **fields), 400, "documents[1]")
    cut = ask(gateway, RERANK, query="a", truncate=True, **fields).json()
    assert cut["usage"]["prompt_tokens"] == 6 + 64
    error = check_error(ask(gateway, RERANK, query="word " * 100, truncate=True, **fields), 400, "documents[0]")
    assert "has no room" in error["message"]


def test_rerank_and_score_are_where_clients_look_for_them(gateway: Gateway) -> None:
    """Cohere's client asks for /v2/rerank, those of vLLM, Jina and Infinity for /rerank. Metrics count one endpoint."""
    fields: dict[str, Any] = {"model": CROSS, "query": "a", "documents": TEXTS}
    pair: dict[str, Any] = {"model": CROSS, "text_1": "a", "text_2": TEXTS}
    for paths, body in ((("/v2/rerank", "/rerank", RERANK), fields), (("/score", SCORE), pair)):
        answers = [ask(gateway, path, **body).json() for path in paths]
        found = [answer.get("results") or answer["data"] for answer in answers]
        assert len(found[0]) == len(TEXTS)
        assert all(each == found[0] for each in found)
    assert ask(gateway, "/v2/score", **pair).json()["error"]["code"] == "unknown_path"
    with gateway.http() as http:
        assert http.get("/v2/rerank").headers["allow"] == "OPTIONS, POST"
        http.headers["authorization"] = f"Bearer {gateway.key('')}"
        counted = http.get("/metrics").text
    assert f'endpoint="{RERANK}"' in counted
    assert 'rerank"' not in counted.replace(f'"{RERANK}"', "")


@pytest.mark.parametrize("model", [MINILM, CROSS])
def test_so_many_tokens_of_each_document_are_read(gateway: Gateway, encoders: list[ServedModel], model: str) -> None:
    """As Cohere has it: those of the query and around the texts do not count, and nothing is too long."""
    query, long = "What does the text say?", "One two three four five six seven. " * 100
    asked = {"model": model, "query": query}

    def scores(*documents: str, **fields: Any) -> tuple[list[float], int]:
        answer = ask(gateway, RERANK, documents=documents, **asked, **fields).json()
        by_index = {item["index"]: item["relevance_score"] for item in answer["results"]}
        return [by_index[index] for index in range(len(documents))], answer["usage"]["prompt_tokens"]

    check_error(ask(gateway, RERANK, documents=[long], **asked), 400, "documents[0]")
    cut, tokens = scores(long, "short", max_tokens_per_doc=3)
    whole, as_many = scores("One two three", "short")
    assert cut == pytest.approx(whole, abs=1e-6)
    assert tokens == as_many
    assert scores(long, max_tokens_per_doc=4096) == scores(long, truncate=True), "no more than the model reads"
    check_error(ask(gateway, RERANK, documents=["a"], max_tokens_per_doc=0, **asked), 400, "max_tokens_per_doc")


def test_tokens_of_texts_count_for_limits_usage_and_spend(gateway: Gateway) -> None:
    first = ask(gateway, EMBEDDINGS, "few-tokens", input=TEXTS[:2])
    assert first.headers["x-ratelimit-remaining-tokens"] == str(20 - 14)
    assert (
        "20 tokens per minute"
        in check_error(ask(gateway, EMBEDDINGS, "few-tokens", input=TEXTS[:1]), 429, None)["message"]
    )
    with gateway.http() as http:
        http.headers["authorization"] = f"Bearer {gateway.key('')}"
        (row,) = http.get("/admin/usage", params={"tenant": "few-tokens"}).json()["data"]
    assert (row["requests"], row["input_tokens"], row["output_tokens"]) == (1, 14, 0)
    assert row["cost"] == "0.014000000"  # of 1,000 for a million
    error = check_error(ask(gateway, EMBEDDINGS, "short", input=["a", TEXTS[0]]), 400, "input[1]")
    assert "limited to 6" in error["message"]


def test_the_client_is_told_of_errors_as_always(gateway: Gateway) -> None:
    with pytest.raises(openai.BadRequestError, match="makes embeddings and cannot be asked for this"):
        gateway.client(gateway.key("free")).chat.completions.create(
            model=MINILM, messages=[{"role": "user", "content": "Hi"}]
        )


def test_the_ollama_client(gateway: Gateway) -> None:
    ollama = pytest.importorskip("ollama")
    key = gateway.key("free")
    client = ollama.Client(host=gateway.url, timeout=120, headers={"Authorization": f"Bearer {key}"})
    expected = embedded(gateway, input=TEXTS)
    answer = client.embed(model=MINILM, input=TEXTS, keep_alive="5m", options={"num_ctx": 256})
    np.testing.assert_array_equal(np.array(answer.embeddings, np.float32), expected)
    assert answer.model == MINILM
    assert answer.prompt_eval_count > len(TEXTS)
    assert answer.total_duration > 0
    (cut,) = client.embed(model=MINILM, input="a " * 3000, dimensions=8).embeddings  # by default, it is truncated
    assert len(cut) == 8
    old = client.embeddings(model=MINILM, prompt=TEXTS[0])
    np.testing.assert_array_equal(np.array(old.embedding, np.float32), expected[0])
    with pytest.raises(ollama.ResponseError, match="models for this: minilm"):
        client.embed(model=MODEL, input="a")
    with pytest.raises(ollama.ResponseError, match="maximum context length is 256 tokens"):
        client.embed(model=MINILM, input="a " * 3000, truncate=False)
    assert client.show(MINILM).capabilities == ["embedding"]


def test_clients_of_llama_cpp(gateway: Gateway) -> None:
    headers = {"authorization": f"Bearer {gateway.key('free')}"}
    expected = embedded(gateway, input=TEXTS)
    with gateway.http() as http:
        for content, rows in ((TEXTS[0], expected[:1]), (TEXTS, expected)):
            answer = http.post(
                "/embedding", json={"content": content, "embd_normalize": 2}, headers=headers, timeout=120
            )
            assert answer.status_code == 200, answer.text
            assert [item["index"] for item in answer.json()] == list(range(len(rows)))
            found = np.array([item["embedding"][0] for item in answer.json()], np.float32)
            np.testing.assert_array_equal(found, rows)
        check_error(http.post("/embedding", json={"content": ""}, headers=headers), 400, "content")
