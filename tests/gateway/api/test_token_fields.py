"""Fields beyond OpenAI's that say which tokens went in and out, and what ended an answer; in vLLM's shapes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.simulation.scripted_engine import MAX_MODEL_LEN, MODEL
from tests.gateway.api.test_bad_input import CHAT, HI, TEXT, check_error
from tests.gateway.conftest import Gateway

ASKED: dict[str, dict[str, Any]] = {CHAT: {"messages": HI}, TEXT: {"prompt": "Once upon"}}
BOTH = pytest.mark.parametrize("path", [CHAT, TEXT])


def ask(gateway: Gateway, path: str, **fields: Any) -> dict[str, Any]:
    with gateway.http() as http:
        response = http.post(path, json={"model": MODEL, **ASKED[path], **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def stream(gateway: Gateway, path: str, **fields: Any) -> list[dict[str, Any]]:
    with gateway.http() as http:
        text = http.post(path, json={"model": MODEL, **ASKED[path], "stream": True, **fields}).text
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n")[:-2]]


@BOTH
def test_token_ids_of_prompt_and_answer(gateway: Gateway, path: str) -> None:
    gateway.answers("ab🌍", "one")
    ends = gateway.tokenizer.eos_ids[:1]
    expected = [[*gateway.tokenizer.encode(text), *ends] for text in ("ab🌍", "one")]
    whole = ask(gateway, path, n=2, return_token_ids=True)
    prompt = list(gateway.engine.requests[0].prompt)
    assert [choice["token_ids"] for choice in whole["choices"]] == expected
    assert sum(map(len, expected)) == whole["usage"]["completion_tokens"]
    holders = [whole] if path == CHAT else whole["choices"]
    assert all(holder["prompt_token_ids"] == prompt for holder in holders)
    built: list[list[int]] = [[], []]
    prompts: list[list[int]] = []
    for chunk in stream(gateway, path, n=2, return_token_ids=True):
        (choice,) = chunk["choices"]
        built[choice["index"]] += choice.get("token_ids", [])
        holder = chunk if path == CHAT else choice
        prompts += [holder["prompt_token_ids"]] if "prompt_token_ids" in holder else []
    assert built == expected
    assert prompts == [prompt, prompt], "with the first chunk of each choice"
    assert "token_ids" not in json.dumps([ask(gateway, path), *stream(gateway, path)])


def test_tokens_in_logprobs_may_go_by_their_ids(gateway: Gateway) -> None:
    gateway.answers("ab🌍")
    ids = [*gateway.tokenizer.encode("ab🌍"), gateway.tokenizer.eos_ids[0]]
    names = [f"token_id:{i}" for i in ids]
    fields = {"return_tokens_as_token_ids": True}
    chat = ask(gateway, CHAT, logprobs=True, top_logprobs=2, **fields)["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in chat] == names
    assert [entry["top_logprobs"][1]["token"] for entry in chat] == [f"token_id:{i + 1}" for i in ids]
    assert bytes(chat[0]["bytes"]) == b"ab"
    text = ask(gateway, TEXT, logprobs=2, **fields)["choices"][0]["logprobs"]
    assert text["tokens"] == names
    assert list(text["top_logprobs"][0]) == [names[0], f"token_id:{ids[0] + 1}"]


@BOTH
@pytest.mark.parametrize("streamed", [False, True])
def test_stop_reason_says_what_ended_the_answer(gateway: Gateway, path: str, streamed: bool) -> None:
    def reason(**fields: Any) -> Any:
        chunks = stream(gateway, path, **fields) if streamed else [ask(gateway, path, **fields)]
        assert ["stop_reason" in chunk["choices"][0] for chunk in chunks[:-1]] == [False] * (len(chunks) - 1)
        return chunks[-1]["choices"][0]["stop_reason"]

    end = gateway.tokenizer.eos_ids[0]
    assert reason() is None, "the model's own end"
    assert reason(max_tokens=1) is None
    assert reason(stop=["x", "friend"]) == "friend"
    assert reason(stop_token_ids=[end]) == end


@BOTH
def test_usage_so_far_in_every_chunk(gateway: Gateway, path: str) -> None:
    chunks = stream(gateway, path, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert len(set(counts)) == counts[-1] == len(gateway.tokenizer.encode("Hello there, friend!")) + 1
    assert all(chunk["usage"]["prompt_tokens"] == len(gateway.engine.requests[0].prompt) for chunk in chunks)
    assert chunks[-1]["choices"] == []
    assert not any("usage" in chunk for chunk in stream(gateway, path, stream_options={"continuous_usage_stats": True}))


@BOTH
def test_a_prompt_may_be_truncated_to_its_end(gateway: Gateway, path: str) -> None:
    long = "word " * 600
    asked_long: dict[str, dict[str, Any]] = {
        CHAT: {"messages": [{"role": "user", "content": long}]},
        TEXT: {"prompt": long},
    }
    ask(gateway, path)
    whole = list(gateway.engine.requests[-1].prompt)
    ask(gateway, path, truncate_prompt_tokens=1)
    assert list(gateway.engine.requests[-1].prompt) == whole[-1:]
    ask(gateway, path, truncate_prompt_tokens=MAX_MODEL_LEN)
    assert list(gateway.engine.requests[-1].prompt) == whole
    ask(gateway, path, **asked_long[path], truncate_prompt_tokens=-1, max_tokens=12)
    request = gateway.engine.requests[-1]
    assert (len(request.prompt), request.params.max_tokens) == (MAX_MODEL_LEN - 12, 12)
    with gateway.http() as http:
        for wrong in (0, -2, MAX_MODEL_LEN + 1):
            body = {"model": MODEL, **ASKED[path], "truncate_prompt_tokens": wrong}
            check_error(http.post(path, json=body), 400, "truncate_prompt_tokens")


def test_echo_is_of_the_prompt_that_is_left(gateway: Gateway) -> None:
    choice = ask(gateway, TEXT, echo=True, max_tokens=0, logprobs=0, truncate_prompt_tokens=1)["choices"][0]
    assert (choice["text"], choice["logprobs"]["text_offset"]) == (" upon", [0])


def test_tokens_as_the_vocabulary_spells_them(gateway: Gateway) -> None:
    with gateway.http() as http:
        answer = http.post("/tokenize", json={"prompt": "Once upon", "return_token_strs": True}).json()
        assert answer["token_strs"] == ["Once", "Ġupon"]
        assert "token_strs" not in http.post("/tokenize", json={"prompt": "Once upon"}).json()
