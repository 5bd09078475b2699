"""The word that somebody probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str], least: float = 0.6) -> str | None:
    """`least`: how like the word it must be, from 0 to 1."""
    found = difflib.get_close_matches(word, list(known), 1, least)
    return found[0] if found else None


def did_you_mean(word: str, known: Iterable[str], least: float = 0.6) -> str:
    """To be put behind the word in a message; empty if nothing is near."""
    found = nearest(word, known, least)
    return f" (did you mean {found}?)" if found else ""
