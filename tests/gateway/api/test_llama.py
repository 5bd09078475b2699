"""What clients of llama.cpp's server use of its own API."""

from __future__ import annotations

import json
from typing import Any

from penstock.simulation.scripted_engine import MAX_MODEL_LEN, MODEL
from penstock.text.tokenizer import Tokenizer
from tests.gateway.api.test_completions import FIM, with_tokens
from tests.gateway.conftest import Gateway, serving


def test_completion_whole_and_streamed(gateway: Gateway) -> None:
    with gateway.http() as http:
        asked = {"prompt": "Once upon", "n_predict": 50, "seed": -1, "cache_prompt": True, "id_slot": -1, "top_k": 7}
        whole = http.post("/completion", json=asked).json()
        assert (whole["content"], whole["stop"], whole["stop_type"]) == ("Hello there, friend!", True, "eos")
        assert whole["tokens_evaluated"] == len(gateway.tokenizer.encode("Once upon"))
        assert (whole["generation_settings"]["n_predict"], whole["generation_settings"]["top_k"]) == (50, 7)
        assert whole["timings"]["predicted_n"] == whole["tokens_predicted"] > 0
        streamed = http.post("/completion", json={**asked, "stream": True})
        assert streamed.headers["content-type"].startswith("text/event-stream")
        chunks = [json.loads(line.removeprefix("data: ")) for line in streamed.text.strip().split("\n\n")]
        assert "".join(chunk["content"] for chunk in chunks) == "Hello there, friend!"
        assert [chunk["stop"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        stopped = http.post("/completion", json={**asked, "stop": ["friend"]}).json()
        assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", "friend")
        assert http.post("/completion", json={**asked, "n_predict": 2}).json()["stop_type"] == "limit"
        ids = gateway.tokenizer.encode("Once upon")
        for schema in ({"type": "object"}, {}):
            http.post("/completion", json={"prompt": ids, "json_schema": schema})
            request = gateway.engine.requests[-1]
            assert list(request.prompt) == ids
            assert request.params.grammar is not None


def test_bad_fields_are_named(shared_gateway: Gateway) -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({"n_probs": 3}, "n_probs"),
        ({"repeat_penalty": -1}, "repeat_penalty"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[1]]}, "prompt[0]"),
        ({"stop": "x"}, "stop"),
        ({"model": "gpt"}, "model"),
    ]
    with shared_gateway.http() as http:
        for change, param in bad:
            response = http.post("/completion", json={"prompt": "x", **change})
            assert response.status_code == (404 if param == "model" else 400)
            assert response.json()["error"]["param"] == param


def test_tokens_and_properties(shared_gateway: Gateway) -> None:
    ids = shared_gateway.tokenizer.encode("schön", add_special_tokens=False)
    with shared_gateway.http() as http:
        assert http.post("/tokenize", json={"content": "schön"}).json()["tokens"] == ids
        pieces = http.post("/tokenize", json={"content": "schön", "with_pieces": True}).json()["tokens"]
        assert [piece["id"] for piece in pieces] == ids
        spelled = b"".join(
            piece["piece"].encode() if isinstance(piece["piece"], str) else bytes(piece["piece"]) for piece in pieces
        )
        assert spelled.decode() == "schön"
        assert http.post("/detokenize", json={"tokens": ids}).json()["content"] == "schön"
        assert http.post("/tokenize", json={"content": "x", "prompt": "x"}).status_code == 400
        props = http.get("/props").json()
        assert props["default_generation_settings"]["n_ctx"] == MAX_MODEL_LEN
        assert props["model_alias"] == MODEL
        slots = http.get("/slots").json()
        assert [slot["is_processing"] for slot in slots] == [True] * props["total_slots"] == [True] * 3


def test_editors_fill_in_the_middle(tokenizer: Tokenizer) -> None:
    """As llama.vim and llama.vscode ask for it."""
    coder = with_tokens(tokenizer, *FIM)
    asked = {
        "id_slot": 0,
        "input_prefix": "def add(a, b):\n",
        "prompt": "    return ",
        "input_suffix": "\n\nprint(add(1, 2))",
        "input_extra": [{"filename": "sub.py", "text": "def sub(a, b): ..."}],
        "n_predict": 16,
        "n_indent": 4,
        "t_max_predict_ms": 500,
        "samplers": ["top_k", "infill"],
        "cache_prompt": True,
        "stream": False,
        "response_fields": ["content", "timings/prompt_n"],
    }
    middle = f"{FIM[0]}def add(a, b):\n    return {FIM[1]}\n\nprint(add(1, 2)){FIM[2]}"
    others = "<file_sep>sub.py\ndef sub(a, b): ...<file_sep>filename\n"
    with serving(coder) as gateway, gateway.http() as http:
        gateway.answers("a + b")
        assert http.post("/infill", json=asked).json()["content"] == "a + b"
        assert coder.decode(gateway.engine.requests[-1].prompt, skip_special_tokens=False) == others + middle
        asked["input_extra"] = [{"text": "old " * MAX_MODEL_LEN}, {"text": "new"}]
        assert http.post("/infill", json=asked).status_code == 200
        prompt = gateway.engine.requests[-1].prompt
        assert len(prompt) == MAX_MODEL_LEN - 1 - 16  # what is oldest is cut, and the answer has its room
        assert "new" in coder.decode(prompt)
        warm = http.post("/infill", json={**asked, "input_suffix": "", "n_predict": 0}).json()
        assert (warm["content"], warm["tokens_predicted"]) == ("", 0)
        asked["input_prefix"] = "x " * 4000
        assert http.post("/infill", json=asked).json()["error"]["param"] == "input_prefix"


def test_a_model_that_cannot_fill_in_says_so(shared_gateway: Gateway) -> None:
    with shared_gateway.http() as http:
        answer = http.post("/infill", json={"input_prefix": "a", "input_suffix": "b"})
    assert answer.status_code == 400
    assert "no tokens for filling in the middle" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "input_suffix"
