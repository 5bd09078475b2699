"""Penstock: LLM serving that keeps a latency promise."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.core.request import Grammar, SamplingParams
    from penstock.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "Grammar", "SamplingParams", "__version__"]

# Imported when they are asked for: the gateway does without the engine, and a command without any of them.
_PLACES = {"LLM": "penstock.llm", "Grammar": "penstock.core.request", "SamplingParams": "penstock.core.request"}


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(import_module(_PLACES[name]), name)
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")
