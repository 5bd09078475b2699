"""Tokenizers as those of model families: the built-in vocabulary with the family's markers and a template in its style.
Some families have their markers as special tokens, some as ordinary ones, some spell them."""

from __future__ import annotations

from pathlib import Path

import tokenizers
from tokenizers import AddedToken

from penstock.text.tokenizer import Tokenizer
from penstock.text.tool_calls import deepseek, hermes, llama, mistral

TEMPLATES = Path(__file__).parent / "data" / "templates"
THINK = ["<think>", "</think>"]

# By template: tokens that are special, and those that are not.
TOKENS: dict[str, tuple[list[str], list[str]]] = {
    "hermes": ([], [hermes.OPEN, hermes.CLOSE, *THINK]),
    "llama3": ([llama.TAG], []),
    "mistral": ([mistral.OPEN, mistral.ARGUMENTS], []),
    "deepseek": ([*deepseek.DeepSeekParser.markers], THINK),
    "qwen3_coder": ([], [hermes.OPEN, hermes.CLOSE]),
}


def family(plain: Tokenizer, name: str, template: str | None = None) -> Tokenizer:
    """`plain` with what a family adds to it."""
    backend = tokenizers.Tokenizer.from_str(plain._backend.to_str())
    special, added = TOKENS[name]
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, normalized=False) for token in added])
    source = template or (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return Tokenizer(backend, bos_id=plain.bos_id, eos_ids=plain.eos_ids, chat_template=source)
