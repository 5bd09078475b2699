"""The calls of DeepSeek's models between tokens of their own: V3 and R1 put JSON into a code block, V3.1 does not."""

from __future__ import annotations

import re
from collections.abc import Sequence

from penstock.text.tool_calls.grammar import CallGrammar, Spell, any_of, arguments_schema, json_rule, literal
from penstock.text.tool_calls.json_call import JsonValue
from penstock.text.tool_calls.parser import Function, State, ToolParser

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_HEAD = re.compile(rf"\s*(?:function{SEPARATOR}([\w.-]+)\s*```(?:json)?|([\w.-]+){SEPARATOR})\s*").fullmatch
LONGEST_HEAD = 256


class DeepSeekParser(ToolParser):
    markers = (BEGIN, END, CALL, CALL_END, SEPARATOR)

    def _first_state(self) -> State:
        self._skipped = ""
        return self._in_text

    def _in_text(self) -> bool:
        found = self._say_until(*((BEGIN, CALL) if not self.calls else self.markers))
        if found == BEGIN:
            self._skipped = BEGIN
        elif found == CALL:
            self._skipped += CALL
            return self._go(self._in_head)
        return found is not None

    def _in_head(self) -> bool:
        at = self._text.find("{")
        head = self._text if at < 0 else self._text[:at]
        found = _HEAD(head) if at >= 0 else None
        if found is not None:
            self._take(at)
            self._skipped = ""
            self._begin(found[1] or found[2])
            self._arguments = JsonValue()
            return self._go(self._in_arguments)
        return self._give_up() if at >= 0 or len(head) > LONGEST_HEAD or CALL_END in head else False

    def _in_arguments(self) -> bool:
        self._add(self._take(self._arguments.scan(self._text)))
        return self._go(self._after_arguments) if self._arguments.done or self._arguments.bad else False

    def _after_arguments(self) -> bool:
        """Here is the end of a code block, if there was one."""
        self._skip_space()
        fence = self._starts_with("```")
        if fence:
            self._take(3)
        return False if fence is None else self._go(self._in_text)

    def _give_up(self) -> bool:
        self._say(self._skipped)
        self._skipped = ""
        return self._go(self._in_text)

    def _end(self) -> None:
        self._say(self._skipped)


def grammar(functions: Sequence[Function], spell: Spell, one: bool) -> CallGrammar:
    """As V3 and R1 have it."""
    rules = [
        f"call{number}: {spell(CALL)} {literal('function')} {spell(SEPARATOR)} "
        f"{literal(f'{function.name}{chr(10)}```json{chr(10)}')} {json_rule(arguments_schema(function))} "
        f"{literal(f'{chr(10)}```')} {spell(CALL_END)}"
        for number, function in enumerate(functions)
    ]
    call = any_of("call", functions)
    more = "" if one else f" ({literal(chr(10))} {call})*"
    return CallGrammar(BEGIN, f"{call}{more} {spell(END)}", None, "\n".join(rules))


def plain_grammar(functions: Sequence[Function], spell: Spell, one: bool) -> CallGrammar:
    """As V3.1 has it."""
    rules = [
        f"call{number}: {spell(CALL)} {literal(function.name)} {spell(SEPARATOR)} "
        f"{json_rule(arguments_schema(function))} {spell(CALL_END)}"
        for number, function in enumerate(functions)
    ]
    call = any_of("call", functions)
    return CallGrammar(BEGIN, f"{call}{'' if one else f' {call}*'} {spell(END)}", None, "\n".join(rules))
