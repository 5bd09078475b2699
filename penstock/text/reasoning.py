"""Separates what a model thinks, `<think>…</think>`, from what it answers."""

from __future__ import annotations

from typing import Literal

from penstock.core.request import ReasoningStart
from penstock.text.tool_calls.parser import possible_beginning

OPEN, CLOSE = "<think>", "</think>"

ReasoningFormatName = Literal["think"]


def find_reasoning(template: str) -> ReasoningFormatName | None:
    return "think" if CLOSE in template or OPEN in template else None


def start_after(prompt: str) -> ReasoningStart:
    """Templates open the reasoning for models that always think, and open and close it where they are not to."""
    end = prompt.rstrip()
    if end.endswith(OPEN):
        return "open"
    return "closed" if end.endswith(CLOSE) else "free"


class ReasoningParser:
    """Reads text as it arrives, and how it is divided changes nothing. White space at the edges of the reasoning and
    before the answer is dropped."""

    markers = (OPEN, CLOSE)  # texts that may be special tokens

    def __init__(self, start: ReasoningStart) -> None:
        self._state = start
        self._text = ""  # not yet known to be part of the reasoning, or of the answer
        self._space = ""  # of the reasoning: dropped if it ends here
        self._begun = False  # the reasoning, or the answer after it, has a first character

    @property
    def over(self) -> bool:
        """What comes from now on is part of the answer."""
        return self._state == "closed" and self._begun

    @property
    def thinks(self) -> bool:
        return self._state == "open"

    def feed(self, text: str) -> tuple[str, str]:
        """What is certain now of the reasoning and of the answer."""
        self._text += text
        if self._state == "free":
            self._look_for_opening()
        reasoning = self._reasoning() if self._state == "open" else ""
        return reasoning, self._answer() if self._state == "closed" else ""

    def finish(self) -> tuple[str, str]:
        """The rest, since the text has ended."""
        rest, self._text = self._text, ""
        return ("", rest) if self._state != "open" else (self._strip(rest) + self._space, "")

    def _look_for_opening(self) -> None:
        begun = self._text.lstrip()
        if begun.startswith(OPEN):
            self._state, self._text = "open", begun[len(OPEN) :]
        elif not OPEN.startswith(begun):
            self._state, self._begun = "closed", True  # there was no reasoning: the answer keeps its space

    def _reasoning(self) -> str:
        end = self._text.find(CLOSE)
        if end >= 0:
            reasoning = self._strip(self._text[:end])
            self._state, self._text, self._begun = "closed", self._text[end + len(CLOSE) :], False
            return reasoning
        sure = len(self._text) - possible_beginning(self._text, (CLOSE,))
        sure_text, self._text = self._text[:sure], self._text[sure:]
        return self._strip(sure_text)

    def _strip(self, text: str) -> str:
        text = (self._space + text) if self._begun else text.lstrip()
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self._begun = self._begun or bool(shown)
        return shown

    def _answer(self) -> str:
        text, self._text = self._text if self._begun else self._text.lstrip(), ""
        self._begun = self._begun or bool(text)
        return text
