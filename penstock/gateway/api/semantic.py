"""Which part of a request may be matched by its meaning: the last user message of a chat, or the text of a prompt.

All the rest of the body must be equal: system prompt, earlier turns, tools, every parameter, and those added later.
Which model answers, and with which adapter, is compared by what they are, in `cache/key.py`, not by their names.
"""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from penstock.core.request import SimilarPrompt
from penstock.gateway.api.openai_types import IGNORED, ChatRequest, CompletionRequest

_encode = msgspec.msgpack.Encoder(order="deterministic").encode


def similar_chat(body: ChatRequest) -> SimilarPrompt | None:
    """None: the conversation does not end with words of the user."""
    last = body.messages[-1]
    if last.role != "user" or not isinstance(last.content, str) or not last.content.strip():
        return None
    messages = [*body.messages[:-1], msgspec.structs.replace(last, content=None)]
    return SimilarPrompt(last.content, _rest(msgspec.structs.replace(body, messages=messages)))


def similar_completion(body: CompletionRequest, text: str) -> SimilarPrompt | None:
    if not text.strip():
        return None
    return SimilarPrompt(text, _rest(msgspec.structs.replace(body, prompt="")))


def _rest(body: ChatRequest | CompletionRequest) -> bytes:
    silent = dict.fromkeys((*IGNORED, "stream", "stream_options", "priority", "model", "prediction"))
    plain = msgspec.structs.replace(body, **silent)
    return blake2b(_encode((type(body).__name__, plain)), digest_size=32).digest()
