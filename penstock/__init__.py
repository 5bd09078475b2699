"""Penstock: LLM serving that keeps a latency promise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.core.request import Grammar, SamplingParams

if TYPE_CHECKING:
    from penstock.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "Grammar", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":  # brings in the engine, which the gateway does without
        from penstock.llm import LLM

        return LLM
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")
