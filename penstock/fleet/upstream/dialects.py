"""OpenAI-compatible servers differ in what they take beyond OpenAI's fields: one `Dialect` for each.

Values that OpenAI's API has no field for are sent where the server knows them, also if they are neutral: vLLM, SGLang
and llama.cpp have defaults of their own for requests that do not say.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.core.request import GenerateRequest, SamplingParams

_NEUTRAL = SamplingParams()
_OPENAI = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "seed")
_EXTENDED = (*_OPENAI, "top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids")


_STRUCTURED: Mapping[str, tuple[str, ...]] = {
    "json_schema": ("structured_outputs", "json"),
    "regex": ("structured_outputs", "regex"),
    "lark": ("structured_outputs", "grammar"),
}


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


def _digest(*parts: str) -> str:
    """Tenants keep their names to themselves, and vLLM takes no salt with a slash in it."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Dialect:
    fields: Mapping[str, str]  # of SamplingParams, those it knows, with their names there
    neutral_sent: bool = True  # False: neutral values are left out, since the server refuses or does not need them
    constants: Mapping[str, Any] = field(default_factory=dict)  # sent with every request, to get token ids
    with_logprobs: Mapping[str, Any] = field(default_factory=dict)  # sent besides where log-probabilities are asked for
    least_logprobs: int = 0  # a smaller number turns them off
    all_tokens: int = 0  # the value of top_k for the whole vocabulary
    seeds: int = 2**63  # how many there are
    cache_salt: bool = False  # prefixes can be kept apart
    penalty_window: str = ""  # field for how many of the last tokens penalties count
    # Where the kinds of grammar that it knows go: the field, or an object and its field.
    grammars: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    schemas_as_text: bool = False  # the JSON of a schema is sent as a string

    def without_token_ids(self) -> Dialect:
        """For servers that give ids which mean other tokens here."""
        return replace(self, constants={}, with_logprobs={})

    def body(self, request: GenerateRequest, min_tokens: int, max_model_len: int) -> dict[str, Any]:
        """The fields for sampling; prompt, model and limits are the same everywhere."""
        params = request.params
        body: dict[str, Any] = dict(self.constants)
        values = {name: getattr(params, name) for name in self.fields} | {"min_tokens": min_tokens}
        values["temperature"] = 0.0 if params.greedy else params.temperature
        values["top_k"] = params.top_k or self.all_tokens
        values["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()} or None
        values["stop_token_ids"] = list(params.stop_token_ids) or None
        values["seed"] = self._seed(request)
        for name, theirs in self.fields.items():
            neutral = name != "temperature" and getattr(params, name) == getattr(_NEUTRAL, name)
            if values[name] is not None and (self.neutral_sent or not neutral):
                body[theirs] = values[name]
        if params.logprobs is not None:
            body |= {"logprobs": max(params.logprobs, self.least_logprobs), **self.with_logprobs}
        if self.cache_salt and (request.prefix_scope or request.cache_salt):
            body["cache_salt"] = _digest(request.prefix_scope, request.cache_salt)
        if self.penalty_window:
            body[self.penalty_window] = max_model_len
        if (grammar := params.grammar) is not None and grammar.kind in self.grammars:
            parsed = grammar.kind == "json_schema" and not self.schemas_as_text
            value: Any = json.loads(grammar.source) if parsed else grammar.source
            for name in reversed(self.grammars[grammar.kind]):
                value = {name: value}
            body |= value
        return body

    def _seed(self, request: GenerateRequest) -> int | None:
        """None unless the user gave one: vLLM samples seeded requests one by one. A continuation has another, else its
        first tokens would be drawn by the same numbers as those of the beginning."""
        if request.params.seed is None or request.params.greedy:
            return None
        return (request.seed + len(request.output)) % self.seeds


DIALECTS: Mapping[str, Dialect] = {
    "vllm": Dialect(
        _same(*_EXTENDED),
        constants={"return_token_ids": True},
        with_logprobs={"return_tokens_as_token_ids": True},
        cache_salt=True,
        grammars=_STRUCTURED,
    ),
    "penstock": Dialect(
        _same(*_EXTENDED),
        constants={"return_token_ids": True},
        with_logprobs={"return_tokens_as_token_ids": True},
        cache_salt=True,
        grammars=_STRUCTURED,
    ),
    "sglang": Dialect(
        _same(*_EXTENDED),
        constants={"return_token_ids": True},
        all_tokens=-1,
        cache_salt=True,
        grammars={"json_schema": ("json_schema",), "regex": ("regex",)},
        schemas_as_text=True,
    ),
    "tensorrt-llm": Dialect(_same(*_EXTENDED)),
    # Verbose answers have the ids of the tokens that complete a character.
    "llama.cpp": Dialect(
        _same(*_OPENAI, "top_k", "min_p", "ignore_eos") | {"repetition_penalty": "repeat_penalty"},
        constants={"verbose": True, "return_tokens": True},
        least_logprobs=1,
        seeds=2**32 - 1,  # the last one means: random
        penalty_window="repeat_last_n",
        grammars={"json_schema": ("json_schema",)},
    ),
    "tgi": Dialect(
        _same("temperature", "top_p", "frequency_penalty", "repetition_penalty", "seed"), neutral_sent=False
    ),
    "openai": Dialect(_same(*_OPENAI), neutral_sent=False),
}

# By what a server's list of models says of who owns them.
BY_OWNER: Mapping[str, str] = {
    "vllm": "vllm",
    "sglang": "sglang",
    "llamacpp": "llama.cpp",
    "tensorrt_llm": "tensorrt-llm",
    "penstock": "penstock",
}
