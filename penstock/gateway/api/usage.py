"""How many tokens the choices of a request have taken, as `usage` says it."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.gateway.api.choices import Choice
from penstock.gateway.api.openai_types import CompletionTokensDetails, PromptTokensDetails, Usage


def count_tokens(choices: Sequence[Choice]) -> tuple[int, int, list[int]]:
    """Tokens of the prompts, those of them that were cached, and the output of each choice."""
    prompt_tokens = cached_tokens = 0
    for choice in choices:
        if choice.first_of_prompt:
            prompt_tokens += len(choice.prompt.token_ids)
            cached_tokens += choice.cached_tokens
    return prompt_tokens, cached_tokens, [choice.stream.output_tokens for choice in choices]


def count_charged(choices: Sequence[Choice]) -> tuple[int, int, list[int]]:
    """As `count_tokens`, without what was stored and what another request pays for."""
    charged = [choice for choice in choices if choice.charged]
    prompts = [choice for choice in charged if choice.share is None or choice.share.paid is None]
    prompt_tokens, cached_tokens, _ = count_tokens(prompts)
    outputs = [(choice.share, choice.stream.output_tokens) for choice in charged]
    return prompt_tokens, cached_tokens, [count if share is None else share.charged(count) for share, count in outputs]


def usage_of(choices: Sequence[Choice]) -> Usage:
    """Of all choices of a request, so far."""
    prompt_tokens, cached, outputs = count_tokens(choices)
    output_tokens = sum(outputs)
    usage = Usage(prompt_tokens, output_tokens, prompt_tokens + output_tokens, PromptTokensDetails(cached))
    if choices[0].stream.reasons or choices[0].prompt.prediction is not None:
        ledgers = [choice.ledger for choice in choices if choice.ledger is not None]
        accepted = sum(ledger.accepted_tokens for ledger in ledgers)
        drafted = sum(ledger.drafted_tokens for ledger in ledgers)
        reasoning_tokens = sum(choice.stream.reasoning_tokens for choice in choices)
        usage.completion_tokens_details = CompletionTokensDetails(reasoning_tokens, accepted, drafted - accepted)
    return usage
