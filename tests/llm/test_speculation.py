"""Speculative decoding with the built-in model: outputs are those that come without it, token for token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from penstock import LLM, SamplingParams
from penstock.engine.settings import SpeculationConfig
from penstock.runner import drafting
from tests.conftest import Server
from tests.engine.guessing import tried_whenever_possible

MODEL = "smollm2-135m"
LIST = "The Mary Ann came first, under Captain Holt, with coal. Then came the Gull, under Captain Reyes, with wool. "
PROMPTS = [  # the model repeats the first two, hardly the last
    f"Copy this text three times.\n\n{LIST}\n\n{LIST}\n\n",
    '{"ship": "Mary Ann", "captain": "Holt"}\n{"ship": "Gull", "captain": "Reyes"}\n{"ship": ',
    "A poem about the sea:\n",
]
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.7, "top_p": 0.9, "seed": 3},
    "penalised": {"temperature": 0.5, "top_p": 1.0, "seed": 4, "frequency_penalty": 0.1, "repetition_penalty": 1.05},
}


def llm(**speculation: Any) -> LLM:
    config = SpeculationConfig(**speculation)
    return LLM(MODEL, kv_memory_gib=0.1, max_model_len=512, speculation=config)


@pytest.fixture(scope="module")
def plain() -> Iterator[dict[str, list[list[int]]]]:
    """Outputs without speculation, by what was asked for."""
    with llm(method="off") as running:
        yield {name: outputs(running, **fields) for name, fields in PARAMS.items()}
        assert not running.engine.stats.drafted_tokens


def outputs(running: LLM, **fields: Any) -> list[list[int]]:
    params = SamplingParams(max_tokens=64, ignore_eos=True, **fields)
    return [answer.choices[0].token_ids for answer in running.generate(PROMPTS, params, progress=False)]


@pytest.mark.parametrize(
    "speculation",
    [{}, {"method": "draft", "model": MODEL, "quantization": "int4"}, {"method": "early_exit", "layers": 25}],
    ids=["default", "draft model", "early exit"],
)
def test_outputs_stay_the_same(
    plain: dict[str, list[list[int]]], speculation: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever pays on this machine, drafts are tried."""
    monkeypatch.setattr(drafting, "Speculation", lambda drafter, _, most: tried_whenever_possible(drafter, most))
    with llm(**speculation) as running:
        for name, fields in PARAMS.items():
            assert outputs(running, **fields) == plain[name], name
        stats = running.engine.stats
    assert 0 < stats.accepted_tokens <= stats.drafted_tokens


@pytest.mark.parametrize("name", list(PARAMS))
def test_over_http(server: Server, plain: dict[str, list[list[int]]], name: str) -> None:
    with httpx.Client(base_url=server.base_url, timeout=120) as http:
        for prompt, expected in zip(PROMPTS, plain[name], strict=True):
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 64, "ignore_eos": True, "return_token_ids": True}
            answer = http.post("/completions", json={**body, **PARAMS[name]}, headers={"x-penstock-ledger": "true"})
            found = answer.json()
            assert found["choices"][0]["token_ids"] == expected
            ledger = found["usage"]["ledger"]["choices"][0]["engine"]
            assert ledger["accepted_tokens"] <= ledger["drafted_tokens"]


def test_a_prediction_changes_nothing_but_the_speed(server: Server) -> None:
    client = openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0, timeout=120)

    def ask(prediction: str | None) -> tuple[str | None, openai.types.CompletionUsage]:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Tell me about the sea."}],
            prediction=openai.omit if prediction is None else {"type": "content", "content": prediction},
            max_tokens=120,
            temperature=0,
            extra_headers={"Cache-Control": "no-store", "x-penstock-ledger": "true"},
        )
        assert answer.usage is not None
        return answer.choices[0].message.content, answer.usage

    text, usage = ask(None)
    assert usage.completion_tokens_details is None
    predicted, usage = ask(text)
    assert predicted == text
    details, ledger = usage.completion_tokens_details, (usage.model_extra or {})["ledger"]["choices"][0]["engine"]
    assert details is not None
    assert details.accepted_prediction_tokens == ledger["accepted_tokens"]
    assert details.rejected_prediction_tokens == ledger["drafted_tokens"] - ledger["accepted_tokens"]
