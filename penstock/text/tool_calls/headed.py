"""Calls whose name stands in a head before their arguments, as in `name[ARGS]{...}`."""

from __future__ import annotations

import re
from abc import abstractmethod
from typing import ClassVar

from penstock.text.tool_calls.json_call import JsonValue
from penstock.text.tool_calls.parser import ToolParser


class HeadedParser(ToolParser):
    head: ClassVar[re.Pattern[str]]  # all before the arguments; its last group is the name
    may_become_head: ClassVar[re.Pattern[str]]
    _skipped = ""  # what led to the head: content, if there is none

    def _in_head(self) -> bool:
        at = self._text.find("{")
        found = self.head.fullmatch(self._text, 0, at) if at >= 0 else None
        if found is not None:
            self._take(at)
            self._skipped = ""
            self._begin(found[found.lastindex or 0])
            self._arguments = JsonValue()
            return self._go(self._in_arguments)
        hopeless = at >= 0 or self.may_become_head.fullmatch(self._text) is None
        return self._give_up() if hopeless else False

    def _in_arguments(self) -> bool:
        self._add(self._take(self._arguments.scan(self._text)))
        return self._go(self._after_arguments) if self._arguments.done or self._arguments.bad else False

    def _give_up(self) -> bool:
        self._say(self._skipped)
        self._skipped = ""
        return self._go(self._in_text)

    @abstractmethod
    def _in_text(self) -> bool: ...

    @abstractmethod
    def _after_arguments(self) -> bool: ...
