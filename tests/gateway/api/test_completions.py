"""Text completions through the real OpenAI client, against a scripted engine."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers

from penstock.simulation.scripted_engine import MODEL, logprob_of
from penstock.text.tokenizer import Tokenizer
from tests.gateway.conftest import Gateway, serving


def test_four_forms_of_prompt(gateway: Gateway) -> None:
    ids = gateway.tokenizer.encode("Once upon")
    client = gateway.client()
    for prompt, count in (("Once upon", 1), (ids, 1), (["Once upon", "Once upon"], 2), ([ids, ids], 2)):
        gateway.engine.requests.clear()
        answer = client.completions.create(model=MODEL, prompt=prompt)
        assert [list(request.prompt) for request in gateway.engine.requests] == [ids] * count
        assert [choice.index for choice in answer.choices] == list(range(count))
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == count * len(ids)


def test_choices_are_numbered_prompt_by_prompt(gateway: Gateway) -> None:
    texts = ["first a", "first b", "second a", "second b"]
    gateway.answers(*texts)
    answer = gateway.client().completions.create(model=MODEL, prompt=["One", "Two"], n=2, best_of=2, seed=1)
    assert [choice.text for choice in answer.choices] == texts
    one, two = gateway.tokenizer.encode("One"), gateway.tokenizer.encode("Two")
    assert [request.prompt for request in gateway.engine.requests] == [one, one, two, two]
    seeds = [request.seed for request in gateway.engine.requests]
    assert seeds[:2] == seeds[2:], "a prompt must be answered as if it had come alone"


def test_default_length_is_sixteen_and_shrinks_to_fit(gateway: Gateway) -> None:
    limit = gateway.engine.info.max_model_len
    for length, expected in ((3, 16), (limit - 5, 5)):
        gateway.client().completions.create(model=MODEL, prompt=[40] * length)
        assert gateway.engine.requests[-1].params.max_tokens == expected


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_covers_prompt_and_answer(gateway: Gateway, stream: bool) -> None:
    gateway.answers("blue sky")
    prompt, answered = gateway.tokenizer.encode("The deep"), gateway.tokenizer.encode("blue sky")[:1]
    created: Any = gateway.client().completions.create(
        model=MODEL, prompt="The deep", echo=True, logprobs=2, max_tokens=1, stream=stream
    )
    choices = [part.choices[0] for part in created] if stream else [created.choices[0]]
    assert "".join(choice.text for choice in choices) == "The deepblue"
    assert choices[-1].finish_reason == "length"
    parts = [choice.logprobs for choice in choices if choice.logprobs]
    tokens = [token for part in parts for token in part.tokens]
    assert tokens == [gateway.tokenizer.token_text(i) for i in (*prompt, *answered)]
    expected = [None, *(logprob_of(i) for i in (*prompt[1:], *answered))]
    assert [value for part in parts for value in part.token_logprobs] == expected
    tops = [top for part in parts for top in part.top_logprobs]
    assert tops[0] is None
    assert all(top[token] == value for top, token, value in zip(tops[1:], tokens[1:], expected[1:], strict=True))
    offsets = [offset for part in parts for offset in part.text_offset]
    assert ["The deepblue"[offset:].startswith(token) for offset, token in zip(offsets, tokens, strict=True)] == [
        True
    ] * len(tokens)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_keep_every_alternative_and_count_characters(gateway: Gateway, stream: bool) -> None:
    """Many tokens are parts of characters, which all read as U+FFFD; each keeps an entry of its own."""
    answer, tokenizer = "Où ? 🌍🌍 你好 é", gateway.tokenizer
    gateway.answers(answer)
    ids = [*tokenizer.encode(answer), tokenizer.eos_ids[0]]
    created: Any = gateway.client().completions.create(
        model=MODEL, prompt="Là 🌍", echo=True, max_tokens=len(ids), logprobs=20, stream=stream
    )
    parts = [part.choices[0].logprobs for part in (created if stream else [created])]
    offsets, tokens, tops = (
        [entry for part in parts if part for entry in getattr(part, name)]
        for name in ("text_offset", "tokens", "top_logprobs")
    )
    prompt = tokenizer.encode("Là 🌍")
    before = [b"".join(map(tokenizer.token_bytes, [*prompt, *ids][:n])) for n in range(len(prompt) + len(ids))]
    assert offsets == [len(data.decode(errors="ignore")) for data in before]
    assert tokens[0] == "L"
    assert "bytes:\\xf0\\x9f" in tokens
    assert [len(top) for top in tops[1:]] == [20] * (len(tops) - 1)
    assert [next(iter(top)) for top in tops[1:]] == tokens[1:]


def test_echo_without_output_scores_the_prompt(gateway: Gateway) -> None:
    answer = gateway.client().completions.create(model=MODEL, prompt="The deep", echo=True, logprobs=0, max_tokens=0)
    (choice,) = answer.choices
    assert choice.text == "The deep"
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == [None, *(logprob_of(i) for i in gateway.tokenizer.encode("The deep")[1:])]
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


def test_echo_of_token_ids_spells_special_tokens(gateway: Gateway) -> None:
    ids = [gateway.tokenizer.eos_ids[0], *gateway.tokenizer.encode("The deep")]
    answer = gateway.client().completions.create(model=MODEL, prompt=ids, echo=True, max_tokens=0)
    assert answer.choices[0].text == gateway.tokenizer.eos_token + "The deep"


def test_stream_of_two_prompts(gateway: Gateway) -> None:
    gateway.answers("alpha beta", "gamma")
    texts, reasons = ["", ""], ["", ""]
    usage = None
    for part in gateway.client().completions.create(
        model=MODEL, prompt=["a", "b"], stream=True, stream_options={"include_usage": True}
    ):
        assert part.object == "text_completion"
        assert part.id.startswith("cmpl-")
        assert usage is None, "usage must be last"
        usage = part.usage
        for choice in part.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] += choice.finish_reason or ""
    assert texts == ["alpha beta", "gamma"]
    assert reasons == ["stop", "stop"]
    assert usage is not None
    assert usage.prompt_tokens == 2


def test_prompt_logprobs_belong_to_their_choice(gateway: Gateway) -> None:
    prompts = ["One two", "Three"]
    with gateway.http() as http:
        body = {"model": MODEL, "prompt": prompts, "prompt_logprobs": 0}
        choices = http.post("/v1/completions", json=body).json()["choices"]
    lengths = [len(gateway.tokenizer.encode(text)) for text in prompts]
    assert [len(choice["prompt_logprobs"]) for choice in choices] == lengths


def test_long_prompts_are_tokenised_off_the_loop_with_the_same_result(gateway: Gateway) -> None:
    text = "word " * 3000
    with gateway.http() as http:
        answer = http.post("/tokenize", json={"prompt": text}).json()
    assert answer["tokens"] == gateway.tokenizer.encode(text)
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == gateway.engine.info.max_model_len


FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


def with_tokens(plain: Tokenizer, *spellings: str) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(plain.serialized())
    backend.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in spellings])
    return Tokenizer(backend, bos_id=plain.bos_id, eos_ids=plain.eos_ids)


def test_the_text_before_a_suffix_is_filled_in(tokenizer: Tokenizer) -> None:
    coder = with_tokens(tokenizer, *FIM)
    with serving(coder) as gateway, gateway.http() as http:
        gateway.answers("a + b")
        for before in ("def add(a, b):\n    return ", ""):
            answer = gateway.client().completions.create(model=MODEL, prompt=before, suffix="\n\nprint(add(1, 2))")
            assert answer.choices[0].text == "a + b"
            prompt = coder.decode(gateway.engine.requests[-1].prompt, skip_special_tokens=False)
            assert prompt == f"{FIM[0]}{before}{FIM[1]}\n\nprint(add(1, 2)){FIM[2]}"
        long = {"model": MODEL, "prompt": "x", "suffix": "y " * 4000}
        assert http.post("/v1/completions", json=long).json()["error"]["code"] == "context_length_exceeded"
        for change in ({"echo": True}, {"prompt": [1, 2]}, {"truncate_prompt_tokens": 4}):
            response = http.post("/v1/completions", json={**long, "suffix": "y", **change})
            assert response.status_code == 400
            assert response.json()["error"]["param"] in change
    with serving(with_tokens(tokenizer, "[PREFIX]", "[SUFFIX]")) as gateway:
        gateway.client().completions.create(model=MODEL, prompt="before", suffix="after")
        prompt = gateway.tokenizer.decode(gateway.engine.requests[-1].prompt, skip_special_tokens=False)
        assert prompt == "[SUFFIX]after[PREFIX]before"


def test_an_empty_suffix_is_none(gateway: Gateway) -> None:
    gateway.client().completions.create(model=MODEL, prompt="Once upon", suffix="")
    assert gateway.engine.requests[-1].prompt == gateway.tokenizer.encode("Once upon")
