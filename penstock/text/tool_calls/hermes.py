"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen2.5, Qwen3, and templates without tools.

Some models, such as SmolLM2-1.7B, put a JSON array of calls between the tags.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.text.tool_calls.grammar import CallGrammar, Spell, json_call, literal
from penstock.text.tool_calls.json_call import JsonCall
from penstock.text.tool_calls.parser import Function, State, ToolParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    markers = (OPEN, CLOSE)
    _closes = False  # the end of a call that was read is still to come

    def _first_state(self) -> State:
        return self._in_text

    def _in_text(self) -> bool:
        found = self._say_until(OPEN, CLOSE) if self._closes else self._say_until(OPEN)
        self._closes = self._closes and found is None
        if found == OPEN:
            self._skipped, self._in_array = OPEN, False
            return self._go(self._before_call)
        return found is not None

    def _before_call(self) -> bool:
        self._skipped += self._skip_space()
        if self._text.startswith("[") and not self._in_array:
            self._in_array = True
            self._skipped += self._take(1)
            return True
        if self._text:
            self._call = JsonCall(self._begin, self._add)
            return self._go(self._in_call)
        return False

    def _in_call(self) -> bool:
        call = self._call
        self._text = call.feed(self._text)
        if call.bad and not call.begun:
            self._say(self._skipped + call.raw)
        if call.done or call.bad:
            self._closes = call.begun
            return self._go(self._after_item if self._in_array and call.done else self._in_text)
        return False

    def _after_item(self) -> bool:
        self._skip_space()
        if not self._text:
            return False
        if self._text[0] == ",":
            self._skipped = self._take(1)
            return self._go(self._before_call)
        if self._text[0] == "]":
            self._take(1)
        return self._go(self._in_text)

    def _end(self) -> None:
        if self._closes and CLOSE.startswith(self._text):  # cut off there
            self._text = ""
        if self._state == self._before_call:
            self._say(self._skipped)
        elif self._state == self._in_call and not self._call.begun:
            self._say(self._skipped + self._call.raw)


def grammar(functions: Sequence[Function], spell: Spell, one: bool) -> CallGrammar:
    calls, rules = json_call(functions, "arguments")
    return CallGrammar(OPEN, f"{literal(chr(10))} {calls} {literal(chr(10))} {spell(CLOSE)}", literal("\n"), rules)
