"""Whether a small model is to try a request, and whether its answer will do."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from penstock.fleet.settings import CascadeConfig


def small_may_try(prompt_tokens: int, max_tokens: int | None, cascade: CascadeConfig) -> bool:
    """A short prompt, whose answer is bound to be short if that is asked for."""
    longest = cascade.max_output_tokens
    return prompt_tokens <= cascade.max_prompt_tokens and (
        longest is None or (max_tokens is not None and max_tokens <= longest)
    )


def is_decided(tokens: int, finished: bool, cascade: CascadeConfig) -> bool:
    """Whether the small model has said enough to judge it. Nothing is streamed before."""
    return finished or tokens >= cascade.confidence_tokens


def escalates(logprobs: Sequence[float], cascade: CascadeConfig) -> bool:
    """Whether the small model is too unsure of its answer. `logprobs` are of its tokens so far; an answer without any
    is an end of text at once, which the large model is asked about."""
    if cascade.min_logprob is None:
        return False
    judged = logprobs[: cascade.confidence_tokens]
    return not judged or fmean(judged) < cascade.min_logprob
