"""`{"name": ..., "parameters": {...}}`, the whole answer or after `<|python_tag|>`: Llama 3.1, 3.2 and 3.3."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.text.tool_calls.grammar import CallGrammar, Spell, json_call
from penstock.text.tool_calls.json_call import JsonCall
from penstock.text.tool_calls.parser import Function, State, ToolParser

TAG = "<|python_tag|>"


class LlamaParser(ToolParser):
    """A call without the tag is known only by its being the beginning of an answer and by its function, one of those
    that the request has: other JSON is content."""

    markers = (TAG,)
    _skipped = ""

    def _first_state(self) -> State:
        return self._at_start

    def _at_start(self) -> bool:
        """Before a first call, or after one, where a semicolon may separate the next."""
        self._skipped += self._skip_space()
        if self._text.startswith(";") and self.calls:
            self._skipped += self._take(1)
            return True
        if self._text.startswith("{"):
            return self._go_to_call(self.functions.__contains__)
        if not self._text or self._starts_with(TAG) is None:
            return False
        return self._go(self._in_text)

    def _in_text(self) -> bool:
        self._say(self._skipped)
        self._skipped = ""
        found = self._say_until(TAG)
        if found is None:
            return False
        self._skipped = TAG
        return self._go(self._after_tag)

    def _after_tag(self) -> bool:
        self._skipped += self._skip_space()
        if not self._text:
            return False
        return self._go_to_call(lambda name: True) if self._text[0] == "{" else self._go(self._in_text)

    def _go_to_call(self, accepts: Callable[[str], bool]) -> bool:
        self._call = JsonCall(self._begin, self._add, accepts)
        return self._go(self._in_call)

    def _in_call(self) -> bool:
        call = self._call
        self._text = call.feed(self._text)
        if not call.done and not call.bad:
            return False
        self._skipped = "" if call.begun else self._skipped + call.raw
        return self._go(self._at_start if call.begun else self._in_text)

    def _end(self) -> None:
        if self._state != self._in_call:
            self._say(self._skipped)
        elif not self._call.begun:
            self._say(self._skipped + self._call.raw)


def grammar(functions: Sequence[Function], spell: Spell, one: bool) -> CallGrammar:
    """One call: the templates of these models refuse a history with several at once."""
    calls, rules = json_call(functions, "parameters")
    return CallGrammar("", calls, None, rules)
