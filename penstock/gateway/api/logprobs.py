"""Log-probabilities in the three shapes that clients expect."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.core.request import TokenLogprob
from penstock.gateway.api.openai_types import (
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


def chat_logprobs(tokenizer: Tokenizer, logprobs: Iterable[TokenLogprob], by_id: bool) -> ChatLogprobs:
    """With `by_id` tokens are called by their ids, beside the bytes that they always have."""

    def top(token_id: int, logprob: float) -> TopLogprob:
        name = _id_name(token_id) if by_id else tokenizer.token_text(token_id)
        return TopLogprob(name, _finite(logprob), list(tokenizer.token_bytes(token_id)))

    content = []
    for entry in logprobs:
        chosen = top(entry.token_id, entry.logprob)
        alternatives = [top(token_id, logprob) for token_id, logprob in entry.top]
        content.append(ChatTokenLogprob(chosen.token, chosen.logprob, chosen.bytes, alternatives))
    return ChatLogprobs(content)


def _id_name(token_id: int) -> str:
    return f"token_id:{token_id}"


def _name(tokenizer: Tokenizer, token_id: int, by_id: bool) -> str:
    """Its text; of bytes that are only part of a character, their spelling, as OpenAI has it."""
    if by_id:
        return _id_name(token_id)
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def completion_logprobs(
    tokenizer: Tokenizer,
    entries: Sequence[TokenLogprob | None],
    prompt_ids: Sequence[int],
    top: int,
    offsets: list[int],
    by_id: bool,
) -> CompletionLogprobs:
    """`entries` may begin with those of the prompt (echo); the first prompt token has no probability, hence None."""
    shaped = CompletionLogprobs(offsets, [], [], [])
    for position, entry in enumerate(entries):
        token_id = prompt_ids[position] if entry is None else entry.token_id
        shaped.tokens.append(_name(tokenizer, token_id, by_id))
        shaped.token_logprobs.append(None if entry is None else _finite(entry.logprob))
        shaped.top_logprobs.append(None if entry is None else _top_by_name(tokenizer, entry, top, by_id))
    return shaped


def _top_by_name(tokenizer: Tokenizer, entry: TokenLogprob, top: int, by_id: bool) -> dict[str, float]:
    """Every alternative, and the token itself. Of several that read the same the token itself has the name, else the
    most probable, listed first; the others go by their ids."""
    own = _name(tokenizer, entry.token_id, by_id)
    named: dict[str, float] = {}
    for token_id, logprob in entry.top[:top]:
        name = _name(tokenizer, token_id, by_id)
        if token_id != entry.token_id and (name == own or name in named):
            name = _id_name(token_id)
        named[name] = _finite(logprob)
    named.setdefault(own, _finite(entry.logprob))
    return named


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
