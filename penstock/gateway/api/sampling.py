"""From the fields of a request to `SamplingParams`, output limits and seeds."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from penstock.core.engine import EngineInfo
from penstock.core.errors import ContextTooLong
from penstock.core.request import Range, SamplingParams
from penstock.gateway.api.bounds import Bounds
from penstock.gateway.api.openai_types import SamplingFields
from penstock.gateway.api.structured import grammar_of
from penstock.gateway.errors import require
from penstock.gateway.settings import TenantConfig

ALL_TOKENS = -1  # a common spelling of it in top_k, beside 0
OUTPUT_TOKENS = Range(1, wording="must be at least 1")  # that a request may ask for

# Requests differ in little but their messages, and checking all of it is not free.
_checked = lru_cache(1024)(SamplingParams)


def sampling_params(
    body: SamplingFields, info: EngineInfo, *, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    stop_ids = body.stop_token_ids or []
    for position, token in enumerate(stop_ids):
        require(0 <= token < info.vocab_size, f"stop_token_ids[{position}]", f"must be below {info.vocab_size}")
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    default, penalty = info.sampling_defaults, body.repetition_penalty
    params = _checked(
        temperature=default.temperature if body.temperature is None else body.temperature,
        top_p=default.top_p if body.top_p is None else body.top_p,
        top_k=default.top_k if body.top_k is None else _top_k(body.top_k, info.vocab_size),
        min_p=default.min_p if body.min_p is None else body.min_p,
        repetition_penalty=default.repetition_penalty if penalty is None else penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        seed=body.seed,
        max_tokens=max_tokens,
        min_tokens=body.min_tokens or 0,
        stop=tuple(stop),
        stop_token_ids=tuple(stop_ids),
        ignore_eos=bool(body.ignore_eos),
        n=1 if body.n is None else body.n,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    if body.logit_bias:
        params = replace(params, logit_bias=_logit_bias(body.logit_bias, info.vocab_size))
    grammar = grammar_of(body)
    return params if grammar is None else replace(params, grammar=grammar)


def _top_k(value: int, vocab_size: int) -> int:
    """More than the vocabulary means all of it, too."""
    return 0 if value == ALL_TOKENS or value >= vocab_size else value


def _logit_bias(given: dict[str, float], vocab_size: int) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in given.items():
        token = int(key) if key.isascii() and key.isdigit() and len(key) < 12 else -1
        require(0 <= token < vocab_size, "logit_bias", f"keys must be token ids below {vocab_size}, not {key[:40]!r}")
        bias[token] = value
    return bias


def truncated(token_ids: list[int], keep: int, output: int | None, info: EngineInfo, tenant: TenantConfig) -> list[int]:
    """The last tokens of a prompt, so many as the request wants to keep; -1: as many as leave room for the output."""
    param, most = "truncate_prompt_tokens", info.max_model_len
    require(keep != 0 and keep <= most, param, f"must be between 1 and {most}, or -1 for as many tokens as fit")
    if keep < 0:
        room = max(most - max(output or 1, 1), 1)
        keep = room if tenant.max_prompt_tokens is None else min(room, tenant.max_prompt_tokens)
    return token_ids[-keep:]


def output_limit(
    requested: int | None,
    default: int | None,
    prompt_tokens: int,
    info: EngineInfo,
    tenant: TenantConfig,
    *,
    prompt_param: str,
    param: str,
) -> int:
    """How many tokens a prompt may be answered with. What was asked for explicitly must fit the model; a default is
    clamped, and so is everything to what the tenant may have."""
    bounds = Bounds.of(info, tenant.max_prompt_tokens)
    if prompt_tokens > bounds.prompt_tokens:
        raise bounds.too_long(prompt_param, str(prompt_tokens))
    room = info.max_model_len - prompt_tokens
    ceiling = room if tenant.max_tokens is None else min(tenant.max_tokens, room)
    if requested is None:
        return ceiling if default is None else min(default, ceiling)
    OUTPUT_TOKENS.check(param, requested)
    if requested > room:
        raise ContextTooLong.beyond(
            info.max_model_len,
            f"there are {prompt_tokens} tokens in {prompt_param} and {param} is {requested}; shorten the prompt or ask "
            f"for at most {room} tokens",
            param=param,
        )
    return min(requested, ceiling)
