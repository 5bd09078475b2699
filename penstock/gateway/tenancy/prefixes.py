"""Whose prompts may share the engine's KV cache.

A tenant that gets a prefix from the cache knows that somebody has sent it: by `cached_tokens`, and by the time it took.
So prefixes are shared within a tenant, and beyond it only where the settings say so.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from penstock.cache.settings import CacheConfig
from penstock.core.errors import InvalidRequest, StartupError
from penstock.text.chat_template import ChatTemplate
from penstock.text.tokenizer import Tokenizer

QUESTIONS = ("a", "Why?")  # what the renderings of chats with these have in common is the system prompt


class Prefixes:
    def __init__(self, config: CacheConfig, tokenizer: Tokenizer) -> None:
        self._tenants_share = config.share_prefixes
        self._common = [
            ids
            for entry in config.shared_prefixes or ()
            for ids in _beginnings(prefix_text(entry), tokenizer)
            if len(ids)
        ]

    def scope(self, tenant: str) -> str:
        return "" if self._tenants_share else tenant

    def common_tokens(self, prompt: Sequence[int]) -> int:
        """How many tokens at the beginning of a prompt are declared to be everybody's."""
        return max((len(ids) for ids in self._common if list(prompt[: len(ids)]) == ids), default=0)


def prefix_text(entry: str) -> str:
    """Of one entry of `cache.shared_prefixes`."""
    if not entry.startswith("@"):
        return entry
    try:
        return Path(entry[1:]).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(
            f"cache.shared_prefixes: cannot read {entry[1:]}: {error}", param="cache.shared_prefixes"
        ) from error


def _beginnings(system: str, tokenizer: Tokenizer) -> list[list[int]]:
    """A chat with this system prompt, and a completion that begins with it."""
    found = [_common([tokenizer.encode(f"{system}{end}") for end in ("\n", " a", "b")])]
    template = ChatTemplate(tokenizer.chat_template)
    try:
        chats = [
            template.render(
                [{"role": "system", "content": system}, {"role": "user", "content": question}],
                bos_token=tokenizer.bos_token,
                eos_token=tokenizer.eos_token,
            )
            for question in QUESTIONS
        ]
    except InvalidRequest:  # there is no template, or none that takes a system prompt
        return found
    return [*found, _common([tokenizer.encode(chat, add_special_tokens=False) for chat in chats])]


def _common(sequences: list[list[int]]) -> list[int]:
    alike = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*sequences, strict=False))
    return [column[0] for column in alike]
