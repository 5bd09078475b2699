"""What is sent to each kind of server, and what their events mean."""

from __future__ import annotations

import json
import re

import pytest

from penstock.core.request import GenerateRequest, Grammar, SamplingParams, TokenLogprob
from penstock.fleet.upstream.answer import Answer
from penstock.fleet.upstream.dialects import DIALECTS
from penstock.fleet.upstream.openai import OpenAIProtocol
from penstock.fleet.upstream.protocol import UNKNOWN_LOGPROB, Piece
from penstock.fleet.upstream.retokenizer import Vocabulary
from penstock.fleet.upstream.settings import UpstreamConfig
from penstock.text.tokenizer import Tokenizer


def body(server: str, params: SamplingParams, output: tuple[int, ...] = ()) -> dict[str, object]:
    request = GenerateRequest("r", [5], params, seed=2**62, output=output, prefix_scope="t", cache_salt="s")
    return DIALECTS[server].body(request, params.min_tokens, 512)


def test_neutral_values_are_sent_where_the_server_has_other_defaults() -> None:
    sent = body("llama.cpp", SamplingParams())
    assert (sent["top_k"], sent["top_p"], sent["min_p"], sent["repeat_penalty"]) == (0, 1.0, 0.0, 1.0)
    assert sent["repeat_last_n"] == 512
    assert body("sglang", SamplingParams())["top_k"] == -1
    assert body("tgi", SamplingParams()) == {"temperature": 1.0}  # it refuses a top_p of 1
    assert body("openai", SamplingParams(top_p=0.5)) == {"temperature": 1.0, "top_p": 0.5}


def test_fields_that_some_servers_have() -> None:
    params = SamplingParams(temperature=1e-9, seed=3, logprobs=0, logit_bias={7: 1.5}, stop_token_ids=(9,))
    sent = body("vllm", params)
    assert sent["temperature"] == 0.0
    assert "seed" not in sent
    assert sent["logit_bias"] == {"7": 1.5}
    assert sent["stop_token_ids"] == [9]
    assert (sent["logprobs"], sent["return_tokens_as_token_ids"]) == (0, True)
    assert re.fullmatch("[0-9a-f]{32}", str(sent["cache_salt"]))  # vLLM refuses some characters
    assert body("llama.cpp", params)["logprobs"] == 1  # 0 turns them off there


def test_seeds_fit_and_differ_in_a_continuation() -> None:
    params = SamplingParams(seed=3)
    assert body("vllm", params)["seed"] == 2**62
    assert 0 <= body("llama.cpp", params)["seed"] < 2**32 - 1  # type: ignore[operator]
    assert body("vllm", params, (1, 2))["seed"] != body("vllm", params)["seed"]


def test_grammars_in_the_words_of_each_server() -> None:
    schema = SamplingParams(grammar=Grammar("json_schema", '{"type": "null"}'))
    regex, lark = SamplingParams(grammar=Grammar("regex", "a")), SamplingParams(grammar=Grammar("lark", "a"))
    assert body("vllm", schema)["structured_outputs"] == {"json": {"type": "null"}}
    assert body("penstock", regex)["structured_outputs"] == {"regex": "a"}
    assert body("vllm", lark)["structured_outputs"] == {"grammar": "a"}
    assert body("sglang", schema)["json_schema"] == '{"type": "null"}'
    assert body("llama.cpp", schema)["json_schema"] == {"type": "null"}
    assert not DIALECTS["openai"].grammars


@pytest.fixture
def protocol(tokenizer: Tokenizer) -> OpenAIProtocol:
    return OpenAIProtocol(UpstreamConfig("http://unused"), Vocabulary(tokenizer))


def parsed(protocol: OpenAIProtocol, **event: object) -> Piece:
    piece = protocol.parse(json.dumps(event))
    assert piece is not None
    return piece


def test_log_probabilities_by_token_id(protocol: OpenAIProtocol) -> None:
    """vLLM adds the sampled token to the alternatives, wherever it ranks."""
    top = {"token_id:8": -0.5, "token_id:9": -1.0, "token_id:7": -3.0}
    scores = {"tokens": ["token_id:7"], "token_logprobs": [-3.0], "top_logprobs": [top], "text_offset": [0]}
    piece = parsed(protocol, choices=[{"text": "x", "token_ids": [7], "logprobs": scores}])
    assert piece.logprobs == [TokenLogprob(7, -3.0, ((8, -0.5), (9, -1.0), (7, -3.0)))]


def test_log_probabilities_by_text(protocol: OpenAIProtocol, tokenizer: Tokenizer) -> None:
    """SGLang's: an alternative that is no single token is left out."""
    [the], [a] = tokenizer.encode(" the"), tokenizer.encode(" a")
    scores = {"tokens": [" the"], "token_logprobs": [-1.0], "top_logprobs": [{" the": -1.0, " a": -2.0, "\ufffd": -3}]}
    piece = parsed(protocol, choices=[{"text": " the", "logprobs": scores}])
    assert piece.logprobs == [TokenLogprob(the, -1.0, ((the, -1.0), (a, -2.0)))]


def test_tokens_that_llama_cpp_leaves_out(protocol: OpenAIProtocol, tokenizer: Tokenizer) -> None:
    """It names the last token of a character, and gives the log-probabilities of that one alone."""
    ids = Vocabulary(tokenizer).encode_bytes("🦊".encode())
    assert len(ids) > 1
    content = [{"id": ids[-1], "logprob": -0.25, "top_logprobs": [{"id": 3, "logprob": -0.1}]}]
    choice = {"text": "🦊", "logprobs": {"content": content}, "finish_reason": None}
    piece = parsed(protocol, choices=[choice], __verbose={"tokens": ids[-1:]})
    chunk = Answer(GenerateRequest("r", [5], SamplingParams(logprobs=1)), Vocabulary(tokenizer)).chunk(piece)
    assert chunk is not None
    assert chunk.token_ids == ids
    assert chunk.logprobs == [
        *(TokenLogprob(i, UNKNOWN_LOGPROB) for i in ids[:-1]),
        TokenLogprob(ids[-1], -0.25, ((3, -0.1),)),
    ]


def test_stop_tokens_count_after_min_tokens(tokenizer: Tokenizer) -> None:
    params = SamplingParams(stop_token_ids=(9,), min_tokens=3, logprobs=0)
    answer = Answer(GenerateRequest("r", [5], params, output=[1]), Vocabulary(tokenizer))
    scores = [TokenLogprob(i, -1.0) for i in (9, 7, 9, 8)]
    chunk = answer.chunk(Piece("", token_ids=[9, 7, 9, 8], logprobs=scores))
    assert chunk is not None
    assert (chunk.token_ids, chunk.finish_reason) == ([9, 7, 9], "stop")
    assert chunk.logprobs == scores[:3]
