"""Log-probabilities in the three shapes that clients expect."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.core.request import TokenLogprob
from penstock.gateway.openai_types import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprobs,
    PromptTokenLogprob,
    TopLogprob,
)
from penstock.text.tokenizer import Tokenizer

LOWEST = -9999.0  # JSON has no infinity; OpenAI uses the same floor


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)


def chat_logprobs(tokenizer: Tokenizer, logprobs: Iterable[TokenLogprob]) -> ChatLogprobs:
    def top(token_id: int, logprob: float) -> TopLogprob:
        return TopLogprob(tokenizer.token_text(token_id), _finite(logprob), list(tokenizer.token_bytes(token_id)))

    content = []
    for entry in logprobs:
        chosen = top(entry.token_id, entry.logprob)
        alternatives = [top(token_id, logprob) for token_id, logprob in entry.top]
        content.append(ChatTokenLogprob(chosen.token, chosen.logprob, chosen.bytes, alternatives))
    return ChatLogprobs(content)


def completion_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprob | None], prompt_ids: Sequence[int], top: int, offset: int
) -> CompletionLogprobs:
    """`entries` may begin with those of the prompt (echo); the first prompt token has no probability, hence None.
    `offset` is where the first token begins in the text returned."""
    shaped = CompletionLogprobs([], [], [], [])
    for position, entry in enumerate(entries):
        token_id = prompt_ids[position] if entry is None else entry.token_id
        text = tokenizer.token_text(token_id)
        shaped.tokens.append(text)
        shaped.text_offset.append(offset)
        shaped.token_logprobs.append(None if entry is None else _finite(entry.logprob))
        shaped.top_logprobs.append(None if entry is None else _top_by_text(tokenizer, entry, text, top))
        offset += len(text)
    return shaped


def _top_by_text(tokenizer: Tokenizer, entry: TokenLogprob, text: str, top: int) -> dict[str, float]:
    """Several tokens may read the same (parts of characters do); the likeliest of them, listed first, stands."""
    by_text: dict[str, float] = {}
    for token_id, logprob in entry.top[:top]:
        by_text.setdefault(tokenizer.token_text(token_id), _finite(logprob))
    by_text.setdefault(text, _finite(entry.logprob))
    return by_text


def prompt_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob | None], top: int) -> PromptLogprobs:
    """By token id, the prompt's own token first; null for the first position."""
    shaped: PromptLogprobs = []
    for entry in entries:
        if entry is None:
            shaped.append(None)
            continue
        pairs = {entry.token_id: entry.logprob} | dict(entry.top[:top])
        shaped.append({i: PromptTokenLogprob(_finite(p), tokenizer.token_text(i)) for i, p in pairs.items()})
    return shaped
